"""The peak that is measured is the one that the code has."""

import pytest
import torch
from peak_memory import PeakMemory

MB = 2**20


def _zeros(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MB, dtype=torch.uint8)


def test_peak_and_what_stays():
    with PeakMemory("cpu") as peak:
        kept = _zeros(3)
        passing = [_zeros(5), _zeros(7)]
        passing.clear()
        other = _zeros(2)
    assert peak.bytes == 15 * MB
    assert peak.kept == (3 + 2) * MB
    del kept, other


def test_peak_counts_backward():
    weight = torch.randn(512, 512, requires_grad=True)
    x = torch.randn(2048, 512)
    with PeakMemory("cpu") as peak:
        x.matmul(weight).square().sum().backward()
    # the product, its square's gradient and the weight's gradient at the least
    assert peak.bytes >= (2 * 2048 * 512 + 512 * 512) * 4
    assert peak.kept == 512 * 512 * 4


def test_mark_forgets_the_peak_but_not_what_is_held():
    with PeakMemory("cpu") as peak:
        kept = _zeros(4)
        high = _zeros(40)
        del high
        peak.mark()
        more = _zeros(1)
    assert peak.bytes == 5 * MB
    assert peak.kept == 5 * MB
    del kept, more


@pytest.mark.slow
def test_of_the_same_work_the_quieter_counts():
    with PeakMemory("cpu") as peak:
        for megabytes in (6, 9, 5, 7):
            peak.mark()
            _zeros(megabytes)
    assert [size // MB for size in peak.peaks] == [6, 9, 5, 7]
    assert peak.bytes == 5 * MB
