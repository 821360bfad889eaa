"""The loss: a sum with the right gradient, whatever pack, rank or micro step its tokens are in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from wands.attention.packed import segment_ids_of
from wands.flow.loss import loss_weights, squared_errors, weighted_sum

P = 5


def random_pack(lens: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pred, target = (torch.randn(sum(lens), P, generator=generator, dtype=torch.float64) for _ in range(2))
    return pred, target, segment_ids_of(lens)


def loss_of(
    pred: Tensor, target: Tensor, segment_ids: Tensor, sample_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of tokens without a mask, and the summed errors of each sample."""
    return weighted_sum(squared_errors(pred, target), segment_ids, sample_weights, torch.ones(len(pred)))


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_value_and_gradient_are_the_hand_written_formula(reduction: str):
    lens = (3, 8, 1)
    pred, target, segment_ids = random_pack(lens)
    pred.requires_grad_(True)
    sigma_weights = torch.tensor([0.5, 2.0, 1.25])
    weights = loss_weights(lens, torch.ones(3), sigma_weights, reduction)
    loss, per_sample = loss_of(pred, target, segment_ids, weights)
    loss.backward()

    value = 0.0
    gradient = torch.zeros_like(pred)
    row = 0
    for s, length in enumerate(lens):
        share = float(sigma_weights[s]) / (length if reduction == "sample" else 1)
        errors = (pred[row : row + length] - target[row : row + length]).detach()
        value += share * float((errors**2).sum()) / P
        gradient[row : row + length] = 2 * share * errors / P
        assert float(per_sample[s]) == pytest.approx(float((errors**2).sum()) / P)
        row += length
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(pred.grad, gradient, rtol=1e-6, atol=1e-9)
    assert not per_sample.requires_grad


def test_a_padding_sample_costs_nothing():
    lens = (4, 1)
    pred, target, segment_ids = random_pack(lens)
    pred.requires_grad_(True)
    weights = loss_weights(lens, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]), "sample")
    loss, _ = loss_of(pred, target, segment_ids, weights)
    loss.backward()
    assert not pred.grad[4:].any()
    assert pred.grad[:4].all()


def test_bf16_predictions_are_compared_in_fp32():
    target = torch.full((64, P), 1.0)
    pred = torch.full((64, P), 1.0078125, dtype=torch.bfloat16)
    loss, per_sample = loss_of(pred, target, torch.zeros(64, dtype=torch.int64), torch.ones(1))
    assert loss.dtype == per_sample.dtype == torch.float32
    assert float(per_sample) == pytest.approx(64 * 0.0078125**2, rel=1e-6)


def test_a_sample_without_tokens_here_counts_zero():
    pred, target, _ = random_pack((3,))
    segment_ids = torch.tensor([0, 2, 2])
    _, per_sample = loss_of(pred, target, segment_ids, torch.ones(3))
    assert float(per_sample[1]) == 0.0
    assert torch.isfinite(per_sample).all()


@examples(30)
@given(
    lens=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    reduction=st.sampled_from(["sample", "token"]),
    data=st.data(),
)
def test_a_step_is_the_same_however_it_is_packed(lens: list[int], reduction: str, data: st.DataObject):
    pred, target, segment_ids = random_pack(tuple(lens))

    def sum_over(packs: list[list[int]]) -> float:
        total = 0.0
        for pack in packs:
            rows = [torch.nonzero(segment_ids == s).flatten() for s in pack]
            index = torch.cat(rows)
            ids = segment_ids_of([len(r) for r in rows])
            weights = loss_weights(
                [lens[s] for s in pack], torch.ones(len(pack)), torch.ones(len(pack)), reduction
            )
            total += float(loss_of(pred[index], target[index], ids, weights)[0])
        return total

    order = data.draw(st.permutations(range(len(lens))))
    cut = data.draw(st.integers(1, len(lens) - 1))
    assert sum_over([order[:cut], order[cut:]]) == pytest.approx(sum_over([list(range(len(lens)))]), rel=1e-6)


# Trap: every rank divides by its own token count, so a token on a rank with few of them weighs more.

LossOfRank = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def check_ranks_with_unequal_tokens_give_the_gradient_of_one_process(loss_of_rank: LossOfRank) -> None:
    rank_lens = [(2,), (9, 30)]
    world_size = len(rank_lens)
    num_tokens = sum(map(sum, rank_lens))
    weight = torch.ones(P, dtype=torch.float64, requires_grad=True)

    gradient = torch.zeros(P, dtype=torch.float64)
    inputs = []
    targets = []
    for rank, lens in enumerate(rank_lens):
        x, target, segment_ids = random_pack(lens, seed=rank)
        inputs.append(x)
        targets.append(target)
        weights = loss_weights(lens, torch.ones(len(lens)), torch.ones(len(lens)), "token")
        loss, _ = loss_of_rank(x * weight, target, segment_ids, weights)
        (local,) = torch.autograd.grad(loss * world_size / num_tokens, weight)
        gradient += local / world_size  # the average over ranks that ZeRO takes

    single = ((torch.cat(inputs) * weight - torch.cat(targets)) ** 2).mean()
    (expected,) = torch.autograd.grad(single, weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_unequal_token_counts():
    check_ranks_with_unequal_tokens_give_the_gradient_of_one_process(loss_of)

    def local_mean(pred: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        loss, per_sample = loss_of(pred, *others)
        mean_tokens = 20.5  # of a rank: the factor would be right if all ranks had equally many
        return loss / len(pred) * mean_tokens, per_sample

    with pytest.raises(AssertionError):
        check_ranks_with_unequal_tokens_give_the_gradient_of_one_process(local_mean)
