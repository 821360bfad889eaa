"""`wands infer` on several ranks: one video, one report, one sentence."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.support.infer_runs import SMALL, make_checkpoint, read_video, records
from tests.support.sampling import infer
from tests.support.world import free_port
from wands.commands import infer as infer_module
from wands.commands.infer import InferResult
from wands.distributed.dims import ParallelDims
from wands.errors import ConfigError, WandsError
from wands.sampling import sample as sampling
from wands.sampling import sharing
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest
from wands.sampling.sharing import plan_ranks, share_pipeline

# --------------------------------------------------------------------------------------------- several ranks

# 45 tokens with guidance and what not to show, then 12 with another shift and neither.
SHARED = [
    SampleRequest(
        prompt="a red bike", height=48, width=80, num_frames=9, num_inference_steps=4, negative_prompt="dull"
    ),
    SampleRequest(prompt="a dog", guidance_scale=1.0, flow_shift=6.0, **SMALL),
]


def infer_on_ranks(pipeline: Path, root: Path, degrees: list[tuple[int, int]]) -> list[list[InferResult]]:
    return [
        infer(
            pipeline,
            SHARED,
            out_dir=root / f"{ring}x{ulysses}",
            save_latents=True,
            ring_degree=ring,
            ulysses_degree=ulysses,
        )
        for ring, ulysses in degrees
    ]


def unusual_pipeline(folder: Path, kind: str) -> WanPipeline:
    pipeline = load_pipeline(find_pipeline(folder), offload="model" if kind == "model offload" else "none")
    if kind == "sequential offload":  # of the transformer alone: for the text encoder it fails on the CPU
        accelerate.cpu_offload(pipeline.transformer, torch.device("cpu"), offload_buffers=True)
    if kind == "two experts":
        low_noise = copy.deepcopy(pipeline.transformer)
        low_noise.proj_out.weight.data *= -1
        pipeline.register_modules(transformer_2=low_noise)
        pipeline.register_to_config(boundary_ratio=0.8)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample_unusually_on_ranks(folder: Path, kind: str) -> torch.Tensor:
    pipeline = unusual_pipeline(folder, kind)
    share_pipeline(pipeline, ParallelDims(2, int(os.environ["RANK"]), ring_degree=2))
    return sampling.sample_latents(pipeline, SHARED[0])


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [(2, [(1, 2), (2, 1)]), pytest.param(4, [(1, 4), (2, 2), (4, 1)], marks=pytest.mark.slow)],
)
def test_ranks_sample_the_video_of_one_process(
    run_world, tiny_pipeline: Path, tmp_path: Path, world_size: int, degrees: list[tuple[int, int]]
) -> None:
    alone = infer(tiny_pipeline, SHARED, out_dir=tmp_path / "alone", save_latents=True)
    ranks = run_world(world_size, infer_on_ranks, tiny_pipeline, tmp_path, degrees)
    assert ranks[1:] == [[[] for _ in degrees]] * (world_size - 1)  # one rank writes
    for results in ranks[0]:
        folder = results[0].video.parent
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            path.name for path in (tmp_path / "alone").iterdir()
        )
        assert len(records(folder)) == len(SHARED)
        for found, wanted in zip(results, alone, strict=True):
            latents, expected = (load_file(r.latents)["latents"] for r in (found, wanted))
            assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()
            frames, of_one = (read_video(r.video).astype(int) for r in (found, wanted))
            assert frames.shape == of_one.shape
            assert abs(frames - of_one).mean() < 0.5  # of 255, behind a lossy codec


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("model offload", "sequential offload")),
        "two experts",
    ],
)
def test_ranks_share_pipelines_of_all_kinds(run_world, tiny_pipeline: Path, kind: str) -> None:
    """As below, accelerate's hooks bring weights to the CPU here."""
    expected = sampling.sample_latents(unusual_pipeline(tiny_pipeline, kind), SHARED[0])
    plain = sampling.sample_latents(unusual_pipeline(tiny_pipeline, ""), SHARED[0])
    assert torch.equal(expected, plain) == (kind != "two experts")
    for latents in run_world(2, sample_unusually_on_ranks, tiny_pipeline, kind):
        assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture
def as_one_of(monkeypatch: pytest.MonkeyPatch):
    """Set what a launcher tells its first process, but for where the others are: it meets none."""

    def tell(world_size: int) -> None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        for name, value in (("WORLD_SIZE", world_size), ("RANK", 0), ("LOCAL_RANK", 0)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(world_size))
        monkeypatch.setattr(infer_module, "load_pipeline", lambda *a, **k: pytest.fail("weights were read"))

    return tell


@pytest.mark.parametrize(
    ("world_size", "asked", "message"),
    [
        (1, {"ring_degree": 2}, "--ring-degree=2 must divide world_size=1, because"),
        (4, {"ring_degree": 3}, "--ring-degree=3 must divide world_size=4, because"),
        (8, {"ring_degree": 1, "ulysses_degree": 2},
         "--ulysses-degree=2, --ring-degree=1 must have the product world_size=8"),
        (8, {"ulysses_degree": 8}, "--ulysses-degree=8 must divide num_heads=4 of wan2.1-t2v-"),
        (6, {"ring_degree": 2}, "world_size=6, --ring-degree=2 leads to --ulysses-degree=3, which must divide num_heads=4"),
        (2, {"device": "cpu"}, "--device=cpu is one device for several processes; leave --device out to"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_a_video(
    as_one_of, tiny_pipeline: Path, tmp_path: Path, world_size: int, asked: dict, message: str
) -> None:
    as_one_of(world_size)
    with pytest.raises(ConfigError) as caught:
        infer(tiny_pipeline, ["a"], out_dir=tmp_path / "out", **asked, **SMALL)
    assert str(caught.value).startswith(message)
    assert "parallel." not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_heads_decide_how_many_ranks_share_them(as_one_of, tiny_pipeline: Path) -> None:
    variant = find_pipeline(tiny_pipeline).variant  # four heads
    for world_size, degrees in ((1, (1, 1)), (2, (2, 1)), (6, (2, 3)), (8, (4, 2))):
        as_one_of(world_size)
        grid = plan_ranks(variant)
        assert (grid.ulysses_degree, grid.ring_degree, grid.dp_size) == (*degrees, 1)
    assert plan_ranks(variant, ulysses_degree=2) == ParallelDims(8, 0, ulysses_degree=2, ring_degree=4)


# Options of each of two ranks in addition to one prompt, and the error of both. Relative paths are in the rank's folder.
DIFFERENCES: dict[str, tuple[list[dict], str]] = {
    "seed": (
        [{"seed": 1}, {"seed": 2}],
        "the command of rank 1 (prompt 1.seed=2, not 1) differs from the command of rank 0; start every rank with the "
        "same command.",
    ),
    "prompts": (
        [{}, {"prompts_file": Path("one_more.txt")}],
        "the command of rank 1 (number of prompts=2, not 1) differs",
    ),
    "dtype": ([{"dtype": "bf16"}, {}], "the command of rank 1 (dtype=fp32, not bf16) differs"),
    "degrees": (
        [{"ring_degree": 2}, {"ulysses_degree": 2}],
        "the command of rank 1 (ring_degree=1, not 2) differs",
    ),
    "pipeline": (
        [{}, {"model": Path("weights")}],
        "the model of rank 1 (model=weights, not same) differs from the model of rank 0; start every rank with the "
        "same model.",
    ),
    "newest step": (
        [{"checkpoint": Path("run")}] * 2,
        "the model of rank 1 (transformer=run/checkpoints/step_00000002/transformer, not run/checkpoints/step_00000001/",
    ),
    "shift": ([{"model": Path("shift")}] * 2, "the pipeline of rank 1 (scheduler.flow_shift=8.0, not 3.0)"),
    "text encoder": (
        [{"model": Path("text")}] * 2,
        "the text_encoder of rank 1 (encoder.embed_tokens.weight=",
    ),
    "weights": ([{"model": Path("weights")}] * 2, "the transformer of rank 1 (proj_out.bias="),
    "software": ([{"version": "9"}, {"version": "8"}], "the software of rank 1 (wands=8, not 9)"),
}
MISTAKES: dict[str, tuple[list[dict], str]] = {
    "a folder": (
        [{}, {"transformer": Path("nowhere")}],
        "[rank 1] --transformer=nowhere: nowhere/config.json cannot be read (no such file)",
    ),
    "a prompt file": ([{}, {"prompts_file": Path("no.txt")}], "[rank 1] --prompts-file=no.txt cannot be"),
    "an option": ([{"seed": -1}, {}], "--seed=-1 is invalid"),
    "weights": (
        [{"model": Path("damaged")}] * 2,
        "[rank 1] --model=damaged: the transformer cannot be loaded",
    ),
}


def make_places(tiny_pipeline: Path, root: Path) -> None:
    """A working folder for each of two ranks, whose files have the same names and not all the same contents."""
    model = WanTransformer3DModel.from_pretrained(str(tiny_pipeline), subfolder="transformer")
    for rank in range(2):
        place = root / str(rank)
        for name in ("same", "shift", "text", "weights", "damaged"):
            shutil.copytree(tiny_pipeline, place / name)
        for step in range(1, rank + 2):
            make_checkpoint(place / "run", model, step)
        (place / "one_more.txt").write_text("a cat")
    change_weight(place / "text" / "text_encoder" / "model.safetensors", "shared.weight")
    change_weight(place / "weights" / "transformer" / "diffusion_pytorch_model.safetensors", "proj_out.bias")
    (place / "damaged" / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"cut")
    config = place / "shift" / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"flow_shift": 8.0}))


