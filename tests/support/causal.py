"""Causal training by its definition: one dense mask over the frames of a clip and its copies, with stock diffusers modules."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from wands.attention.layout import ContextLayout
from wands.attention.units import Unit
from wands.config.recipe import ObjectiveConfig
from wands.flow.noise import draw_noise, draw_sigma
from wands.flow.rng import SampleKey
from wands.flow.sigmas import sigma_weight
from wands.objectives.chunks import diffusion_forcing_units, teacher_forcing_units
from wands.patches import unpatchify
from wands.selftest.stock import stock_velocity
from wands.train.prepared_run import PreparedRun

Grid = tuple[int, int, int]
RULES = {"teacher_forcing": teacher_forcing_units, "diffusion_forcing": diffusion_forcing_units}


def units_of(grids: list[Grid], config: ObjectiveConfig) -> list[tuple[Unit, ...]]:
    return [RULES[config.name](grid, config) for grid in grids]


def chunk_of(frame: int, config: ObjectiveConfig) -> int:
    if config.independent_first_frame:
        return 0 if frame == 0 else 1 + (frame - 1) // config.chunk_frames
    return frame // config.chunk_frames


def rows_of(num_frames: int, config: ObjectiveConfig) -> list[tuple[int, bool]]:
    """(frame, whether it is clean) of each frame of the sequence: clean copies first, without those of the last chunk."""
    last = chunk_of(num_frames - 1, config)
    clean = [frame for frame in range(num_frames) if chunk_of(frame, config) < last]
    has_clean = config.name == "teacher_forcing"
    return [
        *((frame, True) for frame in clean if has_clean),
        *((frame, False) for frame in range(num_frames)),
    ]


def sees(query: tuple[int, bool], key: tuple[int, bool], config: ObjectiveConfig) -> bool:
    """Whether a frame may attend to another frame of its clip."""
    of_query = chunk_of(query[0], config)
    of_key = chunk_of(key[0], config)
    if of_query == of_key:
        return query[1] == key[1]
    if of_key > of_query or (config.name == "teacher_forcing" and not key[1]):
        return False
    if config.window_frames is None:
        return True
    frames = range(200)
    begin = next(frame for frame in frames if chunk_of(frame, config) == of_query)
    first = next(frame for frame in frames if chunk_of(frame, config) == of_key)
    end = next(frame for frame in frames if chunk_of(frame, config) == of_key + 1)
    return first >= begin - config.window_frames or end <= config.sink_frames


def dense_mask(grid: Grid, config: ObjectiveConfig) -> Tensor:
    """Bool [n, n] over the tokens of a clip and its copies: which key (column) a query (row) sees."""
    rows = rows_of(grid[0], config)
    of_frames = torch.tensor([[sees(query, key, config) for key in rows] for query in rows])
    per_frame = grid[1] * grid[2]
    return of_frames.repeat_interleave(per_frame, 0).repeat_interleave(per_frame, 1)


def pack_index(layout: ContextLayout) -> Tensor:
    """Index of each local token in the sequence of all units, without padding."""
    units = [unit for own in layout.samples for unit in own]
    unit_starts = torch.tensor([0, *accumulate(unit.num_tokens for unit in units)])
    clip_starts = torch.tensor([0, *accumulate(layout.seq_lens)])
    valid = slice(layout.num_valid)
    ids = layout.unit_ids[valid]
    in_clip = layout.token_index[valid] - clip_starts[layout.segment_ids[valid]]
    return unit_starts[ids] + in_clip - torch.tensor([unit.start for unit in units])[ids]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, grids: list[Grid], config: ObjectiveConfig) -> Tensor:
    """Attend clip by clip under `dense_mask`. q, k, v and the result are [tokens of all units, heads, head dim]."""
    masks = [dense_mask(grid, config) for grid in grids]
    lens = [len(mask) for mask in masks]
    outs = []
    for mask, *parts in zip(masks, q.split(lens), k.split(lens), v.split(lens), strict=True):
        heads_first = [x.transpose(0, 1) for x in parts]
        scores = heads_first[0] @ heads_first[1].mT * q.shape[-1] ** -0.5
        probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outs.append((probs @ heads_first[2]).transpose(0, 1))
    return torch.cat(outs)


def masked_velocity(
    stock: Any,
    latents: Tensor,
    timesteps: Tensor,
    frames: list[int],
    mask: Tensor,
    text_embeds: Tensor,
    image_embeds: Tensor | None = None,
) -> Tensor:
    """The velocity [C, rows, h, w] of a stock DiT for a sequence of latent frames with positions `frames`.

    `latents` are [C, rows, h, w], `timesteps` [rows], and `mask` bool [tokens, tokens].
    """
    rope = type(stock.rope).forward
    processor = type(stock.blocks[0].attn1.processor).__call__

    def rotations(self: Any, hidden: Tensor) -> tuple[Tensor, ...]:
        whole = rope(self, hidden.new_zeros(1, 1, max(frames) + 1, *hidden.shape[-2:]))
        return tuple(x.unflatten(1, (max(frames) + 1, -1))[:, frames].flatten(1, 2) for x in whole)

    def attend(self: Any, attn: Any, hidden: Tensor, text: Any, _: None, rotary_emb: Any) -> Tensor:
        of_self = text is None
        return processor(self, attn, hidden, text, mask if of_self else None, rotary_emb if of_self else None)

    per_frame = latents.shape[2] * latents.shape[3] // 4
    of_tokens = timesteps.repeat_interleave(per_frame)[None]
    with (
        mock.patch.object(type(stock.rope), "forward", rotations),
        mock.patch.object(type(stock.blocks[0].attn1.processor), "__call__", attend),
    ):
        return stock_velocity(stock, latents, of_tokens, text_embeds, image_embeds)


def sigma_of(
    row: tuple[int, bool], run: PreparedRun, key: SampleKey, sigma_range: tuple[float, float], given: bool
) -> float:
    """The noise level of a frame. `given`: whether the model gets the first frame without noise."""
    frame, is_clean = row
    if given and frame == 0:
        return 0.0
    config = run.recipe.objective
    if is_clean:
        return config.context_noise
    return draw_sigma(run.recipe.train.seed, key, run.recipe.flow, sigma_range, chunk_of(frame, config))


def stock_causal_gradients(model: Path, run: PreparedRun) -> dict[str, Tensor]:
    """Gradients of the first step: stock diffusers in float64 under a dense mask, one sample at a time."""
    from diffusers import WanTransformer3DModel

    [expert] = run.model.experts
    stock = WanTransformer3DModel.from_pretrained(model / expert.subfolder).double()
    config = run.recipe.objective
    seed = run.recipe.train.seed
    plan = run.schedule.sampler.step_plan(0)
    for one in (i for bin_ in plan.bins for i in bin_):
        sample = run.data.read(one)
        batch = run.collator([sample], plan.repeat_indices((one,)), plan.epoch)
        [key] = batch.keys
        grid = tuple(batch.grid_sizes[0].tolist())
        layout = ContextLayout.build(batch.seq_lens)
        clean, noise, of_context = (
            unpatchify(x, grid, run.model.shape.out_channels, run.model.shape.patch_size).double()
            for x in (
                batch.tokens,
                *(
                    draw_noise(layout, (key,), seed, batch.tokens.shape[1], name)
                    for name in ("noise", "context_noise")
                ),
            )
        )
        given = bool(batch.num_cond_tokens[0])
        rows = rows_of(grid[0], config)
        sigmas = [sigma_of(row, run, key, expert.sigma_range, given) for row in rows]
        inputs = [
            (1 - sigma) * clean[:, frame] + sigma * (of_context if is_clean else noise)[:, frame]
            for (frame, is_clean), sigma in zip(rows, sigmas, strict=True)
        ]
        x = torch.stack(inputs, 1)
        image_latents = sample.arrays.get("image_latents")
        if image_latents is not None:
            mark = torch.zeros(4, *x.shape[1:], dtype=x.dtype)
            mark[:, [row for row, (frame, _) in enumerate(rows) if frame == 0]] = 1
            x = torch.cat([x, mark, image_latents[:, [frame for frame, _ in rows]].double()])
        velocity = masked_velocity(
            stock,
            x,
            torch.tensor(sigmas, dtype=torch.float32) * 1000,
            [frame for frame, _ in rows],
            dense_mask(grid, config),
            batch.text_embeds,
            sample.arrays.get("image_embeds"),
        )
        trained = [
            row for row, (frame, is_clean) in enumerate(rows) if not is_clean and not (given and frame == 0)
        ]
        frames = [rows[row][0] for row in trained]
        error = (velocity[:, trained] - (noise - clean)[:, frames]).square().mean(dim=(0, 2, 3))
        weights = sigma_weight(torch.tensor([sigmas[row] for row in trained]), run.recipe.flow)
        loss = (error * weights).mean()
        if run.recipe.loss.reduction == "token":
            loss = loss * (len(trained) * grid[1] * grid[2])
        (loss / run.schedule.denominator(plan)).backward()
    return {name: parameter.grad for name, parameter in stock.named_parameters()}
