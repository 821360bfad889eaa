"""Cards of every variant and of LoRAs: their example runs, and they name base and task as the Hub knows them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.fake_hub import FakeHub
from tests.support.pushed import NAME, RECORD, TOKEN, _quiet_machine, read_card, send, write_record
from wands import __version__
from wands.commands.push import _check_contents
from wands.export.model_card import FolderContents, LoraFile, build_card

__all__ = ["_quiet_machine"]  # a fixture that acts by being here


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "alice"}) as server:
        yield server


def code_of(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path, Path], dict[str, Any]]:
    """Run a card's example on a local folder: everything but the sampling itself; gives what the pipeline is called with."""
    called: dict[str, Any] = {}

    def sample(self: DiffusionPipeline, **options: Any) -> SimpleNamespace:
        bound = inspect.signature(calls[type(self).__name__]).bind(self, **options)
        bound.apply_defaults()
        asked = inspect.signature(self.check_inputs).parameters
        self.check_inputs(**{key: value for key, value in bound.arguments.items() if key in asked})
        called.update(options, pipeline=self)
        return SimpleNamespace(frames=["a video"])

    calls = {name: getattr(diffusers, name).__call__ for name in ("WanPipeline", "WanImageToVideoPipeline")}
    for name in calls:
        monkeypatch.setattr(getattr(diffusers, name), "__call__", sample)
    monkeypatch.setattr(DiffusionPipeline, "to", lambda self, _: self)
    monkeypatch.setattr("diffusers.utils.load_image", lambda _: Image.new("RGB", (64, 32)))
    monkeypatch.setattr("diffusers.utils.export_to_video", lambda video, name, fps: called.update(fps=fps))

    def run(card: str, repo: Path, base: Path) -> dict[str, Any]:
        code = code_of(card).replace(f'repo = "{NAME}"', f'repo = "{repo}"')
        exec(code.replace(f'base = "{RECORD["base"]}"', f'base = "{base}"'), {})
        return called

    return run


@pytest.mark.parametrize(
    ("variant", "task", "pictures", "fps"),
    [
        ("wan2.1-t2v-1.3b", "text-to-video", set(), 16),
        ("wan2.1-i2v-14b", "image-to-video", {"image"}, 16),
        ("wan2.1-flf2v-14b", "image-to-video", {"image", "last_image"}, 16),
        ("wan2.2-t2v-a14b", "text-to-video", set(), 16),
        ("wan2.2-i2v-a14b", "image-to-video", {"image"}, 16),
        ("wan2.2-ti2v-5b", "text-to-video", set(), 24),
    ],
)
def test_the_example_of_a_variant_runs(
    tiny_variant: Callable[[str], Path],
    run_example: Any,
    variant: str,
    task: str,
    pictures: set[str],
    fps: int,
) -> None:
    folder = tiny_variant(variant)
    contents = _check_contents(folder)
    card = build_card(
        folder, NAME, RECORD | {"variant": variant, "parts": ["transformer_2"]}, contents, "mit"
    )
    head, body = read_card(card)
    assert head["pipeline_tag"] == task
    assert head["base_model_relation"] == "finetune"
    assert ("image-to-video" in head["tags"]) == (bool(pictures) or variant == "wan2.2-ti2v-5b")
    assert ("low-noise expert (`transformer_2`)" in body) == variant.endswith("a14b")
    called = run_example(card, folder, folder)
    assert called["fps"] == fps
    assert {"image", "last_image"} & called.keys() == pictures
    if "clip" in str(contents) or (folder / "image_encoder").is_dir():
        assert called["pipeline"].image_encoder.dtype == torch.float32


