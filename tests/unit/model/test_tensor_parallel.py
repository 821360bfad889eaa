"""Parameters that tensor parallelism divides, and their parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wands.config.recipe import LoraConfig
from wands.model.files.loading import build_empty
from wands.model.lora import add_lora
from wands.model.tensor_parallel import COLUMNS, ROWS, Cut, cut_of, divide, divided_dim, set_cut
from wands.variants import VARIANTS

GROUP: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 4)


@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b"])
def test_what_the_planner_counts_is_what_is_divided(variant: str):
    config = VARIANTS[variant].dit.to_config() | {"num_layers": 2}
    whole = build_empty(config)
    divided = build_empty(config)
    divide(divided, GROUP)
    theirs = dict(whole.named_parameters())
    for name, parameter in divided.named_parameters():
        cut = cut_of(parameter)
        assert (cut.dim if cut else None) == divided_dim(name), name
        shape = cut.whole_shape(parameter.shape) if cut else list(parameter.shape)
        assert shape == list(theirs[name].shape), name
    inside = [name for name, _ in divided.named_parameters() if divided_dim(name) is not None]
    assert len(inside) == 2 * (8 * 2 + 4 - 2 + 3 + (5 if "i2v" in variant else 0))
    assert {divided_dim(name) for name in inside} == {ROWS, COLUMNS}


def test_a_lora_is_counted_as_it_is_divided():
    config = VARIANTS["wan2.1-t2v-1.3b"].dit.to_config() | {
        "num_layers": 1,
        "num_attention_heads": 4,
        "ffn_dim": 64,
    }
    model = build_empty(config)
    divide(model, GROUP)
    cuts = {name: cut_of(parameter) for name, parameter in model.named_parameters()}
    model.to_empty(device="cpu")  # makes new parameters
    for name, parameter in model.named_parameters():
        set_cut(parameter, cuts[name])
    add_lora(model, LoraConfig(rank=2, targets="all-linear"), seed=0)
    loras = {name: value for name, value in model.named_parameters() if ".lora_" in name}
    for name, parameter in loras.items():
        cut = cut_of(parameter)
        assert (cut.dim if cut else None) == divided_dim(name.replace(".default", "")), name
    assert any(cut_of(value) for value in loras.values())


def test_parts_put_together_are_the_whole():
    whole = torch.arange(24.0).view(4, 6)
    for dim, degree in ((ROWS, 2), (ROWS, 4), (COLUMNS, 2), (COLUMNS, 3)):
        cuts = [Cut(dim, rank, degree) for rank in range(degree)]
        assert torch.equal(torch.cat([cut.part_of(whole) for cut in cuts], dim), whole)
        assert all(cut.whole_shape(cut.part_of(whole).shape) == [4, 6] for cut in cuts)
