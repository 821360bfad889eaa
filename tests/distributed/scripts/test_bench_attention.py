"""The attention benchmark: the bytes it counts are those that ContextPlan predicts, and it refuses a wrong variant."""

from __future__ import annotations

import io
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout

import attention_variants
import bench_attention
import pytest
import torch
from attention_variants import Variant, make_inputs

from wands.attention.layout import CommBytes, ContextPlan
from wands.attention.varlen import choose_backend
from wands.distributed.bootstrap import init_process_group

HEADS = 4
PACKS = [(9, 6, 14), (40, 3, 1, 7), (2, 1, 3, 1)]
"""Packs for a ring of 4: with remainders; with samples that stay whole; only such samples, so that no block travels."""
CPU = torch.device("cpu")
NAMES = {"single", "blocks", "ulysses", "ring", "hybrid:", "all-gather", "padded"}


def count(lens: tuple[int, ...], ring: int, ulysses: int, dtype: torch.dtype) -> CommBytes:
    """Count the bytes that this rank sends."""
    inputs = make_inputs(lens, HEADS, CPU, dtype)
    backend = choose_backend("cpu", CPU, dtype)
    variant = attention_variants.context_parallel("", inputs, lens, (ring, ulysses), backend)
    *leaves, dout = variant.shard(inputs)
    with bench_attention.counted_bytes() as forward:
        out = variant.attend(*leaves)
    with bench_attention.counted_bytes() as backward:
        torch.autograd.grad(out, leaves, dout)
    kinds = ("all_to_all_single", "batch_isend_irecv")
    return CommBytes(*(sent.get(kind, 0) for kind in kinds for sent in (forward, backward)))


def count_all(ring: int, ulysses: int) -> list[CommBytes]:
    init_process_group()
    return [count(lens, ring, ulysses, dtype) for lens in PACKS for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_bytes_sent_are_those_of_the_plan(run_world, ring: int, ulysses: int):
    ranks = run_world(ring * ulysses, count_all, ring, ulysses)
    most = [tuple(map(max, zip(*case, strict=True))) for case in zip(*ranks, strict=True)]
    plans = [ContextPlan.build(lens, ulysses_degree=ulysses, ring_degree=ring) for lens in PACKS]
    dim = HEADS * attention_variants.HEAD_DIM
    expected = [plan.comm_bytes(dim, size) for plan in plans for size in (4, 2)]
    assert most == expected
    assert most[0] != (0, 0, 0, 0)
    if ring == 4:
        assert expected[-1].ring_backward == 0 < expected[0].ring_backward


def printed(world: int, port: int, args: Namespace) -> str:
    """Text that this rank prints."""
    text = io.StringIO()
    with redirect_stdout(text):
        bench_attention.work(int(os.environ["RANK"]), world, port, args)
    return text.getvalue()


@pytest.mark.slow
def test_one_run_prints_every_variant_and_the_formula_holds(new_world, monkeypatch: pytest.MonkeyPatch):
    def spawn(work: Callable[..., None], args: tuple[int, int, Namespace], nprocs: int) -> None:
        assert work is bench_attention.work
        texts.extend(new_world(nprocs, printed, *args))

    texts: list[str] = []
    command = "bench_attention.py --device cpu --rounds 1 --lens 40 3 1 17"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(bench_attention.mp, "spawn", spawn)
    bench_attention.main()
    assert not any("err grad" in text for text in texts[1:])  # one rank speaks
    lines = texts[0].split("err grad\n")[1].splitlines()
    assert {line.split()[0] for line in lines} == NAMES
    talking = [line for line in lines if not line.startswith(("single", "blocks"))]
    assert len(talking) == 5
    assert all(line.split()[-3] == "1.000" for line in talking), texts[0]


@pytest.mark.slow
def test_blocks_in_one_process_agree_with_the_single_kernel():
    """`measure` itself compares them, at ring degrees 2, 4 and 8."""
    backend = choose_backend("cpu", CPU, torch.float32)
    lens = (40, 3, 1, 17)
    lines = bench_attention.measure(lens, make_inputs(lens, 2, CPU, torch.float32), backend, 1)
    assert [line.split()[0] for line in lines] == ["single", "blocks", "blocks", "blocks"]


def test_a_wrong_variant_stops_the_run(monkeypatch: pytest.MonkeyPatch):
    backend = choose_backend("cpu", CPU, torch.float32)
    lens = (12, 9)

    def variants_of(inputs, lens, backend):
        right = attention_variants.single_kernel(lens, backend, CPU, 0)
        merged = attention_variants.single_kernel((sum(lens),), backend, CPU, 0)  # samples see each other
        merged.name = "one long sample"
        return [right, merged]

    monkeypatch.setattr(bench_attention, "variants_of", variants_of)
    with pytest.raises(SystemExit, match="one long sample differs from single kernel"):
        bench_attention.measure(lens, make_inputs(lens, 2, CPU, torch.float32), backend, 1)


def test_peak_is_what_is_alive_at_once():
    inputs = make_inputs((50,), 2, CPU, torch.float32)
    rows = torch.arange(50)
    size = inputs[0].nbytes
    two = Variant("", rows, lambda q, k, v: (q + k) + v)  # the first sum lives until the second is there
    three = Variant("", rows, lambda q, k, v: torch.stack([q, k, v]).sum(0))
    assert bench_attention.peak_bytes(two, two.shard(inputs)) == (4 + 2) * size
    assert bench_attention.peak_bytes(three, three.shard(inputs)) == (4 + 4) * size
