"""The command line: quick to answer, and a mistake is one clear sentence, printed once, with exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

import wands
from tests.support.cli_calls import MOCK, cache, invoke, refused
from wands import cli
from wands.cli import main
from wands.data.cache.reader import CacheWriter
from wands.distributed.gpu_settings import GPU_SETTINGS
from wands.errors import ConfigError
from wands.texts import safe_lines
from wands.train.prepare import load_run
from wands.variants import VARIANTS

__all__ = ["cache"]  # fixtures


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["train", "--help"], ["infer", "--help"]])
def test_answers_without_heavy_packages(args: list[str]):
    """Importing torch and other large packages takes seconds; asking for help must import none of them."""
    code = (
        "import sys; from wands.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'deepspeed', 'diffusers', 'transformers', 'numpy', 'av', 'h5py'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version():
    assert invoke("--version").output.strip() == f"wands, version {wands.__version__}"


@pytest.mark.parametrize("flag", ["--local_rank=1", "--local-rank=1"])
def test_launchers_may_put_local_rank_first(flag: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert invoke(flag, "train", "--show-timesteps").exit_code == 0
    assert os.environ.pop("LOCAL_RANK") == "1"


def test_flags_mean_the_same_in_every_release_of_click():
    """click 8.3.0 to 8.3.2 gives a flag that stores False this very value, also where nobody typed it."""
    from build_reference import list_commands  # conftest.py puts scripts/ on the path

    flags = [
        (name, option)
        for name, command in list_commands(main).items()
        for option in command.params
        if isinstance(option, click.Option) and option.is_flag and not option.secondary_opts
    ]
    assert len(flags) > 10
    assert [(name, option.opts) for name, option in flags if option.flag_value is False] == []


def test_export_copies_unless_told_to_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: list[bool] = []
    monkeypatch.setattr(
        "wands.commands.export.export", lambda options: told.append(options.link) or "somewhere"
    )
    for extra in ([], ["--copy"], ["--link"]):
        assert invoke("export", tmp_path, "--out", tmp_path / "out", *extra).exit_code == 0
    assert told == [False, False, True]


def test_infer_help_marks_the_options_with_one_value_per_prompt():
    """Each of these options is a field of a request; other repeatable options are for all prompts."""
    of_all = ("prompts", "lora", "lora_1", "lora_2", "imports", "inputs")
    options = [option for option in main.commands["infer"].params if option.name not in of_all]
    marked = [
        option.opts[0] for option in options if "to set one value per prompt" in " ".join(option.help.split())
    ]
    assert marked == [option.opts[0] for option in options if option.multiple]
    assert len(marked) == 11


def test_the_options_of_infer_are_in_groups():
    help_page = invoke("infer", "--help").output
    groups = {
        heading: re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)
        for heading, text in re.findall(r"^(\w[\w ]+):\n((?:  .*\n|\n)+)", help_page, re.MULTILINE)
    }
    assert list(groups) == [
        *(
            "Options",
            "Prompts and images",
            "Video",
            "Sampling",
            "Causal sampling",
            "Trained weights",
            "Speed and memory",
        ),
        "Other options",
    ]
    assert groups["Options"] == ["--model", "--out"]
    assert groups["Sampling"] == ["--steps", "--guidance", "--guidance-2", "--shift", "--scheduler"]
    assert groups["Other options"] == ["--import", "--help"]
    assert max(map(len, groups.values())) == 10


def test_show_timesteps_follows_the_recipe():
    low = invoke("train", "--show-timesteps", "--set", "flow.flow_shift=1").output
    high = invoke("train", "--show-timesteps", "--set", "flow.flow_shift=12").output
    assert low != high
    assert len(low.splitlines()) >= 10
    cut = invoke("train", "--show-timesteps", "--set", "flow.min_timestep=500").output
    assert " 450 -  500    0.0%" in cut
    assert " 450 -  500    0.0%" not in low


def test_show_timesteps_of_a_published_model_needs_no_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "wands.model.files.loading.fetch_model", lambda *_, **__: pytest.fail("a file was read")
    )
    both = invoke("train", "wan2.2-t2v-a14b-lora", "--show-timesteps").output
    assert "high-noise expert (transformer)" in both
    assert "low-noise expert (transformer_2)" in both
    cut = ("--set", "flow.min_timestep=100", "--set", "model.experts=low")
    low = invoke("train", "wan2.2-t2v-a14b-lora", "--show-timesteps", *cut).output
    assert "high-noise" not in low
    assert "  50 -  100    0.0%" in low


def test_dry_run_prints_the_block_and_trains_nothing(tiny_pipeline: Path, tmp_path: Path):
    result = invoke(
        "train",
        "--dry-run",
        "--set",
        MOCK,
        "--set",
        f"model.path={tiny_pipeline}",
        "--set",
        f"output_dir={tmp_path / 'run'}",
    )
    assert result.exit_code == 0, result.output
    for part in (
        "model",
        "grid",
        "1 rank = dp 1",
        "packing",
        "fill",
        "steps",
        "per epoch",
        "attention",
        "memory",
        "6 clips",
    ):
        assert part in result.output
    assert not (tmp_path / "run").exists()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder in the empty cache of the Hub library, on a machine without a network, for the smallest published model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub" / "models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers"


def test_dry_run_of_a_published_model_needs_no_network(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cache, the memory and the images of the samples are checked all the same, and a real run asks the Hub."""
    fingerprint = {"vae": {"weights_sha256": "of encoders that are not on this machine"}}
    with CacheWriter(tmp_path / "cache", VARIANTS["wan2.1-t2v-1.3b"], fingerprint) as writer:
        text = torch.zeros(1, 4096, dtype=torch.bfloat16)
        meta = {"num_frames": 1, "fps": 16.0, "content": "c"}
        latents = torch.zeros(16, 1, 2, 2, dtype=torch.bfloat16)
        writer.add("clip", {"latents": latents, "text_embeds": text}, meta)
        writer.commit(text)
    common = ("--set", f"data.cache={tmp_path / 'cache'}", "--set", f"output_dir={tmp_path / 'run'}")
    run = ("train", "wan2.1-t2v-1.3b-lora", *common)
    result = invoke(*run, "--dry-run")
    assert result.exit_code == 0, result.output
    assert (
        "wan2.1-t2v-1.3b  Wan-AI/Wan2.1-T2V-1.3B-Diffusers (pretrained), 1,419.0 M parameters"
        in result.output
    )
    assert "memory      about" in result.output
    none = "split train (data.holdout=auto): 1 clip to train on, 0 held out, because there are fewer than 12 clips"
    assert none in result.output
    assert "300 in all, 1 per epoch" in result.output
    assert "not checked, because Wan-AI/Wan2.1-T2V-1.3B-Diffusers is not downloaded: the" in result.output
    with pytest.raises(ConfigError, match="Diffusers is not a folder and cannot be downloaded from the Hub"):
        load_run("wan2.1-t2v-1.3b-lora", None, common[1::2], world_size=1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "image": "no.png"}')
    images = ("--set", f"sample.prompts_file={tmp_path / 'prompts.jsonl'}")
    wrong = refused("train", "wan2.2-ti2v-5b-lora", *common, *images, "--dry-run")
    assert "was made for wan2.1-t2v-1.3b" in wrong
    assert "no.png cannot be used" in wrong


