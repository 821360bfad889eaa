"""Stage `attention` of gpu_stages.py: copies, matmuls and attention kernels."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import gpu_clock
import torch
from bench_record import Results, Rows
from gpu_sizes import CLIPS, COPY_BYTES, DTYPES, HEAD_DIM, HEADS, SHORT_CLIPS, TEXT_TOKENS, VARIANT_NAMES
from torch import Tensor

from wands.attention.kernels.registry import BACKENDS, Backend, choose_backend
from wands.attention.packed import Segments
from wands.attention.varlen import PaddedSegments, padded_attention
from wands.errors import ConfigError
from wands.model.fp8 import MIN_CAPABILITY, fp8_matmul
from wands.variants import TEXT_LEN, VARIANTS


def ceilings(device: str) -> Rows:
    """Measure upper limits of the speed: a copy in device memory, and matmuls of the feed-forward layers of 1.3B and 14B."""
    size = 2**20 if device == "cpu" else 2**31
    dtype = DTYPES[device]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = gpu_clock.time_calls(source.clone, device)[1]
    rows: Rows = [{"work": f"copy of {size:,} bytes", "ms": seconds * 1e3, "TB/s": 2 * size / seconds / 1e12}]
    for name in VARIANT_NAMES:
        shape = VARIANTS[name].dit
        tokens = 32760
        m, k, n = (tokens, shape.dim, shape.ffn_dim) if device == "cuda" else (64, 64, 128)
        a, b = (torch.randn(size, dtype=dtype, device=device) for size in ((m, k), (k, n)))
        for title, x, y in (
            ("up", a, b),
            ("weight gradient", a.T, torch.randn(m, n, device=device).to(dtype)),
        ):
            flops = 2e-12 * m * k * n
            seconds = gpu_clock.time_calls(lambda x=x, y=y: x @ y, device)[1]
            rows.append({"work": f"{name} {title}", "ms": seconds * 1e3, "TFLOP/s": flops / seconds})
        if device == "cpu" or torch.cuda.get_device_capability() >= MIN_CAPABILITY:
            # With the casts of both factors, as in training.
            rows_of_a, rows_of_b = (factor.to(torch.bfloat16).contiguous() for factor in (a, b.T))
            multiply = partial(fp8_matmul, rows_of_a, rows_of_b, None, False, False, device == "cuda")
            seconds = gpu_clock.time_calls(multiply, device)[1]
            rows.append(
                {"work": f"{name} up in fp8", "ms": seconds * 1e3, "TFLOP/s": 2e-12 * m * k * n / seconds}
            )
    return rows


def kernels_here(device: str) -> Iterator[Backend]:
    """Yield each attention kernel that runs on this machine and computes correct results, except the reference kernel."""
    for name in BACKENDS:
        with contextlib.suppress(ConfigError):
            if name != "reference":
                yield choose_backend(name, device, DTYPES[device], HEAD_DIM)


def random_rows(device: str, heads: int, *lens: int) -> list[Tensor]:
    """Return random tensors [rows, heads, HEAD_DIM], one for each number of rows in `lens`."""
    return [torch.randn(rows, heads, HEAD_DIM, device=device).to(DTYPES[device]) for rows in lens]


def attention(device: str, heads: int, lens: Sequence[int]) -> Rows:
    """Measure the forward and backward pass of self-attention with every kernel."""
    rows = []
    total = sum(lens)
    scale = HEAD_DIM**-0.5
    q, k, v, dout = random_rows(device, heads, *[total] * 4)
    segments = Segments.build(lens, device=device)
    flops = 4 * heads * HEAD_DIM * sum(length * length for length in lens)
    for kernel in kernels_here(device):
        out, lse = kernel.forward(q, k, v, segments, scale)
        calls = {
            "forward": (1.0, lambda b=kernel: b.forward(q, k, v, segments, scale)),
            "backward": (
                2.5,
                lambda b=kernel, o=out, s=lse: b.backward(dout, q, k, v, o, s, segments, scale),
            ),
        }
        row: dict[str, Any] = {"kernel": kernel.name}
        for name, (factor, call) in calls.items():
            first, seconds = gpu_clock.time_calls(call, device, 3)
            row |= {f"{name} ms": seconds * 1e3, f"{name} TFLOP/s": factor * flops / seconds / 1e12}
            row |= {f"first {name} ms": first * 1e3}
        rows.append(row)
    return rows


def cross_attention(device: str, heads: int) -> Rows:
    """Measure cross-attention with every attention kernel that this machine can run.

    Each kernel is measured in two ways:

    - by itself: only the backward pass, with 1 key and with 100 keys (text tokens)
    - in the cross-attention of the model, which pads the 100 text tokens to 512: the forward pass and the backward pass
    """
    tokens = max(CLIPS[device][0])
    scale = HEAD_DIM**-0.5
    q, dout = random_rows(device, heads, tokens, tokens)
    rows = []
    for kernel in kernels_here(device):
        row: dict[str, Any] = {"kernel": kernel.name}
        for keys in (1, TEXT_TOKENS):
            k, v = random_rows(device, heads, keys, keys)
            segments = Segments.build([tokens], [keys], device)
            out, lse = kernel.forward(q, k, v, segments, scale)
            backward = lambda b=kernel, k=k, v=v, o=out, s=lse, g=segments: b.backward(  # noqa: E731
                dout, q, k, v, o, s, g, scale
            )
            row[f"{keys} keys, backward ms"] = gpu_clock.time_calls(backward, device)[1] * 1e3
        leaves = [x.requires_grad_() for x in (q.detach(), *random_rows(device, heads, *[TEXT_TOKENS] * 2))]
        pads = [x[0].requires_grad_() for x in random_rows(device, heads, 1, 1)]
        padded = PaddedSegments.build([tokens], [TEXT_TOKENS], TEXT_LEN, device)
        forward = lambda b=kernel, x=(*leaves, *pads), p=padded: padded_attention(*x, p, b)  # noqa: E731
        result = forward()
        row["padded text, forward ms"] = gpu_clock.time_calls(forward, device)[1] * 1e3
        inputs = (*leaves, *pads)
        call = lambda r=result, x=inputs: torch.autograd.grad(r, x, dout, retain_graph=True)  # noqa: E731
        row["padded text, backward ms"] = gpu_clock.time_calls(call, device)[1] * 1e3
        rows.append(row)
    return rows


def cudnn_varlen(device: str, heads: int, lens: Sequence[int]) -> Rows:
    """Measure cuDNN with all clips of a bin in one call, which PyTorch itself never chooses, and compare with the kernel `torch`.

    The errors are the largest differences from `torch`, as shares of its largest value. They are a few thousandths if the call
    computes what it should.
    """
    aten = torch.ops.aten
    total = sum(lens)
    longest = max(lens)
    scale = HEAD_DIM**-0.5
    q, k, v, dout = random_rows(device, heads, *[total] * 4)
    segments = Segments.build(lens, device=device)
    starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
    bounds = starts, starts, longest, longest
    forward = partial(aten._cudnn_attention_forward, q, k, v, None, *bounds, True, scale=scale)
    out, lse, *_, seed, offset, _ = forward()
    given = dout, q, k, v, out, lse, seed, offset, None
    backward = partial(aten._cudnn_attention_backward, *given, *bounds, 0.0, False, scale=scale)
    torch_kernel = choose_backend("torch", device, DTYPES[device], HEAD_DIM)
    expected, stats = torch_kernel.forward(q, k, v, segments, scale)
    grads = torch_kernel.backward(dout, q, k, v, expected, stats, segments, scale)
    pairs = zip((out, *backward()), (expected, *grads), strict=True)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    flops = 4 * heads * HEAD_DIM * sum(length * length for length in lens)
    row: dict[str, Any] = {"kernel": "cuDNN varlen", "error of out": errors[0]}
    row["error of gradients"] = max(errors[1:])
    for name, factor, call in (("forward", 1.0, forward), ("backward", 2.5, backward)):
        seconds = gpu_clock.time_calls(call, device, 3)[1]
        row |= {f"{name} ms": seconds * 1e3, f"{name} TFLOP/s": factor * flops / seconds / 1e12}
    return [row]


def copies(device: str) -> Rows:
    """Measure how long a copy to a busy device blocks the host: first with pageable host memory, then with pinned memory."""
    side = 8192 if device == "cuda" else 64
    busy = torch.randn(side, side, device=device).to(DTYPES[device])
    rows: Rows = []
    for size in COPY_BYTES[device]:
        for name, pinned in (("pageable", False), ("pinned", True)):
            source = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and device == "cuda")
            busy @ busy  # the first matmul loads its library, and the first copy allocates memory
            source.to(device, non_blocking=True)
            gpu_clock.wait(device)
            started = time.perf_counter()
            for _ in range(40):
                busy @ busy
            queued = time.perf_counter()
            source.to(device, non_blocking=True)
            copied = time.perf_counter()
            gpu_clock.wait(device)
            ended = time.perf_counter()
            times = {"host waits ms": copied - queued, "matmuls and copy ms": ended - started}
            rows.append({"bytes": size, "memory": name} | {key: value * 1e3 for key, value in times.items()})
    return rows


def attention_stage(args: argparse.Namespace, results: Results) -> None:
    """Measure copies, matmuls, cross-attention and self-attention, and add the measurements to `results`."""
    results.run("ceilings", lambda: ceilings(args.device))
    for heads in HEADS[args.device]:
        results.run(f"cross-attention, {heads} heads", lambda h=heads: cross_attention(args.device, h))
        for lens in CLIPS[args.device]:
            title = f"{heads} heads, {len(lens)} x {lens[0]} tokens"
            results.run(title, lambda h=heads, n=lens: attention(args.device, h, n))
    if args.device == "cuda":  # no CPU has these operators
        for lens in SHORT_CLIPS:
            title = f"cuDNN varlen, {len(lens)} x {lens[0]} tokens"
            results.run(title, partial(cudnn_varlen, args.device, HEADS["cuda"][0], lens))
    results.run("copies to a busy device", lambda: copies(args.device))
