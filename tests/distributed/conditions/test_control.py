"""The whole way of an input that no file of wands knows (`tests.plugin.control`): clips, cache, training, sampling, export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.plugin.control import Control, plugin
from tests.support.commands import check, evaluate, export, preprocess
from tests.support.runs import losses, make_run, run_training, weights
from tests.support.sampling import infer
from tests.support.steps import Grid, Step, optimizer_step, worst, zero
from tests.support.world import WorldPool
from wands.commands.check.check import check as check_command
from wands.commands.infer import InferResult
from wands.conditions.arrays import ClipSize
from wands.config.options import CheckOptions, SelftestOptions
from wands.config.recipe import DataConfig
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, save_video, to_pixels
from wands.data.datasets import describe_data, open_data
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CheckpointError, ConfigError
from wands.files import read_rows
from wands.model.files.loading import load_config, load_weights
from wands.plugin import Plugin
from wands.preprocess.preprocess_report import PreprocessReport
from wands.selftest.selftest import selftest
from wands.train.prepare import load_run
from wands.variants import EXTRA_KEY, variant_of

FRAMES = 9
SMALL = {"max_frames": FRAMES, "max_pixels": 64 * 96, "device": "cpu"}
CLIPS = ("bikes", "carphone_pristine", "still")
VIDEO = {"height": 32, "width": 64, "num_frames": FRAMES, "num_inference_steps": 2}
TOLERANCE = 1e-6
CONTROL = plugin.conditions


def write_control(clip: Path, num_frames: int | None = None) -> Path:
    """Write the negative of a clip next to it."""
    whole = next(decode_clip(clip, ClipSpec(fps=16, max_pixels=96 * 160)))
    path = clip.with_suffix(".control.mp4")
    save_video(path, 255 - whole.frames[:num_frames], 16)
    return path


@pytest.fixture(scope="module")
def source(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips with control videos, one without, one with a short one, and one with one of another shape."""
    folder = tmp_path_factory.mktemp("control") / "clips"
    folder.mkdir()
    for name in ("bikes", "carphone_pristine"):
        whole = next(
            decode_clip(clips_dir / f"{name}.mp4", ClipSpec(fps=16, max_pixels=96 * 160, max_frames=33))
        )
        save_video(folder / f"{name}.mp4", whole.frames, 16)
    shutil.copy(folder / "bikes.mp4", folder / "still.mp4")
    save_video(folder / "still.mp4", whole.frames[:1].repeat(17, axis=0), 16)
    for name in ("lonely", "short", "square"):
        shutil.copy(folder / "bikes.mp4", folder / f"{name}.mp4")
    for name in (*CLIPS, "short", "square"):
        write_control(folder / f"{name}.mp4", 5 if name == "short" else None)
    save_video(folder / "square.control.mp4", np.zeros((33, 64, 64, 3), np.uint8), 16)
    for clip in folder.glob("*.mp4"):
        if ".control" not in clip.name:
            clip.with_suffix(".txt").write_text(f"A clip called {clip.stem}.")
    return folder


