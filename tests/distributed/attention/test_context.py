"""Ulysses, ring and hybrid attention in real process groups equal one process that holds the whole pack."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from tests.support.context import attend, groups_of, make_inputs, meta_of, shard_rows, whole
from wands.attention import ring, ulysses
from wands.attention.kernels import registry as backends
from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.ulysses import context_attention
from wands.attention.varlen import Segments, choose_backend
from wands.model.checkpointing import SelectiveCheckpoint

GRIDS = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (3, 1)]  # (ring, ulysses)
PACKS = {
    "one sample": (37,),
    "one token": (1,),
    "shorter than the ring": (2, 1, 3),
    "only single tokens": (1, 1, 1),
    "unequal": (5, 1, 12, 3),
    "twelve": (33, 2, 7, 1, 1, 19, 4, 8, 3, 2, 6, 10),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
NAMES = ("out", "dq", "dk", "dv")


def worst_errors(grid: tuple[int, int], dtype: torch.dtype, backend: str = "cpu") -> dict[str, float]:
    """Largest difference from the float64 reference over out, dq, dk and dv, for every pack."""
    errors = {}
    for name, lens in PACKS.items():
        inputs = make_inputs(lens, dtype)
        right = whole([x.double() for x in inputs], lens)
        found = attend(inputs, lens, *grid, backend=backend)
        errors[name] = max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True))
    return errors


def all_errors(grid: tuple[int, int]) -> dict[tuple, dict[str, float]]:
    kinds = [*((dtype, "cpu") for dtype in TOLERANCE), (torch.float64, "reference")]
    return {kind: worst_errors(grid, *kind) for kind in kinds}


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=pytest.mark.slow if 4 in grid or 3 in grid else ()) for grid in GRIDS],
    ids=lambda g: f"ring{g[0]}-ulysses{g[1]}",
)
def test_it_is_attention_to_the_whole_pack(grid: tuple[int, int], run_world):
    for errors in run_world(grid[0] * grid[1], all_errors, grid):
        assert len(errors) == 3
        for (dtype, *_), by_pack in errors.items():
            assert by_pack.keys() == PACKS.keys()
            assert max(by_pack.values()) <= TOLERANCE[dtype], (dtype, by_pack)
            print(f"{dtype} {max(by_pack.values()):.1e}")


def relative_errors(
    grid: tuple[int, int], dtype: torch.dtype, factor: float = 1.0, offset: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Relative Frobenius error against float64: ours, and that of the kernel alone on the whole pack.

    q and k are multiplied by `factor`, and `offset` is added to them.
    """
    lens = (211, 64, 3, 129)
    inputs = make_inputs(lens, dtype)
    inputs[:2] = [x * factor + offset for x in inputs[:2]]
    right = whole([x.double() for x in inputs], lens)
    alone = whole(inputs, lens, "cpu")
    found = attend(inputs, lens, *grid)

    def error(x: Tensor, truth: Tensor) -> float:
        return float((x.double() - truth).norm() / truth.norm())

    return {
        name: (error(a, truth), error(b, truth))
        for name, a, b, truth in zip(NAMES, found, alone, right, strict=True)
    }


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
def test_in_bf16_it_is_as_exact_as_the_kernel_alone(grid: tuple[int, int], run_world):
    for errors in run_world(grid[0] * grid[1], relative_errors, grid, torch.bfloat16):
        assert errors.keys() == set(NAMES)
        for name, (ours, kernel) in errors.items():
            assert 0 < ours <= 1.5 * kernel, (name, ours, kernel)
            print(f"{name} {ours / kernel:.2f} x the kernel alone")


@pytest.mark.parametrize(("factor", "offset"), [(30.0, 0.0), (1.0, 40.0)])
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_large_scores_cost_a_ring_no_accuracy(degree: int, factor: float, offset: float, run_world):
    """Scores of some thousands: their log-sum-exp in fp32 has an error that the weights of a merge must not have."""
    for errors in run_world(degree, relative_errors, (degree, 1), torch.float32, factor, offset):
        for name, (ours, kernel) in errors.items():
            assert 0 < ours <= 1.5 * kernel, (name, ours, kernel)


