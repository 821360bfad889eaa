"""Ulysses attention is DeepSpeed's DistributedAttention, in training and in sampling, and the fused all-to-all keeps its bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from tests.support.context import groups_of, make_inputs, meta_of, shard_rows
from tests.support.runs import make_run, model_of
from wands.attention.layout import ContextLayout
from wands.attention.ring import RingAttention
from wands.attention.ulysses import UlyssesAttention, context_attention
from wands.attention.varlen import choose_backend
from wands.distributed.bootstrap import init_process_group
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.sharing import share_pipeline

SEQ_LENS = (33, 2, 7, 1, 19, 6)


def fused_and_deepspeed(degrees: tuple[int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return out, dq, dk and dv of UlyssesAttention, and of the forward of DistributedAttention on the same object."""
    ring, ulysses = degrees
    groups = groups_of(ring, ulysses)
    cp_rank = groups.dims.cp_rank
    layout = ContextLayout.build(SEQ_LENS, ulysses_degree=ulysses, ring_degree=ring, cp_rank=cp_rank)
    backend = choose_backend("cpu", "cpu", dtype)
    attention = context_attention(backend, groups.ulysses, groups.ring, groups.ring_grad)
    assert isinstance(attention, DistributedAttention)
    meta = meta_of(layout)

    def deepspeed_forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return DistributedAttention.forward(attention, q[None], k[None], v[None], 0, None, meta)[0]

    results = []
    for attend in (lambda *qkv: attention(*qkv, meta), deepspeed_forward):
        *leaves, dout = [shard_rows(x, layout).requires_grad_() for x in make_inputs(SEQ_LENS, dtype)]
        out = attend(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.detach())])
    return tuple(results)


@pytest.mark.parametrize(
    "degrees", [(1, 2), (1, 4), (2, 2)], ids=lambda degrees: f"ring{degrees[0]}-ulysses{degrees[1]}"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_deepspeeds_forward_bitwise(
    degrees: tuple[int, int], dtype: torch.dtype, run_world
) -> None:
    for fused, deepspeed in run_world(degrees[0] * degrees[1], fused_and_deepspeed, degrees, dtype):
        assert all(torch.equal(a, b) for a, b in zip(fused, deepspeed, strict=True))
        assert all(x.any() for x in fused)


def attention_classes(model: Path, output_dir: Path, ring: int, ulysses: int) -> dict[str, set[type]]:
    """Return the classes of the self-attention objects that training and sampling build."""
    degrees = (f"parallel.ring_degree={ring}", f"parallel.ulysses_degree={ulysses}")
    run = make_run(model, output_dir, degrees)
    rank, world_size, device = init_process_group()
    trained = model_of(run, ProcessGroups.build(run.grid(rank), device), device)
    pipeline = load_pipeline(find_pipeline(model))
    share_pipeline(
        pipeline,
        ParallelDims(
            world_size=world_size, rank=int(os.environ["RANK"]), ulysses_degree=ulysses, ring_degree=ring
        ),
    )
    models = {"training": trained, "sampling": pipeline.transformer}
    return {
        name: {type(block.attn1.processor.self_attention) for block in transformer.blocks}
        for name, transformer in models.items()
    }


@pytest.mark.parametrize(
    ("ring", "ulysses", "expected"),
    [(1, 2, UlyssesAttention), (2, 2, UlyssesAttention), (2, 1, RingAttention)],
)
def test_training_and_sampling_build_deepspeeds_attention(
    run_world, tiny_pipeline: Path, tmp_path: Path, ring: int, ulysses: int, expected: type
) -> None:
    assert issubclass(UlyssesAttention, DistributedAttention)
    for classes in run_world(ring * ulysses, attention_classes, tiny_pipeline, tmp_path, ring, ulysses):
        assert classes == {"training": {expected}, "sampling": {expected}}
