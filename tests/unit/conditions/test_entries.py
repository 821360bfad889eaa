"""Entries of outside conditions: channels and cross-attention tokens are joined in the order of the conditions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plugin.control import Control
from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.condition import Arrays, Condition, CrossAttention, Entry
from wands.conditions.published import conditions_of
from wands.config.recipe import FlowConfig, MockConfig
from wands.data.collate import PackingCollator
from wands.data.datasets import MockDataset
from wands.errors import ConfigError, DataError
from wands.sampling.extra_inputs import ExtraInputs, appended
from wands.variants import VARIANTS, Variant, variant_of

MOCK = MockConfig(num_samples=3, shapes=[(2, 4, 4), (1, 2, 6)], text_lens=[5])


class Reference(Condition):
    """Three more tokens for the cross-attention to images."""

    name = "reference"
    arrays = (ArraySpec(name="reference_tokens", dtype="bf16", dims=(3, 1280)),)
    cross_tokens = 3

    def enter(self, arrays: Arrays, size: ClipSize) -> Entry:
        return CrossAttention(arrays["reference_tokens"])


def wide(name: str, *conditions: Condition) -> Variant:
    return variant_of(VARIANTS[name].dit.to_config(), conditions=conditions)


def pack(variant: Variant, flow: FlowConfig, **changes: Any) -> tuple[Any, list[Any]]:
    conditions = conditions_of(variant)
    data = MockDataset(mock=MOCK, shape=variant.dit, seed=0, conditions=conditions)
    samples = [data.read(i) for i in range(3)]
    collator = PackingCollator(
        shape=variant.dit, flow=flow, seed=0, null_text_embeds=data.null_text_embeds, conditions=conditions
    )
    return replace(collator, **changes)(samples, [0] * 3, 0), samples


def test_channels_and_tokens_follow_those_of_the_variant():
    variant = wide("wan2.1-i2v-14b", Control(), Reference())
    assert (variant.dit.in_channels, variant.dit.image_len) == (52, 260)
    batch, samples = pack(variant, FlowConfig())
    plain, _ = pack(VARIANTS["wan2.1-i2v-14b"], FlowConfig())
    width = plain.condition_channels.shape[1]
    assert torch.equal(batch.condition_channels[:, :width], plain.condition_channels)
    size = ClipSize((2, 4, 4), (1, 2, 2))
    rows = Control().enter(samples[0].arrays, size).rows
    assert torch.equal(batch.condition_channels[: len(rows), width:], rows)
    assert torch.equal(batch.image_embeds[:, :257], plain.image_embeds)
    assert torch.equal(batch.image_embeds[1, 257:], samples[1].arrays["reference_tokens"])


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "wan2.1-flf2v-14b"])
def test_tokens_need_a_place_in_the_model(name: str):
    with pytest.raises(
        ConfigError,
        match=r"reference enters the cross-attention to images, which only models of Wan 2\.1 I2V have",
    ):
        wide(name, Reference())


def test_entries_have_the_declared_channels():
    """In a pack, and for a video to sample."""

    class Wide(Control):
        channels = 17

    variant = wide("wan2.1-t2v-1.3b", Wide())
    with pytest.raises(DataError, match=r"condition control returns 64 values.*channels=17 .* make 68"):
        pack(variant, FlowConfig())


def test_dropout_replaces_the_arrays_by_absent_ones():
    variant = wide("wan2.1-t2v-1.3b", Control(dropout=1.0))
    dropped, _ = pack(variant, FlowConfig())
    assert not dropped.condition_channels.any()
    evaluated, _ = pack(variant, FlowConfig(), drops_captions=False)
    assert evaluated.condition_channels.any()
    kept, _ = pack(wide("wan2.1-t2v-1.3b", Control()), FlowConfig())
    assert torch.equal(
        dropped.text_embeds, kept.text_embeds
    )  # the captions are dropped by a draw of their own
    assert torch.equal(evaluated.condition_channels, kept.condition_channels)


def test_a_sample_without_the_array_is_refused():
    variant = wide("wan2.1-t2v-1.3b", Control())
    plain = MockDataset(MOCK, variant.published_dit, 0)
    collator = PackingCollator(
        shape=variant.dit,
        flow=FlowConfig(),
        seed=0,
        null_text_embeds=plain.null_text_embeds,
        conditions=conditions_of(variant),
    )
    with pytest.raises(
        DataError, match=r"has control_latents of shape none, but the model takes \[16, 2, 4, 4\]"
    ):
        collator([plain.read(0)], [0], 0)


def test_sampling_appends_to_every_call_of_a_transformer():
    calls: list[dict[str, Any]] = []
    model = SimpleNamespace(forward=lambda **inputs: calls.append(inputs))
    pipeline = SimpleNamespace(transformer=model, transformer_2=None)
    extra = ExtraInputs(torch.ones(1, 2, 1, 2, 2), torch.ones(1, 3, 4))
    images = torch.zeros(2, 5, 4)
    with appended(pipeline, extra):
        model.forward(hidden_states=torch.zeros(2, 4, 1, 2, 2), encoder_hidden_states_image=images, other=1)
    model.forward(hidden_states=torch.zeros(2, 4, 1, 2, 2))
    assert calls[0]["hidden_states"].shape == (2, 6, 1, 2, 2)
    assert calls[0]["hidden_states"][:, 4:].eq(1).all()
    assert calls[0]["encoder_hidden_states_image"].shape == (2, 8, 4)
    assert calls[1]["hidden_states"].shape == (2, 4, 1, 2, 2)
