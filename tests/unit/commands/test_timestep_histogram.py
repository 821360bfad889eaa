"""The histogram shows what training draws."""

from __future__ import annotations

import re

import pytest

from wands.commands.train import BAR_WIDTH, timestep_histogram
from wands.config.recipe import FlowConfig


def shares(text: str) -> list[float]:
    return [float(match) for match in re.findall(r"^ *\d+ - +\d+ +([\d.]+)%", text, flags=re.M)]


def test_bars_follow_the_distribution():
    text = timestep_histogram(FlowConfig(timestep_sampling="uniform", flow_shift=3.0, mix_uniform=0.0), 0)
    quarters = [sum(shares(text)[i : i + 5]) for i in range(0, 20, 5)]
    # P(t > 750) = 1/2 for a uniform sigma shifted by 3, P(t > 500) = 3/4, P(t > 250) = 0.9
    assert quarters == pytest.approx([50, 25, 15, 10], abs=1.2)
    assert max(line.count("#") for line in text.splitlines()) == BAR_WIDTH
    assert text.isascii()


@pytest.mark.slow
def test_heading_says_what_is_drawn():
    pretrain = timestep_histogram(FlowConfig(preset="pretrain"), 0)
    finetune = timestep_histogram(FlowConfig(preset="finetune", flow_shift=8.0), 0)
    mode = timestep_histogram(FlowConfig(timestep_sampling="mode"), 0)
    assert pretrain.startswith("pretrain: logit_normal(0, 1.5), flow_shift 2.5, 20% uniform unshifted\n")
    assert finetune.startswith("finetune: uniform, flow_shift 8\n")
    assert mode.startswith("finetune: mode(1.29), flow_shift 3\n")
    assert "mean " in pretrain.splitlines()[-1]


def test_the_seed_decides():
    flow = FlowConfig()
    assert timestep_histogram(flow, 1) == timestep_histogram(flow, 1)
    assert timestep_histogram(flow, 1) != timestep_histogram(flow, 2)
