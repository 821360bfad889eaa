"""Build sample requests: prompts with their options. All requests are checked before any weight is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wands.config.base import spelling_of
from wands.config.options import InferOptions
from wands.data.clips.tables import NumberedRow, read_lines, read_table
from wands.errors import ConfigError, DataError, suggest
from wands.variants import SamplingDefaults, Variant

CAPTION_NAMES = ("prompt", "caption", "text", "cap")
CLIP_NAMES = ("video", "video_path", "file_name", "path")
"""Columns with the paths of clips in a metadata file, which are ignored if the file is used as a prompt file."""


class SampleRequest(BaseModel):
    """Prompt and options of one video to sample.

    A field of a line of a prompt file overrides the command line option of this name. If neither is set, `build_requests` uses
    the official option of the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    height: int = Field(default=SamplingDefaults.height, gt=0)
    """Height of the video in pixels."""
    width: int = Field(default=SamplingDefaults.width, gt=0)
    """Width of the video in pixels."""
    num_frames: int = Field(default=SamplingDefaults.num_frames, gt=0)
    num_inference_steps: int = Field(default=SamplingDefaults.num_inference_steps, gt=0)
    guidance_scale: float = Field(default=SamplingDefaults.guidance_scale, ge=0, allow_inf_nan=False)
    """Scale of classifier-free guidance. Values up to 1 turn guidance off."""
    guidance_scale_2: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Guidance scale of the low-noise expert; None uses `guidance_scale`."""
    flow_shift: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Shift of the noise schedule. None keeps the shift of the pipeline's scheduler."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    negative_prompt: str = ""
    image: str | None = None
    """File with the first frame of the video: an image, or a video whose first frame is used."""
    last_image: str | None = None
    """File with the last frame of the video: an image, or a video whose last frame is used."""
    later_prompts: list[tuple[Annotated[int, Field(gt=0)], str]] | None = None
    """(first frame, prompt) pairs in ascending order, for causal sampling: from that frame on, the prompt replaces `prompt`. A
    chunk has the prompt of its first frame."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Maps the name of each file that a condition of outside code needs, such as "control", to its path."""


def size_problem(variant: Variant, key: str, value: int) -> str | None:
    """Check `key`, "height", "width" or "num_frames", against the values that a model can sample.

    Return None if the value is valid, else a text with the broken rule and the nearest valid values.
    """
    axis = ("num_frames", "height", "width").index(key)
    stride = variant.vae_stride[axis]
    patch = variant.dit.patch_size[axis]
    first, step = (1, stride) if axis == 0 else (0, stride * patch)
    below = (value - first) // step * step + first
    if value == below:
        return None
    sizes = " or ".join(str(size) for size in (below, below + step) if size > 0)
    if axis == 0:
        return f"must be {stride}k+1 (one frame, then groups of {stride} frames). Use {sizes}."
    return f"must be a multiple of {step} (VAE stride {stride} x patch {patch}). Use {sizes}."


def flag_of(field: str) -> str:
    """Return the command line flag of `wands infer` that sets a field of `SampleRequest`."""
    option = InferOptions.model_fields.get("prompts" if field == "prompt" else field)
    if option is None:  # only in prompt files
        return field
    return spelling_of(option).name or f"--{field.replace('_', '-')}"


def read_prompts(path: Path) -> list[SampleRequest]:
    """Return one request per line of a prompt file, with only the fields that the line contains.

    A `.txt` file has one prompt per line. A `.jsonl` file has one JSON object per line, with the keys `prompt` (or `caption`,
    `text` or `cap`) and any other field of `SampleRequest`. Keys with the path of a training clip, such as `video`, and empty
    lines are ignored. Relative image paths start at the folder of the prompt file.

    Raises:
        ConfigError: if the file is missing, is empty, has a wrong suffix, or contains invalid lines. The error lists all invalid
            lines.
    """
    label = f"--prompts-file={path}"
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"{label} must end in .txt (one prompt per line) or .jsonl. Rename or convert the file."
        )
    rows: list[NumberedRow] = []
    try:
        if path.suffix == ".txt":
            rows += [(i, {"prompt": line}) for i, line in enumerate(read_lines(path), start=1) if line]
        else:
            rows += read_table(path)
    except DataError as error:
        raise ConfigError(str(error).replace(f"SOURCE={path}", label)) from None
    requests = []
    problems = []
    for number, row in rows:
        try:
            requests.append(SampleRequest(**_request_fields(row, path.parent)))
        except ValidationError as error:
            rules = " ".join(f"{key}={value} {rule}" for key, value, rule in _rules(error))
            problems.append(f"{path}:{number}: {rules}")
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if not requests and not problems:
        problems.append(f"{label} contains no prompt. Write one prompt per line.")
    if problems:
        raise ConfigError(problems)
    return requests


def _request_fields(row: dict[str, Any] | str, folder: Path) -> dict[str, Any]:
    if isinstance(row, str):  # the reason why the line is unreadable
        raise ValueError(f"{row}.")
    names = [name for name in CAPTION_NAMES if name in row]
    if len(names) != 1:
        raise ValueError(
            f"the line has {' and '.join(names) or 'no prompt'}. Write exactly one of the keys prompt and caption."
        )
    values = {"prompt": row.pop(names[0])}
    for key, value in row.items():
        if key not in CLIP_NAMES and value is not None:
            is_path = key in ("image", "last_image") and isinstance(value, str) and value
            values[key] = str(folder / value) if is_path else value
            if key == "inputs" and isinstance(value, dict):
                values[key] = {name: str(folder / str(path)) for name, path in value.items()}
    return values


