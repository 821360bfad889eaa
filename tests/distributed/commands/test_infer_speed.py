"""Options of `wands infer` that change where or how a video is computed; the exact path is the reference of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.distributed.commands.test_infer_ranks import unusual_pipeline
from tests.distributed.commands.test_infer_variants import SAMPLED, asked_of
from tests.support.infer_runs import records
from tests.support.sampling import infer, options_of
from wands.attention.kernels.registry import get_backend
from wands.commands import infer_files
from wands.distributed.dims import ParallelDims, ProcessGroups
from wands.errors import ConfigError
from wands.model.files.name_maps import DIT
from wands.sampling import sample as sampling
from wands.sampling import sharing
from wands.sampling.pipeline import apply_options, find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest
from wands.sampling.schedulers import EulerScheduler
from wands.sampling.sharing import ShardedAttentionProcessor, plan_ranks, set_attention, share_pipeline

GUIDED = SampleRequest(
    prompt="a red bike", height=48, width=80, num_frames=9, num_inference_steps=4, negative_prompt="dull"
)
SMALL = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 3}


def count_rows(pipeline: Any) -> list[int]:
    """Return a list that gets the batch size of each call of the transformers' first blocks."""
    rows: list[int] = []
    for model in filter(None, (pipeline.transformer, pipeline.transformer_2)):
        model.blocks[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    return rows


def largest_error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


# ------------------------------------------------------------------------------------------------- guidance


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name in SAMPLED[2:] else ()) for name in SAMPLED]
)
def test_batched_guidance_is_sequential_guidance(
    tiny_variant: Callable[[str], Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, images = asked_of(variant)
    pipeline = load_pipeline(find_pipeline(tiny_variant(variant)))
    view = sampling.pipeline_for(pipeline, request, images)
    view.set_progress_bar_config(disable=True)
    rows = count_rows(pipeline)
    latents = [sampling.sample_latents(view, request, images, guidance=mode) for mode in ("batched", None)]
    steps = request.num_inference_steps
    assert rows == [2] * steps + [1] * 2 * steps  # and the transformers are as before
    assert largest_error(*latents) <= 1e-5


def test_batched_guidance_of_an_offloaded_pipeline_and_without_guidance(tiny_pipeline: Path) -> None:
    plain, offloaded = (
        load_pipeline(find_pipeline(tiny_pipeline), offload=kind) for kind in ("none", "model")
    )
    for request in (GUIDED, GUIDED.model_copy(update={"guidance_scale": 1.0}), GUIDED):
        wanted = sampling.sample_latents(plain, request)
        view = sampling.pipeline_for(offloaded, request)
        view.set_progress_bar_config(disable=True)
        found = sampling.sample_latents(view, request, guidance="batched")
        assert largest_error(found, wanted) <= 1e-5
        assert torch.equal(found, wanted) == (request.guidance_scale == 1)


def sample_on_two_ranks(folder: Path, kind: str) -> tuple[Tensor, list[int], list[int], bool]:
    """Return the latents, batch sizes, numbers of gathered bytes, and whether the attention is that of diffusers."""
    pipeline = unusual_pipeline(folder, kind)
    pair = share_pipeline(pipeline, ParallelDims(2, int(os.environ["RANK"])))
    rows = count_rows(pipeline)
    sent = []
    gather = dist.all_gather
    dist.all_gather = lambda pieces, own, **more: (sent.append(own.nbytes), gather(pieces, own, **more))
    try:
        latents = sampling.sample_latents(pipeline, GUIDED, guidance=pair)
    finally:
        dist.all_gather = gather
    is_stock = not isinstance(pipeline.transformer.blocks[0].attn1.processor, ShardedAttentionProcessor)
    return latents, rows, sent, is_stock


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", pytest.param("model offload", marks=pytest.mark.slow), "two experts"])
def test_two_ranks_compute_one_prediction_each(run_world, tiny_pipeline: Path, kind: str) -> None:
    wanted = sampling.sample_latents(unusual_pipeline(tiny_pipeline, kind), GUIDED)
    for latents, rows, sent, is_stock in run_world(2, sample_on_two_ranks, tiny_pipeline, kind):
        assert torch.equal(latents, wanted)
        assert rows == [1] * GUIDED.num_inference_steps  # half of the calls of one process
        assert sent == [wanted.nbytes] * GUIDED.num_inference_steps  # only predictions
        assert is_stock


def infer_on_ranks(folder: Path, out: Path, options: dict[str, Any]) -> tuple[int, str]:
    """Return the number of calls of the first block, and the degrees of this rank."""
    calls = []
    forward = WanTransformer3DModel.forward
    degrees = []
    build = ProcessGroups.build

    def counted(self: WanTransformer3DModel, *args: Any, **more: Any) -> Any:
        calls.append(1)
        return forward(self, *args, **more)

    def noted(dims: ParallelDims, device: Any) -> ProcessGroups:
        degrees.append(f"{dims.dp_size} x {dims.ring_degree} x {dims.ulysses_degree}")
        return build(dims, device)

    WanTransformer3DModel.forward = counted
    sharing.ProcessGroups.build = noted
    try:
        infer(folder, [GUIDED], out_dir=out, save_latents=True, **options)
    finally:
        WanTransformer3DModel.forward = forward
        sharing.ProcessGroups.build = build
    return len(calls), degrees[0]


@pytest.mark.parametrize(
    ("world_size", "options", "degrees"),
    [
        (2, {}, "2 x 1 x 1"),
        pytest.param(2, {"guidance_mode": "sequential"}, "1 x 1 x 2", marks=pytest.mark.slow),
        pytest.param(2, {"guidance_mode": "batched", "ring_degree": 2}, "1 x 2 x 1", marks=pytest.mark.slow),
        pytest.param(4, {}, "2 x 1 x 2", marks=pytest.mark.slow),
        pytest.param(4, {"ring_degree": 2}, "2 x 2 x 1", marks=pytest.mark.slow),
        pytest.param(4, {"ring_degree": 2, "ulysses_degree": 2}, "1 x 2 x 2", marks=pytest.mark.slow),
    ],
)
def test_ranks_divide_guidance_before_tokens(
    run_world, tiny_pipeline: Path, tmp_path: Path, world_size: int, options: dict[str, Any], degrees: str
) -> None:
    (alone,) = infer(tiny_pipeline, [GUIDED], out_dir=tmp_path / "alone", save_latents=True)
    wanted = load_file(alone.latents)["latents"]
    ranks = run_world(world_size, infer_on_ranks, tiny_pipeline, tmp_path / "ranks", options)
    per_step = 2 if degrees.startswith("1") and options.get("guidance_mode") != "batched" else 1
    assert ranks == [(per_step * GUIDED.num_inference_steps, degrees)] * world_size
    (file,) = (tmp_path / "ranks").glob("*.safetensors")
    error = largest_error(load_file(file)["latents"], wanted)
    assert error <= 1e-5
    assert error == 0 or degrees != "2 x 1 x 1"  # both predictions are those of one process


@pytest.mark.parametrize(
    ("world_size", "ulysses", "ring", "degrees"),
    [
        (1, None, None, (1, 1, 1)),
        (2, None, None, (2, 1, 1)),
        (3, None, None, (1, 1, 3)),
        (4, None, 2, (2, 1, 2)),
        (4, 2, 1, (2, 2, 1)),
        (4, 2, 2, (1, 2, 2)),
        (4, 4, None, (1, 4, 1)),
        (8, None, None, (2, 4, 1)),
        (8, 4, 2, (1, 4, 2)),
        (16, None, None, (2, 4, 2)),
    ],
)
def test_degrees_that_fill_all_ranks_leave_guidance_whole(
    tiny_pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    ulysses: int | None,
    ring: int | None,
    degrees: tuple[int, int, int],
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(world_size))
    monkeypatch.setenv("RANK", "0")
    dims = plan_ranks(find_pipeline(tiny_pipeline).variant, ulysses, ring, split=True)
    assert (dims.dp_size, dims.ulysses_degree, dims.ring_degree) == degrees


# ------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("kernel", ["native", "auto"])
def test_one_gpu_uses_the_kernel_of_training(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """The CPU's kernel in bf16 stands in for that of a GPU, whose name `usable_backends` yields."""
    pipelines = [load_pipeline(find_pipeline(tiny_pipeline), dtype=torch.bfloat16) for _ in range(2)]
    asked = []
    monkeypatch.setattr(sharing, "usable_backends", lambda *_: iter(["cpu"]))
    monkeypatch.setattr(sharing, "choose_backend", lambda *args: asked.append(args) or get_backend("cpu"))
    set_attention(pipelines[1], torch.device("cuda"), ProcessGroups(ParallelDims(1, 0)), kernel)
    head_dim = pipelines[1].transformer.config.attention_head_dim
    assert asked == [("auto", torch.device("cuda"), torch.bfloat16, head_dim)] * (kernel == "auto")
    processor = pipelines[1].transformer.blocks[0].attn1.processor
    assert isinstance(processor, ShardedAttentionProcessor) == (kernel == "auto")
    assert torch.equal(*(sampling.sample_latents(pipeline, GUIDED) for pipeline in pipelines))


def test_a_cpu_and_fp32_keep_the_attention_of_diffusers(tiny_pipeline: Path) -> None:
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        pipeline = load_pipeline(find_pipeline(tiny_pipeline), dtype=dtype)
        before = pipeline.transformer.blocks[0].attn1.processor
        set_attention(pipeline, torch.device(device), ProcessGroups(ParallelDims(1, 0)))
        assert pipeline.transformer.blocks[0].attn1.processor is before


@pytest.mark.gpu
def test_the_kernel_of_a_gpu_samples_what_diffusers_does(tiny_pipeline: Path, tmp_path: Path) -> None:
    latents = []
    for kernel in ("native", "auto"):
        (result,) = infer(
            tiny_pipeline, [GUIDED], out_dir=tmp_path / kernel, save_latents=True, attention_backend=kernel
        )
        latents.append(load_file(result.latents)["latents"])
    assert (latents[0] - latents[1]).square().mean().sqrt() <= 0.05 * latents[0].square().mean().sqrt()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_sample_the_same(
    tiny_pipeline: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    pipeline = unusual_pipeline(tiny_pipeline, "two experts")
    wanted = sampling.sample_latents(pipeline, GUIDED)
    compiled = []
    real = torch.nn.Module.compile

    def compile_with(self: torch.nn.Module) -> None:
        compiled.append(self)
        real(self, backend=backend)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with)
    apply_options(pipeline, options_of(tiny_pipeline, compile=True))
    assert compiled == [*pipeline.transformer.blocks, *pipeline.transformer_2.blocks]
    error = largest_error(sampling.sample_latents(pipeline, GUIDED), wanted)
    assert error == 0 if backend == "eager" else error <= 1e-5
    torch.compiler.reset()


# -------------------------------------------------------------------------------------------------- decoding


def test_a_bf16_decoder_leaves_the_encoder_in_fp32(tiny_pipeline: Path) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_pipeline))
    latents = sampling.sample_latents(pipeline, GUIDED)
    exact = sampling.decode_latents(pipeline, latents).astype(int)
    apply_options(pipeline, options_of(tiny_pipeline, vae_dtype="bf16"))
    assert {p.dtype for p in pipeline.vae.decoder.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in pipeline.vae.encoder.parameters()} == {torch.float32}
    assert pipeline.vae.dtype == torch.float32  # in which diffusers encodes images
    found = sampling.decode_latents(pipeline, latents).astype(int)
    assert 0 < abs(found - exact).mean() <= 1.0  # of 255
    stock = WanPipeline.from_pretrained(tiny_pipeline).vae.bfloat16()
    mean, std = (
        torch.tensor(x).view(1, -1, 1, 1, 1) for x in (stock.config.latents_mean, stock.config.latents_std)
    )
    with torch.no_grad():
        video = stock.decode((latents[None] * std + mean).bfloat16()).sample
    frames = pipeline.video_processor.postprocess_video(video, output_type="np")[0] * 255
    assert abs(found - frames).mean() <= 0.5


def test_tiles_are_those_of_diffusers(tiny_pipeline: Path) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_pipeline))
    latents = sampling.sample_latents(pipeline, GUIDED)
    whole = sampling.decode_latents(pipeline, latents)
    vae = pipeline.vae
    vae.tile_sample_min_height = vae.tile_sample_min_width = 32
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = 24
    found = sampling.decode_latents(pipeline, latents, tiled=True)
    assert not pipeline.vae.use_tiling  # images are encoded whole
    assert np.array_equal(sampling.decode_latents(pipeline, latents), whole)
    vae.enable_tiling()
    wanted = pipeline(
        GUIDED.prompt,
        **GUIDED.model_dump(include={"height", "width", "num_frames", "num_inference_steps", "negative_prompt"}),
        guidance_scale=GUIDED.guidance_scale,
        max_sequence_length=512,
        generator=torch.Generator().manual_seed(GUIDED.seed),
    ).frames[0]  # fmt: skip
    assert np.array_equal(found, (wanted * 255).round().astype(np.uint8))
    assert not np.array_equal(found, whole)  # each tile sees its own pixels only


