"""`wands init`: the settings follow from clips and machine, and the commands run as they are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from tests.support.clip_files import write_clip
from tests.support.corpus import PLAIN, real_frames
from wands.cli import main
from wands.commands.init import init as module
from wands.config.deepspeed import build_ds_config, load_ds_config
from wands.config.recipe_loading import load_recipe
from wands.planning import cluster
from wands.planning.hardware import Machine

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def clips(clips_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips of 9, 13 and 17 frames and a file that is no clip, in a folder whose name needs quotes."""
    folder = tmp_path_factory.mktemp("init") / "it's my clips"
    folder.mkdir()
    for i, name in enumerate(("a", "b", "c #1: end")):
        write_clip(folder / f"{name}.mp4", real_frames(clips_dir)[: 15 + 6 * i], options=PLAIN)
        (folder / f"{name}.txt").write_text(f"cyclists wait, clip {name}")
    (folder / "bad.mp4").write_text("no video")
    (folder / "bad.txt").write_text("a caption")
    return folder


def run(*arguments: object, exit_code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["init", *map(str, arguments)])
    assert done.exit_code == exit_code, done.output
    return done


def commands_of(project: Path) -> list[list[str]]:
    """The words of each command. No line of the script is anything else."""
    lines = (project / "commands.sh").read_text().splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def project(clips: Path, tiny_pipeline: Path, tmp_path: Path) -> Path:
    out = tmp_path / "my project"
    options = ("--gpu-memory", 80, "--fps", 25, "--trigger", "my dog", "--out", out)
    run(clips, "--model", tiny_pipeline, *options)
    return out


def test_chunks_make_a_causal_recipe(clips: Path, tiny_pipeline: Path, tmp_path: Path):
    """The longest clip has 7 latent frames of 24 tokens: 13 in a sequence of chunks of one frame."""
    run(
        clips,
        "--model",
        tiny_pipeline,
        "--gpu-memory",
        80,
        "--fps",
        25,
        "--chunk-frames",
        1,
        "--out",
        tmp_path,
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.objective.name, recipe.objective.chunk_frames) == ("teacher_forcing", 1)
    assert recipe.packing.max_tokens >= 13 * 24
    assert "# Teacher forcing: " in (tmp_path / "recipe.yaml").read_text()
    check, _, _, infer = commands_of(tmp_path)
    assert check[check.index("--chunk-frames") + 1] == "1"
    assert "--causal" in infer


def test_the_files_fit_the_clips(project: Path, clips: Path, tiny_pipeline: Path):
    text = (project / "recipe.yaml").read_text()
    recipe = load_recipe(project / "recipe.yaml")
    # 7 latent frames of 8 x 12 latent pixels, 24 tokens each
    assert re.search(r"has 168 tokens: c #1: end, 25 frames of 96x64\.", text)
    assert recipe.packing.max_tokens >= 168
    assert (recipe.data.cache, recipe.output_dir) == (str(project / "cache"), str(project / "run"))
    assert recipe.lora
    assert recipe.sample
    assert recipe.optim.lr == 1e-4
    assert recipe.train.max_steps == 300  # one step is a pass over the three clips
    assert recipe.eval is None  # three clips are too few to hold some out
    ds_config = json.loads((project / "deepspeed.json").read_text())
    build_ds_config(ds_config, recipe, world_size=1, device_type="cuda")
    prompt = json.loads((project / "prompts.jsonl").read_text())
    caption = "my dog, cyclists wait, clip c #1: end"
    assert prompt == {"prompt": caption, "height": 64, "width": 96, "num_frames": 25}
    commands = commands_of(project)
    assert [words[1] for words in commands] == ["check", "preprocess", "train", "infer"]
    assert all(words[2:5] == [str(clips), "--trigger=my dog", "--fps=25.0"] for words in commands[:2])
    assert commands[0][-2:] == ["||", "true"]  # the rejected clip does not stop the script
    sizes = [str(recipe.packing.max_tokens), "--bins-per-step", str(recipe.train.bins_per_step)]
    assert commands[0][7:11] == ["--max-tokens", *sizes]
    assert str(tiny_pipeline) in commands[1]
    for name, *words in (command[1:] for command in commands):
        main.commands[name].make_context(name, words[:-2] if "||" in words else words)


