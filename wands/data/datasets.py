"""The data of a run: a cache, or several as one, each visited as often as it shall be; less what is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from wands.config.recipe import DataConfig, SourceConfig
from wands.data.cache.format import first_difference
from wands.data.cache.reader import LatentCache
from wands.data.collate import Sample
from wands.data.holdout import hold_out
from wands.data.mock import MockDataset
from wands.data.repeats import RepeatSchedule, exact, repeats_of_weights
from wands.errors import CacheError, ConfigError
from wands.variants import DiTShape, Variant

Data = LatentCache | MockDataset


class Dataset(Protocol):
    """What the loop asks of a latent cache, of several and of mock data alike; a sample may stand in several rows."""

    keys: list[str]
    null_text_embeds: Tensor

    @property
    def places(self) -> np.ndarray:
        """Shard of every sample and its place there, int64 [N, 2]."""

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Video tokens of every sample, int64 [N]."""

    def latent_shape(self, index: int) -> tuple[int, int, int]:
        """Latent (frames, height, width) of a sample, without reading it."""

    def read(self, index: int, frames: tuple[int, int] | None = None) -> Sample:
        """One sample; of its latents only these frames, when they are given."""


@dataclass(frozen=True)
class SelectedSource:
    """One source as a run uses it.

    Attributes:
        name: its path as the recipe gives it, "mock" for mock data.
        data: all of its samples.
        chosen: int64, positions in `data` of the samples on the side of `data.split`.
        repeat: visits per epoch to each of them.
    """

    name: str
    data: Data
    chosen: np.ndarray
    repeat: Fraction


class CombinedDataset:
    """Samples of several sources behind the names of one cache.

    A row is a possible visit to a sample within an epoch (`wands.data.repeats.RepeatSchedule`): a sample that is to be
    visited twice has two. Noise is drawn for the name of a sample and the number of the visit, so one name
    must be one clip: a key that an earlier source has with other content is lengthened by its checksum,
    "key#1a2b3c4d"; with the same content it is the same clip, and its visits are counted through. So neither
    paths nor sources that are added at the end change what a sample is called.

    Args:
        sources: the sources.
        seed: `train.seed`, for the order in which fractions of a source are visited.

    Attributes:
        sources: likewise.
        keys: name of each row.
        null_text_embeds: embedding of the empty caption, bf16 [L, D].
        visits: the rows of each epoch.
        places: int64 [rows, 2], where each row is stored: shards, counted through all sources and copies, and
            the order inside them.

    Raises:
        ConfigError: an epoch might visit nothing.
    """

    def __init__(self, sources: Sequence[SelectedSource], seed: int) -> None:
        self.sources = tuple(sources)
        self.null_text_embeds = sources[0].data.null_text_embeds
        numbers = [len(part.chosen) for part in sources]
        self.schedule = RepeatSchedule(numbers, [part.repeat for part in sources], seed)
        rows = self.schedule.sample_of
        names = _settle_names(sources)
        self.keys = [names[i] for i in rows.tolist()]
        self._part_of = np.repeat(np.arange(len(sources)), numbers)[rows]
        self._position_of = np.concatenate([part.chosen for part in sources])[rows]
        places, first_shard = [], 0
        for part in sources:
            stored = part.data.places[part.chosen]
            for _ in range(ceil(part.repeat)):
                places.append(stored + np.array([first_shard, 0]))
                first_shard += int(stored[:, 0].max(initial=-1)) + 1
        self.places = np.concatenate(places)

    def num_tokens(self, patch_size: tuple[int, int, int]) -> np.ndarray:
        """Video tokens of every row, int64 [rows]."""
        lens = [part.data.num_tokens(patch_size)[part.chosen] for part in self.sources]
        return np.concatenate(lens)[self.schedule.sample_of]

    def latent_shape(self, i: int) -> tuple[int, int, int]:
        """Latent (frames, height, width) of a row, without reading it."""
        data, position = self._find(i)
        return data.latent_shape(position)

    def read(self, i: int, frames: tuple[int, int] | None = None) -> Sample:
        """The sample of a row, as its source gives it, under its name in this run."""
        data, position = self._find(i)
        return replace(data.read(position, frames), sample_id=self.keys[i])

    def _find(self, i: int) -> tuple[Data, int]:
        return self.sources[self._part_of[i]].data, int(self._position_of[i])


def open_data(
    section: DataConfig,
    *,
    shape: DiTShape,
    variant: Variant,
    seed: int,
    fingerprint: Callable[[], Mapping[str, Any]],
) -> Dataset:
    """Open what `data` names, check that it fits the model, and leave out the other side of the split.

    One cache or mock data of which every sample is visited once an epoch is given as it is.

    An epoch: with `repeat` r every sample of the source is visited r times; a fraction takes other samples each
    epoch (`wands.data.repeats.RepeatSchedule`). With `weight` an epoch is as many visits as the sources together have
    samples, of which each source gets its share.

    Args:
        section: `data` of the recipe.
        shape: of the DiT, for mock data.
        variant: of the model.
        seed: `train.seed`.
        fingerprint: gives that of the model's encoders; not called for mock data.

    Raises:
        ConfigError: no data is named, or a side of the split is empty.
        CacheError: a cache cannot be used; the message says which.
    """
    mock = section.mock is not None
    asked = [SourceConfig(path="mock")] if mock else _asked_for(section)
    opened: list[Data] = (
        [MockDataset(section.mock, shape, seed)]
        if section.mock is not None
        else _open_caches(section, asked, variant, fingerprint())
    )
    chosen = _choose_side(section, opened)
    repeats = [exact(source.repeat or 1) for source in asked]
    if any(source.weight for source in asked):
        repeats = repeats_of_weights([len(some) for some in chosen], [source.weight or 0 for source in asked])
    if len(opened) == 1 and len(chosen[0]) == len(opened[0].keys) and repeats == [1]:
        return opened[0]
    names = [source.path for source in asked]
    return CombinedDataset(
        [SelectedSource(*items) for items in zip(names, opened, chosen, repeats, strict=True)], seed
    )