# ------------------------------------------------------------------------------------------ few-step LoRAs


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_euler_steps_at_the_noise_levels_of_distillation(shift: float) -> None:
    scheduler = sampling.with_shift(EulerScheduler(), shift)
    scheduler.set_timesteps(4)
    levels = torch.tensor([1.0, 0.75, 0.5, 0.25])
    wanted = 1000 * shift * levels / (1 + (shift - 1) * levels)
    assert torch.allclose(scheduler.timesteps, wanted)  # 1000, 937.5, 833.3, 625 with shift 5
    x = exact = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    ends = [*(wanted[1:] / 1000), 0.0]
    for t, end in zip(scheduler.timesteps, ends, strict=True):
        velocity = torch.sin(3 * x)
        x = scheduler.step(velocity, t, x, return_dict=False)[0]
        exact = exact + (end - t / 1000) * torch.sin(3 * exact)
    assert torch.allclose(x, exact, atol=1e-5)


# Suffixes as published: lightx2v (Wan 2.1, extracted: matrices, biases, norms and tables in full), Wan 2.2 Lightning
# (alpha), CausVid as converted for ComfyUI (lora_down and lora_up), FastWan and AccVideo (lora_A and lora_B).
PUBLISHED = {
    "lightx2v": ("lora_down", "lora_up", {"diff", "diff_b", "diff_m"}),
    "lightning": ("lora_down", "lora_up", {"alpha"}),
    "causvid": ("lora_down", "lora_up", {"diff_b"}),
    "peft": ("lora_A", "lora_B", set()),
}


