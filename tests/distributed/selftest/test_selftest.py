"""`wands tools selftest` passes on every variant, and each mistake put in makes the lines fail that are of it, and no other."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from tests.support.selftest_mistakes import (
    BUGS,
    DIT,
    FLF2V,
    I2V,
    I2V_A14B,
    T2V,
    T2V_A14B,
    TI2V,
    Patch,
    above_the_boundary_only,
    attention_across_samples,
    two_names_become_one,
    untied_embeddings,
)
from wands.cli import main
from wands.config.options import SelftestOptions
from wands.data.clips.video import save_video
from wands.distributed.dims import ParallelDims
from wands.encoders.vae import WanVideoEncoder
from wands.errors import WandsError
from wands.selftest import dit_parity as selftest_dit
from wands.selftest import encoder_parity as selftest_encoders
from wands.selftest import parity_setup as selftest_setup
from wands.selftest import selftest as selftest_command
from wands.selftest.parity_setup import Result
from wands.texts import safe_lines
from wands.variants import VARIANTS


def selftest(model: Path | str, **options: Any) -> Iterator[Result]:
    return selftest_command.selftest(SelftestOptions(model=str(model), **options))


VAE = ["vae.pixels", "vae.latents", "vae.statistics"]
TEXT = ["text.tied", "text.embeds", "text.length"]


@pytest.fixture(autouse=True)
def _small_clips(monkeypatch: Patch) -> None:
    monkeypatch.setattr(selftest_setup, "NUM_FRAMES", 5)
    monkeypatch.setattr(selftest_setup, "HEIGHT", 64)
    monkeypatch.setattr(selftest_setup, "WIDTH", 96)
    for module in (selftest_command, selftest_dit):
        monkeypatch.setattr(module, "clear_device_cache", lambda **_: None)  # a quarter of a second each


@pytest.fixture
def ask(tiny_variant: Callable[[str], Path], clips_dir: Path) -> Callable[..., dict[str, str]]:
    """`ask(variant, ...)` gives {check: status} of those checks that say anything."""

    def run(variant: str | Path, *only: str, **options: Any) -> dict[str, str]:
        folder = variant if isinstance(variant, Path) else tiny_variant(variant)
        results = selftest(folder, clip=clips_dir / "bikes.mp4", only=only, **options)
        return {result.name: result.status for result in results if result.status != "skipped"}

    return run


def of_experts(names: list[str]) -> list[str]:
    return [f"{name} {part}" for part in ("transformer", "transformer_2") for name in names]


EXPERTS = ["experts.boundary", "experts.draws"]
LINES = {
    T2V: VAE + TEXT + DIT,
    I2V: [*VAE, "image.condition", *TEXT, "image.embeds", *DIT],
    FLF2V: [*VAE, "image.condition", *TEXT, "image.embeds", *DIT],
    T2V_A14B: VAE + TEXT + EXPERTS + of_experts(DIT),
    I2V_A14B: [*VAE, "image.condition", *TEXT, *EXPERTS, *of_experts(DIT)],
    TI2V: [*VAE, "first_frame.latents", *TEXT, *DIT, "first_frame.timesteps"],
}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name == TI2V else pytest.mark.slow)
        for name in sorted(VARIANTS.keys() - {"wan2.1-t2v-14b"})
    ],
)
def test_every_variant_passes(ask: Callable[..., dict[str, str]], variant: str) -> None:
    assert ask(variant) == dict.fromkeys(LINES[variant], "pass")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"wan2.1-t2v-14b"}))
def test_every_variant_passes_on_a_gpu(ask: Callable[..., dict[str, str]], variant: str, dtype: str) -> None:
    assert ask(variant, device="cuda", dtype=dtype) == dict.fromkeys(LINES[variant], "pass")


DEFAULT_BUGS = (untied_embeddings, above_the_boundary_only, attention_across_samples)


@pytest.mark.parametrize(
    ("bug", "variant", "lines"),
    [pytest.param(*row, marks=() if row[0] in DEFAULT_BUGS else pytest.mark.slow) for row in BUGS],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_mistake_fails_its_own_lines(
    ask: Callable[..., dict[str, str]],
    monkeypatch: Patch,
    bug: Callable[[Patch], None],
    variant: str,
    lines: set[str],
) -> None:
    bug(monkeypatch)
    found = ask(variant)
    assert {name for name, status in found.items() if status == "fail"} == lines
    if bug is untied_embeddings:
        assert "text.embeds" not in found  # nothing is said of what cannot be right


def changed(folder: Path, target: Path, **values: Any) -> Path:
    """Copy the model with other values in the VAE's config."""
    shutil.copytree(folder, target)
    file = target / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return target


