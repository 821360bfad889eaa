"""Setup of `wands tools selftest` (model, clip and settings), and the classes for the results of the checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from wands.conditions.condition import Condition
from wands.config.options import SelftestOptions
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip
from wands.encoders.components import read_variant
from wands.errors import ConfigError, DataError
from wands.model.files.hub import fetch_model, is_hub_id
from wands.model.files.loading import load_config
from wands.texts import plural
from wands.variants import VARIANTS, Expert, Variant

NUM_FRAMES = 13
HEIGHT = 128
WIDTH = 192
"""Size of the synthetic clip. A clip from --clip is cut to `NUM_FRAMES` frames of at most 2.25 * `HEIGHT` * `WIDTH` pixels."""


class Skipped(Exception):
    """Exception that a check of `wands tools selftest` raises if it cannot be applied to the model. The text is the reason."""


@dataclass(frozen=True)
class Result:
    """Result of one check, printed as one line of the report.

    Attributes:
        status: "pass", "fail" or "skipped".
        text: measured value and its bound, the error that stopped the check, or the reason why it was skipped.
        name: name of the check, and of the tested DiT if the model has two.
    """

    status: str
    text: str
    name: str = ""

    @classmethod
    def of(cls, passed: bool | None, measured: str, bound: str) -> Result:
        """Return the result of a check, without its name. `passed` None means "skipped": the measured value has no bound."""
        status = "skipped" if passed is None else "pass" if passed else "fail"
        return cls(status, f"{measured} ({bound})")

    def __str__(self) -> str:
        return f"{self.name:<32} {self.status:<8} {self.text}"


@dataclass(frozen=True)
class Setup:
    """The tested model and the settings of the checks.

    Attributes:
        options: options of the command.
        folder: folder of the diffusers pipeline.
        variant: variant of the pipeline's configs.
        device: device of all computations.
        dtype: dtype of the text encoder and of the DiT's computation. The VAE and CLIP use fp32, as in `wands preprocess`.
        frames: RGB frames of the clip, uint8 [F, height, width, 3], F = 4k + 1 >= 5.
        expert: the DiT to test. Its checks run once for each DiT of the model.
    """

    options: SelftestOptions
    folder: Path
    variant: Variant
    device: torch.device
    dtype: torch.dtype
    frames: np.ndarray
    expert: Expert

    @property
    def is_published(self) -> bool:
        """Whether the model has the layer sizes of a published Wan model, and therefore the published statistics of latents."""
        return self.variant.name in VARIANTS

    def has(self, condition: str) -> bool:
        """Return whether the published model takes the input `condition`, such as "image" (see `Variant.conditions`)."""
        return condition in self.variant.conditions


def load_setup(options: SelftestOptions, conditions: Sequence[Condition] = ()) -> Setup:
    """Read the configs of the model and the frames of the clip, without reading weights or downloading.

    The default clip is synthetic.

    Raises:
        ConfigError: if the model is not on this machine or is not a Wan pipeline, or if the device does not exist.
        DataError: if the clip cannot be used.
    """
    folder = find_folder(options.model)
    variant = read_variant(folder, conditions)
    if variant.dit.in_channels != load_config(folder, key="--model")["in_channels"]:
        names = ", ".join(condition.name for condition in conditions)
        raise ConfigError(
            f"--model={options.model} has no channels for the input {names}; use a model that was trained with it."
        )
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    if options.device == "cuda" and not on_gpu:
        raise ConfigError("--device=cuda, but PyTorch finds no GPU on this machine; use --device=cpu.")
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if on_gpu else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype or ("bf16" if on_gpu else "fp32")]
    frames = _make_frames() if options.clip is None else _read_frames(options.clip, variant)
    return Setup(
        options=options,
        folder=folder,
        variant=variant,
        device=device,
        dtype=dtype,
        frames=frames,
        expert=variant.experts[0],
    )


def find_folder(model: str) -> Path:
    """Return the folder of a model, given as folder or cached Hub id; raise ConfigError if it is not on this machine."""
    if not is_hub_id(model):
        return fetch_model(model, key="--model")
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        raise ConfigError(
            f"--model={model} is not in the Hub's cache on this machine, and selftest downloads nothing; download it first: "
            f"hf download {model}."
        ) from None


def _read_frames(clip: Path, variant: Variant) -> np.ndarray:
    spec = ClipSpec.of_variant(variant, max_frames=NUM_FRAMES, max_pixels=HEIGHT * WIDTH * 9 // 4)
    frames: np.ndarray = next(iter(decode_clip(clip, spec))).frames
    if len(frames) < 5:
        raise DataError(
            f"--clip={clip} has {plural(len(frames), 'frame')} at {variant.fps} fps, but at least 5 frames are "
            "needed; use a longer clip."
        )
    return frames


def _make_frames() -> np.ndarray:
    """Return a synthetic clip of moving, smooth color waves, uint8 [frames, height, width, 3]."""
    axes = (np.linspace(0, 3, NUM_FRAMES), np.linspace(0, 4, HEIGHT), np.linspace(0, 6, WIDTH))
    t, y, x = np.meshgrid(*axes, indexing="ij")
    waves = np.stack([np.sin(x + t), np.cos(y - t), np.sin(x * y / 3 + t)], -1)
    return (127.5 + 127.5 * waves).round().astype(np.uint8)


def judge(measured: Tensor, expected: Tensor) -> Result:
    """Return the result of a check of fp32 values. The check passes if the relative error of `measured` is at most 1e-5."""
    return judge_error(relative_error(measured, expected), 1e-5, "fp32 sums in a different order")


def judge_error(error: float, bound: float, why: str, origin: str = "the stock pipeline") -> Result:
    """Return the result of a check that measured a relative error.

    `why` is the reason for the bound, `origin` names the reference.
    """
    return Result.of(error <= bound, f"relative error {error:.2g} to {origin}", f"<= {bound:.2g}, {why}")


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """Return the norm of `measured - expected` over that of `expected`; infinity if shapes differ or values are not finite."""
    measured = measured.detach().double().cpu()
    expected = expected.detach().double().cpu()
    if measured.shape != expected.shape:
        return float("inf")
    error = float((measured - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if np.isfinite(error) else float("inf")
