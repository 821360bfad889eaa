"""`wands infer` end to end through diffusers' own pipeline, on a tiny model of real classes."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import av
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.sampling import infer, source_of
from tests.support.train_state import train_state
from tests.support.world import free_port
from wands.commands import infer as infer_module
from wands.commands.infer import InferResult
from wands.distributed.dims import ParallelDims
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.sampling import sample as sampling
from wands.sampling import sharing
from wands.sampling.pipeline import DiTSource, find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest, build_requests, read_prompts, size_problem
from wands.sampling.sharing import plan_ranks, share_pipeline
from wands.variants import VARIANTS

SMALL = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2}


def read_video(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def broken_pipeline(tiny_pipeline: Path, tmp_path: Path):
    """Make a copy of the tiny pipeline whose JSON file `name` has other entries."""

    def build(name: str, **entries: object) -> Path:
        copy = tmp_path / "broken"
        shutil.copytree(tiny_pipeline, copy)
        config = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(config | entries))
        return copy

    return build


@pytest.fixture
def other_transformer(tiny_pipeline: Path, tmp_path: Path) -> Path:
    model = WanTransformer3DModel.from_pretrained(str(tiny_pipeline), subfolder="transformer")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


# ---------------------------------------------------------------------------------------------- the whole way


def test_prompts_become_videos_sheet_and_record(tiny_pipeline: Path, tmp_path: Path) -> None:
    results = infer(
        str(tiny_pipeline),
        ["A dog runs.", "Ein Café / am *Meer*", ""],
        out_dir=tmp_path,
        height=(32, 48, 32),
        width=[48, 32, 32],
        num_frames=(9, 5, 1),
        num_inference_steps=2,
        guidance_scale=(5.0, 1.0, 3.0),
        negative_prompt=("blurry", "", "blurry"),
    )
    names = ["000_a-dog-runs.mp4", "001_ein-café-am-meer.mp4", "002_sample.mp4"]
    assert [r.video.name for r in results] == names
    shapes = [read_video(r.video).shape for r in results]
    assert shapes == [(9, 32, 48, 3), (5, 48, 32, 3), (1, 32, 32, 3)]
    with av.open(str(results[0].video)) as container:
        assert container.streams.video[0].average_rate == 16
    assert {r.contact_sheet for r in results} == {tmp_path / "contact_sheet_000.png"}
    Image.open(results[0].contact_sheet).load()
    rows = records(tmp_path)
    assert [row["file"] for row in rows] == names
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert [row["flow_shift"] for row in rows] == [3.0] * 3
    assert (rows[0]["height"], rows[0]["width"], rows[0]["num_frames"], rows[0]["fps"]) == (32, 48, 9, 16)
    assert (rows[1]["guidance_scale"], rows[1]["num_inference_steps"]) == (1.0, 2)
    assert rows[0]["model"] == str(tiny_pipeline)
    assert all(row["seconds"] > 0 for row in rows)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "contact_sheet_000.png", "samples.jsonl"]


def test_equals_the_stock_pipeline_and_its_latents_decode_to_the_video(tiny_pipeline: Path) -> None:
    request = SampleRequest(prompt="a red bike", seed=7, negative_prompt="dull", **SMALL)
    pipeline = load_pipeline(find_pipeline(tiny_pipeline))
    latents = sampling.sample_latents(pipeline, request)
    frames = sampling.decode_latents(pipeline, latents)

    stock = WanPipeline.from_pretrained(tiny_pipeline)
    stock.set_progress_bar_config(disable=True)
    call = request.model_dump(exclude={"seed", "flow_shift", "image", "last_image", "inputs"})
    video = stock(**call, generator=torch.Generator().manual_seed(7), output_type="np").frames[0]
    wanted = stock(**call, generator=torch.Generator().manual_seed(7), output_type="latent").frames[0]
    assert torch.equal(latents, wanted)
    np.testing.assert_array_equal(frames, (video * 255).round().astype(np.uint8))

    # The written latents, denormalized as the pipeline does it, decode to the very video.
    mean, std = (
        torch.tensor(stock.vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std")
    )
    with torch.no_grad():
        decoded = stock.vae.decode((latents / (1.0 / std) + mean)[None]).sample
    again = stock.video_processor.postprocess_video(decoded)[0]
    np.testing.assert_array_equal(again, video)
    assert frames.std() > 1


def test_saved_latents_are_the_final_normalized_ones(tiny_pipeline: Path, tmp_path: Path) -> None:
    result = infer(tiny_pipeline, ["a dog"], out_dir=tmp_path, save_latents=True, **SMALL)[0]
    assert result.latents == tmp_path / "000_a-dog.safetensors"
    saved = load_file(result.latents)["latents"]
    assert (saved.shape, saved.dtype) == ((16, 2, 4, 6), torch.float32)
    latents = sampling.sample_latents(load_pipeline(find_pipeline(tiny_pipeline)), result.request)
    assert torch.equal(saved, latents)
    assert records(tmp_path)[0]["latents"] == result.latents.name


def test_a_sample_depends_on_its_request_alone(tiny_pipeline: Path, tmp_path: Path) -> None:
    def latents(folder: str, prompts: list, **options: object) -> list[torch.Tensor]:
        results = infer(
            tiny_pipeline, prompts, out_dir=tmp_path / folder, save_latents=True, **SMALL | options
        )
        return [load_file(r.latents)["latents"] for r in results]

    pair = latents("pair", ["a cat", "a dog"], seed=4)
    alone = latents("alone", ["a dog"], seed=5)
    assert torch.equal(pair[1], alone[0])
    assert not torch.equal(*latents("same", ["a cat", "a cat"]))
    assert torch.equal(*latents("pinned", ["a cat", "a cat"], seed=(3, 3)))
    # Each option reaches the pipeline; the shift of one sample does not stay for the next.
    plain, shifted, negative, guided = latents(
        "options",
        ["a dog"] * 4,
        seed=(5, 5, 5, 5),
        flow_shift=(None, 8.0, None, None),
        negative_prompt=("", "", "ugly", ""),
        guidance_scale=(5.0, 5.0, 5.0, 2.0),
    )
    assert torch.equal(plain, alone[0])
    assert not any(torch.equal(plain, other) for other in (shifted, negative, guided))
    assert not torch.equal(plain, latents("steps", ["a dog"], seed=5, num_inference_steps=3)[0])
    assert [row["flow_shift"] for row in records(tmp_path / "options")] == [3.0, 8.0, 3.0, 3.0]


def test_flow_shift_reaches_schedulers_that_call_it_shift(tiny_pipeline: Path) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_pipeline))
    euler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline.scheduler = sampling.with_shift(euler, 8.0)
    assert (euler.config.shift, pipeline.scheduler.config.shift) == (3.0, 8.0)
    shifted = sampling.sample_latents(pipeline, SampleRequest(prompt="a cat", **SMALL))
    pipeline.scheduler = sampling.with_shift(pipeline.scheduler, 3.0)
    plain = sampling.sample_latents(pipeline, SampleRequest(prompt="a cat", **SMALL))
    assert not torch.equal(shifted, plain)


def test_text_beyond_226_tokens_counts(tiny_pipeline: Path, tmp_path: Path) -> None:
    tokenizer = load_pipeline(find_pipeline(tiny_pipeline)).tokenizer
    repeats = 400 // (len(tokenizer("dog").input_ids) - 1)  # the end token counts once
    prompts = ["dog " * repeats + color for color in ("red", "blue")]
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert all(226 < length < 512 for length in lengths), lengths
    results = infer(tiny_pipeline, prompts, out_dir=tmp_path, seed=(1, 1), save_latents=True, **SMALL)
    first, second = (load_file(r.latents)["latents"] for r in results)
    assert not torch.equal(first, second)


def test_a_second_run_numbers_on_and_touches_nothing(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "007_mine.mp4").write_bytes(b"kept")
    first = infer(tiny_pipeline, ["a cat"], out_dir=tmp_path, **SMALL)[0]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = infer(tiny_pipeline, ["a cat"], out_dir=tmp_path, **SMALL)[0]
    assert [first.video.name, second.video.name] == ["008_a-cat.mp4", "009_a-cat.mp4"]
    assert second.contact_sheet.name == "contact_sheet_009.png"
    old_record = before.pop("samples.jsonl")
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(old_record)
    assert len(records(tmp_path)) == 2


def test_a_full_disk_is_one_sentence_and_leaves_no_fragment(tiny_pipeline: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        with pytest.raises(WandsError, match=r"000_a-cat\.mp4 cannot be written .*free space") as caught:
            infer(tiny_pipeline, ["a cat"], out_dir=tmp_path / "out", **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


# ---------------------------------------------------------------------------------------- other transformers


def test_transformer_folder_replaces_the_pipelines(
    tiny_pipeline: Path, other_transformer: Path, tmp_path: Path
) -> None:
    pipeline = load_pipeline(source_of(tiny_pipeline, transformer=other_transformer))
    wanted = load_file(other_transformer / "diffusion_pytorch_model.safetensors")
    found = pipeline.transformer.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    results = infer(tiny_pipeline, ["a cat"], out_dir=tmp_path / "o", transformer=other_transformer, **SMALL)
    assert records(tmp_path / "o")[0]["transformer"] == str(other_transformer)
    assert results[0].video.is_file()
    # A whole pipeline folder is welcome too: its transformer is taken.
    found = source_of(tiny_pipeline, transformer=tiny_pipeline).dits
    label = f"--transformer={tiny_pipeline}"
    assert found == {"transformer": DiTSource(str(tiny_pipeline), "transformer", label)}


def write_state(path: Path, weights: dict[str, torch.Tensor]) -> str:
    """Write the weights as the only rank of a ZeRO-0 run does. Return the hash of the file."""
    from wands.model.files.tensor_files import LazyTensor, write_safetensors

    path.parent.mkdir(parents=True, exist_ok=True)
    fragments = {name: [0, list(value.shape)] for name, value in weights.items()}
    tensors = [LazyTensor.of(f"{name}/master", value.flatten()) for name, value in weights.items()]
    header = json.dumps({"fragments": fragments, "frozen": {}})
    return write_safetensors(path, tensors, {"wands_state": header})


def make_checkpoint(run: Path, model: WanTransformer3DModel, step: int, **config: object) -> Path:
    """Write what `wands train` leaves after a ZeRO-0 step on one process."""
    from wands.checkpoint.checkpoint_files import state_file
    from wands.checkpoint.step_folders import STATE_FILE, step_name

    folder = run / "checkpoints" / step_name(step)
    weights = folder / "transformer" / state_file(0)
    digest = write_state(weights, model.state_dict())
    state = train_state(
        step=step,
        transformer_config={**model.config, **config},
        files={f"transformer/{weights.name}": weights.stat().st_size},
        hashes={f"transformer/{weights.name}": digest},
    )
    (folder / STATE_FILE).write_text(json.dumps(state.to_json()))
    (folder.parent / "latest").write_text(folder.name)
    return folder


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_checkpoint_equals_the_exported_folder(
    tiny_pipeline: Path, other_transformer: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = WanTransformer3DModel.from_pretrained(str(other_transformer))
    run = tmp_path / "run"
    make_checkpoint(
        run, WanTransformer3DModel.from_pretrained(str(tiny_pipeline), subfolder="transformer"), 1
    )
    newest = make_checkpoint(run, model, 2)
    request = SampleRequest(prompt="a cat", **SMALL)
    from_folder = load_pipeline(source_of(tiny_pipeline, transformer=other_transformer), dtype=dtype)
    wanted = from_folder.transformer.state_dict()
    for where in (run, newest):
        source = source_of(tiny_pipeline, checkpoint=where)
        assert source.dits["transformer"].folder == str(newest)
        found = load_pipeline(source, dtype=dtype)
        state = found.transformer.state_dict()
        assert {n: (t.dtype, t.shape) for n, t in state.items()} == {
            n: (t.dtype, t.shape) for n, t in wanted.items()
        }
        assert {t.dtype for t in state.values()} == {torch.float32, dtype}
        latents = sampling.sample_latents(sampling.pipeline_for(found, request), request)
        view = sampling.pipeline_for(from_folder, request)
        assert torch.equal(latents, sampling.sample_latents(view, request))


def test_bf16_keeps_the_vae_in_fp32(tiny_pipeline: Path) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_pipeline), dtype=torch.bfloat16)
    assert {p.dtype for p in pipeline.vae.parameters()} == {torch.float32}
    assert pipeline.text_encoder.dtype == torch.bfloat16
    assert pipeline.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert pipeline.transformer.blocks[0].scale_shift_table.dtype == torch.float32


# --------------------------------------------------------------------------------------------------- offload


def test_model_offload_through_accelerates_hooks(tiny_pipeline: Path) -> None:
    """The hooks know no difference between devices: here they bring each model to the CPU."""
    request = SampleRequest(prompt="a cat", **SMALL)
    plain = load_pipeline(find_pipeline(tiny_pipeline))
    expected = sampling.sample_latents(plain, request)
    pipeline = load_pipeline(find_pipeline(tiny_pipeline), offload="model")
    assert [
        hasattr(part, "_hf_hook") for part in (pipeline.text_encoder, pipeline.transformer, pipeline.vae)
    ] == [True] * 3
    for _ in range(2):
        view = sampling.pipeline_for(pipeline, request)
        latents = sampling.sample_latents(view, request)
        assert torch.equal(latents, expected)
        frames = sampling.decode_latents(view, latents)
        np.testing.assert_array_equal(frames, sampling.decode_latents(plain, expected))


def test_sequential_offload_leaves_no_weight_on_the_device(tiny_pipeline: Path) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_pipeline), offload="sequential")
    parts = (pipeline.text_encoder, pipeline.transformer, pipeline.vae)
    assert {p.device.type for part in parts for p in part.parameters()} == {"meta"}


@pytest.mark.gpu
def test_a_gpu_samples_what_a_cpu_does(tiny_pipeline: Path) -> None:
    request = SampleRequest(prompt="a cat", **SMALL)
    source = find_pipeline(tiny_pipeline)
    latents = {}
    for device in ("cpu", "cuda"):
        latents[device] = sampling.sample_latents(load_pipeline(source, device=device), request)
    torch.testing.assert_close(latents["cuda"], latents["cpu"], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offload_changes_nothing_on_cuda(tiny_pipeline: Path, offload: str) -> None:
    request = SampleRequest(prompt="a cat", **SMALL)
    source = find_pipeline(tiny_pipeline)
    plain = load_pipeline(source, device="cuda")
    expected = sampling.sample_latents(plain, request)
    frames = sampling.decode_latents(plain, expected)
    del plain
    pipeline = load_pipeline(source, device="cuda", offload=offload)
    for _ in range(2):
        view = sampling.pipeline_for(pipeline, request)
        latents = sampling.sample_latents(view, request)
        assert torch.equal(latents, expected)
        np.testing.assert_array_equal(sampling.decode_latents(view, latents), frames)


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
    "kind", [pytest.param("model offload", marks=pytest.mark.slow), "sequential offload", "two experts"]
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


# What each of two ranks is given beside one prompt, and what both say. Relative paths lie in a folder of the rank's own.
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
    """What this rank says in each case, and whether it knows that all say so; None where it samples."""
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


# -------------------------------------------------------------------------------------------------- mistakes


def test_all_mistakes_in_one_report_before_weights_are_read(
    tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_module, "load_pipeline", lambda *a, **k: pytest.fail("weights were read"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        infer(
            tiny_pipeline,
            ["a", "b", SampleRequest(prompt="c", width=10)],
            out_dir=tmp_path / "file",
            height=100,
            width=(32, 40, 48),
            num_frames=(5, 5, 12),
            num_inference_steps=(1, 2),
            guidance_scale=-1.0,
            seed=(1, -2, 3),
            offload="model",
            device="cpu",
            fps=-3,
        )
    text = str(caught.value)
    for line in (
        "--steps has 2 values for 3 prompts. Give one value or 3 values.",
        "--guidance=-1.0 is invalid: input should be greater than or equal to 0.",
        "--seed=-2 of prompt 2 is invalid: input should be greater than or equal to 0.",
        "/file cannot be written (Not a directory); choose another folder.",
        "--offload=model needs an accelerator, and sampling runs on the CPU; use --offload=none.",
        "--fps=-3 must be above 0; leave --fps out for the model's frame rate.",
    ):
        assert line in text
    assert text.startswith("6 problems:\n")
    with pytest.raises(ConfigError) as caught:
        infer(
            tiny_pipeline,
            ["a", "b", SampleRequest(prompt="c", width=10)],
            out_dir=tmp_path / "out",
            height=100,
            width=(32, 40, 48),
            num_frames=(5, 5, 12),
        )
    assert str(caught.value).splitlines() == [
        "4 problems:",
        "  - --height=100 must be a multiple of 16 (VAE stride 8 x patch 2). Use 96 or 112.",
        "  - --width=40 of prompt 2 must be a multiple of 16 (VAE stride 8 x patch 2). Use 32 or 48.",
        "  - --width=10 of prompt 3 must be a multiple of 16 (VAE stride 8 x patch 2). Use 16.",
        "  - --frames=12 of prompt 3 must be 4k+1 (one frame, then groups of 4 frames). Use 9 or 13.",
    ]
    with pytest.raises(ConfigError, match=r"^--device=gpu is not on this machine; use one of cpu"):
        infer(tiny_pipeline, ["a"], out_dir=tmp_path, device="gpu", **SMALL)
    with pytest.raises(ConfigError, match=r"--prompt is missing"):
        infer(tiny_pipeline, [], out_dir=tmp_path)


@pytest.mark.parametrize("place", ["{}/file/out", "{}/link", "/proc/self", "/proc/out"])
def test_an_out_folder_that_cannot_be_written_is_told_before_weights_are_read(
    place: str, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer_module, "load_pipeline", lambda *a, **k: pytest.fail("weights were read"))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    out = Path(place.format(tmp_path))
    with pytest.raises(ConfigError) as caught:
        infer(tiny_pipeline, ["a"], out_dir=out, **SMALL)
    assert str(caught.value).startswith(f"--out={out} cannot be written (")
    assert str(caught.value).endswith("); choose another folder.")
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_torchrun_tells_once_that_nothing_can_be_written(tiny_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = launch("--model", tiny_pipeline, "--out", tmp_path / "file" / "out")
    assert ended.returncode != 0
    assert ended.stderr.count(f"wands: --out={tmp_path}/file/out cannot be written (Not a dir") == 1
    assert ended.stderr.count("--out=") == 1


def test_size_rule_follows_the_model() -> None:
    variant = VARIANTS["wan2.2-ti2v-5b"]
    assert (
        size_problem(variant, "height", 720)
        == "must be a multiple of 32 (VAE stride 16 x patch 2). Use 704 or 736."
    )
    assert size_problem(variant, "width", 1280) is None
    assert size_problem(variant, "num_frames", 121) is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "no/such/folder",
            "--model=no/such/folder is neither a folder nor a Hub id; set --model to an existing folder or",
        ),
        (
            "nobody/nothing",
            "--model=nobody/nothing is not a folder and cannot be downloaded from the Hub (",
        ),
    ],
)
def test_missing_model(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        infer(model, ["a"], out_dir=tmp_path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_folder_that_is_no_pipeline(tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model_index\.json cannot be read \(no such file\); use a folder in diffusers"
    ):
        infer(tiny_pipeline / "vae", ["a"], out_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "FluxPipeline"},
            "is a FluxPipeline, not a WanPipeline or WanImageToVideoPipeline",
        ),
        (
            "transformer/config.json",
            {"in_channels": 20},
            "in_channels=20, out_channels=16 and image_dim=None, which no Wan 2.1 or 2.2",
        ),
        (
            "transformer/config.json",
            {"in_channels": 36},
            "(wan2.2-i2v-tiny) needs a WanImageToVideoPipeline. Use",
        ),
        (
            "model_index.json",
            {"boundary_ratio": 0.9},
            "has a wrong model_index.json: boundary_ratio=0.9 and DiTs transformer.",
        ),
        ("transformer/config.json", {"text_dim": 64}, "d_model=32 must equal text_dim=64 of the transformer"),
        ("vae/config.json", {"z_dim": 48}, "z_dim=48 must equal out_channels=16 of the transformer"),
        (
            "transformer/config.json",
            {"num_layers": 3},
            "weights of the transformer do not fit its config.json",
        ),
        ("transformer/config.json", {"ffn_dim": 64}, "the transformer cannot be loaded"),
        ("scheduler/scheduler_config.json", {"use_flow_sigmas": False}, "does not support flow matching"),
    ],
)
def test_pipeline_whose_parts_do_not_fit(
    broken_pipeline, name: str, entries: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        infer(broken_pipeline(name, **entries), ["a"], out_dir=tmp_path / "out", **SMALL)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_transformer_and_checkpoint_mistakes(tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^--transformer=.*config\.json cannot be read \(no such file\); use"
    ):
        source_of(tiny_pipeline, transformer=tmp_path)
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        source_of(tiny_pipeline, checkpoint=tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"^--transformer-2=.* is a low-noise expert \(transformer_2\), but --model=.* has only one expert\. Pass",
    ):
        source_of(tiny_pipeline, transformer_2=tiny_pipeline / "transformer")
    with pytest.raises(ConfigError, match=r"^--ema needs --checkpoint"):
        source_of(tiny_pipeline, ema=True)
    model = WanTransformer3DModel.from_pretrained(str(tiny_pipeline), subfolder="transformer")
    step = make_checkpoint(tmp_path / "run", model, 3, num_layers=3)
    with pytest.raises(
        CheckpointError, match=r"tensors of the checkpoint do not fit its config \(.*Missing key.*blocks\.2\."
    ):
        load_pipeline(source_of(tiny_pipeline, checkpoint=step))
    with pytest.raises(
        ConfigError, match=r"--transformer=.* and --checkpoint=.* replace the same DiT; remove one"
    ):
        source_of(tiny_pipeline, transformer=tiny_pipeline, checkpoint=step)


def test_untied_text_embedding_is_refused(tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transformers bug of late 2025: `encoder.embed_tokens` keeps its random initialization."""
    load = WanPipeline.from_pretrained

    def untied(*args: object, **kwargs: object) -> WanPipeline:
        pipeline = load(*args, **kwargs)
        embedding = pipeline.text_encoder.encoder.embed_tokens
        embedding.weight = torch.nn.Parameter(torch.randn_like(embedding.weight))
        return pipeline

    monkeypatch.setattr(WanPipeline, "from_pretrained", untied)
    with pytest.raises(ConfigError, match="loads UMT5 wrongly"):
        load_pipeline(find_pipeline(tiny_pipeline))