def test_a_shipped_recipe_fits_its_length_to_the_clips(offline: Path):
    mock = ("--set", "data.mock={num_samples: 440, shapes: [[1, 2, 2]]}", "--set", "packing.max_tokens=1")
    output = invoke("train", "wan2.1-t2v-1.3b-lora", "--dry-run", *mock).output
    assert "split train (data.holdout=auto): 420 clips to train on, 20 held out" in output
    assert "1,680 in all, 420 per epoch" in output
    assert "held-out and" in output


@pytest.mark.parametrize("name", ["{}.safetensors", "{}-00001-of-00001.safetensors"])
def test_dry_run_checks_a_published_model_that_is_downloaded(name: str, offline: Path):
    stem = "diffusion_pytorch_model"
    weights = offline / "snapshots" / "1" / "transformer" / name.format(stem)
    weights.parent.mkdir(parents=True)
    (offline / "refs").mkdir()
    (offline / "refs" / "main").write_text("1")
    run = ("train", "wan2.1-t2v-1.3b-lora", "--dry-run", "--set", MOCK)
    if "-of-" in name:
        index = weights.with_name(f"{stem}.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": {"proj_out.weight": weights.name}}))
        result = invoke(*run)  # the index without the weights that it lists
        assert "not downloaded" in result.output, result.output
        index.write_text("damaged")
        damaged = refused(*run, "--set", "train.bins_per_step=0")
        assert safe_lines(f"{index} is not an index of weights in JSON") in damaged
        assert "train.bins_per_step=0 is invalid" in damaged
        index.write_text(json.dumps({"weight_map": {"proj_out.weight": weights.name}}))
    weights.write_text("damaged")
    assert "model.path=Wan-AI/Wan2.1-T2V-1.3B-Diffusers has no transformer/config.json" in refused(*run)