class ThreeExchanges(ulysses.UlyssesAttention):
    """The forward pass of DeepSpeed, which sends q, k and v one after the other."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, meta: PackedMeta) -> Tensor:
        batches = q[None], k[None], v[None]
        return DistributedAttention.forward(self, *batches, ulysses.BATCH_AXIS, None, meta)[0]


def bits(grid: tuple[int, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    inputs = make_inputs(PACKS["twelve"], dtype)
    ours = attend(inputs, PACKS["twelve"], *grid)
    with mock.patch.object(ulysses, "UlyssesAttention", ThreeExchanges):
        return ours, attend(inputs, PACKS["twelve"], *grid)


@pytest.mark.parametrize("grid", [(1, 2), (1, 4), (2, 2)], ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_exchange_brings_the_bits_of_deepspeeds_three(
    grid: tuple[int, int], dtype: torch.dtype, run_world
):
    for ours, deepspeeds in run_world(grid[0] * grid[1], bits, grid, dtype):
        assert all(torch.equal(a, b) for a, b in zip(ours, deepspeeds, strict=True))
        assert all(x.any() for x in ours)


def leaks(grid: tuple[int, int], break_order: bool = False) -> list[str]:
    """Names of results in which a sample saw that another one changed."""
    lens = PACKS["twelve"]
    if break_order:  # what another trainer does: lengths of the samples in packed order, rows in rank order

        class LostOrder(ring.RingAttention):
            def __call__(self, q, k, v, meta):
                chunk_lens = tuple((*row[1:], row[0]) for row in meta.chunk_lens)
                return super().__call__(q, k, v, replace(meta, chunk_lens=chunk_lens))

        ulysses.RingAttention = LostOrder
    ends = torch.tensor([0, *lens]).cumsum(0).tolist()
    before = make_inputs(lens, torch.float32)
    results = attend(before, lens, *grid)
    bad = []
    for changed in (0, 3, 6, 11):
        mine = slice(ends[changed], ends[changed + 1])
        after = [x.clone() for x in before]
        for x in after:
            x[mine] = x[mine] * -2.0 + 1.0
        for name, a, b in zip(NAMES, results, attend(after, lens, *grid), strict=True):
            others = torch.ones(sum(lens), dtype=torch.bool)
            others[mine] = False
            if not torch.equal(a[others], b[others]):
                bad.append(f"{name}: sample {changed} is seen by others")
            # One token attends to itself alone: its value decides, its query and key do not.
            if torch.equal(a[mine], b[mine]) and not (lens[changed] == 1 and name in ("dq", "dk")):
                bad.append(f"{name}: sample {changed} does not see itself")
    return bad


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2), (4, 1)], ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
def test_a_changed_sample_leaves_the_others_bitwise_as_they_were(grid: tuple[int, int], run_world):
    assert run_world(grid[0] * grid[1], leaks, grid) == [[]] * (grid[0] * grid[1])


@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (2, 2)], ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
def test_a_lost_order_would_be_seen(grid: tuple[int, int], run_world):
    """The trap of packed Ulysses elsewhere: `cu_seqlens` that does not describe the gathered rows."""
    assert all(run_world(grid[0] * grid[1], leaks, grid, True))


def one_block_lse() -> float:
    """A backward that is given each block's own log-sum-exp instead of the whole row's, a known mistake of rings."""
    right = backends.BACKENDS["cpu"]

    class LocalLse:
        name = "cpu"
        forward = right.forward

        @staticmethod
        def backward(dout, q, k, v, out, lse, segments, scale):
            own_out, own_lse = right.forward(q, k, v, segments, scale)
            return right.backward(dout, q, k, v, own_out, own_lse, segments, scale)

    ring.get_backend = lambda name: LocalLse
    return max(worst_errors((2, 1), torch.float64).values())


def test_a_local_log_sum_exp_in_backward_would_be_seen(run_world):
    assert min(run_world(2, one_block_lse)) > 1e-2


def attended_pads() -> float:
    """The trap of tail padding that counts as the last sample's tokens."""

    class AttendedPads(ring.RingAttention):
        def __call__(self, q, k, v, meta):
            chunk_lens = tuple((*row[:-1], row[-1] + len(q) - sum(row)) for row in meta.chunk_lens)
            return super().__call__(q, k, v, replace(meta, chunk_lens=chunk_lens))

    ulysses.RingAttention = AttendedPads
    return max(worst_errors((2, 2), torch.float64).values())