def list_sources(section: DataConfig, data: Dataset) -> list[dict[str, Any]]:
    """What each source brings into a run, for people: path, num_samples, num_other_side (of the split), repeat.

    Args:
        section: `data` of the recipe.
        data: what `open_data` made of it.
    """
    if isinstance(data, CombinedDataset):
        sources = [(part.name, len(part.chosen), len(part.data.keys), part.repeat) for part in data.sources]
    else:
        name = "mock" if section.mock is not None else _asked_for(section)[0].path
        sources = [(name, len(data.keys), len(data.keys), Fraction(1))]
    return [
        {"path": path, "num_samples": num, "num_other_side": of - num, "repeat": float(repeat)}
        for path, num, of, repeat in sources
    ]


def describe_data(section: DataConfig, data: Dataset) -> list[str]:
    """The same in lines of text, one for each source and one for the split."""
    listed = list_sources(section, data)
    lines = [
        f"{one['path']}: {one['num_samples']:,} clips" + (f" x {one['repeat']:.4g}" * (one["repeat"] != 1))
        for one in listed
    ]
    if section.holdout:
        here, there = (sum(one[name] for one in listed) for name in ("num_samples", "num_other_side"))
        shares = {
            "train": f"{here:,} clips to train on, {there:,} held out",
            "holdout": f"{here:,} held-out clips, {there:,} left out",
            "all": f"all {here:,} clips, none held out",
        }
        lines.append(f"split {section.split} (data.holdout={section.holdout:g}): {shares[section.split]}")
    return lines


def _asked_for(section: DataConfig) -> list[SourceConfig]:
    if section.sources is not None:
        return section.sources
    if section.cache is None:
        raise ConfigError(
            "data.cache is not set; give a folder written by wands preprocess, for example --set data.cache=DIR."
        )
    return [SourceConfig(path=section.cache)]


def _open_caches(
    section: DataConfig,
    asked: Sequence[SourceConfig],
    variant: Variant,
    fingerprint: Mapping[str, Any],
) -> list[Data]:
    caches: list[LatentCache] = []
    for number, source in enumerate(asked):
        name = "data.cache" if section.sources is None else f"data.sources.{number}.path"
        try:
            cache = LatentCache(source.path, verify=section.verify)
            if not cache.keys:
                raise CacheError(
                    f"{name}={source.path} holds no sample; run wands preprocess on a folder with clips."
                )
            cache.check_fits(variant, fingerprint)
            cache.serve(variant)
        except CacheError as error:
            if section.sources is None or str(error).startswith(name):
                raise
            raise CacheError(f"{name}: {error}") from None
        if caches and (
            difference := first_difference(_encoders(caches[0], variant), _encoders(cache, variant))
        ):
            key, first, this = difference
            raise CacheError(
                f"{name}={source.path} was encoded with {key}={this} but {asked[0].path} with {first}; encode "
                "both with wands preprocess --model of the model you train."
            )
        caches.append(cache)
    return [*caches]


def _encoders(cache: LatentCache, variant: Variant) -> dict[str, Any]:
    """What caches of one run must share; sizes and lengths of clips may differ, and what the model does not look at."""
    ignored = (
        {"settings"} if "clip" in variant.conditions else {"settings", "image_encoder", "image_processor"}
    )
    return {part: value for part, value in cache.fingerprint.items() if part not in ignored}


def _choose_side(section: DataConfig, opened: Sequence[Data]) -> list[np.ndarray]:
    """Positions of the samples on the side of `data.split`, for each source."""
    if not section.holdout or section.split == "all":
        return [np.arange(len(data.keys)) for data in opened]
    held = [hold_out(data.keys, section.holdout) for data in opened]
    num_held, total = sum(int(some.sum()) for some in held), sum(map(len, held))
    if num_held in (0, total):
        raise ConfigError(
            f"data.holdout={section.holdout} holds out {num_held} of {total} samples, and both sides need one; "
            f"{'raise' if num_held == 0 else 'lower'} it, or add clips."
        )
    return [np.flatnonzero(some == (section.split == "holdout")) for some in held]


def _settle_names(sources: Sequence[SelectedSource]) -> list[str]:
    """What the chosen samples are called, one name for one content; see `CombinedDataset`."""
    if len(sources) == 1:
        keys = sources[0].data.keys
        return [keys[i] for i in sources[0].chosen.tolist()]
    names: list[str] = []
    first_with: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(sources):
        keys, contents = part.data.keys, _contents(part.data)
        for i in part.chosen.tolist():
            source, content = first_with.setdefault(keys[i], (number, contents[i]))
            same = source == number or content == contents[i]
            names.append(keys[i] if same else f"{keys[i]}#{contents[i] & 0xFFFFFFFF:08x}")
    return names


def _contents(data: Data) -> list[int]:
    """What tells samples from others of the same name: checksum, text tokens and frames."""
    assert isinstance(data, LatentCache), "there is but one source of mock data"
    index = data.index
    frames, texts = index.latent_shapes[:, 1].astype(np.int64), index.text_lens.astype(np.int64)
    return (index.crc32.astype(np.int64) | texts << 32 | frames << 44).tolist()
