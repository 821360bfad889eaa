"""Mistakes that `wands tools selftest` must find, each with the lines that fail."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import UMT5EncoderModel

from wands.data.collate import PackingCollator
from wands.encoders import text
from wands.encoders.image import ImageEncoder
from wands.encoders.vae import WanVideoEncoder
from wands.flow.sigmas import sample_sigma, shift_sigma
from wands.selftest import dit_parity as selftest_dit
from wands.selftest import encoder_parity as selftest_encoders
from wands.selftest import expert_ranges as selftest_experts
from wands.variants import Variant

Patch = pytest.MonkeyPatch


T2V = "wan2.1-t2v-1.3b"
I2V = "wan2.1-i2v-14b"
FLF2V = "wan2.1-flf2v-14b"
T2V_A14B = "wan2.2-t2v-a14b"
I2V_A14B = "wan2.2-i2v-a14b"
TI2V = "wan2.2-ti2v-5b"
DIT = ["names", "packed.output", "packed.gradients"]


def pixels_from_0_to_1(patch: Patch) -> None:
    patch.setattr(
        selftest_encoders, "to_pixels", lambda x: torch.from_numpy(x.copy()).permute(3, 0, 1, 2) / 255.0
    )


def mean_and_std_inverted(patch: Patch) -> None:
    patch.setattr(WanVideoEncoder, "normalize", WanVideoEncoder.denormalize)


def mean_and_std_skipped(patch: Patch) -> None:
    patch.setattr(WanVideoEncoder, "normalize", lambda self, latents: latents)


def text_of_226_tokens(patch: Patch) -> None:
    patch.setattr(text, "TEXT_LEN", 226)


def untied_embeddings(patch: Patch) -> None:
    load = UMT5EncoderModel.from_pretrained

    def untied(*args: Any, **kwargs: Any) -> UMT5EncoderModel:
        model = load(*args, **kwargs)
        weight = torch.randn_like(model.shared.weight)
        model.encoder.set_input_embeddings(torch.nn.Embedding.from_pretrained(weight))
        return model

    patch.setattr(UMT5EncoderModel, "from_pretrained", untied)


def zeros_instead_of_gray(patch: Patch) -> None:
    """Latents that are zero where the frames are gray, and the given images encoded alone."""
    given_frames = selftest_encoders.given_frames
    encode = WanVideoEncoder.encode
    given: list[tuple[torch.Tensor, bool]] = []

    def remember(pixels: torch.Tensor, last_image: bool) -> torch.Tensor:
        given.append((given_frames(pixels, last_image), last_image))
        return given[-1][0]

    def zeros(encoder: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        if not given or pixels is not given[-1][0]:
            return encode(encoder, pixels)
        latents = torch.zeros_like(encode(encoder, pixels))
        latents[:, :1] = encode(encoder, pixels[:, :1])
        if given[-1][1]:
            latents[:, -1:] = encode(encoder, pixels[:, -1:])
        return latents

    patch.setattr(selftest_encoders, "given_frames", remember)
    patch.setattr(WanVideoEncoder, "encode", zeros)


def black_instead_of_gray(patch: Patch) -> None:
    right = selftest_encoders.given_frames

    def black(pixels: torch.Tensor, last_image: bool) -> torch.Tensor:
        gray = right(pixels, last_image)
        gray[:, 1 : -1 if last_image else None] = -1.0
        return gray

    patch.setattr(selftest_encoders, "given_frames", black)


def last_states_of_clip(patch: Patch) -> None:
    class Last(ImageEncoder):
        def encode(self, pictures: Any) -> torch.Tensor:
            values = self.processor(images=list(pictures), return_tensors="pt")
            return self.model(**values).last_hidden_state.flatten(0, 1)

    patch.setattr(selftest_encoders, "ImageEncoder", Last)


def first_frame_at_t(patch: Patch) -> None:
    patch.setattr(PackingCollator, "num_cond_tokens", lambda *_: 0)


def latent_frames_shifted(patch: Patch) -> None:
    encode = WanVideoEncoder.encode
    patch.setattr(WanVideoEncoder, "encode", lambda self, pixels: encode(self, pixels).roll(1, dims=1))


def above_the_boundary_only(patch: Patch) -> None:
    """> instead of >=."""
    right = Variant.experts.fget

    def experts(self: Variant) -> Any:
        high, low = right(self)
        edge = float(np.nextafter(self.boundary_ratio, 1.0))
        return replace(high, sigma_range=(edge, 1.0)), replace(low, sigma_range=(0.0, edge))

    patch.setattr(Variant, "experts", property(experts))


def experts_swapped(patch: Patch) -> None:
    right = Variant.experts.fget

    def experts(self: Variant) -> Any:
        high, low = right(self)
        return replace(high, subfolder=low.subfolder), replace(low, subfolder=high.subfolder)

    patch.setattr(Variant, "experts", property(experts))


def a_range_before_the_shift(patch: Patch) -> None:
    def early(generator: Any, flow: Any, low: float, high: float) -> float:
        unshifted = flow.model_copy(update={"flow_shift": 1.0})
        return shift_sigma(sample_sigma(generator, unshifted, low, high), flow.flow_shift)

    patch.setattr(selftest_experts, "sample_sigma", early)


def attention_across_samples(patch: Patch) -> None:
    def build(*args: Any) -> Any:
        attention = context_attention(*args)

        def attend_to_all_samples(q: Any, k: Any, v: Any, meta: Any) -> torch.Tensor:
            chunk_lens = tuple((sum(row),) for row in meta.chunk_lens)
            return attention(q, k, v, type("Meta", (), {"chunk_lens": chunk_lens, "visible": ()})())

        return attend_to_all_samples

    context_attention = selftest_dit.context_attention
    patch.setattr(selftest_dit, "context_attention", build)


def two_names_become_one(patch: Patch) -> None:
    right = selftest_dit.DIT
    wrong = SimpleNamespace(
        to_diffusers=right.to_diffusers,
        to_official=lambda name: right.to_official(name).replace("attn.k", "attn.q"),
    )
    patch.setattr(selftest_dit, "DIT", wrong)


BUGS = [
    (pixels_from_0_to_1, T2V, {"vae.pixels"}),
    (mean_and_std_inverted, T2V, {"vae.latents"}),
    (mean_and_std_skipped, T2V, {"vae.latents"}),
    (untied_embeddings, T2V, {"text.tied"}),
    (text_of_226_tokens, T2V, {"text.length"}),
    (zeros_instead_of_gray, I2V, {"image.condition"}),
    (zeros_instead_of_gray, FLF2V, {"image.condition"}),
    (black_instead_of_gray, FLF2V, {"image.condition"}),
    (last_states_of_clip, I2V, {"image.embeds"}),
    (first_frame_at_t, TI2V, {"first_frame.timesteps"}),
    (latent_frames_shifted, TI2V, {"vae.latents", "first_frame.latents"}),
    (above_the_boundary_only, I2V_A14B, {"experts.boundary", "experts.draws"}),
    (experts_swapped, T2V_A14B, {"experts.boundary", "experts.draws"}),
    (a_range_before_the_shift, T2V_A14B, {"experts.draws"}),
    (attention_across_samples, T2V, {"packed.output", "packed.gradients"}),
    (two_names_become_one, T2V, {"names"}),
]
