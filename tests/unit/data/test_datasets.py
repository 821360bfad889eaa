"""Several caches in one run: names, visits, places, held-out clips, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.samples import narrow_text
from wands.config.recipe import DataConfig
from wands.config.recipe_loading import load_recipe
from wands.data import datasets as sources_module
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.datasets import CombinedDataset, Dataset, describe_data, list_sources, open_data
from wands.errors import CacheError, ConfigError, WandsError

VARIANT = narrow_text("wan2.1-t2v-1.3b")
ENCODERS = {"vae": {"weights": "aa"}}


def write(
    path: Path,
    clips: Iterable[tuple[Any, ...]],
    max_samples: int = 3,
    num_frames: int = 1,
    **fingerprint: Any,
) -> Path:
    """Clips of a name and a number, which decides what they look like, and perhaps a number of another caption."""
    with CacheWriter(
        path, VARIANT, ENCODERS | {"settings": str(path)} | fingerprint, max_samples=max_samples
    ) as writer:
        for key, number, *caption in clips:
            draw = torch.Generator().manual_seed(number)
            latents = torch.randn(16, 1 + number % 3, 4, 4, generator=draw).bfloat16()
            text = torch.randn(2, 8, generator=draw.manual_seed(*caption) if caption else draw).bfloat16()
            writer.add(
                key,
                {"latents": latents, "text_embeds": text},
                {"num_frames": num_frames, "fps": 16.0, "content": "c"},
            )
        writer.commit(torch.zeros(1, 8, dtype=torch.bfloat16))
    return path


def open_section(fingerprint: dict[str, Any] = ENCODERS, **values: Any) -> Dataset:
    return open_data(DataConfig(**values), VARIANT, seed=0, fingerprint=lambda: fingerprint)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """a has seven clips; b shares one name with other content and one clip that is the same."""
    folder = tmp_path_factory.mktemp("caches")
    write(folder / "a", [(f"clip{i}", i) for i in range(7)])
    write(folder / "b", [("clip0", 100), ("clip6", 6), ("other", 101), ("clip9", 102)])
    write(folder / "c", [("clip0", 100)])
    write(folder / "empty", [])
    write(folder / "alien", [("x", 1)], vae={"weights": "bb"})
    write(folder / "text", [("x", 1)], text_encoder={"weights": "cc"})
    write(folder / "seen", [("x", 1)], image_encoder={"weights": "dd"})
    return lambda name: str(folder / name)


def test_one_source_is_the_cache_itself(caches):
    for values in (
        {"cache": caches("a")},
        {"sources": [{"path": caches("a")}]},
        {"sources": [{"path": caches("a"), "repeat": 1.0}]},
        {"sources": [{"path": caches("a"), "weight": 0.3}]},
        {"cache": caches("a"), "holdout": 0.5, "split": "all"},
    ):
        data = open_section(**values)
        assert isinstance(data, LatentCache)
        assert data.keys == [f"clip{i}" for i in range(7)]


def test_a_name_is_one_clip(caches):
    """The same content under the same name is the same clip; other content gets another name, whatever the paths."""
    sources = [{"path": caches("a")}, {"path": caches("b")}, {"path": caches("c")}]
    data = open_section(sources=sources)
    crc = LatentCache(caches("c")).index.crc32[0]
    renamed = f"clip0#{crc:08x}"
    assert data.keys == [f"clip{i}" for i in range(7)] + [renamed, "clip6", "clip9", "other", renamed]
    assert (
        open_section(sources=sources[:2]).keys == data.keys[:-1]
    )  # a source at the end renames nothing before it
    wanted = [(name, i) for name, num in (("a", 7), ("b", 4), ("c", 1)) for i in range(num)]
    opened = {name: LatentCache(caches(name)) for name in "abc"}
    lens = data.num_tokens((1, 2, 2))
    for row, (name, i) in enumerate(wanted):
        mine = data.read(row)
        theirs = opened[name].read(i)
        assert mine.sample_id == data.keys[row]
        assert torch.equal(mine.latents.view(torch.int16), theirs.latents.view(torch.int16))
        assert torch.equal(mine.text_embeds.view(torch.int16), theirs.text_embeds.view(torch.int16))
        assert data.latent_shape(row) == opened[name].latent_shape(i)
        assert lens[row] == opened[name].num_tokens((1, 2, 2))[i]
    part = data.read(1, (0, 1)).latents
    assert torch.equal(part[:, :1], opened["a"].read(1).latents[:, :1])
    assert not part[:, 1:].any()
    assert torch.equal(data.null_text_embeds, opened["a"].null_text_embeds)


def test_clip_states_that_the_model_does_not_look_at_do_not_part_caches(caches):
    sources = [{"path": caches("c")}, {"path": caches("seen")}]
    assert open_section(sources=sources).keys == ["clip0", "x"]
    dit = replace(VARIANT.dit, image_dim=8, image_len=5)
    looking = replace(VARIANT, dit=dit, conditions=("text", "image", "clip"))
    assert "image_encoder" in sources_module._encoders(LatentCache(caches("seen")), looking)


def test_visits_are_rows_and_rows_know_where_they_lie(caches):
    data = open_section(sources=[{"path": caches("a"), "repeat": 1.5}, {"path": caches("b"), "repeat": 2}])
    assert isinstance(data, CombinedDataset)
    assert len(data.keys) == 2 * 7 + 2 * 4
    assert [len(data.schedule.rows(epoch)) for epoch in (0, 1)] == [7 + 3 + 8, 7 + 4 + 8]
    over_two = Counter(data.keys[row] for epoch in (0, 1) for row in data.schedule.rows(epoch))
    assert over_two["clip1"] == 3
    assert over_two["other"] == 4
    assert over_two["clip6"] == 7  # in both
    # Shards of three samples; a shard has another number in every copy and source.
    shards = data.places[:, 0].tolist()
    assert Counter(Counter(shards).values()) == Counter({3: 2 * 2 + 2, 1: 2 + 2})
    assert [sorted(set(shards[i:j])) for i, j in ((0, 7), (7, 14), (14, 18), (18, 22))] == [
        *([0, 1, 2], [3, 4, 5], [6, 7], [8, 9])
    ]


def test_weights_are_shares(caches):
    data = open_section(sources=[{"path": caches("a"), "weight": 1}, {"path": caches("b"), "weight": 3}])
    found = np.zeros(2)
    for epoch in range(40):
        rows = data.schedule.rows(epoch)
        assert abs(len(rows) - 11) <= 1
        found += np.bincount(data._source_of[rows], minlength=2)
    assert found / found.sum() == pytest.approx([0.25, 0.75], abs=0.005)


def test_each_row_has_the_loss_weight_and_the_caption_dropout_of_its_source(caches):
    a = {"path": caches("a"), "loss_weight": 0.25}
    b = {"path": caches("b"), "caption_dropout": 0.5, "repeat": 2}
    for sources, expected in (
        ([a], [(0.25, None)] * 7),
        ([a, b], [(0.25, None)] * 7 + [(1.0, 0.5)] * 8),  # clip6 is in both
        ([b, a], [(1.0, 0.5)] * 8 + [(0.25, None)] * 7),
    ):
        data = open_section(sources=sources)
        samples = [data.read(row) for row in range(len(data.keys))]
        assert [(sample.loss_weight, sample.caption_dropout) for sample in samples] == expected


def test_held_out_clips_are_one_side_of_all(caches):
    sources = [{"path": caches("a"), "repeat": 2}, {"path": caches("b")}]
    by_split = {
        split: open_section(sources=sources, holdout=0.4, split=split)
        for split in ("train", "holdout", "all")
    }
    of_name = {split: {key.partition("#")[0] for key in data.keys} for split, data in by_split.items()}
    assert of_name["train"] | of_name["holdout"] == of_name["all"]
    assert not of_name["train"] & of_name["holdout"]
    assert sum(len(data.keys) for name, data in by_split.items() if name != "all") == len(
        by_split["all"].keys
    )
    alone = open_section(cache=caches("a"), holdout=0.4)
    assert set(alone.keys) == of_name["train"] & set(LatentCache(caches("a")).keys)
    assert alone.read(0).sample_id == alone.keys[0]


def test_what_is_said_of_the_data(caches):
    section = DataConfig(sources=[{"path": caches("a"), "repeat": 1.5}, {"path": caches("b")}], holdout=0.4)
    data = open_data(section, VARIANT, seed=0, fingerprint=dict)
    listed = list_sources(section, data)
    assert [one["num_samples"] + one["num_other_side"] for one in listed] == [7, 4]
    first, second, split = describe_data(section, data)
    assert first == f"{caches('a')}: {listed[0]['num_samples']} clips, each used 1.5 times per epoch"
    assert second == f"{caches('b')}: {listed[1]['num_samples']} clips"
    here, there = (sum(one[name] for one in listed) for name in ("num_samples", "num_other_side"))
    assert split == f"split train (data.holdout=0.4): {here} clips to train on, {there} held out"
    assert describe_data(DataConfig(cache="a"), LatentCache(caches("a"))) == ["a: 7 clips"]


def test_what_would_leak_is_on_neither_side(tmp_path: Path):
    """A film of 40 windows, and three of its windows under other names in a second cache, with other captions."""
    write(tmp_path / "film", [(f"film#{i:04d}", 3 * i + 1) for i in range(40)], num_frames=81)
    film = open_section(cache=str(tmp_path / "film"), holdout=0.1, split="holdout")
    held = [int(key[-4:]) for key in film.keys]
    assert held == list(range(held[0], held[0] + 4))
    train = next(i for i in range(40) if abs(i - held[0]) > 20 or abs(i - held[0]) > 10)
    copies = [(f"copy{i}", 3 * i + 1, 7) for i in (held[0], held[1], train)]
    write(tmp_path / "copies", copies)
    sources = [{"path": str(tmp_path / name)} for name in ("film", "copies")]
    section = DataConfig(sources=sources, holdout=0.1)
    data = open_data(section, VARIANT, seed=0, fingerprint=lambda: ENCODERS)
    assert not set(data.keys) & {f"film#{i:04d}" for i in range(held[0] - 1, held[0] + 5)}
    assert [key for key in data.keys if key.startswith("copy")] == [f"copy{train}"]
    listed = list_sources(section, data)
    counts = [
        [item[f"num_{name}"] for name in ("samples", "other_side", "gap", "duplicates")] for item in listed
    ]
    assert counts == [[34, 4, 2, 0], [1, 0, 0, 2]]
    split = describe_data(section, data)[-1]
    assert split.endswith(
        "35 clips to train on, 4 held out; left out: 2 next to and 2 nearly equal to held-out clips"
    )


@pytest.mark.parametrize(
    ("sources", "kind", "said"),
    [
        ([("a", {}), ("nowhere", {})], CacheError, r"data\.sources\.1\.path: cache=.*nowhere is not a folder; use the --out"),
        ([("a", {}), ("empty", {})], CacheError, r"data\.sources\.1\.path=.*empty contains no sample; run"),
        ([("alien", {})], CacheError, r"data\.sources\.0\.path: cache=.*alien was .* vae\.weights=bb but the model"),
        ([("a", {}), ("text", {})], CacheError, r"sources\.1\.path=.*text was .*={'w.*}, but .*a with text_encoder=None\. All"),
        ([("c", {"repeat": 0.5})], ConfigError, r"less than one sample per epoch \(samples x repeat: 1 x 0\.5\); increase"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_are_refused(caches, sources, kind: type[WandsError], said: str):
    with pytest.raises(kind, match=said) as caught:
        open_section(sources=[{"path": caches(name)} | more for name, more in sources])
    assert "\n" not in str(caught.value)


def test_another_variant_is_refused_by_name(caches):
    section = DataConfig(sources=[{"path": write_wide(caches)}, {"path": caches("b")}])
    wide = narrow_text("wan2.2-ti2v-5b")
    said = r"data\.sources\.1\.path: cache=.*b was made for wan2\.1-t2v-1\.3b \("
    with pytest.raises(CacheError, match=said):
        open_data(section, wide, seed=0, fingerprint=dict)


def write_wide(caches: Callable[[str], str]) -> str:
    path = Path(caches("wide"))
    with CacheWriter(path, narrow_text("wan2.2-ti2v-5b"), {}) as writer:
        latents = torch.zeros(48, 1, 4, 4).bfloat16()
        text = torch.zeros(1, 8).bfloat16()
        writer.add(
            "x", {"latents": latents, "text_embeds": text}, {"num_frames": 1, "fps": 24.0, "content": "c"}
        )
        writer.commit(text)
    return str(path)


@pytest.mark.parametrize(
    ("holdout", "said"),
    [
        (1e-9, r"holds out 0 of 7 samples.* Set data\.holdout=[0-9.]+ or more"),
        (1 - 1e-9, r"holds out 7 of 7 samples.* Lower data\.holdout"),
    ],
)
@pytest.mark.parametrize("split", ["train", "holdout"])
def test_a_side_without_clips_is_refused(caches, holdout: float, said: str, split: str):
    with pytest.raises(ConfigError, match=said) as error:
        open_section(cache=caches("a"), holdout=holdout, split=split)
    if named := re.search(r"Set data\.holdout=([0-9.]+)", str(error.value)):
        smallest = float(named.group(1))
        assert len(open_section(cache=caches("a"), holdout=smallest, split="holdout").keys) >= 1
        with pytest.raises(ConfigError, match="holds out 0"):
            open_section(cache=caches("a"), holdout=max(smallest - 0.01, 1e-9), split=split)


@pytest.mark.parametrize("holdout", [1e-9, 1 - 1e-9])
def test_one_clip_cannot_be_split(holdout: float):
    mock = {"num_samples": 1, "shapes": [[1, 4, 4]], "text_lens": [4]}
    with pytest.raises(ConfigError, match=r"are not used\.\) Add clips\.$"):
        open_section(mock=mock, holdout=holdout)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.sources=[{path: a, weight: 1}, {path: b}]"],
         "data.sources.1 has no weight, but 1 of 2 sources have a weight; set"),
        (["data.sources=[{path: a, weight: 1, repeat: 2}]"], "data.sources.0 has weight=1.0 and repeat=2.0, which exclude"),
        (["data.sources=[{path: a, weight: 0}]"], "data.sources.0.weight=0 is invalid: input should be greater than 0"),
        (["data.sources=[{path: a, repeat: -1}]"], "data.sources.0.repeat=-1 is invalid: input should be greater than 0"),
        (["data.sources=[{path: a, weight: .inf}]"], "data.sources.0.weight=inf is invalid"),
        (["data.sources=[{weight: 1}]"], "data.sources.0.path is invalid: field required; `wands recipes data.sources.path`"),
        (["data.sources=[]"], "data.sources=[] is invalid"),
        (["data.sources=[{path: a, weights: 1}]"], "did you mean data.sources.0.weight?"),
        (["data.mock={num_samples: 1, shapes: [[1,2,2]], text_len: [1]}"], "did you mean data.mock.text_lens?"),
        (["data.sources=[{path: a}]", "data.cache=b"], "data.sources and data.cache=b are both set; keep one"),
        (["data.split=holdout"], "data.split=holdout needs held-out clips, but data.holdout=0; set"),
        (["data.holdout=1"], "data.holdout=1 is invalid"),
        (["packing.buffer_size=0"], "packing.buffer_size=0 is invalid"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(overrides: list[str], said: str):
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
