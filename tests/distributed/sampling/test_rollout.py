"""A rollout with cached keys predicts what the masked forward pass of the training predicts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.sampling.test_sharing import build
from tests.support.causal import dense_mask, masked_velocity, rows_of, units_of
from tests.support.context import groups_of
from tests.support.packs import CONFIG
from wands.attention.kernels.registry import choose_backend
from wands.attention.layout import ContextLayout
from wands.attention.packed import PackedMeta
from wands.attention.ulysses import context_attention
from wands.config.recipe import ObjectiveConfig
from wands.distributed.dims import ProcessGroups
from wands.model.transformer import PackedWanTransformer
from wands.objectives.chunks import chunk_bounds, seen_chunks
from wands.patches import patchify, unpatchify
from wands.sampling.rollout import ChunkAdapter, packed_adapters
from wands.variants import TEXT_LEN

SIZE = (7, 4, 6)  # latent frames, rows and columns; 6 tokens a frame
GRID = (7, 2, 3)
TEACHER = {"name": "teacher_forcing", "chunk_frames": 2}
RULES: dict[str, dict[str, Any]] = {
    "all": TEACHER,
    "first frame": {**TEACHER, "independent_first_frame": True, "context_noise": 0.1},
    "window": {**TEACHER, "chunk_frames": 1, "window_frames": 2, "sink_frames": 1},
}
RANKS = [(1, 1), (1, 2), (2, 1)]  # (ring, Ulysses)


def inputs(config: ObjectiveConfig) -> tuple[Tensor, Tensor, Tensor, list[float], Tensor]:
    """A clip, its noise, the noise of its context, a noise level for each chunk, and a text."""
    generator = torch.Generator().manual_seed(7)
    clip, noise, of_context = torch.randn(3, 4, *SIZE, generator=generator, dtype=torch.float64)
    num_chunks = len(chunk_bounds(SIZE[0], config.chunk_frames, config.independent_first_frame))
    sigmas = [0.9 - 0.1 * chunk for chunk in range(num_chunks)]
    text = torch.randn(TEXT_LEN, CONFIG["text_dim"], generator=generator, dtype=torch.float64)
    return clip, noise, of_context, sigmas, text


def sequence(config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """The latents of the training's sequence [C, rows, h, w] and the noise level of each row."""
    clip, noise, of_context, sigmas, _ = inputs(config)
    bounds = chunk_bounds(SIZE[0], config.chunk_frames, config.independent_first_frame)
    latents = []
    levels = []
    for frame, is_clean in rows_of(SIZE[0], config):
        chunk = next(number for number, (first, end) in enumerate(bounds) if first <= frame < end)
        # noise levels are fp32
        sigma = float(torch.tensor(config.context_noise)) if is_clean else sigmas[chunk]
        own_noise = of_context if is_clean else noise
        latents.append((1 - sigma) * clip[:, frame] + sigma * own_noise[:, frame])
        levels.append(sigma)
    return torch.stack(latents, 1), torch.tensor(levels)


