"""The commands of the documentation, run line by line as a reader would, with a tiny model in the place of Wan.

A folder named as the Hub id makes `wands` load that folder. Options that make a command small are added: two training
steps, small videos, a local Hub.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.clip_files import write_clip
from tests.support.corpus import PLAIN, real_frames
from tests.support.fake_hub import FakeHub
from tests.unit.test_docs import ROOT, code_blocks, wands_arguments
from wands.cli import main
from wands.config.recipe_loading import load_recipe

VARIANT_PAGES = sorted((ROOT / "docs" / "variants").glob("*.md"))
SMALL = {
    "infer": ["--height", "64", "--width", "96", "--frames", "5", "--steps", "2"],
    "train": ["--set", "train.max_steps=2", "--set", "train.log_every=1"],
}


@pytest.fixture
def home(tmp_path: Path, clips_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A working folder with clips and images; yields the Hub that `wands push` uploads to."""
    monkeypatch.chdir(tmp_path)
    frames = real_frames(clips_dir)
    Path("my_clips").mkdir()
    for name in "abcdefgh":  # a clip for each of the GPUs that the pages name
        write_clip(Path(f"my_clips/{name}.mp4"), frames[:9], options=PLAIN)
        Path(f"my_clips/{name}.txt").write_text(f"cyclists wait, clip {name}")
    for name in ("first", "last"):
        Image.fromarray(frames[0]).save(f"{name}.png")
    with FakeHub({"hf_secret": "you"}, lfs_from=None) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield hub


def commands_of(page: Path) -> list[str]:
    """The `wands` commands of a page that run as they stand: not those with a placeholder in capitals."""
    commands = [line for line in code_blocks(page.read_text(encoding="utf-8")) if wands_arguments(line)]
    return [line for line in commands if not re.search(r"\b(?!TI2V|T2V|I2V|FLF2V)[A-Z]{3,}\b", line)]


def link_models(commands: list[str], tiny_variant: Callable[[str], Path]) -> None:
    """Put a tiny model of the right variant where a command names a model of the Hub."""
    names = {
        f"{name}-Diffusers": name
        for name in re.findall(r"Wan-AI/(Wan2[\w.-]+)-Diffusers", " ".join(commands))
    }
    recipes = re.findall(r"\b(wan2\.[12]-[\w.]+?-[\w.]+)-(?:finetune|lora)\b", " ".join(commands))
    for folder in {f"Wan-AI/{name}" for name in names} | {
        load_recipe(f"{recipe}-finetune", []).model.path for recipe in recipes
    }:
        path = Path(folder)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.symlink_to(tiny_variant(variant_of(path.name)))


def variant_of(name: str) -> str:
    """wan2.1-t2v-1.3b for Wan2.1-T2V-1.3B-Diffusers, without a size of the frames such as 480P."""
    return re.sub(r"(-\d+p)?(-diffusers)?$", "", name.lower())


def run(command: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, *, dry: bool) -> None:
    """Run one command; training that is not dry gets a separate process."""
    arguments = wands_arguments(command)
    assert arguments
    launched = re.search(r"--(?:num_gpus|nproc-per-node) (\d+)", command)
    name = arguments[0]
    if "--frames" not in arguments:
        arguments += SMALL.get(name, [])
    if name == "plan":  # or the numbers of the published model count, of which no file is needed
        arguments += ["--set", f"model.path={load_recipe(arguments[1], []).model.path}"]
    if name == "push":
        arguments += ["--endpoint", hub.url]
    if name == "train" and not (dry or launched or "--dry-run" in arguments):
        arguments = [sys.executable, "-m", "wands", *arguments]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(arguments, capture_output=True, text=True, env=env, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return
    with monkeypatch.context() as patch:
        if name == "train":
            arguments += ["--dry-run"]
            patch.setenv("WORLD_SIZE", launched[1] if launched else "1")
            if launched:  # a reader runs it in place of the command for one GPU, whose run is already there
                arguments += ["--set", "output_dir=runs/launched"]
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"


@pytest.mark.slow
def test_the_readme_from_clips_to_the_hub(home: FakeHub, tiny_variant, monkeypatch: pytest.MonkeyPatch):
    commands = commands_of(ROOT / "README.md")
    assert [wands_arguments(line)[0] for line in commands].count("train") >= 3
    link_models(commands, tiny_variant)
    after_demo = [line for line in commands if "demo_out" in line]
    for command in commands:
        if command not in after_demo:
            if " --offload model" in command:  # the only thing that a CPU refuses
                with pytest.raises(AssertionError, match="--offload=model needs an accelerator"):
                    run(command, home, monkeypatch, dry=False)
            run(command.replace(" --offload model", ""), home, monkeypatch, dry=False)
    assert "pytorch_lora_weights.safetensors" in home.files("you/my-lora")
    assert list(Path("my-lora/samples").glob("*.mp4"))
    assert Path("clips.html").is_file()

    Path("demo_out").mkdir()
    for name, target in (("model", tiny_variant("wan2.1-t2v-1.3b")), ("cache", Path("cache").resolve())):
        Path(f"demo_out/{name}").symlink_to(target)
    Path("demo_out/exported").symlink_to(Path("demo_out/model").resolve())
    assert len(after_demo) >= 2
    for command in after_demo:
        run(command, home, monkeypatch, dry=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", VARIANT_PAGES, ids=lambda page: page.stem)
def test_the_page_of_a_variant(page: Path, home: FakeHub, tiny_variant, monkeypatch: pytest.MonkeyPatch):
    """Check everything a page says up to the start of training; the samples need a trained LoRA and are tested elsewhere."""
    commands = commands_of(page)
    link_models(commands, tiny_variant)
    ran = []
    for command in commands:
        if (name := wands_arguments(command)[0]) in ("preprocess", "plan", "train", "check"):
            run(command, home, monkeypatch, dry=True)
            ran.append(name)
    assert {"preprocess", "train"} <= set(ran)
