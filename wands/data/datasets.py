"""Open the data of a training run: mock data, or at least one cache, repeated and with clips held out as the recipe says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from wands.conditions.arrays import ClipSize
from wands.conditions.condition import Condition
from wands.conditions.published import conditions_of, published_conditions, specs_of
from wands.config.auto import MIN_CLIPS
from wands.config.recipe import DataConfig, MockConfig, SourceConfig
from wands.data.cache.reader import LatentCache
from wands.data.collate import Sample
from wands.data.holdout import (
    DUPLICATE,
    GAP,
    HELD_OUT,
    TRAIN,
    choose_sides,
    clip_name,
    drop_duplicates,
    smallest_fraction,
)
from wands.data.sample_facts import SampleFacts
from wands.data.sampler import RepeatSchedule, exact, repeats_of_weights
from wands.errors import CacheError, ConfigError, DataError
from wands.files import first_difference
from wands.flow.rng import philox
from wands.texts import plural
from wands.variants import DiTShape, Variant

Fingerprint = Callable[[], Mapping[str, Any]]
LEFT_OUT = ("num_other_side", "num_gap", "num_duplicates")


@dataclass(eq=False)
class MockDataset(SampleFacts):
    """Data set of artificial samples with realistic shapes, read like a `LatentCache`.

    Latents and text embeddings are standard normal numbers that depend only on the seed and the sample id. The shapes come in
    turn from the lists in `mock`. `places` counts shards of 512 samples.

    Raises:
        DataError: if a latent shape is not a multiple of the patch size.
    """

    mock: MockConfig
    shape: DiTShape
    seed: int
    conditions: Sequence[Condition] | None = None

    def __post_init__(self) -> None:
        patch_size = self.shape.patch_size
        if self.conditions is None:
            self.conditions = published_conditions(self.shape)
        self._specs = {spec.name: spec for spec in specs_of(self.shape, self.conditions)}
        for latent_shape in self.mock.shapes:
            if any(n < 1 or n % patch for n, patch in zip(latent_shape, patch_size, strict=True)):
                raise DataError(
                    f"data.mock.shapes={list(latent_shape)} (latent frames, rows, columns) must be "
                    f"positive multiples of the model's patch size {list(patch_size)} in the same order; change this shape."
                )
        self.keys = [f"mock-{i:06d}" for i in range(self.mock.num_samples)]
        self.licenses = np.full(len(self.keys), "", object)
        self.mask_sums = np.zeros((len(self.keys), 2))
        self.latent_shapes = np.resize(self.mock.shapes, (len(self.keys), 3))
        self.checksums = np.zeros(len(self.keys), np.uint32)  # the seed and the key determine a sample
        text = self._specs["text_embeds"]
        self.null_text_embeds = text.draw(self._rng("", "null"), (1, self.shape.text_dim))
        self.places = np.stack(np.divmod(np.arange(len(self.keys)), 512), axis=1)

    def read(self, index: int, frames: tuple[int, int] | None = None) -> Sample:
        """Return the same random sample as in every call, with all conditions except optional arrays."""
        key = self.keys[index]
        size = ClipSize(self.latent_shape(index), self.shape.patch_size)
        text_len = self.mock.text_lens[index % len(self.mock.text_lens)]
        draw = partial(self._rng, key)
        latents = self._specs["latents"]
        arrays = {"latents": latents.draw(draw("latents"), latents.shape(size))}
        for condition in self.conditions or ():
            arrays |= condition.mock(draw, size, text_len)
        if frames is not None:
            arrays = {
                name: self._specs[name].blank(array, frames, size.patch_size)
                for name, array in arrays.items()
            }
        return Sample(key, arrays)

    def _rng(self, key: str, what: str) -> np.random.Generator:
        return philox(self.seed, key, "mock", what)


Data = LatentCache | MockDataset


@dataclass(frozen=True)
class SelectedSource:
    """One source of data, and the samples that the recipe selects from it.

    Attributes:
        config: settings of the source, as in an item of `data.sources`. For mock data, the path is "mock".
        chosen: int64, positions in `data` of the samples that `data.split` selects.
        repeat: mean number of uses of each chosen sample in an epoch.
        num_left_out: numbers of samples, see `list_sources`.
    """

    config: SourceConfig
    data: Data
    chosen: np.ndarray
    repeat: Fraction
    num_left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEFT_OUT, 0))


class CombinedDataset(SampleFacts):
    """Samples of several sources, with the attributes and methods of one `LatentCache`.

    A row is one possible use of a sample in an epoch; `schedule` selects the rows of each epoch. The noise of a row depends on
    its sample id and repeat. The id is the key in the cache, or, for a key that an earlier source has with other content, the key
    with a checksum: "key#1a2b3c4d". Renaming a cache, or adding a source after the others, changes no existing id.

    Attributes:
        keys: sample id of each row.
        mask_sums: float64 [rows, 2], see `LatentCache`.
        places: int64 [rows, 2], (shard, position in the shard). Each repeat of a source gets new shard numbers.

    Raises:
        ConfigError: if an epoch could be empty.
    """

    def __init__(self, sources: Sequence[SelectedSource], seed: int) -> None:
        self.sources = tuple(sources)
        self.null_text_embeds = sources[0].data.null_text_embeds
        numbers = [len(source.chosen) for source in sources]
        self.schedule = RepeatSchedule(numbers, [source.repeat for source in sources], seed)
        rows = self.schedule.sample_of
        names = _settle_names(sources)
        self.keys = [names[i] for i in rows.tolist()]

        def of_rows(name: str) -> np.ndarray:
            return np.concatenate([getattr(part.data, name)[part.chosen] for part in sources])[rows]

        self.licenses = of_rows("licenses")
        self.mask_sums = of_rows("mask_sums")
        self.latent_shapes = of_rows("latent_shapes")
        self.checksums = of_rows("checksums")
        self._source_of = np.repeat(np.arange(len(sources)), numbers)[rows]
        self._position_of = np.concatenate([source.chosen for source in sources])[rows]
        places = []
        first_shard = 0
        for source in sources:
            stored = source.data.places[source.chosen]
            for _ in range(ceil(source.repeat)):
                places.append(stored + np.array([first_shard, 0]))
                first_shard += int(stored[:, 0].max(initial=-1)) + 1
        self.places = np.concatenate(places)

    def read(self, i: int, frames: tuple[int, int] | None = None) -> Sample:
        """Read the sample of row `i`, with `self.keys[i]` as its id."""
        source = self.sources[self._source_of[i]]
        config = source.config
        sample = source.data.read(int(self._position_of[i]), frames)
        of_source = {"loss_weight": config.loss_weight, "caption_dropout": config.caption_dropout}
        return replace(sample, sample_id=self.keys[i], **of_source)


Dataset = Data | CombinedDataset
"""Data of a run. The three classes have the same attributes and methods for reading."""


def open_data(section: DataConfig, variant: Variant, seed: int, fingerprint: Fingerprint) -> Dataset:
    """Open the data of a recipe, check that it fits the model, and select the samples of `data.split`.

    The result is a `CombinedDataset` if there are several sources, the recipe repeats samples, `data.split` removes samples, or
    `loss_weight` or `caption_dropout` is set. With `weight` instead of `repeat`, an epoch has as many samples as all sources
    together, with shares proportional to the weights. `fingerprint` returns digests of the model's encoders; it is not called for
    mock data.

    Raises:
        ConfigError: if the recipe names no data, or if `data.holdout` leaves no sample for training or for evaluation.
        CacheError: if a cache cannot be used.
    """
    configs = _configured_sources(section)
    opened = _open_sources(section, variant, seed, fingerprint)
    sides = _choose_sides(section, opened)
    wanted = HELD_OUT if section.split == "holdout" else TRAIN
    chosen = [np.flatnonzero(side == wanted) for side in sides]
    numbers = [len(rows) for rows in chosen]
    weights = [source.weight or 0 for source in configs]
    repeats = [exact(source.repeat or 1) for source in configs]
    if any(weights):
        repeats = repeats_of_weights(numbers, weights)
    is_plain = [*repeats, configs[0].loss_weight, configs[0].caption_dropout] == [1, 1.0, None]
    if is_plain and numbers[0] == len(opened[0].keys):
        return opened[0]
    kinds = dict(zip(LEFT_OUT, (HELD_OUT + TRAIN - wanted, GAP, DUPLICATE), strict=True))
    left_out = [{name: int((side == kind).sum()) for name, kind in kinds.items()} for side in sides]
    selected = [
        SelectedSource(config=config, data=data, chosen=kept, repeat=repeat, num_left_out=counts)
        for config, data, kept, repeat, counts in zip(configs, opened, chosen, repeats, left_out, strict=True)
    ]
    return CombinedDataset(selected, seed)


def open_held_out(
    section: DataConfig, cache: str | None, variant: Variant, seed: int, fingerprint: Fingerprint
) -> Dataset | None:
    """Open the clips of `eval.cache`, else those that `data.holdout` leaves out of `data.split` "train", else return None."""
    if cache is not None:
        return open_data(DataConfig(cache=cache, verify=section.verify), variant, seed, fingerprint)
    if not section.holdout or section.split != "train":
        return None
    # The training data has been compared with the fingerprint.
    if section.holdout == "auto":
        sides = _choose_sides(section, _open_sources(section, variant, seed, dict))
        if not any((side == HELD_OUT).any() for side in sides):
            return None
    return open_data(section.model_copy(update={"split": "holdout"}), variant, seed, dict)


def check_excluded(section: DataConfig, data: Dataset) -> None:
    """Raise ConfigError if a key in `data.exclude` is in no source, even unselected, or every sample is excluded."""
    excluded = set(section.exclude)
    used = set(data.keys)
    known = used.union(*(part.data.keys for part in getattr(data, "sources", ())))
    if unknown := sorted(excluded - known):
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0)[0]
        raise ConfigError(f"data.exclude={unknown[0]} is not the key of a sample; did you mean {near}?")
    if used <= excluded:
        raise ConfigError("data.exclude names every sample; remove a key from the list.")


def select_sources(section: DataConfig, data: Dataset) -> Sequence[SelectedSource]:
    """Return the sources of the data from `open_data`, each with the samples that the run uses."""
    if isinstance(data, CombinedDataset):
        return data.sources
    config = _configured_sources(section)[0]
    return [SelectedSource(config=config, data=data, chosen=np.arange(len(data.keys)), repeat=Fraction(1))]


def list_sources(section: DataConfig, data: Dataset) -> list[dict[str, Any]]:
    """Describe each source by "path", "num_samples" (used by the run), "repeat" and three counts of unused samples.

    - "num_other_side": held-out samples, or training samples if `data` is the held-out data.
    - "num_gap": samples close in time to a held-out sample.
    - "num_duplicates": samples nearly equal to a held-out sample.
    """
    return [
        {"path": part.config.path, "num_samples": len(part.chosen), **part.num_left_out}
        | {"repeat": float(part.repeat)}
        for part in select_sources(section, data)
    ]


def describe_data(section: DataConfig, data: Dataset) -> list[str]:
    """Describe the data in lines: one for each source, then split, excluded samples and unused inputs, if any."""
    listed = list_sources(section, data)
    lines = [
        f"{item['path']}: {plural(item['num_samples'], 'clip')}"
        + (f", each used {item['repeat']:.4g} times per epoch" * (item["repeat"] != 1))
        for item in listed
    ]
    if section.holdout:
        here, there, gap, duplicates = (
            sum(item[name] for item in listed) for name in ("num_samples", *LEFT_OUT)
        )
        shares = {
            "train": f"{plural(here, 'clip')} to train on, {there:,} held out",
            "holdout": f"{here:,} held-out clips, {there:,} left out",
            "all": f"all {here:,} clips, none held out",
        }
        lines.append(f"split {section.split} (data.holdout={section.holdout}): {shares[section.split]}")
        if not there and section.holdout == "auto" and section.split == "train":
            lines[-1] += f", because there are fewer than {MIN_CLIPS} clips"
        if gap or duplicates:
            lines[-1] += f"; left out: {gap:,} next to and {duplicates:,} nearly equal to held-out clips"
    lines += [f"data.exclude leaves out {plural(len(section.exclude), 'sample')}"] * bool(section.exclude)
    for part in select_sources(section, data):
        if isinstance(part.data, LatentCache) and part.data.unused:
            names = ", ".join(part.data.unused)
            lines.append(f"NOT USED: {names}; to use it, add --import FILE, where FILE defines {names}")
    return lines


def _configured_sources(section: DataConfig) -> list[SourceConfig]:
    if section.mock is not None:
        return [SourceConfig(path="mock")]
    if section.sources is not None:
        return section.sources
    if section.cache is None:
        raise ConfigError(
            "data.cache is not set; add --set data.cache=DIR, where DIR is a folder that wands preprocess wrote."
        )
    return [SourceConfig(path=section.cache)]


def _open_sources(section: DataConfig, variant: Variant, seed: int, fingerprint: Fingerprint) -> list[Data]:
    if section.mock is not None:
        return [
            MockDataset(mock=section.mock, shape=variant.dit, seed=seed, conditions=conditions_of(variant))
        ]
    encoders = fingerprint()
    caches = list[LatentCache]()
    for number, source in enumerate(_configured_sources(section)):
        name = "data.cache" if section.sources is None else f"data.sources.{number}.path"
        try:
            cache = LatentCache(source.path, verify=section.verify)
            cache.check_fits(variant, encoders)
            cache.serve(conditions_of(variant))
        except CacheError as error:
            raise error if section.sources is None else CacheError(f"{name}: {error}") from None
        if not cache.keys:
            raise CacheError(
                f"{name}={source.path} contains no sample; run wands preprocess on a folder with clips."
            )
        caches.append(cache)
        if difference := first_difference(_encoders(caches[0], variant), _encoders(cache, variant)):
            key, first, this = difference
            raise CacheError(
                f"{name}={source.path} was encoded with {key}={this}, but {caches[0].path} with {key}={first}. All caches of "
                "a run need the same encoders; run wands preprocess again for both, with --model set to the model that you train."
            )
    return [*caches]


def _encoders(cache: LatentCache, variant: Variant) -> dict[str, Any]:
    """Return the digests of the encoders that the variant uses, which must be equal in all caches of a run."""
    uses_images = any("image" in condition.encoders for condition in conditions_of(variant))
    ignored = ["settings"] if uses_images else ["settings", "image_encoder", "image_processor"]
    return {part: value for part, value in cache.fingerprint.items() if part not in ignored}


def _choose_sides(section: DataConfig, opened: Sequence[Data]) -> list[np.ndarray]:
    """Return TRAIN, HELD_OUT, GAP or DUPLICATE for each sample of each source."""
    if not section.holdout or section.split == "all":
        return [np.full(len(data.keys), TRAIN) for data in opened]
    caches = [data for data in opened if isinstance(data, LatentCache)]
    # All names of mock data differ, so its lengths are not needed.
    seconds = [cache.index.num_frames / cache.index.fps for cache in caches]
    names = [key for data in opened for key in data.keys]
    sides = choose_sides(names, seconds or [np.zeros(len(names))], section.holdout)
    if caches:
        contents = np.concatenate([_contents(cache) for cache in caches])
        drop_duplicates(sides, contents, np.concatenate([cache.index.signatures for cache in caches]))
    num_held, num_train = ((sides == side).sum() for side in (HELD_OUT, TRAIN))
    if not num_train or not (num_held or section.holdout == "auto"):
        smallest = smallest_fraction(names)
        if len({clip_name(name) for name in names}) == 1 or (not num_held and smallest >= 1):
            fix = "Add clips."
        elif num_held:
            fix = "Lower data.holdout, or add clips."
        else:
            fix = f"Set data.holdout={smallest:g} or more, or add clips."
        raise ConfigError(
            f"data.holdout={section.holdout} holds out {num_held} of {len(sides)} samples and leaves {num_train} for "
            "training, but evaluation and training need at least 1 each. (Samples next to a held-out sample in the same video, "
            f"and near-duplicates of it, are not used.) {fix}"
        )
    return np.split(sides, np.cumsum([len(data.keys) for data in opened])[:-1])


def _settle_names(sources: Sequence[SelectedSource]) -> list[str]:
    """Return the sample ids of all sources (see `CombinedDataset`)."""
    if len(sources) == 1:
        keys = sources[0].data.keys
        return [keys[i] for i in sources[0].chosen.tolist()]
    names: list[str] = []
    first_with: dict[str, tuple[int, int]] = {}
    for number, source in enumerate(sources):
        keys = source.data.keys
        contents = _contents(source.data)
        for i in source.chosen.tolist():
            owner, content = first_with.setdefault(keys[i], (number, contents[i]))
            same = owner == number or content == contents[i]
            names.append(keys[i] if same else f"{keys[i]}#{contents[i] & 0xFFFFFFFF:08x}")
    return names


def _contents(data: Data) -> list[int]:
    """Return for each sample a number that combines its checksum, text length and number of latent frames."""
    assert isinstance(data, LatentCache), "mock data has one source"
    index = data.index
    frames = index.latent_shapes[:, 1].astype(np.int64)
    texts = index.text_lens.astype(np.int64)
    return (index.crc32.astype(np.int64) | texts << 32 | frames << 44).tolist()
