"""Arrays of outside conditions in the cache: every dtype, every range of frames, optional and of free length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data_tools.export import export_cache
from data_tools.import_cache import import_cache
from data_tools.merge import merge
from data_tools.verify import verify_cache
from tests.plugin.control import Control
from tests.plugin.facts import Facts
from tests.support.cache_samples import NULL, make_sample, meta_of
from tests.support.samples import narrow_text, with_arrays
from wands.conditions.arrays import ArraySpec, ClipSize
from wands.conditions.condition import Condition
from wands.conditions.published import conditions_of
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, ConfigError
from wands.variants import EXTRA_KEY, VARIANTS, variant_of, with_extra

PATCH = (1, 2, 2)
PLAIN = narrow_text("wan2.1-t2v-1.3b")
VARIANT = variant_of(PLAIN.dit.to_config(), conditions=[Facts()])


def facts_of(latents: Tensor, seed: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    size = ClipSize(tuple(latents.shape[1:]), PATCH)
    specs = {spec.name: spec for spec in Facts.arrays}
    found = {name: specs[name].draw(rng, specs[name].shape(size)) for name in ("depth", "inside")}
    if seed % 2:
        found["track"] = specs["track"].draw(rng, (seed, 2))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("facts") / "cache"
    with CacheWriter(path, VARIANT, {"vae": {"weights_sha256": "aa"}}) as writer:
        for number in range(4):
            latents = torch.randn(16, 3 + number, 6, 10).bfloat16()
            sample = with_arrays(make_sample(number), latents=latents, **facts_of(latents, number))
            writer.add(sample.sample_id, sample.arrays, meta_of(sample, num_frames=9 + 4 * number))
        writer.commit(NULL)
    return path


def check_arrays(path: Path) -> None:
    cache = LatentCache(path, verify=True)
    for number in range(4):
        sample = cache.read(number)
        wanted = facts_of(sample.latents, number)
        assert sample.arrays.keys() - {"latents", "text_embeds"} == wanted.keys()
        for name, array in wanted.items():
            assert sample.arrays[name].dtype == array.dtype
            assert torch.equal(sample.arrays[name], array)


def test_every_dtype_goes_through_every_tool(folder: Path, tmp_path: Path):
    check_arrays(folder)
    assert verify_cache(folder).problems == []
    merge(tmp_path / "merged", [folder])
    export_cache(folder, tmp_path / "files", "safetensors")
    import_cache(tmp_path / "files", tmp_path / "imported")
    for out in ("merged", "imported"):
        check_arrays(tmp_path / out)
        assert LatentCache(tmp_path / out).manifest == LatentCache(folder).manifest


@pytest.mark.parametrize("verify_all", [False, True])
def test_a_rank_reads_only_its_frames(folder: Path, verify_all: bool):
    cache = LatentCache(folder, verify=verify_all)
    for number in range(4):
        whole = cache.read(number)
        for frames in ((0, 1), (1, 3), (2, 2)):
            part = cache.read(number, frames)
            for name, axis in (("latents", 1), ("depth", 0), ("inside", 0)):
                mine = part.arrays[name].movedim(axis, 0)
                all_of = whole.arrays[name].movedim(axis, 0)
                assert torch.equal(mine[slice(*frames)], all_of[slice(*frames)])
                others = [i for i in range(len(mine)) if not frames[0] <= i < frames[1]]
                assert not mine[others].any()
            assert part.arrays.keys() == whole.arrays.keys()


def test_bits_are_packed(folder: Path):
    cache = LatentCache(folder)
    spec = next(spec for spec in cache.arrays if spec.name == "inside")
    assert spec.num_bytes((3, 3, 5)) == 6  # 45 bits


def test_a_cache_serves_models_with_fewer_inputs(folder: Path):
    cache = LatentCache(folder)
    cache.check_fits(PLAIN, {})
    cache.serve(conditions_of(PLAIN))
    assert cache.read(0).arrays.keys() == {"latents", "text_embeds"}


class WiderFacts(Facts):
    arrays = (ArraySpec("depth", "uint8", ("frames", "rows", "columns", 4)),)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Control(), r"\[text, mask, facts\].*control \(version=1\)"),
        (WiderFacts(), r"depth=uint8 .* 3\]\) but .*depth=uint8 .* 4\]"),
    ],
)
def test_a_cache_must_have_the_arrays_of_the_model(folder: Path, condition: Condition, message: str):
    model = variant_of(PLAIN.dit.to_config(), conditions=[condition])
    with pytest.raises(CacheError, match=message):
        LatentCache(folder).check_fits(model, {})


def test_a_cache_is_continued_only_with_the_same_inputs(folder: Path):
    with pytest.raises(CacheError, match=r"was begun with.*facts"):
        CacheWriter(folder, PLAIN, {"vae": {"weights_sha256": "aa"}})


@pytest.mark.parametrize(
    ("dtype", "dims", "said"),
    [("fp32", (1,), "dtype=fp32"), ("bf16", ("f",), "'f'"), ("bool", (None,), "free length")],
)
def test_a_wrong_description_is_refused(dtype: str, dims: tuple, said: str):
    with pytest.raises(ValueError, match=said):
        ArraySpec("x", dtype, dims)


# ---- channels of a model


PUBLISHED = VARIANTS["wan2.1-t2v-1.3b"]
CONFIG = PUBLISHED.dit.to_config()


def test_the_channels_of_a_model_are_those_of_its_conditions():
    wide = variant_of(CONFIG, conditions=[Control()])
    assert (wide.name, wide.dit.in_channels, wide.dit.out_channels) == (PUBLISHED.name, 32, 16)
    assert wide.published_dit == PUBLISHED.dit
    config = with_extra(CONFIG, wide)
    assert config[EXTRA_KEY] == [{"name": "control", "channels": 16}]
    assert variant_of(config, conditions=[Control()]).dit == wide.dit
    foreign = {key: value for key, value in config.items() if key != EXTRA_KEY}
    assert variant_of(foreign, conditions=[Control()]).dit == wide.dit


def test_a_missing_condition_is_named():
    config = with_extra(CONFIG, variant_of(CONFIG, conditions=[Control()]))
    with pytest.raises(ConfigError, match="trained with the input control, but no condition"):
        variant_of(config)
    other = type("Wide", (Control,), {"channels": 8})()
    with pytest.raises(ValueError, match="control has 8 channels, but the transformer was trained with 16"):
        variant_of(config, conditions=[other])


def test_the_order_of_the_config_counts():
    first = Control()
    second = type("Second", (Control,), {"name": "second", "channels": 4})()
    config = with_extra(CONFIG, variant_of(CONFIG, conditions=[first, second]))
    again = variant_of(config, conditions=[second, first])
    assert [condition.name for condition in again.extra] == ["control", "second"]