def write_published(path: Path, kind: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write a LoRA with the keys of a publisher; return what it adds to each parameter of the stock transformer."""
    generator = torch.Generator().manual_seed(5)
    first, second, more = PUBLISHED[kind]
    file = {}
    changes = {}
    for name, value in state.items():
        module, _, leaf = f"diffusion_model.{DIT.to_official(name)}".rpartition(".")
        normal = partial(torch.randn, generator=generator)
        if leaf == "weight" and value.ndim == 2 and ".head" not in module:
            down = 0.1 * normal(4, value.shape[1])
            up = 0.1 * normal(value.shape[0], 4)
            file |= {f"{module}.{first}.weight": down, f"{module}.{second}.weight": up}
            if "alpha" in more:
                file[f"{module}.alpha"] = torch.tensor(8.0)
            changes[name] = (8 / 4 if "alpha" in more else 1) * up @ down
        else:
            suffix = {"bias": "diff_b", "weight": "diff"}.get(leaf, "diff_m")
            if suffix in more:
                file[f"{module}.{suffix}"] = changes[name] = 0.1 * normal(*value.shape)
    save_file({key: value.contiguous() for key, value in file.items()}, path)
    return changes


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "lightx2v" else pytest.mark.slow) for kind in PUBLISHED],
)
def test_a_four_step_lora_is_the_merged_model_with_euler_steps(
    tiny_pipeline: Path, tmp_path: Path, kind: str
) -> None:
    stock = WanPipeline.from_pretrained(tiny_pipeline)
    stock.set_progress_bar_config(disable=True)
    state = stock.transformer.state_dict()
    changes = write_published(tmp_path / "lora.safetensors", kind, state)
    assert {"lightx2v": changes.keys() == state.keys(), "peft": len(changes) < len(state)}.get(kind, True)
    fast = {"num_inference_steps": 4, "guidance_scale": 1.0, "flow_shift": 5.0}
    size = {"height": 32, "width": 64, "num_frames": 5}
    options = {"out_dir": tmp_path / "out", "save_latents": True, "scheduler": "euler", **fast, **size}
    (result,) = infer(tiny_pipeline, ["a cat"], lora=(tmp_path / "lora.safetensors",), **options)
    found = load_file(result.latents)["latents"]
    (row,) = records(tmp_path / "out")
    assert (row["flow_shift"], row["scheduler"]) == (5.0, "euler")

    stock.transformer.load_state_dict(
        state | {name: state[name] + change for name, change in changes.items()}
    )
    x = torch.randn(1, 16, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        text, _ = stock.encode_prompt("a cat", None, False, max_sequence_length=512)
        for t, end in zip((1000.0, 937.5, 2500 / 3, 625.0), (0.9375, 2.5 / 3, 0.625, 0.0), strict=True):
            x = x + (end - t / 1000) * stock.transformer(x, torch.tensor([t]), text, return_dict=False)[0]
    assert largest_error(found, x[0]) <= 1e-4


# -------------------------------------------------------------------------------------------- the command


def test_stages_are_printed_and_options_recorded(
    tiny_pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled = []
    decode = infer_files.decode_latents
    monkeypatch.setattr(
        infer_files,
        "decode_latents",
        lambda *args, **more: tiled.append(more["tiled"]) or decode(*args, **more),
    )
    changed = {
        "guidance_mode": "batched",
        "vae_dtype": "bf16",
        "vae_tiling": True,
        "attention_backend": "native",
    }
    with caplog.at_level("INFO", "wands"):
        infer(tiny_pipeline, ["a cat"], out_dir=tmp_path / "fast", **changed, **SMALL)
        (result,) = infer(tiny_pipeline, ["a cat"], out_dir=tmp_path / "plain", **SMALL)
    line = caplog.messages[-1]
    seconds = [float(word) for word in line.replace(",", "").split() if word.replace(".", "").isdigit()][2:]
    assert line.startswith(f"sample 1 of 1 in {result.seconds:.1f} s (text ")
    assert seconds[0] == pytest.approx(sum(seconds[1:]), abs=0.25)
    plain, fast = (records(tmp_path / name)[0] for name in ("plain", "fast"))
    assert {key: fast[key] for key in fast.keys() - plain.keys()} == changed
    assert tiled == [True, False]


def test_compiled_blocks_need_their_weights_on_the_gpu(tiny_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--compile needs whole blocks on the GPU"):
        infer(tiny_pipeline, ["a"], out_dir=tmp_path, compile=True, offload="sequential", **SMALL)
