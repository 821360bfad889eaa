"""Causal objectives: a model that makes a video chunk by chunk. Chunks of frames have their own noise levels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from wands.attention.units import Unit, UnitRule, join_visible, num_pairs
from wands.config.recipe import ObjectiveConfig, Recipe
from wands.data.collate import RankSlice
from wands.errors import ConfigError
from wands.flow.noise import NoisyBatch, draw_chunk_sigmas, mix_noise
from wands.flow.sigmas import with_clip_shift
from wands.objectives.chunks import diffusion_forcing_units, teacher_forcing_units
from wands.objectives.flow_matching import FlowMatching
from wands.objectives.objective import ClipCosts, ClipFacts
from wands.variants import Expert, Variant


class CausalFlowMatching(FlowMatching):
    """Flow matching in which a chunk of frames sees itself and earlier chunks, and has its own noise level."""

    def setup(self, recipe: Recipe, variant: Variant) -> None:
        super().setup(recipe, variant)
        self.config = recipe.objective
        self.unit_rule: UnitRule = lru_cache(maxsize=4096)(self.units)

    @abstractmethod
    def units(self, grid: tuple[int, int, int]) -> tuple[Unit, ...]:
        """Return the units of a sample, for its tokens along (frame, row, column)."""

    def costs(self, clips: ClipFacts) -> ClipCosts:
        return unit_costs(clips.grids, self.unit_rule)

    def prepare(self, part: RankSlice, expert: Expert) -> NoisyBatch:
        sigmas = []
        for key, length, units in zip(part.keys, part.layout.seq_lens, part.layout.samples, strict=True):
            chunks = draw_chunk_sigmas(
                self.seed,
                key,
                with_clip_shift(self.flow, length),
                expert.sigma_range,
                num_chunks=units[-1].chunk + 1,
                stratified=self.config.stratify_chunks,
            )
            sigmas.append(chunks)
        return self._mix(part, sigmas)

    def prepare_at(self, part: RankSlice, sigmas: Sequence[float]) -> NoisyBatch:
        pairs = zip(sigmas, part.layout.samples, strict=True)
        return self._mix(part, [[sigma] * (units[-1].chunk + 1) for sigma, units in pairs])

    def _mix(self, part: RankSlice, sigmas: Sequence[Sequence[float]]) -> NoisyBatch:
        return mix_noise(
            part.tokens,
            part.layout,
            part.keys,
            self.seed,
            sigmas,
            num_cond_tokens=part.num_cond_tokens,
            context_noise=self.config.context_noise,
        )


class TeacherForcing(CausalFlowMatching):
    """Every noisy chunk sees the clean copies of earlier chunks."""

    name = "teacher_forcing"

    def units(self, grid: tuple[int, int, int]) -> tuple[Unit, ...]:
        return teacher_forcing_units(grid, self.config)


class DiffusionForcing(CausalFlowMatching):
    """Every noisy chunk sees earlier chunks with their own noise."""

    name = "diffusion_forcing"

    def setup(self, recipe: Recipe, variant: Variant) -> None:
        if len(variant.experts) > 1:
            raise ConfigError(
                f"objective.name=diffusion_forcing: {variant.name} has two experts, each for a range of noise levels, but a "
                "forward pass has all noise levels; use teacher_forcing."
            )
        super().setup(recipe, variant)

    def units(self, grid: tuple[int, int, int]) -> tuple[Unit, ...]:
        return diffusion_forcing_units(grid, self.config)


def unit_costs(grids: np.ndarray, rule: UnitRule) -> ClipCosts:
    """Return the costs of clips that are divided into units. `grids` are as in `ClipFacts`."""
    different, index = np.unique(grids, axis=0, return_inverse=True)
    costs = []
    for frames, rows, columns in different.tolist():
        units = rule((frames, rows, columns))
        lens = [unit.num_tokens for unit in units]
        costs.append((sum(lens), num_pairs(lens, lens, join_visible([units]))))
    tokens, pairs = np.array(costs, dtype=np.int64).reshape(-1, 2).T
    return ClipCosts(tokens=tokens[index.ravel()], pairs=pairs[index.ravel()])


def teacher_forcing_costs(grids: np.ndarray, chunk_frames: int) -> ClipCosts:
    """Return the costs of clips under teacher forcing, before a recipe exists. `grids` are as in `ClipFacts`."""
    config = ObjectiveConfig(name="teacher_forcing", chunk_frames=chunk_frames)
    return unit_costs(grids, partial(teacher_forcing_units, config=config))


def objective_of(recipe: Recipe) -> FlowMatching:
    """Return the objective that `objective.name` names, before its `setup`."""
    known = {one.name: one for one in (FlowMatching, TeacherForcing, DiffusionForcing)}
    return known[recipe.objective.name]()
