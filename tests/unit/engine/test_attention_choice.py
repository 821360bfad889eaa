"""The choice between attention kernels, from invented times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wands.engine.attention_choice import LENGTHS, fastest_backend


def times(**kernels: Callable[[int], float]) -> dict[str, dict[int, float]]:
    return {name: {length: cost(length) for length in LENGTHS} for name, cost in kernels.items()}


FLASH2 = {"torch": lambda n: n}
PLANS = {"cudnn": lambda n: 0.5 * n + 700}
"""Half the time for each key, and a fixed cost: faster than torch with 5 % to spare from 2,048 rows on."""


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (FLASH2, "torch"),
        ({**PLANS, **FLASH2}, "cudnn:2048:torch"),
        ({**FLASH2, **PLANS}, "cudnn:2048:torch"),
        ({**FLASH2, "cudnn": lambda n: 0.5 * n}, "cudnn:512:torch"),
        ({**FLASH2, "cudnn": lambda n: 0.97 * n}, "torch"),  # not worth a plan for each length
        ({**FLASH2, "cudnn": lambda n: 0.94 * n}, "cudnn:512:torch"),
        ({**FLASH2, **PLANS, "flash3": lambda n: 0.4 * n + 50}, "flash3"),
        ({"flash3": lambda n: 0.6 * n, **PLANS, **FLASH2}, "cudnn:16384:flash3"),
        ({"flash3": lambda n: 2.0 * n, **PLANS, **FLASH2}, "cudnn:2048:torch"),
        ({"flash3": lambda n: n, "flash4": lambda n: n, **FLASH2}, "flash3"),  # the first of equals
        ({"flash3": lambda n: n, "flash4": lambda n: 0.9 * n, **FLASH2}, "flash4"),
    ],
)
def test_the_fastest_kernel_and_its_shortest_segment(kernels, expected):
    assert fastest_backend(times(**kernels)) == expected


def test_one_slow_length_in_the_middle_does_not_end_cudnn():
    measured = times(torch=lambda n: n, cudnn=lambda n: 0.5 * n)
    measured["cudnn"][2048] *= 2.5
    assert fastest_backend(measured) == "cudnn:512:torch"
    measured["cudnn"][1024] = measured["cudnn"][512] = 1e4
    assert fastest_backend(measured) == "cudnn:4096:torch"
