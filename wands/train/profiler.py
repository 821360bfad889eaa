"""Profile some optimizer steps: a Chrome trace, the time and FLOPs of each part of a step, and a snapshot of GPU memory.

Modules are wrapped for the profiled steps only, so other steps are not slower. A scope is a part of a step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from wands.attention.ring import BACKWARD_FLOPS, attention_flops
from wands.distributed.engine_protocol import TrainingEngine
from wands.errors import WandsError
from wands.files import atomic_path, write_text
from wands.train.training import Training

T = TypeVar("T")
SCOPES = {name: name for name in ("projections", "ffn", "norm", "copies", "optimizer", "data wait")} | {
    "attention": "wands::ring_|_VarlenAttention",
    "exchange": "wands::to_|c10d::alltoall",
    "ring hop": "ring hop|c10d::(send|recv)",
    "modulation": "_ScaledAdd",
    "ZeRO gather": "ZeRO gather|c10d::.*allgather",
    "reduction": "c10d::(allreduce|_?reduce)",
}
"""Maps each scope to a regular expression for the beginning of the names of profiler events. Events inside a matching event also
belong to the scope, unless their names match another one.
"""
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm"}
"""Operators whose FLOPs are taken from PyTorch's profiler."""


def profiled_steps(training: Training, batches: Iterable[T], start_step: int) -> Iterator[T]:
    """Yield the batch of each step after `start_step`, and profile the steps that the recipe's section `profile` selects.

    If a run resumes after the first selected step, the same number of steps is profiled from the first resumed step on. With
    `profile.stop`, the iterator ends after the profiled steps, so that the run ends.
    """
    config = training.recipe.profile
    total = training.total_steps
    iterator = iter(batches)
    first = max(config.start, start_step + 1) if config else total + 1
    yield from islice(iterator, first - 1 - start_step)
    if config and first <= total:
        number = min(config.steps, total + 1 - first)
        with _record(training, first, number) if training.rank in config.ranks else contextlib.nullcontext():
            for _ in range(number):
                with record_function("data wait"):
                    batch = next(iterator)
                yield batch
    if config and not config.stop:
        yield from iterator


