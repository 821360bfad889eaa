"""Choose the attention kernel of a run: rank 0 measures the kernels, and all ranks use its choice."""

from __future__ import annotations

from itertools import product

import torch

from wands.attention.kernels.registry import Backend, get_backend, usable_backends
from wands.attention.packed import Segments
from wands.config.recipe import Recipe
from wands.distributed.bootstrap import gather_objects
from wands.engine.engine import attention_backend
from wands.texts import Log
from wands.transfer import to_device
from wands.variants import DiTShape

Choice = tuple[Backend, dict[str, str] | None]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def fastest_backend(times: dict[str, dict[int, float]]) -> str:
    """Return the name for `get_backend` of the fastest kernel, or of the fastest combination of cuDNN with another kernel.

    For example, "cudnn:1024:torch" means cuDNN for segments of 1,024 tokens or more, and torch for shorter ones. The fastest
    choice has the smallest sum over all `LENGTHS` of the milliseconds in `times`. cuDNN's times count 5 % more, because it builds
    an execution plan for each new length. At least one kernel must not be cuDNN.
    """

    def total(choice: tuple[str, float]) -> float:
        name, start = choice
        return sum(1.05 * times["cudnn"][n] if n >= start else times[name][n] for n in LENGTHS)

    others = [name for name in times if name != "cudnn"]
    name, start = min(product(others, [torch.inf, *times.get("cudnn", ())]), key=total)
    return name if start == torch.inf else f"cudnn:{start}:{name}"


def measure_backends(names: list[str], device: torch.device, *shape: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds of each kernel for each segment length, in bf16, forward and backward.

    `shape` is the number of heads on one rank, and the head dim. All times are for the same number of tokens: one segment of the
    longest length, or several shorter ones. The global random state does not change.
    """
    rows = torch.randn((4, LENGTHS[0], *shape), generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v, dout = to_device(rows, device).repeat(1, LENGTHS[-1] // LENGTHS[0], 1, 1)
    times: dict[str, dict[int, float]] = {name: {} for name in names}
    busy = torch.ones(8192, 8192, dtype=q.dtype, device=device)
    for name, length in product(names, LENGTHS):
        backend = get_backend("cudnn:1:torch" if name == "cudnn" else name)
        scale = shape[-1] ** -0.5
        segments = Segments.build([length] * (LENGTHS[-1] // length), device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for repeat in range(4):  # the last repeat counts; the first repeat builds plans and loads kernels
            if repeat == 3:
                # This work takes longer than the host needs to start the kernels below. Otherwise, cuDNN would be measured by
                # the host's time for a call per segment. In a training step, too, the host is ahead of the GPU.
                for _ in range(16):
                    torch.mm(busy, busy)
                start.record()
            backend.backward(dout, q, k, v, *backend.forward(q, k, v, segments, scale), segments, scale)
        end.record()
        end.synchronize()
        times[name][length] = start.elapsed_time(end)
    return times


def agree_on_backend(
    recipe: Recipe,
    shape: DiTShape,
    ulysses_degree: int,
    saved: dict[str, str] | None,
    *,
    rank: int,
    device: torch.device,
    log: Log,
) -> Choice:
    """Return the attention kernel of a run, and the choice to store in checkpoints. Every rank must call this function.

    No kernel is measured, and the choice is None, if `attention.backend` is not `auto`, if the run computes in fp32 or on a CPU,
    or if no kernel but cuDNN runs on all ranks. The kernel is then that of `attention_backend`. Otherwise rank 0 chooses among
    the kernels that run on all ranks: the choice `saved` in the checkpoint, if the GPU, torch and the kernels have not changed
    since; else the fastest kernel or combination that it measures. A choice has the keys "backend" (name of the kernel) and
    "setup" (GPU, torch version and usable kernels).
    """
    names = []
    heads = shape.num_heads // ulysses_degree
    head_dim = shape.head_dim
    if (recipe.attention.backend, recipe.precision.compute, device.type) == ("auto", "bf16", "cuda"):
        usable = gather_objects(list(usable_backends(device, torch.bfloat16, head_dim)))
        names = [name for name in usable[0] if all(name in others for others in usable)]
    if not {*names} - {"cudnn"}:  # nothing to compare
        return attention_backend(recipe, head_dim, device), None
    setup = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {', '.join(names)}"
    choice = saved or {"backend": "", "setup": ""}
    if rank == 0 and choice["setup"] != setup:
        if choice["setup"]:
            log(f"attention.backend=auto measures again: {choice['backend']} was chosen on {choice['setup']}")
        times = measure_backends(names, device, heads, head_dim)
        choice = {"backend": fastest_backend(times), "setup": setup}
        longest = ", ".join(f"{name} {times[name][LENGTHS[-1]]:.1f} ms" for name in names)
        log(f"attention.backend=auto: {choice['backend']} ({setup}; {LENGTHS[-1]:,} tokens: {longest})")
    choice = gather_objects(choice)[0]
    return get_backend(choice["backend"]), choice
