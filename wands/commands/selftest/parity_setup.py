"""What the checks of `wands selftest` share: the model that is on disk, a clip, and how a result is said."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip
from wands.errors import ConfigError, DataError
from wands.model.files.loading import load_config, load_index
from wands.variants import VARIANTS, Variant, variant_of

NUM_FRAMES, HEIGHT, WIDTH = 13, 128, 192
"""Of the clip that is made up; of a given one at most as many frames, and 1.5 x 1.5 as many pixels."""
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline")
OFFICIAL_TEXT_LEN = 512
"""Official Wan's `text_len`; not `wands.variants.TEXT_LEN`, which is among what is checked."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Skipped(Exception):
    """A check that says nothing here; the text is the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        passed: it keeps its bound; None where there is no bound to keep.
        number: what was measured.
        bound: what it must be, and why where that is not plain.
    """

    passed: bool | None
    number: str
    bound: str


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        name: of the check, and of the DiT where a model has two.
        status: how it ended.
        text: number and bound, or the reason.
    """

    name: str
    status: Literal["pass", "fail", "skipped"]
    text: str

    def __str__(self) -> str:
        return f"{self.name:<32} {self.status:<8} {self.text}"


@dataclass(frozen=True)
class Setup:
    """What is tested, and where.

    Attributes:
        folder: diffusers pipeline.
        index: its `model_index.json`.
        config: of the (first) DiT.
        variant: what they are.
        device: where everything runs.
        dtype: "fp32", or "bf16": text encoder and, under autocast, DiT; VAE and CLIP stay in fp32, as in preprocess.
        frames: uint8 [F, H, W, 3], F = 4k + 1 >= 5.
        clip: where the frames are from; None when they are made up.
        command: how the user called this, without its options.
    """

    folder: Path
    index: Mapping[str, Any]
    config: Mapping[str, Any]
    variant: Variant
    device: torch.device
    dtype: Literal["fp32", "bf16"]
    frames: np.ndarray
    clip: Path | None
    command: str

    @property
    def is_published(self) -> bool:
        """The model has the shape of one that Wan's authors published, and so has its VAE's statistics."""
        return self.variant.name in VARIANTS

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return DTYPES[self.dtype]


def load_setup(model: str, clip: Path | None, device: str | None, dtype: str | None) -> Setup:
    """Read the model's configs and the clip; no weight is read and nothing is fetched.

    Args:
        model: folder of a diffusers pipeline, or the id of one that is in the Hub's cache on this machine.
        clip: a video; None makes one up.
        device: "cuda" or "cpu"; by default this process's GPU, if there is one.
        dtype: "fp32" or "bf16"; by default bf16 on a GPU, as in training, and fp32 elsewhere.

    Raises:
        ConfigError: no such model here, it is no Wan pipeline, or no such device.
        DataError: the clip cannot be used.
    """
    folder = find_folder(model)
    index = load_index(folder)
    if index.get("_class_name") not in PIPELINES:
        raise ConfigError(
            f"model={model} is no Wan pipeline in diffusers layout (model_index.json names {index.get('_class_name')}); give "
            "one, or make one with wands convert."
        )
    config = load_config(folder)
    try:
        variant = variant_of(config, index)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model={model}: {error}; give a pipeline of Wan 2.1 or 2.2.") from None
    where = _find_device(device)
    own = dtype or ("bf16" if where.type == "cuda" else "fp32")
    assert own in DTYPES, own
    chosen = cast(Literal["fp32", "bf16"], own)
    frames = _make_frames() if clip is None else _read_frames(clip, variant)
    return Setup(
        folder, index, config, variant, where, chosen, frames, clip, f"wands selftest --model {model}"
    )


def find_folder(model: str) -> Path:
    """The folder of a model, or that of a Hub id in this machine's cache; the network is not asked.

    Raises:
        ConfigError: neither is here.
    """
    if Path(model).is_dir():
        return Path(model)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists():
        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            cure = f"fetch it first: hf download {model}"
    else:
        cure = "give the folder of a Wan pipeline"
    raise ConfigError(
        f"model={model} is no folder here, nor is it in the Hub's cache, and selftest fetches nothing; {cure}."
    )


def _find_device(device: str | None) -> torch.device:
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ConfigError("device=cuda, but PyTorch finds no GPU here; use cpu.")
    if device == "cpu" or not found:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _read_frames(clip: Path, variant: Variant) -> np.ndarray:
    spec = ClipSpec.of_variant(variant, max_frames=NUM_FRAMES, max_pixels=HEIGHT * WIDTH * 9 // 4)
    frames: np.ndarray = next(iter(decode_clip(clip, spec))).frames
    if len(frames) < 5:
        raise DataError(
            f"clip={clip} gives {len(frames)} frames at {variant.fps} fps, 5 are needed; give a longer one."
        )
    return frames


def _make_frames() -> np.ndarray:
    """Smooth colours that move, over the full range."""
    axes = (np.linspace(0, 3, NUM_FRAMES), np.linspace(0, 4, HEIGHT), np.linspace(0, 6, WIDTH))
    t, y, x = np.meshgrid(*axes, indexing="ij")
    waves = [np.sin(x + t), np.cos(y - t), np.sin(x * y / 3 + t)]
    return np.stack([(127.5 + 127.5 * wave).round() for wave in waves], -1).astype(np.uint8)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right; infinite where shapes differ or something is not finite."""
    found, right = found.detach().double().cpu(), right.detach().double().cpu()
    if found.shape != right.shape:
        return float("inf")
    error = float((found - right).norm() / right.norm().clamp(min=1e-30))
    return error if np.isfinite(error) else float("inf")


def judge(error: float, bound: float, why: str = "") -> Outcome:
    """An outcome of a relative error."""
    return Outcome(error <= bound, f"relative error {error:.2g}", f"<= {bound:.2g}{why and f', {why}'}")


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """Products of fp32 numbers in fp32: PyTorch lets cuDNN's convolutions round to TF32, at 1e-3."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' notes on every load: a line of the report is what is read."""
    names = ("diffusers", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def free_memory() -> None:
    """Give back what the part that was just dropped held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