@contextlib.contextmanager
def memory_snapshots(training: Training) -> Iterator[None]:
    """Write a snapshot of the GPU memory if it runs out in the `with` block. A note of the error names the file."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if training.device.type == "cuda":
            path = _path(training.output_dir, training.rank, "out_of_memory.pickle")
            try:
                with atomic_path(path) as temporary:
                    torch.cuda.memory._dump_snapshot(str(temporary))
                note = f"A snapshot of the GPU memory is in {path}; https://pytorch.org/memory_viz shows it."
            except WandsError as problem:  # such as a full disk, which must not hide the error of the GPU
                note = str(problem)
            error.add_note(note)
        raise


@contextlib.contextmanager
def _record(training: Training, first: int, number: int) -> Iterator[None]:
    on_gpu = training.device.type == "cuda"
    memory = torch.cuda.memory
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    if (
        not on_gpu
    ):  # libkineto's lines "USDT: ... profiler_start"; on a GPU, the level would also hide its errors
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with contextlib.ExitStack() as stack:
        for engine in training.engines.values():
            _name_parts(engine, stack)
        if on_gpu:
            # Not the stacks of frees: recording them breaks activation checkpointing with compiled operators in
            # torch 2.11 (pytorch/pytorch issue 179536).
            memory._record_memory_history(context="alloc", max_entries=200_000)
            stack.callback(memory._record_memory_history, enabled=None)
        with profile(activities=activities, record_shapes=True, with_flops=True) as recorded:
            started = time.perf_counter()
            yield
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        if on_gpu:
            with atomic_path(
                _path(training.output_dir, training.rank, f"step_{first:06d}.pickle")
            ) as temporary:
                memory._dump_snapshot(str(temporary))
    path = _path(training.output_dir, training.rank, f"step_{first:06d}.json.gz")
    with atomic_path(path) as temporary:
        recorded.export_chrome_trace(str(temporary))
    table = format_scopes(sum_scopes(recorded.events()), seconds, number)
    table = f"profile of rank {training.rank}, steps {first} to {first + number - 1}: {path}\n{table}"
    write_text(_path(training.output_dir, training.rank, f"step_{first:06d}.txt"), table + "\n")
    training.log(table)


def _path(output_dir: Path, rank: int, name: str) -> Path:
    return output_dir / "profile" / f"rank{rank}_{name}"


def sum_scopes(events: Iterable[FunctionEvent]) -> dict[str, np.ndarray]:
    """Return [calls, CPU microseconds, GPU microseconds, FLOPs] of the profiler events in each scope of `SCOPES` and in "other".

    An event whose name matches no scope belongs to the scope of the innermost enclosing event that has one. An event of the
    backward pass belongs to the scope of its forward operator, and is not counted as a call. The events must be recorded with the
    shapes of their inputs.
    """
    own = [event for event in events if event.device_type == DeviceType.CPU]
    # Of the forward operators with the same sequence number, the last created the backward operator with this number.
    operators = [e for e in own if e.sequence_nr >= 0 and e.scope == 0 and "autograd::" not in e.name]
    forward: dict[tuple[int | None, int], FunctionEvent] = {(e.thread, e.sequence_nr): e for e in operators}

    @functools.cache
    def scope_of(event: FunctionEvent | None) -> str:
        if event is None:
            return "other"
        is_backward = "evaluate_function" in event.name
        cause = forward.get((event.fwd_thread, event.sequence_nr)) if is_backward else None
        return _scope_of_name(event.name) or scope_of(cause or event.cpu_parent)

    rows = defaultdict[str, np.ndarray](lambda: np.zeros(4))
    for event in own:
        scope = scope_of(event)
        calls = _scope_of_name(event.name) == scope and scope_of(event.cpu_parent) != scope
        # The matmuls of a kernel in plain PyTorch are part of the attention.
        counted = event.name in MATMULS and scope != "attention"
        flops = event.flops if counted else _attention_flops(event)
        rows[scope] += (calls, event.self_cpu_time_total, event.self_device_time_total, flops)
    return dict(rows)


def format_scopes(rows: Mapping[str, np.ndarray], seconds: float, num_steps: int) -> str:
    """Return a table of the scopes with means per step: calls, time, share of the step, and FLOPs.

    The share is GPU time / duration of the step, or CPU time for a scope without GPU time, such as "data wait". `seconds` is the
    duration of all `num_steps` profiled steps together.
    """
    lines = [f"{'scope':<12}{'calls':>7}{'CPU ms':>10}{'GPU ms':>10}{'share':>8}{'GFLOP':>12}"]
    for name, row in sorted(rows.items(), key=lambda item: -(item[1][2] or item[1][1])):
        calls, cpu, gpu, flops = np.divide(row, num_steps) / (1, 1e3, 1e3, 1e9)
        share = (gpu or cpu) / 1e3 * num_steps / seconds
        lines.append(f"{name:<12}{calls:>7.0f}{cpu:>10.1f}{gpu:>10.1f}{share:>8.1%}{flops:>12.3f}")
    flops = sum(row[3] for row in rows.values())
    total = f"one step: {seconds / num_steps * 1e3:.1f} ms, {flops / num_steps / 1e9:.3f} GFLOP"
    return "\n".join([*lines, f"{total}, {flops / seconds / 1e12:.3g} TFLOP/s"])


def _name_parts(engine: TrainingEngine, stack: contextlib.ExitStack) -> None:
    """Wrap methods of an engine and of its modules until `stack` closes, so that the profile lists their calls by scope."""
    for name, module in engine.module.named_modules():
        part = name.rpartition(".")[2]
        if scope := {"attn1": "projections", "attn2": "projections", "ffn": "ffn"}.get(part):
            _wrap(module, "forward", scope, stack)
        elif "Norm" in type(module).__name__:
            _wrap(module, "forward", "norm", stack)
    _wrap(engine, "step", "optimizer", stack)
    if engine.zero_optimization_stage() == 3:
        optimizer: Any = engine.optimizer
        coordinator = optimizer.parameter_offload.get_param_coordinator()
        _wrap(coordinator, "fetch_sub_module", "ZeRO gather", stack)


def _wrap(owner: Any, method: str, scope: str, stack: contextlib.ExitStack) -> None:
    wrapped = record_function(scope)(getattr(owner, method))
    stack.enter_context(patch.object(owner, method, wrapped))


@functools.cache
def _scope_of_name(name: str) -> str | None:
    return next((scope for scope, pattern in SCOPES.items() if re.match(pattern, name)), None)


def _attention_flops(event: FunctionEvent) -> float:
    """Return the FLOPs of an operator that computes self-attention; 0 for others."""
    shapes: Any = event.input_shapes  # torch declares the shape of one input
    values = event.concrete_inputs
    if event.name == "wands::ring_forward":
        return attention_flops(shapes[0], values[6])
    if event.name == "wands::ring_backward":
        return BACKWARD_FLOPS * attention_flops(shapes[1], values[9])
    return 0
