"""The command `wands tools calibrate`: measure the speeds from which `wands plan` predicts step times."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.benchmark import Timer

from wands.attention.kernels.registry import get_backend, usable_backends
from wands.attention.packed import Segments
from wands.config.options import CalibrateOptions
from wands.distributed.bootstrap import accelerator_type
from wands.files import write_text
from wands.planning.hardware import measurement_file
from wands.planning.step_time import ATTENTION_BACKWARD


def calibrate(options: CalibrateOptions) -> str:
    """Measure this machine's GPU, or else its CPU, write the speeds for `wands plan` to a file, and return them as text."""
    kind = accelerator_type()
    device = torch.device(kind)
    # Speeds of a GPU hardly grow with larger tensors. A CPU without bf16 units takes minutes for a product of this size.
    rows, width, heads = (32_768, 5120, 12) if kind == "cuda" else (256, 512, 2)
    head_dim = 128
    name = torch.cuda.get_device_name() if kind == "cuda" else f"CPU {platform.machine()}"
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    x = draw(rows, width)
    weight = draw(width, width)
    one = torch.zeros(1, device=device)
    q, k, v, dout = draw(4, rows, heads, head_dim)
    attention = {}
    segments = Segments.build((rows,), device=device)
    scale = head_dim**-0.5
    names = usable_backends(device, torch.bfloat16, head_dim) if kind == "cuda" else ["cpu"]
    flops = 4 * rows * q.numel()
    for backend_name in names:
        backend = get_backend("cudnn:1:torch" if backend_name == "cudnn" else backend_name)
        forward = partial(backend.forward, q, k, v, segments, scale)
        backward = partial(backend.backward, dout, q, k, v, *forward(), segments, scale)
        works = (flops, forward), (ATTENTION_BACKWARD * flops, backward)
        attention[backend_name] = [work / _median_seconds(function) for work, function in works]
    speeds = {
        "copy_bandwidth": 2 * x.nbytes / _median_seconds(partial(torch.empty_like(x).copy_, x)),
        "linear_flops": 2 * rows * width * width / _median_seconds(partial(torch.mm, x, weight)),
        "attention_flops": attention,
        "launch_seconds": _median_seconds(partial(one.add_, 1)),
    }
    file = options.out or measurement_file(name)
    text = json.dumps({"device": name, **speeds}, indent=2)
    write_text(file, text + "\n")
    return f"{text}\nspeeds of {name} in bytes/s, FLOP/s and seconds, written to {file}"


def _median_seconds(function: Callable[[], Any]) -> float:
    """Return the median time of a call of a function, after a warm-up call, which may load kernels."""
    function()
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.3).median)
