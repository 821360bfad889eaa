"""The layout of a pack without context parallelism, and what the model is told of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wands.attention.segments import Segments
from wands.parallel.layout import ContextLayout, PackedMeta, segment_ids_of


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_one_rank_holds_every_token_once_and_in_order(seq_lens: list[int]):
    layout = ContextLayout.build(seq_lens)
    assert layout.seq_lens == layout.local_lens == tuple(seq_lens)
    assert layout.num_tokens == sum(seq_lens)
    assert torch.equal(layout.token_index, torch.arange(sum(seq_lens)))
    assert layout.segment_ids.tolist() == [i for i, length in enumerate(seq_lens) for _ in range(length)]
    assert layout.token_index.dtype == layout.segment_ids.dtype == torch.int64


@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"ring_degree": 2}, {"cp_rank": 1}])
def test_context_parallelism_is_not_silently_ignored(degrees: dict[str, int]):
    with pytest.raises(AssertionError, match="not in this version"):
        ContextLayout.build([4, 4], **degrees)


def make_meta(seq_lens: tuple[int, ...], num_rows: int) -> PackedMeta:
    ids = segment_ids_of((*seq_lens[:-1], seq_lens[-1] + num_rows - sum(seq_lens)))
    return PackedMeta(
        torch.zeros(num_rows, 3, dtype=torch.int64),
        ids,
        Segments.build(seq_lens),
        seq_lens,
        (1,) * len(seq_lens),
    )


def test_rows_behind_the_last_sample_count_as_its_rows():
    assert make_meta((3, 2), 5).row_lens == (3, 2)
    meta = make_meta((3, 2), 8)
    assert meta.row_lens == (3, 5)
    assert meta.segment_ids.bincount().tolist() == [3, 5]


def test_meta_keeps_its_parts_when_moved():
    meta = make_meta((3, 2), 5)
    moved = meta.to("meta")
    assert moved.positions.device.type == moved.segment_ids.device.type == "meta"
    assert moved.segments.cu_seqlens_q.device.type == "meta"
    assert (moved.seq_lens, moved.text_lens, moved.segments.lens_k) == ((3, 2), (1, 1), (3, 2))


def test_meta_refuses_parts_that_do_not_belong_together():
    meta = make_meta((3, 2), 5)
    with pytest.raises(AssertionError, match="2 samples, 1 texts"):
        PackedMeta(meta.positions, meta.segment_ids, meta.segments, (3, 2), (1,))
    with pytest.raises(AssertionError):
        PackedMeta(meta.positions[:4], meta.segment_ids, meta.segments, (3, 2), (1, 1))
