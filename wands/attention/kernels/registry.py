"""Which attention kernel runs: `attention.backend` by name, or the best that can run here and keeps the contract.

A kernel for CUDA is used only behind a check of the kernel itself, once in a process: its log-sum-exp and its
backward with a global one, in the dtype and head dim of the run, on this GPU, in the versions that are
installed (backends_check.py).
"""

from __future__ import annotations

import importlib.metadata
import logging
from functools import cache

import torch

from wands.attention.kernels.contract import Backend, ReferenceBackend
from wands.attention.kernels.flash import FLASH_BACKENDS, CpuBackend, FlashBackend
from wands.attention.kernels.self_check import check_backend
from wands.errors import ConfigError

__all__ = ["Backend", "choose_backend", "get_backend"]

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (ReferenceBackend(), CpuBackend(), *FLASH_BACKENDS)
}


def get_backend(name: str) -> Backend:
    """The kernel of that name, always the same object; whether it can run here is `choose_backend`'s to ask.

    Args:
        name: reference, cpu, torch, flash2, flash3 or flash4, as in `Backend.name`.
    """
    return BACKENDS[name]


def choose_backend(name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int = 128) -> Backend:
    """Turn `attention.backend` into a kernel that can run there, and say which in the log.

    `auto` takes the first of flash4, flash3, flash2 and torch that is installed, made for the GPU and right,
    with a warning for each that is not right; then the reference. On a CPU it takes cpu.

    Args:
        name: auto, reference, cpu, torch, flash2, flash3 or flash4.
        device: where q, k and v will live.
        dtype: their dtype, which is autocast's where autocast is on.
        head_dim: their last dimension.

    Raises:
        ConfigError: the named kernel cannot run on that device or with that dtype, is not installed, or fails
            the check of its results.
    """
    device = torch.device(device)
    where = f"{device.type} in {str(dtype).removeprefix('torch.')}"
    if name == "auto":
        chosen = _first_right(device, dtype, head_dim)
        _log_once(logging.INFO, f"attention.backend=auto: {chosen} ({where})")
        return get_backend(chosen)
    refusal = f"attention.backend={name} cannot run on {where}"
    if obstacle := _obstacle(name, device, dtype):
        raise ConfigError(f"{refusal} ({obstacle[0]}); {obstacle[1]}.")
    if isinstance(get_backend(name), FlashBackend) and (fault := _fault(name, device, dtype, head_dim)):
        raise ConfigError(f"{refusal} (it fails the check of its results: {fault}); use auto.")
    _log_once(logging.INFO, f"attention.backend={name} ({where})")
    return get_backend(name)


def _first_right(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    if device.type == "cpu":
        return "cpu"
    for name in (backend.name for backend in FLASH_BACKENDS):
        if _obstacle(name, device, dtype):
            continue
        fault = _fault(name, device, dtype, head_dim)
        if not fault:
            return name
        _log_once(logging.WARNING, f"attention.backend=auto: {name} fails the check of its results: {fault}")
    _log_once(
        logging.WARNING,
        f"attention.backend=auto: no flash kernel runs on {device.type} in {dtype}; the reference needs "
        "memory for whole score matrices, which grow with the square of a clip's tokens",
    )
    return "reference"


def _obstacle(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """What keeps a kernel from running there at all, and the cure."""
    backend = get_backend(name)
    if name == "cpu" and device.type != "cpu":
        return "its kernel is for CPUs", "use auto"
    if not isinstance(backend, FlashBackend):
        return None
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "its kernel needs CUDA and bf16 or fp16", "use auto"
    capability = torch.cuda.get_device_capability(device)
    if not backend.runs_on(capability):
        have = ".".join(map(str, capability))
        return f"compute capability {have}, its kernel needs {backend.capability}", "use auto"
    if backend.package and not _installed(backend.package):
        return f"{backend.package} is not installed", f"{backend.install}, or use auto"
    return None


def _installed(package: str) -> bool:
    """By distribution: flash-attn 2 and 4 share the module `flash_attn`, and 2 has brought an old copy of 4."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@cache
def _fault(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """What is wrong with a kernel's results there; empty when they are right."""
    try:
        check_backend(get_backend(name), device, dtype, head_dim)
    except Exception as error:  # a package of another version or build fails in ways of its own
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line[:300]}"
    return ""


@cache
def _log_once(level: int, message: str) -> None:
    """The start block asks for the kernel too, not only the model."""
    logger.log(level, message)
