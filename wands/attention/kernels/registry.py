"""Select the attention kernel for a value of `attention.backend`: the name of a kernel, or `auto`.

For training in bf16 on a GPU, `auto` measures the kernels (wands/engine/attention_choice.py). Otherwise it takes the first of a
fixed list that gives right results. A `FlashBackend` is used only after `check_backend`, once per process, has checked it on this
GPU in the dtype and head dim of the run.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache

import torch

from wands.attention.kernels.contract import REFERENCE, Backend
from wands.attention.kernels.flash import CPU, FLASH_BACKENDS, FlashBackend, cudnn_backend
from wands.attention.kernels.self_check import check_backend
from wands.errors import ConfigError

__all__ = ["Backend", "choose_backend", "get_backend", "usable_backends"]

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (REFERENCE, CPU, *FLASH_BACKENDS)}


def get_backend(name: str) -> Backend:
    """Return the kernel called `name`, without checking that it runs on this machine (see `choose_backend`).

    "cudnn:2048:torch" means cuDNN for segments of 2048 tokens or more, and torch for shorter ones.
    """
    _, *mixed = name.split(":")
    return cudnn_backend(int(mixed[0]), BACKENDS[mixed[1]]) if mixed else BACKENDS[name]


def choose_backend(name: str, device: torch.device | str, dtype: torch.dtype, head_dim: int = 128) -> Backend:
    """Return the attention kernel for a value of `attention.backend`, and log its name once.

    On a CPU, `auto` returns the cpu kernel. On a GPU, it returns the first of `usable_backends`, or else the slow reference
    kernel, without comparing speeds. Under autocast, `dtype` is the dtype of autocast.

    Raises:
        ConfigError: if the named kernel does not support the device or the dtype, is not installed, or fails `check_backend`.
    """
    device = torch.device(device)
    target = f"{device.type} in {str(dtype).removeprefix('torch.')}"
    if name == "auto":
        names = iter(["cpu"]) if device.type == "cpu" else usable_backends(device, dtype, head_dim)
        if (chosen := next(names, "reference")) == "reference":
            text = f"attention.backend=auto: no flash kernel runs on {device.type} in {dtype}. The slow reference kernel is used."
            text += " Its memory grows with the square of a clip's tokens, and it is expected to be about 10 times slower. "
            text += "Flash kernels need CUDA compute capability >= 8.0, and bf16 or fp16."
            _log_once(logging.WARNING, text)
        _log_once(logging.INFO, f"attention.backend=auto: {chosen} ({target})")
        return get_backend(chosen)
    if unmet := _unmet_requirement(name, device, dtype):
        raise ConfigError(f"attention.backend={name} cannot run on {target}: {unmet}.")
    if isinstance(get_backend(name), FlashBackend) and (fault := _fault(name, device, dtype, head_dim)):
        raise ConfigError(f"attention.backend={name} fails on {target}: {fault}. Use attention.backend=auto.")
    _log_once(logging.INFO, f"attention.backend={name} ({target})")
    return get_backend(name)


def usable_backends(device: torch.device, dtype: torch.dtype, head_dim: int) -> Iterator[str]:
    """Yield the kernels that `attention.backend: auto` may use on a GPU, in the order of preference.

    A kernel that fails `check_backend` is left out with a warning.
    """
    for name in (b.name for b in FLASH_BACKENDS if not _unmet_requirement(b.name, device, dtype)):
        if fault := _fault(name, device, dtype, head_dim):
            text = f"attention.backend=auto skips {name}, which fails the check of its results ({fault}). "
            text += "Without cudnn, flash3 and flash4, attention on a Hopper GPU is expected to take 1.7 times as long."
            _log_once(logging.WARNING, text)
        else:
            yield name


def _unmet_requirement(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run on the device in the dtype, with the fix; None if it can."""
    backend = get_backend(name)
    use_auto = "Use attention.backend=auto"
    if name == "cpu" and device.type != "cpu":
        return f"the kernel is for CPUs. {use_auto}"
    if not isinstance(backend, FlashBackend):
        return None
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel needs CUDA and bf16 or fp16. {use_auto}"
    capability = torch.cuda.get_device_capability(device)
    if not backend.runs_on(capability):
        found = ".".join(map(str, capability))
        return f"the GPU has compute capability {found}, the kernel needs {backend.capability}. {use_auto}"
    if backend.package and not _installed(backend.package):
        install = backend.install.format(name=name)
        return f"{backend.package} is not installed. {install}, or use attention.backend=auto"
    return None


def _installed(package: str) -> bool:
    # Look for the distribution, not the module: flash-attn 2 and 4 share the module `flash_attn`, and some releases of
    # flash-attn 2 contain an old copy of flash-attn 4.
    return any(importlib.metadata.distributions(name=package))


@cache
def _fault(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return why `check_backend` refuses a kernel, or ""."""
    tested = "cudnn:64:torch" if name == "cudnn" else name  # most segments of the check are short
    try:
        check_backend(get_backend(tested), device, dtype, head_dim)
    except Exception as error:  # packages of another version or build raise errors of any class
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line[:300]}"
    return ""


@cache
def _log_once(level: int, message: str) -> None:
    """Log a message once per process: `choose_backend` is called for the model and for the run summary."""
    logger.log(level, message)