@pytest.fixture(scope="module")
def report(source: Path, tiny_pipeline: Path) -> PreprocessReport:
    found = preprocess(
        source,
        source.parent / "cache",
        tiny_pipeline,
        conditions=CONTROL,
        workers=1,
        text_dtype="fp32",
        **SMALL,
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def cache(report: PreprocessReport) -> Path:
    return report.out


def settings_of(cache: Path, *more: str) -> tuple[str, ...]:
    return (
        "data.mock=null",
        f"data.cache={cache}",
        "packing.max_tokens=256",
        "train.bins_per_step=1",
        "train.max_steps=3",
        *more,
    )


# ---- preprocess


@pytest.mark.slow
def test_files_that_do_not_fit_are_named(report: PreprocessReport):
    reasons = {rejection.key: rejection.reason for rejection in report.rejected}
    assert reasons.keys() == {"lonely", "short", "square"}
    assert "has no control; add lonely.control.mp4 next to the clip" in reasons["lonely"]
    assert "is a control of 0.31 s for a clip of 2.06 s" in reasons["short"]
    assert "is a control of aspect ratio 1.000 for a clip of aspect ratio" in reasons["square"]


@pytest.mark.slow
def test_check_rejects_the_same_clips(source: Path, tiny_pipeline: Path, report: PreprocessReport):
    options = CheckOptions(
        source=str(source), model=str(tiny_pipeline), max_frames=FRAMES, max_pixels=(64 * 96,)
    )
    told = check_command(options, conditions=CONTROL)
    assert {clip.key: clip.reason for clip in told.clips if clip.reason} == {
        rejection.key: rejection.reason for rejection in report.rejected
    }
    assert told.cache_bytes == pytest.approx(report.num_bytes, abs=16_000)
    assert "control" not in {clip.key for clip in check(source, max_frames=FRAMES).clips if not clip.reason}


def test_the_cache_has_the_latents_of_the_control_video(source: Path, tiny_pipeline: Path, cache: Path):
    stored = LatentCache(cache, verify=True)
    assert set(stored.keys) == set(CLIPS)
    assert stored.manifest["conditions"]["control"] == {"version": 1}
    vae = WanVideoEncoder.load(tiny_pipeline)
    for i, key in enumerate(stored.keys):
        sample = stored.read(i)
        _, _, rows, columns = sample.latents.shape
        spec = ClipSpec(fps=16, height=8 * rows, width=8 * columns, center_crop=True, max_frames=FRAMES)
        frames = next(decode_clip(source / f"{key}.control.mp4", spec)).frames
        wanted = vae.encode(to_pixels(frames))
        assert sample.arrays["control_latents"].shape == sample.latents.shape
        torch.testing.assert_close(sample.arrays["control_latents"].float(), wanted, rtol=1e-2, atol=1e-2)
        part = stored.read(i, (1, 2)).arrays["control_latents"]
        assert torch.equal(part[:, 1:2], sample.arrays["control_latents"][:, 1:2])
        assert not part[:, [0, 2]].any()


@pytest.mark.slow
def test_an_unchanged_clip_is_not_encoded_again(
    source: Path, tiny_pipeline: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    again = shutil.copytree(source, tmp_path / "clips")
    out = shutil.copytree(cache, tmp_path / "cache")
    before = LatentCache(out)
    write = partial(preprocess, again, out, tiny_pipeline, conditions=CONTROL, text_dtype="fp32", **SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(WanVideoEncoder, "encode", None)
        assert write().num_reused == len(CLIPS)
    shutil.copy(again / "still.control.mp4", again / "bikes.control.mp4")  # shorter than the clip
    assert write().num_accepted == len(CLIPS) - 1
    shutil.copy(again / "bikes.mp4", again / "bikes.control.mp4")
    (again / "bikes.txt").write_text("Another caption.")
    write()
    after = LatentCache(out)
    i = after.find("bikes")
    old = before.read(before.find("bikes"))
    assert torch.equal(after.read(i).latents, old.latents)
    assert not torch.equal(after.read(i).arrays["control_latents"], old.arrays["control_latents"])


# ---- training


@pytest.fixture(scope="module")
def trained(
    cache: Path, tiny_pipeline: Path, worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of three steps with held-out clips and samples."""
    out = tmp_path_factory.mktemp("trained") / "run"
    control = cache.parent / "clips" / "bikes.control.mp4"
    video = ", ".join(f"{key}: {value}" for key, value in VIDEO.items())
    sample = f"sample={{every: 3, prompts: [a dog], inputs: {{control: {control}}}, {video}}}"
    more = ("checkpoint.every=3", f"eval={{every: 3, cache: {cache}, max_share: 1}}", sample)
    run = partial(run_training, plugin=plugin)
    worlds[1].run(run, tiny_pipeline, out, settings_of(cache, *more), zero(2))
    return out


@pytest.mark.parametrize("case", ["full", pytest.param("dropout", marks=pytest.mark.slow)])
def test_every_grid_has_the_step_of_one_process(
    case: str, cache: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    drops = Plugin(conditions=(Control(dropout=0.5 if case == "dropout" else 0.0),))
    settings = settings_of(cache, "flow.weighting=linear")
    step = partial(optimizer_step, plugin=drops, dtype=torch.float64)
    [one] = worlds[1].run(step, tiny_pipeline, tmp_path, settings, zero(1))
    grad = one.gradients["patch_embedding.weight"]
    assert grad.shape[1] == 32
    assert float(grad[:, 16:].abs().max()) > 0
    for number, grid in enumerate((Grid(1, 2, 1), Grid(1, 1, 2))):
        ranks: list[Step] = worlds[2].run(
            step, tiny_pipeline, tmp_path, (*settings, *grid.overrides), zero(2 + number)
        )
        assert worst(ranks[0].gradients, one.gradients) <= TOLERANCE, grid


def test_the_first_step_is_that_of_the_base(
    cache: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """New channels have zero weights: the loss, and the gradient of every old weight, are those of the base, bit for bit."""
    settings = settings_of(cache)
    [base] = worlds[1].run(optimizer_step, tiny_pipeline, tmp_path / "a", settings, zero(0))
    [wide] = worlds[1].run(
        partial(optimizer_step, plugin=plugin), tiny_pipeline, tmp_path / "b", settings, zero(0)
    )
    assert wide.loss == base.loss
    for name, grad in base.gradients.items():
        mine = wide.gradients[name]
        assert torch.equal(mine[:, : grad.shape[1]] if name == "patch_embedding.weight" else mine, grad), name


def test_the_control_of_a_clip_is_next_to_its_own_tokens(cache: Path, tiny_pipeline: Path, tmp_path: Path):
    run = make_run(tiny_pipeline, tmp_path, settings_of(cache), world_size=1, plugin=plugin)
    [part] = run.reader(run.grid(0)).rank_slices(run.schedule.sampler.step_plan(0))
    assert part.condition_channels is not None
    at = 0
    for key, length in zip(part.keys, part.layout.seq_lens, strict=True):
        sample = run.data.read(run.data.keys.index(key.sample_id))
        size = ClipSize(tuple(sample.latents.shape[1:]), (1, 2, 2))
        rows = CONTROL[0].enter(sample.arrays, size).rows
        assert torch.equal(part.condition_channels[at : at + length], rows)
        at += length


def test_held_out_loss_and_samples(trained: Path):
    rows = read_rows(trained / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, 3]
    assert all(row["held_out"] > 0 for row in rows)
    assert rows[0]["by"]["kind"][0]["name"] == "text"
    samples = read_rows(trained / "samples" / "samples.jsonl")
    assert [row["step"] for row in samples] == [0, 3]
    assert all((trained / row["video"]).is_file() for row in samples)


@pytest.mark.slow
def test_a_resumed_run_is_the_run(
    trained: Path, cache: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = settings_of(cache, "checkpoint.every=3", "train.max_steps=4")
    run = partial(run_training, plugin=plugin)
    [whole] = worlds[1].run(run, tiny_pipeline, tmp_path / "whole", settings, zero(2))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step_00000004")
    [rest] = worlds[1].run(run, tiny_pipeline, tmp_path / "part", settings, zero(2), True)
    assert losses(rest)[-1] == losses(whole)[-1]
    with pytest.raises(CheckpointError, match="was trained with control, but this command has no input"):
        load_run(
            None,
            None,
            [
                *settings,
                f"model.path={tiny_pipeline}",
                f"output_dir={tmp_path / 'part'}",
                "train.max_steps=5",
            ],
            world_size=1,
            resume="auto",
            encoders=lambda path: {},
        )


def test_an_experiment_without_the_condition_is_refused(cache: Path, trained: Path, worlds: WorldPool):
    with pytest.raises(
        ConfigError, match="trained with control, but this command has no input of outside code"
    ):
        evaluate(trained, cache)
    given = partial(evaluate, imports=("tests.plugin.control",))
    assert "loss" in str(worlds[1].run(given, trained, cache)[0])


def test_a_run_names_the_input_that_it_does_not_use(cache: Path, tiny_pipeline: Path):
    section = DataConfig(cache=str(cache))
    config = load_config(str(tiny_pipeline))
    lines = {}
    for conditions in ((), CONTROL):
        data = open_data(section, variant_of(config, conditions=conditions), 0, dict)
        lines[len(conditions)] = describe_data(section, data)[1:]
    assert lines == {
        0: ["NOT USED: control; to use it, add --import FILE, where FILE defines control"],
        1: [],
    }


# ---- sampling and export


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    return export(trained, trained.parent / "exported")


def sampled(result: InferResult) -> torch.Tensor:
    assert result.latents is not None
    return load_file(result.latents)["latents"]


@pytest.mark.slow
def test_infer_with_a_checkpoint_and_with_the_export(
    trained: Path, exported: Path, source: Path, tiny_pipeline: Path, tmp_path: Path
):
    config = json.loads((exported / "transformer" / "config.json").read_text())
    assert (config["in_channels"], config[EXTRA_KEY]) == (32, [{"name": "control", "channels": 16}])
    stored = load_weights(exported)
    assert all(torch.equal(stored[name], value) for name, value in weights(trained).items())
    assert float(stored["patch_embedding.weight"][:, 16:].abs().max()) > 0
    draw = partial(infer, prompts=["a dog"], conditions=CONTROL, save_latents=True, **VIDEO)
    given = (f"control={source / 'bikes.control.mp4'}",)
    [first] = draw(tiny_pipeline, checkpoint=trained, inputs=given, out_dir=tmp_path / "a")
    [second] = draw(exported, inputs=given, out_dir=tmp_path / "b")
    [third] = draw(
        exported, inputs=(f"control={source / 'carphone_pristine.control.mp4'}",), out_dir=tmp_path / "c"
    )
    assert torch.equal(sampled(first), sampled(second))
    assert not torch.equal(sampled(first), sampled(third))


@pytest.mark.parametrize(
    ("inputs", "with_condition", "said"),
    [
        ((), True, r"--input control is missing.*Add --input control=FILE"),
        (("depth=x.mp4",), True, r"--input depth=x.mp4 is for models with the input depth"),
        (("control=short",), True, r"it has 5 frames at 16 per second, but the video has 9"),
        ((), False, r"was trained with the input control, but no condition of this name is given"),
    ],
)
def test_requests_that_do_not_fit_are_one_sentence(
    inputs: tuple[str, ...], with_condition: bool, said: str, exported: Path, source: Path, tmp_path: Path
):
    inputs = tuple(text.replace("=short", f"={source / 'short.control.mp4'}") for text in inputs)
    with pytest.raises(ConfigError, match=said):
        infer(
            exported, ["a dog"], conditions=CONTROL * with_condition, inputs=inputs, out_dir=tmp_path, **VIDEO
        )


def test_a_base_without_the_channels_is_named(tiny_pipeline: Path, source: Path, tmp_path: Path):
    given = (f"control={source / 'bikes.control.mp4'}",)
    with pytest.raises(ConfigError, match="has no channels for the input control"):
        infer(tiny_pipeline, ["a dog"], conditions=CONTROL, inputs=given, out_dir=tmp_path, **VIDEO)


@pytest.mark.slow
def test_a_lora_of_the_exported_model(
    exported: Path, cache: Path, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool, source: Path
):
    lora = ("lora.rank=2", "lora.alpha=4", "checkpoint.every=3")
    with pytest.raises(
        ConfigError, match="has no input channels for control, and a LoRA does not train new channels"
    ):
        make_run(tiny_pipeline, tmp_path, settings_of(cache, *lora), world_size=1, plugin=plugin)
    run = partial(run_training, plugin=plugin)
    [rows] = worlds[1].run(run, exported, tmp_path / "run", settings_of(cache, *lora), zero(2))
    assert len(rows) == 3
    given = (f"control={source / 'bikes.control.mp4'}",)
    written = export(tmp_path / "run", tmp_path / "lora")
    draw = partial(infer, prompts=["a dog"], conditions=CONTROL, inputs=given, save_latents=True, **VIDEO)
    [merged] = draw(exported, checkpoint=tmp_path / "run", out_dir=tmp_path / "a")
    [added] = draw(exported, lora=(written,), out_dir=tmp_path / "b")
    torch.testing.assert_close(sampled(added), sampled(merged), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan2.1-i2v-14b"])
def test_extra_channels_follow_those_of_the_variant(
    name: str, tiny_variant: Callable[[str], Path], source: Path, tmp_path: Path, worlds: WorldPool
):
    """With the mask and the image channels in between; mock data, and the selftest of the exported model."""
    model = tiny_variant(name)
    run = partial(run_training, plugin=plugin)
    worlds[1].run(run, model, tmp_path / "run", ("train.max_steps=2", "checkpoint.every=2"), zero(2))
    out = export(tmp_path / "run", tmp_path / "out")
    assert json.loads((out / "transformer" / "config.json").read_text())["in_channels"] == 52
    options = SelftestOptions(model=str(out), device="cpu", only=("packed.output", "packed.gradients"))
    results = [*selftest(options, CONTROL)]
    assert results
    assert {result.status for result in results} <= {"pass", "skipped"}
    assert any(result.status == "pass" for result in results)


def test_nothing_of_wands_knows_it():
    root = Path(__file__).resolve().parents[3] / "wands"
    assert not [path for path in root.rglob("*.py") if "tests.plugin" in path.read_text()]
