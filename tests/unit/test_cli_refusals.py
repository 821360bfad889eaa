"""Refusals of the command line before anything starts, in one sentence each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.cli_calls import MOCK, cache, invoke, refused
from wands.texts import safe_lines

__all__ = ["cache"]  # fixtures


def sets(model: Path, folder: Path) -> tuple[str, ...]:
    """Options of a run on mock data in `folder`/run."""
    settings = (f"model.path={model}", MOCK, f"output_dir={folder / 'run'}")
    return tuple(word for setting in settings for word in ("--set", setting))


def test_unknown_key_wrong_value_and_recipe(tiny_pipeline: Path):
    assert "did you mean train.max_steps?" in refused("train", "--set", "train.max_step=3")
    assert "neither a file nor a shipped recipe" in refused("train", "no-such-recipe")
    assert "data.cache is not set" in refused("train", "--set", f"model.path={tiny_pipeline}")


def test_missing_model():
    text = refused("train", "--set", "model.path=/no/such/model", "--set", MOCK)
    assert "model.path" in text
    assert "neither a folder nor a Hub id" in text


@pytest.mark.parametrize("damage", ["missing", "cut", "another shape"])
def test_weights_that_do_not_fit_are_refused_before_the_start(
    damage: str, tiny_pipeline: Path, tmp_path: Path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline, model)
    weights = next((model / "transformer").glob("*.safetensors"))
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        path = model / "transformer" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "ffn_dim": 24}))
    run = tmp_path / "run"
    text = refused("train", "--set", f"model.path={model}", "--set", MOCK, "--set", f"output_dir={run}")
    assert safe_lines(str(model)) in text
    assert not run.exists()


def test_an_output_dir_that_cannot_be_made(tiny_pipeline: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"
    text = refused(
        "train", "--set", f"model.path={tiny_pipeline}", "--set", MOCK, "--set", f"output_dir={run}"
    )
    assert safe_lines(str(run)) in text
    assert "cannot be created" in text


def test_resume_from_nowhere(tiny_pipeline: Path, tmp_path: Path):
    common = sets(tiny_pipeline, tmp_path)
    assert (
        "--resume tiny does not exist; pass a run folder or a step folder. If tiny is the recipe, write tiny before --resume."
        in refused("train", "--resume", "tiny", *common)
    )


def test_missing_cache(tiny_pipeline: Path, tmp_path: Path):
    assert "is not a folder" in refused(
        "train", "--set", f"model.path={tiny_pipeline}", "--set", f"data.cache={tmp_path / 'no'}"
    )


def test_cache_of_another_model(cache: Path, tmp_path: Path):
    from make_tiny_pipeline import build_tiny_pipeline

    other = tmp_path / "other"
    build_tiny_pipeline(other, seed=1, size="test", vae_dir="random")
    text = refused("train", "--set", f"model.path={other}", "--set", f"data.cache={cache}")
    assert "was encoded for" in text
    assert "but the model" in text


def test_cache_of_another_variant(cache: Path, tiny_pipeline: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_pipeline, model)
    config = json.loads((model / "transformer" / "config.json").read_text())
    (model / "transformer" / "config.json").write_text(json.dumps({**config, "in_channels": 32}))
    text = refused("train", "--set", f"model.path={model}", "--set", f"data.cache={cache}")
    assert "which no Wan 2.1 or 2.2" in text
    (model / "transformer" / "config.json").write_text(
        json.dumps({**config, "in_channels": 36, "image_dim": 1280})
    )
    text = refused("train", "--set", f"model.path={model}", "--set", f"data.cache={cache}")
    assert "conditions=[text, mask]" in text
    assert "conditions=[text, image (frames=first), clip, mask]" in text
    (model / "transformer" / "config.json").write_text(
        json.dumps({**config, "in_channels": 48, "out_channels": 48})
    )
    text = refused("train", "--set", f"model.path={model}", "--set", f"data.cache={cache}")
    assert "latent_channels=16" in text
    assert "latent_channels=48" in text


def test_the_checks_of_cache_and_heads_are_what_refuses(
    cache: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Traps: a 1.3B with Ulysses 8 on its 12 heads, and latents of another VAE. Without the checks both would start."""
    from make_tiny_pipeline import build_tiny_pipeline

    from wands.data.cache.reader import LatentCache
    from wands.distributed.dims import ContextDegrees
    from wands.train import prepare as module

    twelve = tmp_path / "twelve"
    build_tiny_pipeline(
        twelve, size="test", vae_dir="random", dit={"num_attention_heads": 12, "attention_head_dim": 12}
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    heads = (
        "train",
        "--dry-run",
        "--set",
        f"model.path={twelve}",
        "--set",
        MOCK,
        "--set",
        "parallel.ulysses_degree=8",
    )
    assert "parallel.ulysses_degree=8 must divide num_heads=12 of" in refused(*heads)
    assert "Use one of 1, 2, 3, 4, 6, 12." in refused(*heads)
    monkeypatch.delenv("WORLD_SIZE")
    other = tmp_path / "other"
    build_tiny_pipeline(other, seed=1, size="test", vae_dir="random")
    vae = ("train", "--dry-run", "--set", f"model.path={other}", "--set", f"data.cache={cache}")
    assert "was encoded for" in refused(*vae)

    monkeypatch.setattr(
        module, "choose_degrees", lambda parallel, **_: ContextDegrees(parallel.group_size, 1)
    )
    monkeypatch.setattr(LatentCache, "check_fits", lambda *args: None)
    assert invoke(*vae).exit_code == 0
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert invoke(*heads).exit_code == 0


def test_heads_and_context_parallelism(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "15")
    monkeypatch.setenv("RANK", "0")
    common = (
        "train",
        "--set",
        f"model.path={tiny_pipeline}",
        "--set",
        MOCK,
        "--set",
        "train.bins_per_step=15",
    )
    text = refused(*common, "--set", "parallel.ulysses_degree=5")
    assert "parallel.ulysses_degree=5 must divide num_heads=4 of wan2.1-t2v-tiny. Use one of 1, 2, 4." in text
    assert "world_size=15 is not a multiple of 2" in refused(*common, "--set", "parallel.ring_degree=2")
    both = ("--set", "parallel.ring_degree=3", "--set", "parallel.cp_size=5")
    assert "parallel.cp_size=5 must be a multiple of parallel.ring_degree=3" in refused(*common, *both)
    accepted = invoke(*common, "--dry-run", "--set", "parallel.cp_size=3")
    assert accepted.exit_code == 0
    assert "15 ranks = dp 5 x ring 3 x ulysses 1 (parallel.cp_size=3)" in accepted.output


def test_bin_smaller_than_a_sample(cache: Path, tiny_pipeline: Path):
    text = refused(
        "train",
        "--set",
        f"model.path={tiny_pipeline}",
        "--set",
        f"data.cache={cache}",
        "--set",
        "packing.max_tokens=8",
    )
    assert "packing.max_tokens=8 is less than sample" in text
    assert "bikes" in text or "carphone" in text


def test_micro_batch_other_than_one(tiny_pipeline: Path, tmp_path: Path):
    ds = tmp_path / "ds.json"
    ds.write_text('{"train_micro_batch_size_per_gpu": 2}')
    text = refused("train", "--deepspeed", ds, "--set", f"model.path={tiny_pipeline}", "--set", MOCK)
    assert safe_lines(f"{ds}: train_micro_batch_size_per_gpu=2 contradicts") in text


def test_fewer_samples_than_ranks(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    text = refused(
        "train", "--set", f"model.path={tiny_pipeline}", "--set", MOCK, "--set", "train.bins_per_step=8"
    )
    assert "data has 6 samples, fewer than the 8 data-parallel ranks" in text


def test_bins_per_step_and_ranks(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    text = refused(
        "train", "--set", f"model.path={tiny_pipeline}", "--set", MOCK, "--set", "train.bins_per_step=6"
    )
    assert "train.bins_per_step=6: " in text
    assert "must be a multiple of dp_size=4 (4 processes / cp_size). Add --set train.bins_per_step=8;" in text


def test_a_lora_recipe_on_eight_gpus_names_the_setting(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch):
    """The recipe has one bin in a step."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    text = refused("train", "wan2.1-t2v-1.3b-lora", "--set", f"model.path={tiny_pipeline}", "--set", MOCK)
    assert "train.bins_per_step=1: " in text
    assert "Add --set train.bins_per_step=8;" in text


def test_preprocess_mistakes(tiny_pipeline: Path, clips_dir: Path, tmp_path: Path):
    rest = ("--out", tmp_path / "cache", "--model", tiny_pipeline)
    assert "does not exist" in refused("preprocess", tmp_path / "nowhere", *rest)
    (tmp_path / "empty").mkdir()
    refused("preprocess", tmp_path / "empty", *rest)
    source = tmp_path / "no_caption"
    source.mkdir()
    shutil.copy(clips_dir / "carphone_pristine.mp4", source)
    text = refused("preprocess", source, *rest)
    assert "carphone_pristine" in text
    assert "caption" in text


def test_an_output_dir_with_checkpoints_is_not_overwritten(tiny_pipeline: Path, tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "step_00000003").mkdir(parents=True)
    common = sets(tiny_pipeline, tmp_path)
    assert "contains checkpoints of an earlier run; add --resume" in refused("train", *common)
    assert "contains no complete checkpoint" in refused("train", *common, "--resume")


def test_export_and_infer_mistakes(tmp_path: Path, tiny_pipeline: Path):
    assert "contains no complete checkpoint" in refused("export", tmp_path, "--out", tmp_path / "out")
    assert "--model=/no/model is neither a folder nor a Hub id; set --model to" in refused(
        "infer", "--model", "/no/model", "--prompt", "x", "--out", tmp_path / "o"
    )
    text = refused(
        "infer",
        "--model",
        tiny_pipeline,
        "--prompt",
        "x",
        "--out",
        tmp_path / "o",
        "--height",
        100,
        "--frames",
        8,
    )
    assert "height=100" in text
    assert "8" in text