def change_weight(file: Path, name: str) -> None:
    """The last bit of one element."""
    state = load_file(file)
    state[name].view(torch.int32).flatten()[5] ^= 1
    save_file(state, file, metadata={"format": "pt"})


def infer_apart(root: Path, cases: list[list[dict]]) -> list[tuple[str, bool] | None]:
    """Error of this rank in each case, and whether it knows that all ranks raise it; None where it samples."""
    rank = int(os.environ["RANK"])
    os.chdir(root / str(rank))
    said: list[tuple[str, bool] | None] = []
    for case in cases:
        options = {"model": Path("same"), "prompts": ["a dog"]} | case[rank]
        infer_module.__version__ = options.pop("version", "1")
        try:
            infer(out_dir=root / "out", **options, **SMALL)
            said.append(None)
        except WandsError as error:
            said.append((str(error), error.agreed))
    return said


@pytest.mark.parametrize("kinds", [DIFFERENCES, MISTAKES], ids=["differences", "mistakes"])
def test_all_ranks_end_with_one_sentence(
    run_world, tiny_pipeline: Path, tmp_path: Path, kinds: dict[str, tuple[list[dict], str]]
) -> None:
    """Without it they mix videos in silence, or wait for each other for ever."""
    make_places(tiny_pipeline, tmp_path)
    first, second = run_world(2, infer_apart, tmp_path, [case for case, _ in kinds.values()], timeout=120)
    assert first == second
    for (name, (_, wanted)), said in zip(kinds.items(), first, strict=True):
        assert said is not None, name
        text, agreed = said
        assert text.startswith(wanted), name
        assert agreed, name
        assert "\n" not in text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_weights_are_compared_wherever_an_offload_keeps_them(tiny_pipeline: Path) -> None:
    plain = load_pipeline(find_pipeline(tiny_pipeline))
    for name in ("transformer", "text_encoder"):
        module = getattr(plain, name)
        wanted = sharing._checksums(module, torch.device("cpu"))
        assert wanted.keys() >= {key for key, _ in module.named_parameters()}
        for offload in ("model", "sequential"):
            other = getattr(load_pipeline(find_pipeline(tiny_pipeline), offload=offload), name)
            before = {key: value.device for key, value in other.named_parameters()}
            assert sharing._checksums(other, torch.device("cpu")) == wanted
            assert {key: value.device for key, value in other.named_parameters()} == before
        for key, parameter in module.named_parameters():
            parameter.data.view(torch.int32).flatten()[-1] ^= 1
            found = sharing._checksums(module, torch.device("cpu"))
            assert found[key] != wanted[key]
            wanted = found