def write_lora(path: Path, prefix: str) -> None:
    tensors = {"A": torch.randn(2, 48), "B": torch.randn(48, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{prefix}blocks.0.attn1.to_q.lora_{half}.weight": value for half, value in tensors.items()}, path
    )


LORA = {"rank": 2, "alpha": 4.0, "targets": ["blocks.*.to_q", "proj_out"]}


def test_a_lora_of_two_experts(
    tiny_variant: Callable[[str], Path], hub: FakeHub, run_example: Any, tmp_path: Path
) -> None:
    """A LoRA as `wands export` writes it: a folder for each expert, each with a second file in another program's keys."""
    folder = tmp_path / "lora"
    for name in ("high_noise", "low_noise"):
        write_lora(folder / name / "pytorch_lora_weights.safetensors", "transformer.")
        write_lora(folder / name / "comfyui.safetensors", "diffusion_model.")
    (folder / "README.txt").write_text("LoRA for /home/alice/base (x), step 3.\n")
    parts = {"variant": "wan2.2-t2v-a14b", "parts": ["transformer", "transformer_2"]}
    write_record(folder, RECORD | parts | {"recipe": {"lora": LORA}})
    send(folder, hub)
    there = hub.files(NAME)
    assert hub.repos[NAME].messages == [f"Upload the LoRA of step 1200 with wands {__version__}"]
    assert there["README.txt"] == b"LoRA for base (x), step 3.\n"
    assert {"low_noise/comfyui.safetensors", "high_noise/pytorch_lora_weights.safetensors"} <= there.keys()
    card = there["README.md"].decode()
    head, body = read_card(card)
    assert (head["base_model"], head["base_model_relation"]) == (RECORD["base"], "adapter")
    assert "lora" in head["tags"]
    assert body.startswith("<!--")
    assert "A LoRA for a Wan video pipeline (wan2.2-t2v-a14b)" in body
    assert "| LoRA | rank 2, alpha 4.0, targets blocks.\\*.to\\_q, proj\\_out |" in body
    assert "high-noise expert (`transformer`) and low-noise expert (`transformer_2`)" in body
    pipeline = run_example(card, folder, tiny_variant("wan2.2-t2v-a14b"))["pipeline"]
    for part in ("transformer", "transformer_2"):
        assert "lora_A" in " ".join(name for name, _ in getattr(pipeline, part).named_parameters())


def test_a_lora_of_one_model(tiny_variant: Callable[[str], Path], run_example: Any, tmp_path: Path) -> None:
    write_lora(tmp_path / "pytorch_lora_weights.safetensors", "transformer.")
    contents = _check_contents(tmp_path)
    assert contents.loras == (LoraFile("pytorch_lora_weights.safetensors"),)
    card = build_card(tmp_path, NAME, RECORD | {"variant": "wan2.1-i2v-tiny"}, contents, "mit")
    assert read_card(card)[0]["pipeline_tag"] == "image-to-video"
    called = run_example(card, tmp_path, tiny_variant("wan2.1-i2v-14b"))
    assert "image" in called
    # Without a record there is still a card.
    assert build_card(tmp_path, NAME, {}, contents, "mit").count("load_lora_weights") == 1
    merged = build_card(
        tmp_path, NAME, RECORD | {"recipe": {"lora": LORA}}, FolderContents("WanPipeline"), "mit"
    )
    assert "proj\\_out, merged into the weights |" in merged
    assert "load_lora_weights" not in merged


def test_both_experts_in_one_file(
    tiny_variant: Callable[[str], Path], run_example: Any, tmp_path: Path
) -> None:
    write_lora(tmp_path / "a.safetensors", "transformer.")
    high = load_file(tmp_path / "a.safetensors")
    low = {key.replace("transformer.", "transformer_2."): value + 1 for key, value in high.items()}
    save_file(high | low, tmp_path / "a.safetensors")
    card = build_card(
        tmp_path, NAME, RECORD | {"variant": "wan2.2-t2v-a14b"}, _check_contents(tmp_path), "mit"
    )
    pipeline = run_example(card, tmp_path, tiny_variant("wan2.2-t2v-a14b"))["pipeline"]
    for part, shift in (("transformer", 0), ("transformer_2", 1)):
        [found] = [value for name, value in getattr(pipeline, part).named_parameters() if "lora_A" in name]
        wanted = high["transformer.blocks.0.attn1.to_q.lora_A.weight"] + shift
        assert torch.equal(found, wanted.to(found.dtype))
