"""Modulation of packed rows against the same arithmetic written out, and what it keeps for backward."""

import pytest
import torch

from wands.model.modulation import gated_add, modulate

LENS = (5, 1, 7)


def _tensors(*, table_learns: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(LENS), 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    table = [torch.randn(len(LENS), 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    return *(x.requires_grad_() for x in rows), *(x.requires_grad_(table_learns) for x in table)


def _rows(table: torch.Tensor) -> torch.Tensor:
    return table.repeat_interleave(torch.tensor(LENS), 0)


@pytest.mark.parametrize("table_learns", [True, False])
def test_forward_and_gradients(table_learns):
    x, residual, factor, shift = tensors = _tensors(table_learns=table_learns)
    packed = [modulate(x, factor, shift, LENS), gated_add(residual, x, factor, LENS)]
    plain = [x * _rows(factor) + _rows(shift), residual + x * _rows(factor)]
    learn = [one for one in tensors if one.requires_grad]
    assert len(learn) == (4 if table_learns else 2)
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        weight = torch.randn_like(theirs)
        grads = [
            torch.autograd.grad((out * weight).sum(), learn, allow_unused=True) for out in (ours, theirs)
        ]
        for mine, reference in zip(*grads, strict=True):
            assert (mine is None) == (reference is None)
            if reference is not None:
                torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_rows_are_kept_only_for_a_table_that_learns():
    kept = {}
    for learns in (True, False):
        x, residual, factor, shift = _tensors(table_learns=learns)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(len(t)) or t, lambda t: t
        ):
            modulate(x, factor, shift, LENS)
            gated_add(residual, x, factor, LENS)
        kept[learns] = saved
    assert kept == {True: [13, 3, 13, 3], False: [3, 3]}
