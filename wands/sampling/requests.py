"""What `wands infer` is asked for: prompts with their options, checked before any weight is read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wands.errors import ConfigError
from wands.variants import Variant, legal_frames

CAPTION_NAMES = ("prompt", "caption", "text", "cap")
CLIP_NAMES = ("video", "video_path", "file_name", "path")
"""Columns of a data set's metadata file: such a file is a prompt file too, its clips are not looked at."""


class SampleRequest(BaseModel):
    """One video to sample. A field that is set explicitly wins over the same option of the command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    height: int = Field(default=480, gt=0)
    """Pixels."""
    width: int = Field(default=832, gt=0)
    """Pixels."""
    num_frames: int = Field(default=81, gt=0)
    num_inference_steps: int = Field(default=50, gt=0)
    guidance_scale: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Classifier-free guidance; 1 and below run without it."""
    guidance_scale_2: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of the low-noise expert; None takes `guidance_scale`."""
    flow_shift: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """None keeps the shift of the pipeline's scheduler."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    negative_prompt: str = ""
    image: str | None = None
    """File of the picture that the video starts from; of a video, its first frame."""
    last_image: str | None = None
    """File of the picture that the video ends at; of a video, its last frame."""


@dataclass(frozen=True)
class SizeRule:
    """Sizes that a model can make.

    Attributes:
        vae_stride: pixels per latent in (frames, height, width).
        patch_size: latents per token in (frames, height, width).
    """

    vae_stride: tuple[int, int, int] = (4, 8, 8)
    patch_size: tuple[int, int, int] = (1, 2, 2)

    def problem(self, key: str, value: int) -> str | None:
        """Say what is wrong with one size and which legal sizes are next to it; None when it is legal.

        Args:
            key: "height", "width" or "num_frames".
            value: pixels or frames, at least 1.
        """
        if key == "num_frames":
            stride = self.vae_stride[0]
            if (value - 1) % stride == 0:
                return None
            below = legal_frames(value) if stride == 4 else (value - 1) // stride * stride + 1
            return (
                f"must be {stride}k+1 (one frame, then groups of {stride}); use {below} or {below + stride}."
            )
        axis = 1 if key == "height" else 2
        multiple = self.vae_stride[axis] * self.patch_size[axis]
        if value % multiple == 0:
            return None
        below = value // multiple * multiple
        cure = f"{below} or {below + multiple}" if below else f"{multiple}"
        derived = f"VAE stride {self.vae_stride[axis]} x patch {self.patch_size[axis]}"
        return f"must be a multiple of {multiple} ({derived}); use {cure}."