def test_a_folder_with_the_name_of_a_published_model_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    Path("Wan-AI/Wan2.1-T2V-1.3B-Diffusers").mkdir(parents=True)
    for command in (("train", "--dry-run", "--set", MOCK), ("plan",)):
        assert "no transformer/config.json" in refused(*command, "wan2.1-t2v-1.3b-lora")


@pytest.mark.slow
def test_plan_of_a_published_model_needs_no_file(offline: Path, tmp_path: Path):
    for name in ("Wan2.1-I2V-14B-720P-Diffusers", "Wan2.2-TI2V-5B-Diffusers"):
        result = invoke(
            "plan", "wan2.1-t2v-1.3b-lora", "--set", f"model.path=Wan-AI/{name}", "--hardware", "h100"
        )
        assert f"{name.lower().replace('-720p', '').removesuffix('-diffusers')}, LoRA" in result.output
    unknown = ("plan", "wan2.1-t2v-1.3b-lora", "--set", "model.path=Wan-AI/Wan2.1-T2V-1.3B-Nonsense")
    assert "cannot be downloaded from the Hub" in refused(*unknown)


def test_only_rank_zero_speaks(monkeypatch: pytest.MonkeyPatch):
    """Once per node: a mistake that only another node has, such as a missing folder, must be heard too."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = invoke("train", "--set", "train.max_step=3")
    assert result.exit_code == 2
    assert result.output == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    stderr = invoke("train", "--set", "train.max_step=3").stderr
    assert stderr.startswith(
        "wands [rank 3]: 2 problems:\n  - train.max_step is not a key of the recipe; did you mean"
    )
    assert "\n  - model.path is not set; " in stderr


def test_a_closed_terminal_does_not_end_a_command(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        cli._echo("step 1")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            closed.flush()
        with contextlib.suppress(BrokenPipeError):
            closed.close()


def test_the_command_sets_what_the_gpu_libraries_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Before PyTorch is imported; `wands -v` prints the values."""
    for name in GPU_SETTINGS:
        monkeypatch.setenv(name, "mine")
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    invoke("-v", "recipes")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert "NCCL_LAUNCH_ORDER_IMPLICIT=1" in caplog.messages
    assert "CUDA_DEVICE_MAX_CONNECTIONS=mine" in caplog.messages


@pytest.mark.parametrize("encoding", ["latin-1", "cp437"])
def test_a_terminal_that_lacks_characters_gets_them_escaped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str
):
    (tmp_path / "日本語.csv").write_text("video,caption\nmissing – ü.mp4,猫\n", encoding="utf-8")
    shown = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", shown)
    with pytest.raises(SystemExit):
        cli.main(
            ["check", str(tmp_path / "日本語.csv"), "--json", str(tmp_path / "r.json")], standalone_mode=False
        )
    shown.seek(0)
    text = shown.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "\\u65e5" in text or "\\u2013" in text


def test_ctrl_c_during_the_imports_is_no_traceback():
    program = """if True:
        import runpy, sys
        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == "wands.config.base":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupt())
        runpy.run_module("wands", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "Aborted!\n")