@pytest.mark.slow
def test_a_process_alone_asks_nothing_of_deepspeed(tiny_pipeline: Path, tmp_path: Path) -> None:
    """It takes seconds to load, and judges whether there is an accelerator by itself."""
    call = f"infer({str(tiny_pipeline)!r}, ['a'], out_dir=Path({str(tmp_path)!r}), **{SMALL})"
    program = f"""
import sys
from pathlib import Path
from tests.support.sampling import infer
{call}
assert "deepspeed" not in sys.modules
assert not [name for name in sys.modules if name.endswith("pipeline_wan_i2v")], "it asks for torchvision"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    assert len(records(tmp_path)) == 1


def launch(*options: object, rank_1: str = "") -> subprocess.CompletedProcess[str]:
    """`wands infer` on two processes of torchrun; the second is given more options."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "--master-port",
        free_port(),
    ]
    started = f'exec "$0" -m wands infer "$@" $(test $RANK = 0 || echo {rank_1})'
    command += ["--no-python", "bash", "-c", started, sys.executable]
    command += [
        "--prompt",
        "a dog",
        "--height",
        32,
        "--width",
        48,
        "--frames",
        5,
        "--steps",
        2,
    ]
    return subprocess.run(
        [str(part) for part in (*command, *options)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_torchrun_samples_one_video_and_tells_once(tiny_pipeline: Path, tmp_path: Path) -> None:
    done = launch("--model", tiny_pipeline, "--out", tmp_path / "out", "--save-latents")
    assert done.returncode == 0, done.stderr
    assert "sampling on 2 ranks: guidance 2 x Ulysses 1 x ring 1" in done.stderr
    names = ["000_a-dog.mp4", "000_a-dog.safetensors", "contact_sheet_000.png", "samples.jsonl"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert [done.stdout.count(words) for words in ("000_a-dog.mp4", "contact sheet ")] == [1, 1]
    alone = infer(tiny_pipeline, ["a dog"], out_dir=tmp_path / "alone", save_latents=True, **SMALL)[0]
    latents, expected = (
        load_file(p)["latents"] for p in (tmp_path / "out" / "000_a-dog.safetensors", alone.latents)
    )
    assert (latents - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.full
def test_torchrun_tells_once_what_all_ranks_find(tiny_pipeline: Path, tmp_path: Path) -> None:
    refused = launch("--model", tiny_pipeline, "--out", tmp_path / "out", "--ring-degree", 3)
    assert refused.returncode != 0
    assert refused.stderr.count("wands: --ring-degree=3 must divide world_size=2") == 1
    assert refused.stderr.count("--ring-degree") == 1


@pytest.mark.slow
def test_torchrun_tells_the_mistake_of_a_rank_that_is_not_the_first(
    tiny_pipeline: Path, tmp_path: Path
) -> None:
    ended = launch("--model", tiny_pipeline, "--out", tmp_path / "out", rank_1="--transformer nowhere")
    assert ended.returncode != 0
    assert (
        "wands: [rank 1] --transformer=nowhere: nowhere/config.json cannot be read (no such" in ended.stderr
    )
    assert ended.stderr.count("wands: ") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_torchrun_tells_once_that_nothing_can_be_written(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = launch("--model", tiny_pipeline, "--out", tmp_path / "file" / "out")
    assert ended.returncode != 0
    assert ended.stderr.count(f"wands: --out={tmp_path}/file/out cannot be written (Not a dir") == 1
    assert ended.stderr.count("--out=") == 1
