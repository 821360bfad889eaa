"""A GPU without its arithmetic: operators on CUDA tensors give shapes, dtypes and devices, and everything on the CPU is real.

What a GPU would refuse is refused here as well: tensors of two devices in one operator, and kernels that get a shape or dtype
that they do not take. What a GPU would make the host wait for (`.item()`, `.tolist()`, a shape that depends on values, a copy to
the CPU, a copy from memory that is not pinned) has no answer here and raises. With `reads = 0` the numbers that the host reads
are counted instead. Autocast casts as it does for CUDA. Numbers are not computed.

A process calls `load` before it imports torch. It needs a C++ compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def build(folder: Path) -> Path:
    """Compile what lets torch hold fake CUDA tensors with gradients; a few seconds."""
    library = folder / "fake_cuda.so"
    source = Path(__file__).with_suffix(".cpp")
    command = [
        "g++",
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-I",
        str(_torch_dir() / "include"),
        str(source),
    ]
    command += ["-L", str(_torch_dir() / "lib"), "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def _torch_dir() -> Path:
    found = importlib.util.find_spec("torch")  # without importing it
    assert found is not None
    return Path(str(found.origin)).parent


def load(library: Path) -> None:
    """Put it into this process, which has not imported torch yet: torch looks for a GPU once."""
    ctypes.CDLL(str(_torch_dir() / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))

    import torch.cuda.amp.common

    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # else autocast for CUDA is off


def fake_streams() -> None:
    """Let torch make streams that do nothing: all work is done in the order in which it is submitted."""
    import torch

    class Stream:
        def __init__(self, device: Any = None) -> None:
            pass

        def wait_stream(self, stream: Stream) -> None:
            pass

        def wait_event(self, event: None) -> None:
            pass

        def record_event(self) -> None:
            pass

    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = nullcontext


def fake_cuda(may_wait: bool = False) -> Any:
    """A context in which `device="cuda"` works as the module says.

    Args:
        may_wait: copies to the GPU may be such that the host waits for them.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten
    copy = aten._to_copy.default
    copy_into = aten.copy_.default

    class FakeCuda(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.shapes = FakeTensorMode(allow_non_fake_inputs=True)
            self.pinned: dict[int, torch.Tensor] = {}
            self.reads: int | None = None
            """Number of times that the host has read the GPU; None refuses a read."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            leaves = tree_leaves((args, kwargs))
            on_gpu = any(
                isinstance(one, FakeTensor) or (isinstance(one, torch.device) and one.type == "cuda")
                for one in leaves
            )
            if func is aten._pin_memory.default:
                copied = args[0].clone()
                return self.pinned.setdefault(copied.data_ptr(), copied)
            if not on_gpu:
                return func(*args, **kwargs)
            if self.reads is not None and func is aten._local_scalar_dense.default:
                self.reads += 1
                return 0.0
            if self.reads is not None and func is copy and str(kwargs.get("device")) == "cpu":
                self.reads += 1
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            with self.shapes:
                result = func(*args, **kwargs)
            arrived = [one for one in tree_leaves(result) if isinstance(one, FakeTensor)]
            assert not any(one.device.type == "cpu" for one in arrived), f"{func} copies to the CPU"
            if func in (copy, copy_into):
                source = args[0] if func is copy else args[1]
                at_once = args[2] if func is copy_into and len(args) > 2 else kwargs.get("non_blocking")
                waits = not isinstance(source, FakeTensor) and not at_once
                assert may_wait or not waits, f"{func} copies to the GPU when all its queued work is done"
                pageable = not isinstance(source, FakeTensor) and source.data_ptr() not in self.pinned
                assert may_wait or not pageable, f"{func} copies to the GPU from pageable memory"
            return result

    return FakeCuda()


def move(model: Any) -> Any:
    """Put a model of any device on the fake GPU, its values left behind."""
    import torch

    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                module._parameters[name] = torch.nn.Parameter(
                    torch.empty_like(one, device="cuda"), one.requires_grad
                )
        for name, one in module._buffers.items():
            module._buffers[name] = None if one is None else torch.empty_like(one, device="cuda")
    return model
