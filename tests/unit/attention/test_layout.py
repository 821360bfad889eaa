"""The layout of a pack over a context-parallel group: every token once, nothing but tails padded, work even."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from wands.attention.layout import ContextLayout, ContextPlan, ring_rounds, split_over_ring
from wands.attention.packed import PackedMeta, segment_ids_of
from wands.transfer import to_device

PACKS = st.lists(st.one_of(st.integers(1, 8), st.integers(1, 400)), min_size=1, max_size=12)
DEGREES = st.integers(1, 5)


def group_of(seq_lens: list[int], ring: int, ulysses: int) -> list[ContextLayout]:
    return [
        ContextLayout.build(seq_lens, ulysses_degree=ulysses, ring_degree=ring, cp_rank=rank)
        for rank in range(ring * ulysses)
    ]


@examples(200)
@given(PACKS, DEGREES, DEGREES)
def test_the_ranks_hold_every_token_once_and_the_same_number_of_rows(
    seq_lens: list[int], ring: int, ulysses: int
):
    layouts = group_of(seq_lens, ring, ulysses)
    held = torch.cat([layout.token_index for layout in layouts])
    assert sorted(held[held >= 0].tolist()) == list(range(sum(seq_lens)))
    assert len({layout.num_tokens for layout in layouts}) == 1
    assert int((held < 0).sum()) == layouts[0].plan.num_pads
    for layout in layouts:
        assert (layout.token_index[: layout.num_valid] >= 0).all()
        assert (layout.token_index[layout.num_valid :] == -1).all()  # only the tail is padding
        assert layout.token_index.dtype == layout.segment_ids.dtype == torch.int64


@examples(200)
@given(PACKS, DEGREES, DEGREES)
def test_a_ranks_own_numbers_agree_with_its_index(seq_lens: list[int], ring: int, ulysses: int):
    sample_of = segment_ids_of(seq_lens)
    starts = [sum(seq_lens[:i]) for i in range(len(seq_lens))]
    for layout in group_of(seq_lens, ring, ulysses):
        valid = layout.token_index[: layout.num_valid]
        assert torch.equal(layout.segment_ids[: layout.num_valid], sample_of[valid])
        assert (layout.segment_ids[layout.num_valid :] == len(seq_lens) - 1).all()
        assert layout.local_seq_lens == tuple(sample_of[valid].bincount(minlength=len(seq_lens)).tolist())
        ranges = [
            list(range(start + first, start + last))
            for start, (first, last) in zip(starts, layout.token_ranges, strict=True)
        ]
        assert [i for one in ranges for i in one] == valid.tolist()


@examples(200)
@given(PACKS, DEGREES, DEGREES)
def test_ulysses_ranks_side_by_side_are_their_row_in_order(seq_lens: list[int], ring: int, ulysses: int):
    """`chunk_lens` describes the rows that the all-to-all joins: another order would attend to the wrong sample."""
    layouts = group_of(seq_lens, ring, ulysses)
    plan = layouts[0].plan
    for row in range(ring):
        parts = [layout for layout in layouts[row * ulysses : (row + 1) * ulysses]]
        index = torch.cat([layout.token_index for layout in parts])
        lens = plan.chunk_lens[row]
        assert len(index) == plan.row_len
        assert torch.equal(segment_ids_of(seq_lens)[index[: sum(lens)]], segment_ids_of(lens))
        assert (index[sum(lens) :] == -1).all()
        assert (index[: sum(lens)].diff() > 0).all()


@examples(200)
@given(PACKS, DEGREES)
def test_chunks_are_even_and_short_samples_stay_whole(seq_lens: list[int], ring: int):
    chunks = split_over_ring(tuple(seq_lens), ring)
    for sample, length in enumerate(seq_lens):
        sizes = [row[sample] for row in chunks]
        assert sum(sizes) == length
        if length >= ring:
            assert max(sizes) - min(sizes) <= 1
        else:
            assert sorted(sizes) == [0] * (ring - 1) + [length]
    totals = [sum(row) for row in chunks]
    shorts = [length for length in seq_lens if length < ring]
    assert max(totals) - min(totals) <= max([1, *shorts])


@examples(100)
@given(PACKS, st.integers(2, 5))
def test_every_pair_of_a_samples_tokens_meets_in_exactly_one_round(seq_lens: list[int], ring: int):
    """The dumb reference is the block-diagonal mask of the whole pack."""
    rows = [layout.token_index[: layout.num_valid] for layout in group_of(seq_lens, ring, 1)]
    rounds = ring_rounds(ContextPlan.build(seq_lens, ring_degree=ring).chunk_lens)
    ids = segment_ids_of(seq_lens)
    met = torch.zeros(sum(seq_lens), sum(seq_lens), dtype=torch.int64)
    for row in range(ring):
        for step in range(rounds):
            source = rows[(row - step) % ring]
            met[rows[row][:, None], source] += ids[rows[row]][:, None] == ids[source]
    assert torch.equal(met, (ids[:, None] == ids).long())


def test_nothing_travels_when_no_sample_is_cut():
    assert ring_rounds(split_over_ring((1, 2, 1), 3)) == 1
    assert ring_rounds(split_over_ring((9, 2), 3)) == 3
    assert ring_rounds(((4, 7),)) == 1


def test_long_videos_cost_every_rank_the_same():
    mix = [32760, 20280, 9360, 1560, 1560, 4680, 14040]
    for ring in (2, 3, 4, 8):
        plan = ContextPlan.build(mix, ring_degree=ring, ulysses_degree=4)
        assert plan.num_pads < ring * 4
        assert 1.0 <= plan.cost_balance() < 1.001
    # A cut of the pack end to end is what this layout is there to avoid.
    ends = torch.tensor([0, *mix]).cumsum(0)
    flat = [
        sum(
            max(0, min(int(ends[i + 1]), (row + 1) * sum(mix) // 4) - max(int(ends[i]), row * sum(mix) // 4))
            * mix[i]
            for i in range(len(mix))
        )
        for row in range(4)
    ]
    assert max(flat) * 4 / sum(flat) > 1.3


def test_predicted_bytes_are_the_papers():
    """Ulysses 4Nh/P x (U-1)/U a pass; the ring R-1 blocks of keys and values, and in backward as many of their gradients."""
    tokens = 7200
    dim = 1536
    for ring, ulysses in ((1, 4), (4, 1), (2, 2), (2, 4)):
        sent = ContextPlan.build([tokens], ring_degree=ring, ulysses_degree=ulysses).comm_bytes(dim, 2)
        per_rank = tokens * dim // (ring * ulysses)
        assert sent.ulysses_forward == sent.ulysses_backward == 2 * 4 * per_rank * (ulysses - 1) // ulysses
        assert sent.ring_forward == 2 * 2 * (ring - 1) * per_rank
        grads = 2 * (ring - 1) * per_rank * 4
        assert sent.ring_backward == sent.ring_forward + grads
    nothing = ContextPlan.build([1, 1, 1], ring_degree=3).comm_bytes(dim, 2)
    assert sum(nothing) == 0


@pytest.mark.parametrize("bad", [[], [3, 0]])
def test_an_empty_sample_is_a_programmer_mistake(bad: list[int]):
    with pytest.raises(AssertionError, match=re.escape(f"needs a token, but the lengths are {bad}")):
        ContextPlan.build(bad)


def make_meta(seq_lens: tuple[int, ...], num_rows: int) -> PackedMeta:
    ids = segment_ids_of((*seq_lens[:-1], seq_lens[-1] + num_rows - sum(seq_lens)))
    positions = torch.zeros(num_rows, 3, dtype=torch.int64)
    return PackedMeta(
        positions=positions,
        segment_ids=ids,
        chunk_lens=(seq_lens,),
        local_seq_lens=seq_lens,
        text_lens=(1,) * len(seq_lens),
    )


def test_rows_behind_the_last_sample_count_as_its_rows():
    assert make_meta((3, 2), 5).padded_seq_lens == (3, 2)
    meta = make_meta((3, 2), 8)
    assert meta.padded_seq_lens == (3, 5)
    assert meta.segment_ids.bincount().tolist() == [3, 5]


def test_meta_keeps_its_parts_when_moved():
    moved = to_device(make_meta((3, 2), 5), "meta")
    assert moved.positions.device.type == moved.segment_ids.device.type == "meta"
    assert (moved.local_seq_lens, moved.text_lens, moved.chunk_lens) == ((3, 2), (1, 1), ((3, 2),))


def test_meta_refuses_parts_that_do_not_belong_together():
    meta = make_meta((3, 2), 5)
    with pytest.raises(AssertionError, match="2 samples, but 1 texts"):
        PackedMeta(
            positions=meta.positions,
            segment_ids=meta.segment_ids,
            chunk_lens=meta.chunk_lens,
            local_seq_lens=(3, 2),
            text_lens=(1,),
        )
    with pytest.raises(AssertionError):
        PackedMeta(
            positions=meta.positions[:4],
            segment_ids=meta.segment_ids,
            chunk_lens=meta.chunk_lens,
            local_seq_lens=(3, 2),
            text_lens=(1, 1),
        )
