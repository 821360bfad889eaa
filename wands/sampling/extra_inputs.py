"""Read, encode and apply the inputs of conditions of outside code, when videos are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from wands.conditions.arrays import ClipSize
from wands.conditions.clip_files import ClipFile
from wands.conditions.condition import Channels, ClipFrames, CrossAttention, Encoders, check_entry
from wands.conditions.published import clip_files_of
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, to_pixels
from wands.errors import ConfigError, DataError
from wands.patches import unpatchify
from wands.sampling.requests import SampleRequest, flag_of
from wands.variants import Variant

Files = Mapping[str, np.ndarray]
"""Result of `ClipFile.of_window` for the frames of a video, by the column of the file, such as "control"."""


class ExtraInputs(NamedTuple):
    """Inputs of the conditions of outside code for one video.

    Attributes:
        channels: [1, C', f, h, w] to append to the latents, or None.
        tokens: [1, I, E] to append to the cross-attention to images, or None.
    """

    channels: Tensor | None = None
    tokens: Tensor | None = None


NO_INPUTS = ExtraInputs()


def read_inputs(requests: Sequence[SampleRequest], variant: Variant) -> tuple[list[Files], list[str]]:
    """Return the files that conditions of outside code need for each checked request, and an error text for each bad file."""
    kinds = {kind.column: kind for kind in clip_files_of(variant.extra)}
    flag = flag_of("inputs")
    files = list[Files]()
    problems = []
    for request in requests:
        found = {}
        for column in request.inputs.keys() - kinds.keys():
            problems.append(
                f"{flag} {column}={request.inputs[column]} is for models with the input {column}, not for {variant.name}. "
                f"Leave it out, or add --import FILE, where FILE defines {column}."
            )
        for column, kind in kinds.items():
            path = request.inputs.get(column)
            if path is None:
                if kind.required:
                    fix = f"Add {flag} {column}=FILE."
                    problems.append(f"{flag} {column} is missing, and the model was trained with it. {fix}")
                continue
            try:
                found[column] = _read_file(Path(path), kind, request, variant)
            except (DataError, ValueError) as error:
                problems.append(f"{flag} {column}={path} cannot be used: {error}.")
        files.append(found)
    return files, list(dict.fromkeys(problems))


def parse_inputs(texts: Sequence[str]) -> dict[str, str]:
    """Parse values of the option --input, such as "control=clip.control.mp4".

    Raises:
        ConfigError: if a value has no name or no path.
    """
    inputs = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(
                f"--input {text} must be NAME=FILE; write for example --input control=clip.control.mp4."
            )
        inputs[name] = path
    return inputs


def _read_file(path: Path, kind: ClipFile, request: SampleRequest, variant: Variant) -> np.ndarray:
    """Decode a file in the size, frame rate and length of a request, as `wands preprocess` decodes it for a clip."""
    side = variant.vae_stride[1] * variant.dit.patch_size[1]
    spec = ClipSpec(
        fps=variant.fps,
        height=request.height,
        width=request.width,
        center_crop=True,
        max_frames=request.num_frames,
        size_multiple=side,
        frame_stride=variant.vae_stride[0],
    )
    frames = next(decode_clip(path, spec)).frames
    if len(frames) != request.num_frames:
        raise DataError(
            f"it has {len(frames)} frames at {variant.fps} per second, but the video has {request.num_frames}; use a longer "
            "file, or fewer frames"
        )
    kept = np.stack([kind.of_frame(frame, side) for frame in frames])
    return kind.of_window(kept, variant.vae_stride[0])


@torch.no_grad()
def encode_inputs(request: SampleRequest, files: Files, variant: Variant, encoders: Encoders) -> ExtraInputs:
    """Return the inputs of the conditions of outside code for one video, on the CPU."""
    latents = variant.latent_size(request.num_frames, request.height, request.width)
    size = ClipSize(latents, variant.dit.patch_size)
    gray = torch.full((request.num_frames, request.height, request.width, 3), 128, dtype=torch.uint8)
    clip = ClipFrames(
        frames=gray,
        pixels=to_pixels(gray).to(encoders.device),
        files={column: torch.from_numpy(np.ascontiguousarray(array)) for column, array in files.items()},
        size=size,
    )
    channels = []
    tokens = []
    for condition in variant.extra:
        lacks = any(kind.column not in files for kind in condition.files)
        arrays = condition.absent(size) if lacks else condition.request(clip, encoders)
        dtypes = {spec.name: spec.torch_dtype for spec in condition.arrays}
        entry = condition.enter({name: array.cpu().to(dtypes[name]) for name, array in arrays.items()}, size)
        check_entry(condition, entry, size)
        if isinstance(entry, Channels):
            patch_size = size.patch_size
            channels.append(unpatchify(entry.rows, size.grid, condition.channels, patch_size))
        elif isinstance(entry, CrossAttention):
            tokens.append(entry.tokens.float())
    return ExtraInputs(
        channels=torch.cat(channels)[None] if channels else None,
        tokens=torch.cat(tokens)[None] if tokens else None,
    )


@contextmanager
def appended(pipeline: Any, extra: ExtraInputs) -> Iterator[None]:
    """Append inputs to what a pipeline passes to its transformers, inside a `with` block."""

    def forward(own_forward: Callable[..., Any], **inputs: Any) -> Any:
        for name, more, dim in (
            ("hidden_states", extra.channels, 1),
            ("encoder_hidden_states_image", extra.tokens, 1),
        ):
            given = inputs.get(name)
            if more is not None and given is not None:
                more = more.to(given.device, given.dtype).expand(len(given), *more.shape[1:])
                inputs[name] = torch.cat([given, more], dim)
        return own_forward(**inputs)

    with ExitStack() as patches:
        for model in filter(None, (pipeline.transformer, pipeline.transformer_2)):
            patches.enter_context(patch.object(model, "forward", partial(forward, model.forward)))
        yield
