"""The start block's memory estimate against what autograd really keeps and what ZeRO really shards."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wands.attention.hybrid import ContextAttention
from wands.attention.ring import OPERATOR
from wands.attention.varlen import choose_backend
from wands.config import load_recipe
from wands.model.transformer import PackedWanTransformer
from wands.parallel.layout import PackedMeta, segment_ids_of
from wands.train.summary import estimate_memory
from wands.variants import DiTShape

LENS = (600, 400)


def bytes_kept_for_backward(compute: str, checkpointing: str) -> tuple[int, DiTShape]:
    """Bytes of all tensors that a forward saves, parameters left out."""
    model = PackedWanTransformer(
        num_attention_heads=4, attention_head_dim=64, num_layers=4, ffn_dim=1024, text_dim=64, freq_dim=64
    )
    backend = choose_backend("cpu", torch.device("cpu"), torch.float32)
    model.set_attention(ContextAttention(backend), backend)
    model.set_checkpointing(checkpointing)
    tokens = sum(LENS)
    meta = PackedMeta(
        torch.zeros(tokens, 3, dtype=torch.int64),
        segment_ids_of(LENS),
        (tuple(LENS),),
        LENS,
        (100,) * len(LENS),
    )
    params = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == "bf16"),
    ):
        model(torch.randn(tokens, 64), meta, torch.rand(len(LENS)) * 1000, torch.randn(100 * len(LENS), 64))
    size = sum(tensor.untyped_storage().nbytes() for where, tensor in kept.items() if where not in params)
    return size, DiTShape.from_config(model.config)


def estimate(
    shape: DiTShape, *settings: str, stage: int = 0, world_size: int = 1, **zero: object
) -> dict[str, float]:
    recipe = load_recipe(None, [f"packing.max_tokens={sum(LENS)}", *settings])
    return estimate_memory(shape, recipe, zero_stage=stage, world_size=world_size, zero=zero)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_activations(compute: str):
    kept, shape = bytes_kept_for_backward(compute, "none")
    assert estimate(shape, f"precision.compute={compute}")["activations"] == pytest.approx(kept, rel=0.15)


def test_checkpointing_keeps_block_inputs_and_one_block():
    """Between blocks only their inputs are kept; while one runs again in backward, its own tensors are there too."""
    kept, shape = bytes_kept_for_backward("bf16", "full")
    full, _ = bytes_kept_for_backward("bf16", "none")
    expected = kept + full / shape.num_layers
    assert estimate(shape, "model.checkpointing=full")["activations"] == pytest.approx(expected, rel=0.25)
    assert kept < full / 4


def test_selective_checkpointing_keeps_the_results_of_attention_too():
    """The policy's store is out of sight of autograd's hooks: the operator's outputs themselves are counted."""
    sizes: list[int] = []

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is OPERATOR:
                sizes.extend(tensor.nbytes for tensor in result)
            return result

    with Outputs():
        _, shape = bytes_kept_for_backward("bf16", "none")
    assert len(sizes) == 2 * shape.num_layers
    more = (
        estimate(shape, "model.checkpointing=selective")["activations"]
        - estimate(shape, "model.checkpointing=full")["activations"]
    )
    assert more == sum(sizes)


def test_ranks_that_share_a_bin_share_its_activations():
    shape = DiTShape(4, 64, 4, 1024, in_channels=16, out_channels=16, text_dim=64)
    alone, shared = (
        estimate(shape, *more, world_size=4)["activations"] for more in ((), ("parallel.cp_size=4",))
    )
    assert 0.25 * alone < shared < 0.26 * alone


def test_a_ring_has_buffers():
    shape = DiTShape(4, 64, 4, 1024, in_channels=16, out_channels=16, text_dim=64)
    recipe = load_recipe(None, [f"packing.max_tokens={sum(LENS)}", "parallel.cp_size=4"])
    parts = estimate_memory(shape, recipe, zero_stage=3, world_size=4, zero={}, ring_degree=2)
    # bf16: two blocks of k and v; fp32: gradients of three blocks, and of q
    assert parts["ring buffers"] == 250 * 256 * (2 * 2 * 2 + 3 * 2 * 4 + 4)
    assert "ring buffers" not in estimate(shape, "parallel.cp_size=4", stage=3, world_size=4)


def test_states_follow_the_stage():
    shape = DiTShape(4, 64, 4, 1024, in_channels=16, out_channels=16, text_dim=64)
    for stage, (weights, gradients, optimizer) in {
        0: (1, 1, 1),
        1: (1, 1, 4),
        2: (1, 4, 4),
        3: (4, 4, 4),
    }.items():
        parts = estimate(shape, stage=stage, world_size=4)
        assert parts["weights"] == 4 * shape.num_params / weights
        assert parts["gradients"] == 4 * shape.num_params / gradients
        assert parts["optimizer"] == 12 * shape.num_params / optimizer
    offloaded = estimate(
        shape, stage=3, world_size=4, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    )
    assert offloaded["optimizer"] == offloaded["weights"] == 0