def test_the_commands_name_the_rejected_clips(project: Path, clips: Path):
    text = (project / "commands.sh").read_text()
    assert "\n# 4 clips were decoded. Rejected clips: 1.\n#   bad: video=" in text
    assert "bad.mp4 is a text file, despite its name" in text
    assert "\n# Warning: small frame (3 of the clips).\n" in text
    assert "Your choice (wands init --model)" in (project / "recipe.yaml").read_text()


def test_a_default_model_is_not_called_a_choice(clips: Path, tmp_path: Path):
    run(clips, "--gpu-memory", 80, "--out", tmp_path / "out")
    text = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "# The default; wands init --model chooses another. For" in text


@pytest.mark.slow
def test_the_commands_run_as_they_are_written(project: Path, tmp_path: Path):
    recipe = project / "recipe.yaml"
    text = recipe.read_text().replace("max_steps: 300", "max_steps: 2")
    recipe.write_text(text.replace("num_inference_steps: 30", "num_inference_steps: 2"))
    (tmp_path / "bin").mkdir()
    wands = tmp_path / "bin" / "wands"
    wands.write_text(f'#!/bin/sh\nexec {sys.executable} -m wands "$@"\n')
    wands.chmod(0o755)
    env = {**os.environ, "PATH": f"{wands.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # From another folder, because the commands contain absolute paths.
    command = ["bash", "-e", str(project / "commands.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 samples" in done.stdout
    assert len((project / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert list((project / "samples").glob("*.mp4"))
    assert (project / "clips.html").is_file()


@pytest.mark.slow
def test_refusals(project: Path, clips: Path, tiny_pipeline: Path, tmp_path: Path):
    again = (clips, "--model", tiny_pipeline, "--gpu-memory", 80, "--out", project)
    before = (project / "recipe.yaml").read_text()
    refused = run(*again, exit_code=2)
    assert (
        "already contains recipe.yaml, commands.sh, deepspeed.json, prompts.jsonl; choose" in refused.stderr
    )
    assert (project / "recipe.yaml").read_text() == before
    run(*again, "--force", "--max-frames", 9)
    assert "9 frames of 96x64" in (project / "recipe.yaml").read_text()
    new = (clips, "--out", tmp_path / "new")
    assert "no GPU that PyTorch can use; describe" in run(*new, exit_code=2).stderr
    small = run(*new, "--gpu-memory", 1, exit_code=2).stderr
    assert "no settings fit 1 x RTX 4070 1 GB" in small
    assert "lower --max-frames or --max-pixels, or use more or larger GPUs." in small
    host = run(*new, "--gpu-memory", 1, "--host-memory", 2, exit_code=2).stderr
    assert "available, 90% of 1.86 GiB) per node" in host
    large = run(*new, "--gpu-memory", 8, "--height", 1440, "--width", 2560, "--full", exit_code=2).stderr
    assert "clips of up to 57,600 tokens" in large
    assert "the longest sample is c #1: end, 13 frames of 2560x1440; lower" in large
    assert "remove --full, or use" in large
    (tmp_path / "none").mkdir()
    shutil.copy(clips / "bad.mp4", tmp_path / "none")
    unusable = run(tmp_path / "none", "--gpu-memory", 80, "--out", tmp_path / "new", exit_code=2).stderr
    assert "no clip can be used; first clip: " in unusable
    assert "wands check --html clips.html lists the others" in unusable
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_large_source_is_sampled(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bins then hold the longest sample that the options allow: 9 frames of 9,216 pixels are 3 x 36 tokens."""
    monkeypatch.setattr(module, "MAX_CLIPS", 2)
    sizes = ("--max-pixels", 96 * 96, "--max-frames", 9)
    done = run(clips, "--gpu-memory", 24, "--out", tmp_path / "new", *sizes)
    assert "2 clips were decoded, and 2 were not." in done.output
    assert re.search(r"^wands infer .* --offload \w+$", done.output, re.MULTILINE)
    text = (tmp_path / "new" / "recipe.yaml").read_text()
    assert "2 clips were not decoded. With these options, no sample has more than 108 tokens." in text
    assert "passes over 2 samples" in text  # half of the decoded clips are rejected
    assert load_recipe(tmp_path / "new" / "recipe.yaml").packing.max_tokens >= 108
    done = run(clips, "--gpu-memory", 24, "--out", tmp_path / "whole", "--max-frames", 0)
    assert "4 clips were decoded." in done.output
    assert all("--max-frames=0" in words for words in commands_of(tmp_path / "whole")[:2])


@pytest.mark.slow
def test_this_machine(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """GPUs that PyTorch finds are used, with their own name and memory. A small GPU gets no samples in the run."""
    monkeypatch.setattr(cluster.torch.cuda, "device_count", lambda: 2)
    here = Machine(name="NVIDIA GeForce RTX 3090", memory=12.6e9, host_memory=128e9, ranks_per_node=2)
    monkeypatch.setattr(cluster, "machine_here", lambda device, ranks: here)
    done = run(clips, "--out", tmp_path / "new")
    assert "on 2 x RTX 3090 12.6 GB" in done.output
    assert "deepspeed --num_gpus 2 --module wands train" in done.output
    assert "--workers 2 --text-device cpu" in done.output
    assert [words[0] for words in commands_of(tmp_path / "new")] == ["wands", "wands", "deepspeed", "wands"]
    assert commands_of(tmp_path / "new")[-1][-2:] == ["--offload", "sequential"]
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.sample is None
    assert recipe.train.bins_per_step % 2 == 0
    more = run(clips, "--gpus", 4, "--out", tmp_path / "more")
    assert "--nnodes 2 " in more.output  # as many GPUs in each node as here


def test_an_image_to_video_model_samples_from_the_clip(clips: Path, tiny_variant, tmp_path: Path):
    run(
        clips,
        "--model",
        tiny_variant("wan2.1-flf2v-14b"),
        "--hardware",
        "h100",
        "--full",
        "--out",
        tmp_path / "new",
    )
    prompt = json.loads((tmp_path / "new" / "prompts.jsonl").read_text())
    assert (
        prompt["image"]
        == prompt["last_image"]
        == str(clips / f"{prompt['prompt'].partition('clip ')[2]}.mp4")
    )
    assert load_recipe(tmp_path / "new" / "recipe.yaml").lora is None


@pytest.mark.slow
def test_clips_are_held_out_if_there_are_enough(clips: Path, tmp_path: Path):
    source = tmp_path / "many.jsonl"
    video = str(clips / "a.mp4")
    rows = [
        json.dumps({"video": video, "caption": f"clip {i}", "start": 0, "end": 0.3 + i / 100})
        for i in range(24)
    ]
    source.write_text("\n".join(rows[:11]))
    run(source, "--gpu-memory", 80, "--out", tmp_path / "new")
    assert load_recipe(tmp_path / "new" / "recipe.yaml").data.holdout == 0
    assert (
        "No clip is held out, because there are fewer than 12."
        in (tmp_path / "new" / "recipe.yaml").read_text()
    )
    source.write_text("\n".join(rows))
    run(source, "--gpu-memory", 80, "--out", tmp_path / "new", "--force")
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.data.holdout == "auto"
    assert recipe.eval
    assert recipe.train.max_steps == 900  # 3 steps are a pass, at most 300 passes


def test_the_shell_and_the_folder_change_no_argument(
    clips: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Relative paths of another folder, and names that a shell or a comment would read as commands."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(clips, "clips")
    name = "model \N{CLAPPER BOARD}"
    shutil.copytree(tiny_pipeline, name)
    out = "my 'own' $(touch a)\ntouch b; `touch c` \N{CLAPPER BOARD}"
    run(
        "clips",
        "--model",
        name,
        "--gpu-memory",
        80,
        "--max-frames",
        9,
        "--max-pixels",
        96 * 64,
        "--out",
        out,
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    wands = tmp_path / "bin" / "wands"
    wands.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> arguments\n')
    wands.chmod(0o755)
    env = {**os.environ, "PATH": f"{wands.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-e", str(tmp_path / out / "commands.sh")], cwd="home", env=env, check=True)
    assert [path.name for path in Path("home").iterdir()] == ["arguments"]
    words = Path("home/arguments").read_text().split("\0")[:-1]
    project = str(tmp_path / out)
    folder = str(tmp_path / "clips")
    assert words[:4] == ["check", folder, "--max-pixels=6144", "--max-frames=9"]
    first = words.index("preprocess")
    model = ["--model", str(tmp_path / name)]
    assert words[first + 1 :] == [
        *(folder, "--max-pixels=6144", "--max-frames=9", *model, "--out", f"{project}/cache"),
        *("train", f"{project}/recipe.yaml", "--deepspeed", f"{project}/deepspeed.json"),
        *("infer", *model, "--checkpoint", f"{project}/run", "--prompts-file", f"{project}/prompts.jsonl"),
        *("--out", f"{project}/samples"),
    ]
    recipe = load_recipe(tmp_path / out / "recipe.yaml")
    assert (recipe.data.cache, recipe.output_dir) == (f"{project}/cache", f"{project}/run")
    assert recipe.model.path == str(tmp_path / name)


def test_images_only(clips_dir: Path, tmp_path: Path):
    (tmp_path / "images").mkdir()
    for name, frame in zip("abc", real_frames(clips_dir), strict=False):
        Image.fromarray(frame).resize((96, 64)).save(tmp_path / "images" / f"{name}.png")
        (tmp_path / "images" / f"{name}.txt").write_text(f"cyclists, image {name}")
    run(tmp_path / "images", "--gpu-memory", 24, "--out", tmp_path / "new")
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.packing.max_tokens == 72  # three images of 4 x 6 tokens in a step
    assert recipe.train.bins_per_step == 1
    assert json.loads((tmp_path / "new" / "prompts.jsonl").read_text())["num_frames"] == 1
    done = run(tmp_path / "images", "--gpu-memory", 12, "--full", "--out", tmp_path / "full")
    assert "with zero3_offload." in done.output
    assert json.loads((tmp_path / "full" / "deepspeed.json").read_text()) == load_ds_config("zero3_offload")


def test_fewer_clips_than_gpus(clips: Path, tmp_path: Path):
    """Each data-parallel rank needs a clip, so that several GPUs share a clip."""
    run(clips, "--gpus", 8, "--gpu-memory", 80, "--out", tmp_path / "new")
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.parallel.group_size == 4
    assert recipe.train.bins_per_step == 4  # two ranks, and three bins that each have room for one long clip


@pytest.mark.slow
def test_a_run_is_not_longer_than_a_newcomer_can_wait(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = ("--height", 720, "--width", 1280)
    run(clips, "--gpu-memory", 24, *sizes, "--out", tmp_path / "new")
    text = (tmp_path / "new" / "recipe.yaml").read_text()
    assert "at least 4 and at most 300 passes, and at most 12 h" in text
    minutes = int(re.search(r"predicted to take (\d+) min", text)[1])
    recipe = load_recipe(tmp_path / "new" / "recipe.yaml")
    assert recipe.train.max_steps == 300
    assert recipe.model.checkpointing == "selective"  # none, the default, does not fit
    monkeypatch.setattr(module, "MAX_HOURS", minutes / 60 / 3)
    run(clips, "--gpu-memory", 24, *sizes, "--out", tmp_path / "short")
    short = load_recipe(tmp_path / "short" / "recipe.yaml").train
    assert short.bins_per_step < recipe.train.bins_per_step, "fewer clips in a step, not fewer steps"
    assert short.max_steps > 300
    later = (tmp_path / "short" / "recipe.yaml").read_text()
    assert int(re.search(r"predicted to take (\d+) min", later)[1]) <= minutes / 3 + 1