def test_attention_to_pads_would_be_seen(run_world):
    assert min(run_world(4, attended_pads)) > 1e-2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_blocks_in_any_order_are_the_whole(order: tuple[int, ...]):
    """Scores up to +-80, where exp alone would overflow, and rows that see nothing in the first blocks."""
    q, k, v, _ = make_inputs((12,), torch.float64)
    q = q * 12
    kernel = choose_backend("reference", "cpu", torch.float64)
    # 3 rows are of a sample whose keys all lie in the last block
    blocks = [(0, 3), (3, 4), (4, 12)]
    lens_q = (9, 3)
    sees = [(3, 0), (1, 0), (5, 3)]
    whole_out, whole_lse = kernel.forward(q, k, v, Segments.build(lens_q, (9, 3)), 1.0)
    assert float((q[:9].transpose(0, 1) @ k[:9].permute(1, 2, 0)).abs().max()) > 60
    out = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], 12), -torch.inf)
    for i in order:
        rows = slice(*blocks[i])
        segments = Segments.build(lens_q, sees[i])
        ring._merge(out, lse, *kernel.forward(q, k[rows], v[rows], segments, 1.0))
        assert not out.isnan().any()
    torch.testing.assert_close(out, whole_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-13, atol=1e-13)


# Activation checkpointing and torch.compile.


KEPT = {  # mode -> what is saved, what is offloaded
    "none": None,
    "full": ((), ()),
    "output": (("attn_output",), ()),
    "input": (("attn_input",), ()),
    "both": (("attn_output", "attn_input"), ()),
    "both on the host": ((), ("block_input", "attn_output", "attn_input")),
}


def checkpointed(mode: str, grid: tuple[int, int]) -> tuple[int, int, list[Tensor]]:
    """Return the number of kernel forwards and of exchanges of a rank in one step, and the gradients of q, k and v."""
    groups = groups_of(*grid)
    lens = PACKS["unequal"]
    layout = ContextLayout.build(
        lens, ulysses_degree=grid[1], ring_degree=grid[0], cp_rank=groups.dims.cp_rank
    )
    attention = context_attention(
        choose_backend("cpu", "cpu", torch.float32), groups.ulysses, groups.ring, groups.ring_grad
    )
    kernel = mock.Mock(wraps=backends.BACKENDS["cpu"])
    *leaves, dout = [shard_rows(x, layout).requires_grad_() for x in make_inputs(lens, torch.float32)]

    def block(q: Tensor, k: Tensor, v: Tensor, watch: Any = nullcontext) -> Tensor:
        q = q.sin()
        k = k.cos()
        v = v.exp()
        with watch():
            out = attention(q, k, v, meta_of(layout))
        return out.tanh()

    run: Any = block
    if KEPT[mode] is not None:
        run = lambda *inputs: again(block, *inputs, again.watch)  # noqa: E731
        again = SelectiveCheckpoint([], *KEPT[mode], ulysses.OPERATORS)
    with (
        mock.patch.dict(backends.BACKENDS, cpu=kernel),
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange,
    ):
        grads = torch.autograd.grad(run(*leaves), leaves, dout.detach())
    return kernel.forward.call_count, exchange.call_count, list(grads)