def read_prompts(path: Path) -> list[SampleRequest]:
    """Read a file of prompts.

    Args:
        path: `.txt`, one prompt a line; or `.jsonl`, one object a line with `prompt` (or `caption`) and any
            other field of `SampleRequest`. Empty lines are skipped; columns that name a clip are ignored. Pictures with
            relative names lie beside the file.

    Returns:
        One request a line, in the file's order; only the fields that the line sets are set explicitly.

    Raises:
        ConfigError: the file is missing, empty or of another kind, or lines are wrong: all of them, numbered.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"infer.prompts_file={path} must end in .txt (one prompt a line) or .jsonl; rename or convert it."
        )
    try:
        # Windows' editors begin a file with a BOM. splitlines would also cut at U+2028, which JSON allows inside a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(
            f"infer.prompts_file={path} cannot be read ({reason}); give a .txt or .jsonl file."
        ) from None
    requests, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(
                SampleRequest(prompt=line.strip())
                if path.suffix == ".txt"
                else _beside(path, _parse_line(line))
            )
        except ConfigError as error:
            problems.append(f"{path}:{number}: {error}")
    if not requests and not problems:
        problems.append(f"infer.prompts_file={path} holds no prompt; write one a line.")
    raise_problems(problems)
    return requests


def _beside(path: Path, request: SampleRequest) -> SampleRequest:
    names = {key: getattr(request, key) for key in ("image", "last_image")}
    return request.model_copy(update={key: str(path.parent / name) for key, name in names.items() if name})


def build_requests(
    prompts: Sequence[str | SampleRequest], options: Mapping[str, Any], rule: SizeRule
) -> tuple[list[SampleRequest], list[str]]:
    """Give every prompt its options and check the whole.

    Args:
        prompts: texts, or requests whose explicitly set fields win over `options`.
        options: field of `SampleRequest` -> None or () (not given), one value for all prompts, or one value
            per prompt. A single `seed` is counted up: prompt i gets seed + i, so that equal prompts differ.
        rule: the sizes that the model can make.

    Returns:
        The requests, complete when the second list, every problem of every prompt, is empty.
    """
    if not prompts:
        return [], ["infer.prompt is missing; give --prompt TEXT at least once, or a file of prompts."]
    columns, problems = {}, []
    for key, given in options.items():
        try:
            columns[key] = _spread(key, given, len(prompts))
        except ConfigError as error:
            problems.append(str(error))
    wrong: dict[
        tuple[str, str, str], list[int]
    ] = {}  # key, value, rule -> prompts: one line if they share it
    requests = []
    for i, prompt in enumerate(prompts):
        values = {key: column[i] for key, column in columns.items() if column[i] is not None}
        values |= {"prompt": prompt} if isinstance(prompt, str) else prompt.model_dump(exclude_unset=True)
        try:
            request = SampleRequest(**values)
        except ValidationError as error:
            for key, value, broken in _validation_problems(error):
                wrong.setdefault((key, value, broken), []).append(i + 1)
            continue
        requests.append(request)
        for key in ("height", "width", "num_frames"):
            size = getattr(request, key)
            if illegal := rule.problem(key, size):
                wrong.setdefault((key, str(size), illegal), []).append(i + 1)
    for (key, value, broken), where in wrong.items():
        of = "" if len(where) == len(prompts) else f" of prompt {', '.join(map(str, where))}"
        problems.append(f"infer.{key}={value}{of} {broken}")
    return requests, problems


def check_conditions(requests: Sequence[SampleRequest], variant: Variant) -> list[str]:
    """Say what a model needs, or cannot use, of pictures and guidance.

    Args:
        requests: from `build_requests`.
        variant: of the model.

    Returns:
        Every problem, one sentence for all prompts that share it.
    """
    name, conditions = variant.name, variant.conditions
    may_start, must_end = {"image", "first_frame"} & set(conditions), "last_image" in conditions
    wrong: dict[
        tuple[str, str, str], list[int]
    ] = {}  # key and value, what is said of it, its cure -> prompts
    for i, request in enumerate(requests, start=1):
        for problem in _condition_problems(request, name, bool(may_start), must_end, variant):
            wrong.setdefault(problem, []).append(i)
    problems = []
    for (given, said, cure), where in wrong.items():
        of = "" if len(where) == len(requests) else f" of prompt {', '.join(map(str, where))}"
        problems.append(f"infer.{given}{of} {said}; {cure}.")
    return problems


def _condition_problems(
    request: SampleRequest, name: str, may_start: bool, must_end: bool, variant: Variant
) -> Iterator[tuple[str, str, str]]:
    image, last_image = f"image={request.image}", f"last_image={request.last_image}"
    if request.image is None and "image" in variant.conditions:
        yield "image", f"is missing, and {name} starts from a picture", "give --image PATH"
    if request.image is not None and not may_start:
        yield image, f"is for models that start from a picture, not for {name}", "leave it out"
    if request.last_image is None and must_end:
        yield "last_image", f"is missing, and {name} ends at a picture", "give --last-image PATH"
    if request.last_image is not None and not must_end:
        cure = "leave it out" if not may_start else "leave it out, or use FLF2V"
        yield last_image, f"is for models that end at a picture, not for {name}", cure
    if must_end and request.num_frames == 1:
        yield "num_frames=1", "leaves no frame between the first picture and the last", "use 5 or more"
    # diffusers asks the first scale alone whether there is any guidance.
    unheeded = f"is not heeded beside guidance_scale={request.guidance_scale:g}, which turns guidance off"
    if request.guidance_scale <= 1 and (text := request.negative_prompt):
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        yield f"negative_prompt={shown}", unheeded, "raise guidance_scale above 1, or leave it out"
    if request.guidance_scale_2 is None:
        return
    second = f"guidance_scale_2={request.guidance_scale_2:g}"
    if len(variant.experts) == 1:
        yield second, f"is for models of two experts, and {name} has one", "leave it out"
    elif request.guidance_scale <= 1 < request.guidance_scale_2:
        yield second, unheeded, "raise guidance_scale above 1"


def _spread(key: str, given: Any, count: int) -> list[Any]:
    values = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if len(values) not in (0, 1, count):
        raise ConfigError(
            f"infer.{key} is given {len(values)} times for {count} prompts; give it once or {count} times."
        )
    if len(values) == count:
        return values
    if key == "seed":
        first = values[0] if values else 0
        return [first + i for i in range(count)]
    return (values or [None]) * count


def _parse_line(line: str) -> SampleRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON ({error.msg}, column {error.colno}); mend the line.") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f'must be an object such as {{"prompt": "a cat"}}, not {type(row).__name__}; mend the line.'
        )
    names = [name for name in CAPTION_NAMES if name in row]
    if len(names) != 1:
        raise ConfigError(
            f"has {' and '.join(names) or 'no prompt'}; give the text once, as prompt or caption."
        )
    values = {"prompt": row.pop(names[0])} | {
        k: v for k, v in row.items() if k not in CLIP_NAMES and v is not None
    }
    try:
        return SampleRequest(**values)
    except ValidationError as error:
        raise ConfigError(
            " ".join(f"{key}={value} {broken}" for key, value, broken in _validation_problems(error))
        ) from None


def _validation_problems(error: ValidationError) -> Iterator[tuple[str, str, str]]:
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, list(SampleRequest.model_fields), n=1, cutoff=0.5)
            cure = f"did you mean {near[0]}?" if near else f"known: {', '.join(SampleRequest.model_fields)}."
            yield key, repr(item["input"]), f"is not an option of a prompt; {cure}"
        else:
            yield key, repr(item["input"]), f"is refused: {item['msg'][0].lower()}{item['msg'][1:]}."


def raise_problems(problems: Sequence[str]) -> None:
    """Report all problems at once; none is no error.

    Raises:
        ConfigError: one line for one problem, a list for more.
    """
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(
            "\n".join([f"{len(problems)} problems:", *(f"  - {problem}" for problem in problems)])
        )