def test_statistics_of_another_vae_fail_their_line(
    ask: Callable[..., dict[str, str]], tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    inverted = changed(tiny_variant(T2V), tmp_path / "inverted", latents_std=[1 / 0.2] * 16)
    assert ask(inverted, "vae") == dict.fromkeys(VAE, "pass") | {"vae.statistics": "fail"}
    shifted = changed(tiny_variant(T2V), tmp_path / "shifted", latents_mean=[0.2] * 16)
    assert ask(shifted, "vae") == dict.fromkeys(VAE, "pass") | {"vae.statistics": "fail"}


@pytest.mark.slow
def test_of_a_published_model_the_config_is_judged(
    ask: Callable[..., dict[str, str]], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(selftest_setup.Setup, "is_published", True)
    # The statistics of a random VAE are not the published ones.
    assert ask(T2V, "vae") == dict.fromkeys(VAE, "pass") | {"vae.statistics": "fail"}


def test_in_bf16_it_passes_and_still_sees_a_mistake(
    ask: Callable[..., dict[str, str]], monkeypatch: Patch
) -> None:
    assert ask(I2V, "packed", "text", dtype="bf16") == dict.fromkeys(TEXT + DIT[1:], "pass")
    attention_across_samples(monkeypatch)
    assert ask(I2V, "packed", dtype="bf16") == dict.fromkeys(DIT[1:], "fail")


def of_context(folder: Path, dtype: str, reverse: bool) -> dict[str, tuple[str, str]]:
    """On a rank of a test world: every line that says anything, and with the mistake of a lost order."""
    if reverse:
        plan = selftest_dit.plan_ranks

        class Reversed(ParallelDims):
            @property
            def cp_rank(self) -> int:
                return self.cp_size - 1 - self.rank % self.cp_size

        selftest_dit.plan_ranks = lambda variant: Reversed(**vars(plan(variant)))
    found = [one for one in selftest(folder, dtype=dtype) if one.status != "skipped"]
    return {one.name: (one.status, one.text) for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_context_parallelism_is_one_process(
    world_size: int, tiny_variant: Callable[[str], Path], run_world: Callable[..., list[Any]]
) -> None:
    grid = {2: "Ulysses 2 x ring 1", 3: "Ulysses 1 x ring 3"}[world_size]  # four heads
    for dtype in ("fp32", "bf16"):
        for found in run_world(world_size, of_context, tiny_variant(TI2V), dtype, False):
            assert {name: status for name, (status, _) in found.items()} == {
                "cp.output": "pass",
                "cp.gradients": "pass",
            }
            assert all(grid in line for _, line in found.values())
    if world_size == 3:  # a ring attends to the same keys in any order
        return
    for found in run_world(world_size, of_context, tiny_variant(TI2V), "fp32", True):
        assert {name: status for name, (status, _) in found.items()} == {
            "cp.output": "fail",
            "cp.gradients": "fail",
        }
        assert all("relative error" in line for _, line in found.values())


@pytest.mark.slow
def test_one_big_part_at_a_time(ask: Callable[..., dict[str, str]], monkeypatch: Patch) -> None:
    for module in (selftest_command, selftest_dit):
        monkeypatch.setattr(module, "clear_device_cache", lambda **_: gc.collect())
    loaded: list[weakref.ref] = []

    def watch(owner: Any, name: str) -> None:
        load = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            assert not [model for one in loaded if (model := one()) is not None]
            found = load(*args, **options)
            loaded.append(weakref.ref(found[0] if isinstance(found, tuple) else found))
            return found

        monkeypatch.setattr(owner, name, watched)

    for owner in (AutoencoderKLWan, UMT5EncoderModel, WanTransformer3DModel):
        watch(owner, "from_pretrained")
    watch(selftest_dit, "load_transformer")
    assert set(ask(T2V_A14B).values()) == {"pass"}
    assert len(loaded) == 6  # VAE, text encoder, and of each expert the stock and the packed model


def test_an_untrained_head_is_said(ask: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    from make_tiny_pipeline import build_tiny_pipeline

    small = {"num_layers": 1, "ffn_dim": 32, "num_attention_heads": 1}
    build_tiny_pipeline(tmp_path / "demo", dit=small, vae_dir="random")
    assert ask(tmp_path / "demo", "packed") == {"packed.gradients": "pass"}


def test_what_a_library_cannot_do_fails_its_line_alone(
    ask: Callable[..., dict[str, str]], monkeypatch: Patch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(WanVideoEncoder, "encode", full)
        assert ask(T2V, "vae") == dict.fromkeys(VAE, "pass") | {"vae.latents": "fail"}
    with monkeypatch.context() as patch:
        patch.setattr(selftest_dit, "load_transformer", full)
        assert ask(T2V, "packed", "names") == {"names": "pass", "packed.output": "fail"}
    monkeypatch.setattr(selftest_encoders, "WanVideoToVideoPipeline", full)
    assert ask(T2V, "vae", "names") == {"vae.pixels": "fail", "names": "pass"}


def test_the_command(tiny_variant: Callable[[str], Path], monkeypatch: Patch) -> None:
    command = [
        "tools",
        "selftest",
        "--model",
        str(tiny_variant(T2V)),
        "--only",
        "names",
        "--only",
        "cp",
        "--only",
        "experts",
    ]
    right = CliRunner().invoke(main, command)
    lines = right.stdout.splitlines()
    assert right.exit_code == 0
    assert lines[0].split()[:3] == ["experts.boundary", "skipped", "wan2.1-t2v-tiny"]
    assert lines[2].split()[:4] == ["names", "pass", "69", "of"]
    advice = f"torchrun --nproc-per-node 2 -m {' '.join(['wands', *command[:4]])} --only cp"
    assert safe_lines(advice) in lines[3]
    assert lines[-1] == "1 passed, 0 failed, 4 skipped"
    two_names_become_one(monkeypatch)
    wrong = CliRunner().invoke(main, command)
    assert wrong.exit_code == 1
    assert wrong.stdout.splitlines()[-1] == "0 passed, 1 failed, 4 skipped"


@pytest.mark.slow
def test_a_hub_id_is_looked_for_on_this_machine_alone(
    tiny_variant: Callable[[str], Path], monkeypatch: Patch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: calls.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **_: calls.append(address) or [])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--a-wan"
    shutil.copytree(tiny_variant(I2V), repository / "snapshots" / "0a1b")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a1b")
    found = list(selftest("someone/a-wan"))
    assert {one.status for one in found} == {"pass", "skipped"}
    assert [one.name for one in found if one.status == "pass"] == [
        name for name in LINES[I2V] if name != "vae.statistics"
    ]
    assert calls == []


def test_mistakes_of_the_user(
    tiny_variant: Callable[[str], Path], monkeypatch: Patch, tmp_path: Path
) -> None:
    folder = tiny_variant(T2V)

    def refusal(model: Path | str = folder, **options: Any) -> str:
        with pytest.raises(WandsError) as caught:
            list(selftest(model, **options))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "selftest downloads nothing; download it first: hf download no/such" in refusal("no/such")
    assert "set --model to an existing folder" in refusal(tmp_path / "gone")
    assert "has no transformer folder. Use a complete Wan pipeline in diffusers layout" in refusal(tmp_path)
    assert "--only=vae.pixel is not a check; use one of vae.pixels, vae.latents" in refusal(
        only=("vae.pixel",)
    )
    assert "no.mp4 does not exist" in refusal(clip=tmp_path / "no.mp4")
    save_video(tmp_path / "short.mp4", np.zeros((2, 64, 96, 3), dtype=np.uint8), 16)
    assert "has 1 frame at 16 fps, but at least 5 frames are needed" in refusal(clip=tmp_path / "short.mp4")
    if not torch.cuda.is_available():
        assert "--device=cuda" in refusal(device="cuda")
    incomplete = tmp_path / "incomplete"
    shutil.copytree(folder, incomplete)
    shutil.rmtree(incomplete / "vae")
    assert "has no vae folder" in refusal(incomplete)
    assert [one.status for one in selftest(incomplete, only=("text.tied",))] == ["pass"]
    wrong = CliRunner().invoke(main, ["tools", "selftest", "--model", str(incomplete)])
    assert wrong.exit_code == 2