def all_checkpointed(grid: tuple[int, int]) -> dict[str, tuple[int, int, list[Tensor]]]:
    return {mode: checkpointed(mode, grid) for mode in KEPT}


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda g: f"ring{g[0]}-ulysses{g[1]}")
def test_what_is_kept_is_neither_computed_nor_sent_again(grid: tuple[int, int], run_world):
    ring_degree = grid[0]
    exchanges = grid[1] > 1
    for found in run_world(grid[0] * grid[1], all_checkpointed, grid):
        kernels = {mode: count for mode, (count, *_) in found.items()}
        once = ring_degree
        twice = 2 * ring_degree
        assert kernels == {
            **{"none": once, "full": twice, "output": once, "input": twice},
            **{"both": once, "both on the host": once},
        }
        # There and back, in forward and in backward; when the block runs again, what was not kept.
        sent = {mode: count for mode, (_, count, _) in found.items()}
        again = {"none": 0, "full": 2, "output": 1, "input": 1, "both": 0, "both on the host": 0}
        assert sent == {mode: exchanges * (4 + count) for mode, count in again.items()}
        for mode, (*_, grads) in found.items():
            assert all(torch.equal(a, b) for a, b in zip(grads, found["none"][2], strict=True)), mode


def compiled(grid: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the attention inside a function, eager and compiled."""
    groups = groups_of(*grid)
    lens = PACKS["unequal"]
    layout = ContextLayout.build(
        lens, ulysses_degree=grid[1], ring_degree=grid[0], cp_rank=groups.dims.cp_rank
    )
    attention = context_attention(
        choose_backend("cpu", "cpu", torch.float32), groups.ulysses, groups.ring, groups.ring_grad
    )
    meta = meta_of(layout)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.sin(), k.cos(), v.exp(), meta).tanh()

    results = []
    for fn in (block, torch.compile(block, backend="aot_eager")):
        *leaves, dout = [shard_rows(x, layout).requires_grad_() for x in make_inputs(lens, torch.float32)]
        out = fn(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.detach())])
    return tuple(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=pytest.mark.slow) for grid in ((2, 1), (1, 2))] + [(2, 2)],
    ids=lambda g: f"ring{g[0]}-ulysses{g[1]}",
)
def test_compile_does_not_lose_the_gradient(grid: tuple[int, int], run_world):
    for eager, fast in run_world(grid[0] * grid[1], compiled, grid):
        for a, b in zip(eager, fast, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            assert a.any()


@pytest.mark.parametrize("visible", [[], [0, 0, 1, 1, 0, 2]], ids=["samples", "units"])
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
def test_the_operators_keep_pytorchs_rules_for_operators(layout: str, visible: list[int]):
    """Schema, fake tensors and autograd registration, as torch.library checks them, on a ring of one."""
    q, k, v, dout = make_inputs((5, 3), torch.float64)
    if layout == "heads first":  # in memory
        q, k, v, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v, dout))
    plan = ([5, 3], 1, visible, 34, "", "", "cpu", 0.3)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(ring.ring_forward, (*leaves, *plan))
    out, lse = torch.ops.wands.ring_forward(q, k, v, *plan)
    detached = [x.detach() for x in (dout, q, k, v, out, lse)]
    torch.library.opcheck(ring.ring_backward, (*detached, *plan))


def exchanges_keep_the_rules() -> list[Tensor]:
    """Return a tensor, and the same tensor after both exchanges."""
    peers = (groups_of(1, 2).ulysses.group_name, 2)
    x = torch.randn(3, 5, 4, 8, requires_grad=True)
    torch.library.opcheck(ulysses.to_heads, (x, *peers))
    there = torch.ops.wands.to_heads(x.detach(), *peers)
    torch.library.opcheck(ulysses.to_tokens, (there.requires_grad_(), *peers))
    return [x.detach(), torch.ops.wands.to_tokens(there.detach(), *peers)]


@pytest.mark.slow
def test_the_exchanges_keep_them_too(run_world):
    for sent, found in run_world(2, exchanges_keep_the_rules):
        assert torch.equal(sent, found)


def test_rows_of_another_ring_are_a_programmer_mistake():
    q = torch.zeros(4, 1, 8)
    with pytest.raises(AssertionError, match="chunk_lens has 2 rows, but the ring has 1 ranks"):
        ring.RingAttention(backends.BACKENDS["cpu"])(
            q, q, q, SimpleNamespace(chunk_lens=((4,), (4,)), visible=())
        )