def trained_velocity(config: ObjectiveConfig) -> Tensor:
    """Velocity of the noisy frames in one masked forward pass on one rank, [C, f, h, w]."""
    model = PackedWanTransformer.of_stock(build(torch.float64))
    kernel = choose_backend("cpu", "cpu", torch.float64)
    model.set_attention(context_attention(kernel), kernel)
    layout = ContextLayout.build([GRID[0] * GRID[1] * GRID[2]], units=units_of([GRID], config))
    latents, levels = sequence(config)
    parts = layout.timestep_parts()
    per_frame = GRID[1] * GRID[2]
    ends = itertools.accumulate(part.num_tokens for part in parts)
    timesteps = torch.stack([levels[(end - 1) // per_frame] for end in ends]) * 1000
    positions = torch.cartesian_prod(*map(torch.arange, GRID))
    meta = PackedMeta(
        positions=positions[layout.token_index],
        segment_ids=layout.segment_ids,
        chunk_lens=layout.plan.chunk_lens,
        local_seq_lens=layout.local_seq_lens,
        text_lens=(TEXT_LEN,),
        timestep_lens=tuple(part.num_tokens for part in parts),
        timestep_samples=tuple(part.sample for part in parts),
        visible=layout.plan.visible,
    )
    tokens = patchify(latents, (1, 2, 2))
    with torch.no_grad():
        velocity = model(tokens, meta, timesteps, inputs(config)[-1])
    return unpatchify(velocity[-GRID[0] * per_frame :], GRID, 4, (1, 2, 2))


def rolled_velocity(config: ObjectiveConfig, groups: ProcessGroups) -> tuple[Tensor, list[int]]:
    """Velocity of each noisy chunk from a call that sees the cached clean chunks; and the cached chunks after each chunk."""
    clip, noise, of_context, sigmas, text = inputs(config)
    kernel = choose_backend("cpu", "cpu", torch.float64)
    adapter = packed_adapters({"transformer": build(torch.float64)}, groups, torch.device("cpu"), kernel)[
        "transformer"
    ]
    assert isinstance(adapter, ChunkAdapter)
    bounds = chunk_bounds(SIZE[0], config.chunk_frames, config.independent_first_frame)
    parts = []
    cached = []
    with adapter.attached(), torch.no_grad():
        for chunk, (first, end) in enumerate(bounds):
            seen = seen_chunks(bounds, chunk, config.window_frames, config.sink_frames)
            adapter.begin_chunk(first, [number for begin, stop in seen for number in range(begin, stop)])
            own = slice(first, end)
            sigma = sigmas[chunk]
            noisy = ((1 - sigma) * clip[:, own] + sigma * noise[:, own])[None]
            timestep = torch.tensor([sigma]) * 1000
            for prediction in ("cond", "uncond"):  # another text must not enter the cache of the first
                with adapter.cache_context(prediction):
                    own_text = text if prediction == "cond" else text.flip(0)
                    velocity = adapter(noisy, timestep, own_text[None])[0][0]
                    parts += [velocity] if prediction == "cond" else []
            adapter.write(chunk, clip[None, :, own], of_context[None, :, own], config.context_noise)
            cached.append(len(adapter._caches["cond"]))
    assert not adapter._attention.cache  # no keys stay in memory
    return torch.cat(parts, 1), cached


def differences(ranks: tuple[int, int]) -> dict[str, float]:
    groups = groups_of(*ranks)
    found = {}
    for name, settings in RULES.items():
        config = ObjectiveConfig(**settings)
        velocity, _ = rolled_velocity(config, groups)
        found[name] = float((velocity - trained_velocity(config)).abs().max())
    return found


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(one, marks=() if one == (1, 2) else pytest.mark.slow) for one in RANKS],
    ids=lambda r: f"ring{r[0]}-ulysses{r[1]}",
)
def test_a_rollout_is_the_masked_forward_pass(ranks: tuple[int, int], run_world):
    for errors in run_world(ranks[0] * ranks[1], differences, ranks):
        assert errors.keys() == RULES.keys()
        assert max(errors.values()) <= 1e-12, errors


def stock_differences() -> dict[str, float]:
    found = {}
    for name, settings in RULES.items():
        config = ObjectiveConfig(**settings)
        latents, levels = sequence(config)
        frames = [frame for frame, _ in rows_of(SIZE[0], config)]
        with torch.no_grad():
            stock = masked_velocity(
                build(torch.float64),
                latents,
                levels * 1000,
                frames,
                dense_mask(GRID, config),
                inputs(config)[-1],
            )
        velocity, _ = rolled_velocity(config, groups_of(1, 1))
        found[name] = float((velocity - stock[:, -SIZE[0] :]).abs().max() / stock.abs().max())
    return found


def test_a_rollout_is_a_stock_model_under_a_dense_mask(run_world):
    [errors] = run_world(1, stock_differences)
    assert max(errors.values()) <= 1e-6, errors


def cache_sizes() -> list[int]:
    return rolled_velocity(ObjectiveConfig(**RULES["window"]), groups_of(1, 1))[1]


def test_the_cache_has_the_window_and_the_sink(run_world):
    [sizes] = run_world(1, cache_sizes)
    assert sizes == [1, 2, 3, 4, 4, 4, 4]  # the sink, a window of two, and the chunk that was just written