def build_requests(
    prompts: Sequence[str | SampleRequest], options: Mapping[str, Any], variant: Variant
) -> tuple[list[SampleRequest], list[str]]:
    """Combine every prompt with the command line options. Return the requests, and the error texts of all prompts.

    A prompt with an invalid field has error texts and no request. The fields that are set in a request override `options`, and
    the sampling defaults of the variant fill the rest. An option has one value for all prompts or a list with one per prompt;
    None or an empty list means that it was not given. With only one `seed`, prompt number i (from 0) gets seed + i, so that equal
    prompts give different videos.
    """
    if not prompts:
        return [], ["--prompt is missing. Add --prompt TEXT at least once, or --prompts-file FILE."]
    columns = {}
    problems = []
    for key, given in options.items():
        values = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        if len(values) == len(prompts):
            columns[key] = values
        elif len(values) > 1:
            problems.append(
                f"{flag_of(key)} has {len(values)} values for {len(prompts)} prompts. Give one value or {len(prompts)} values."
            )
        elif key == "seed":
            columns[key] = [(values or [0])[0] + i for i in range(len(prompts))]
        elif values:
            columns[key] = values * len(prompts)
    requests = []
    # Maps (option, broken rule) to the numbers of the prompts that break the rule.
    broken_by = defaultdict[tuple[str, str], list[int]](list)
    for i, prompt in enumerate(prompts):
        fields = {key: column[i] for key, column in columns.items() if column[i] is not None}
        fields |= {"prompt": prompt} if isinstance(prompt, str) else prompt.model_dump(exclude_unset=True)
        try:
            requests.append(fill_defaults(SampleRequest(**fields), variant.sampling))
            broken_rules = list(find_problems(requests[-1], variant))
        except ValidationError as error:
            broken_rules = [(f"{flag_of(key)}={value}", rule) for key, value, rule in _rules(error)]
        for broken in broken_rules:
            broken_by[broken].append(i + 1)
    for (option, rule), numbers in broken_by.items():
        names = "" if len(numbers) == len(prompts) else f" of prompt {', '.join(map(str, numbers))}"
        problems.append(f"{option}{names} {rule}")
    return requests, problems


def fill_defaults(request: SampleRequest, sampling: SamplingDefaults) -> SampleRequest:
    """Return a copy of a request, in which the official options of the model replace the fields that are not set.

    Exceptions:

    - If `guidance_scale` is set, an unset `guidance_scale_2` stays unset: both experts use `guidance_scale`.
    - If the model was published with a scheduler that has the official shift, an unset `flow_shift` stays unset: the scheduler of
      the loaded pipeline keeps its own shift.
    - Without guidance, an unset negative prompt becomes empty.
    """
    options = asdict(sampling)
    # A scheduler with the shift of the published pipeline has the official shift in some pipelines, and diffusers' 3 in others.
    if options.pop("scheduler_shift") == sampling.flow_shift:
        del options["flow_shift"]
    given = request.model_fields_set
    if "guidance_scale" in given:  # the official second scale fits only the official first scale
        del options["guidance_scale_2"]
    filled = request.model_copy(update={key: options[key] for key in options.keys() - given})
    if filled.guidance_scale > 1 or "negative_prompt" in given:
        return filled
    return filled.model_copy(update={"negative_prompt": ""})


def find_problems(request: SampleRequest, variant: Variant) -> Iterator[tuple[str, str]]:
    """Find options of a request that do not fit the model, that are missing, or that would have no effect.

    Yield the option, such as "--height=100", and a text that says what is wrong and how to fix it.
    """
    for key in ("height", "width", "num_frames"):
        if text := size_problem(variant, key, size := getattr(request, key)):
            yield f"{flag_of(key)}={size}", text
    name = variant.name
    conditions = variant.conditions
    can_start = {"image", "first_frame"} & set(conditions)
    must_end = "last_image" in conditions
    image = f"--image={request.image}"
    last_image = f"--last-image={request.last_image}"
    if request.image is None and "image" in conditions:
        yield "--image", f"is missing, and {name} starts from an image. Add --image PATH."
    if request.image is not None and not can_start:
        yield image, f"is for models that start from an image, not for {name}. Leave --image out."
    if request.last_image is None and must_end:
        yield "--last-image", f"is missing, and {name} ends at an image. Add --last-image PATH."
    if request.last_image is not None and not must_end:
        fix = "Leave --last-image out" + (", or use an FLF2V model" if can_start else "")
        yield last_image, f"is for models that end at an image, not for {name}. {fix}."
    if must_end and request.num_frames == 1:
        yield "--frames=1", "has no room for a first and a last image. Use 5 or more frames."
    # In diffusers, guidance_scale alone decides whether there is any guidance.
    no_effect = f"has no effect with --guidance={request.guidance_scale:g}, which turns guidance off. Raise --guidance above 1"
    if request.guidance_scale <= 1 and (text := request.negative_prompt):
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        yield f"--negative-prompt={shown}", f"{no_effect}, or leave --negative-prompt out."
    if request.guidance_scale_2 is None:
        return
    second = f"--guidance-2={request.guidance_scale_2:g}"
    if len(variant.experts) == 1:
        yield second, f"is for models of two experts, and {name} has one expert. Leave --guidance-2 out."
    elif request.guidance_scale <= 1 < request.guidance_scale_2:
        yield second, f"{no_effect}."


def _rules(error: ValidationError) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value as text, broken rule) for every error that pydantic found in the options of one video."""
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        rule = f"is invalid: {item['msg'][0].lower()}{item['msg'][1:]}."
        if item["type"] == "extra_forbidden":
            rule = f"is not an option of a prompt; {suggest(key, SampleRequest.model_fields)}"
        yield key, repr(item["input"]), rule