def test_sample_that_is_not_finite_is_refused(tiny_pipeline: Path, tmp_path: Path) -> None:
    state = load_file(tiny_pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    shutil.copytree(tiny_pipeline / "transformer", tmp_path / "nan")
    state["proj_out.bias"].fill_(3e38)  # finite, unlike the sum of a few
    save_file(state, tmp_path / "nan" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(WandsError, match="values that are not finite"):
        infer(tiny_pipeline, ["a"], out_dir=tmp_path / "out", transformer=tmp_path / "nan", **SMALL)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------- prompt files


def test_prompt_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  ein Hund — groß  \n", encoding="utf-8")
    assert [r.prompt for r in read_prompts(path)] == ["a cat", "ein Hund — groß"]


def test_prompt_files_of_other_editors(tmp_path: Path) -> None:
    """A BOM and CRLF of Windows, and the line separators that JSON leaves as they are inside a string."""
    (tmp_path / "a.txt").write_bytes("\ufeffa cat\r\na dog\r\n".encode())
    assert [r.prompt for r in read_prompts(tmp_path / "a.txt")] == ["a cat", "a dog"]
    texts = ["a cat", "two\u2028lines\u0085of\u2029one"]
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    assert [r.prompt for r in read_prompts(tmp_path / "a.jsonl")] == texts


def test_prompt_file_of_objects_overrides_the_command(tiny_pipeline: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a cat", "height": 48, "seed": 9, "negative_prompt": "ugly"},
        {"caption": "a dog", "file_name": "dog.mp4", "num_frames": 9, "width": None},
        {"text": "a bike", "guidance_scale": 1, "num_inference_steps": 1, "flow_shift": 2},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    results = infer(tiny_pipeline, read_prompts(path), out_dir=tmp_path / "o", seed=20, **SMALL)
    requests = [r.request for r in results]
    assert [r.prompt for r in requests] == ["a cat", "a dog", "a bike"]
    assert [(r.height, r.width, r.num_frames) for r in requests] == [(48, 48, 5), (32, 48, 9), (32, 48, 5)]
    assert [r.seed for r in requests] == [9, 21, 22]
    assert [r.negative_prompt for r in requests] == ["ugly", "", ""]
    assert [r.flow_shift for r in requests] == [3.0, 3.0, 2.0]
    assert [(r.guidance_scale, r.num_inference_steps) for r in requests] == [(5.0, 2), (5.0, 2), (1.0, 1)]


def test_prompt_file_problems_come_together_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [
        '{"prompt": "fine"}',
        "{",
        '{"heigth": 3, "prompt": "x"}',
        "",
        '["x"]',
        '{"seed": 1}',
        '{"prompt": 3}',
        '{"prompt": "x", "image": 3}',
    ]
    path.write_text(
        "\n".join([*rows, '{"prompt": "a", "text": "b"}', '{"prompt": "x", "num_frames": "many"}'])
    )
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    report = str(caught.value).replace(f"{path}:", "").splitlines()
    assert report[0] == "8 problems:"
    for line, (number, words) in zip(
        report[1:],
        [
            (2, "unreadable line (Expecting property name enclosed in double quotes"),
            (3, "heigth=3 is not an option of a prompt; did you mean height?"),
            (5, "line is not a JSON object; write a JSON object on the line."),
            (6, "the line has no prompt. Write exactly one of"),
            (7, "prompt=3 is invalid: input should be a valid string."),
            (8, "image=3 is invalid: input should be a valid string."),
            (9, "the line has prompt and text. Write exactly one of"),
            (10, "num_frames='many' is invalid"),
        ],
        strict=True,
    ):
        assert line.startswith(f"  - {number}: ")
        assert words in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "cannot be read: No such file or directory; check the path"),
        ("empty.txt", b"\n \n", "contains no prompt"),
        ("prompts.csv", b"a,b", "must end in .txt"),
        (
            "latin.txt",
            b"caf\xe9",
            "can't decode byte 0xe9 in position 3: unexpected end of data; save the file as UTF-8 text",
        ),
    ],
)
def test_unusable_prompt_file(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_prompts(tmp_path / name)
    assert message in str(caught.value)


def test_defaults_are_the_models_own() -> None:
    def fields(name: str, **options: object) -> SampleRequest:
        requests, problems = build_requests(
            ["a"], {"height": None, "seed": (), "image": "f.png", **options}, VARIANTS[name]
        )
        assert not [text for text in problems if "image" not in text]
        return requests[0]

    plain = fields("wan2.1-t2v-1.3b")
    assert (plain.height, plain.width, plain.num_frames, plain.num_inference_steps) == (480, 832, 81, 50)
    assert (plain.guidance_scale, plain.guidance_scale_2, plain.flow_shift) == (6.0, None, 8.0)
    assert plain.negative_prompt.startswith("色调艳丽，过曝")
    two = fields("wan2.2-t2v-a14b")
    assert (two.width, two.guidance_scale, two.guidance_scale_2, two.flow_shift) == (1280, 4.0, 3.0, 12.0)
    # Who sets the first scale means both experts; who turns guidance off has no use for a negative prompt.
    assert fields("wan2.2-t2v-a14b", guidance_scale=6.0).guidance_scale_2 is None
    assert fields("wan2.2-t2v-a14b", guidance_scale=1.0).negative_prompt == ""
    assert fields("wan2.1-t2v-14b", negative_prompt="").negative_prompt == ""
    chosen = fields("wan2.2-ti2v-5b", height=64, num_frames=5, flow_shift=2.0)
    assert (chosen.height, chosen.width, chosen.num_frames, chosen.flow_shift) == (64, 1280, 5, 2.0)
    # The schedulers of these pipelines have the official shift, 3 for the 480p and 5 for the 720p model of I2V.
    assert {fields(name).flow_shift for name in ("wan2.1-i2v-14b", "wan2.2-ti2v-5b")} == {None}


def test_a_model_of_another_shape_has_no_official_options(tiny_pipeline: Path) -> None:
    requests, problems = build_requests(["a"], {}, find_pipeline(tiny_pipeline).variant)
    assert (requests, problems) == ([SampleRequest(prompt="a")], [])
