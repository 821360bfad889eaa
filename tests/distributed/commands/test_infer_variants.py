"""`wands infer` of every variant: pictures, two experts, LoRAs, several ranks; the stock pipelines are the reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from safetensors.torch import load_file, save_file

from tests.support.infer_pictures import SMALL, noise_picture
from tests.support.infer_runs import make_checkpoint, records, write_state
from tests.support.sampling import infer, source_of
from wands.checkpoint.checkpoint_files import load_state, state_file
from wands.cli import main
from wands.commands.infer import check_ranks
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, to_pixels
from wands.distributed.dims import ParallelDims
from wands.encoders.vae import WanVideoEncoder
from wands.errors import ConfigError
from wands.sampling import sample as sampling
from wands.sampling.images import ConditionImages
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest, read_prompts
from wands.sampling.sharing import share_pipeline
from wands.variants import VARIANTS

SAMPLED = (
    "wan2.1-i2v-14b",
    "wan2.1-flf2v-14b",
    "wan2.2-t2v-a14b",
    "wan2.2-i2v-a14b",
    "wan2.2-ti2v-5b",
)
REQUEST = SampleRequest(prompt="a red bike", seed=7, negative_prompt="dull", flow_shift=6.0, **SMALL)


@cache
def loaded(folder: Path) -> DiffusionPipeline:
    return load_pipeline(find_pipeline(folder))


def asked_of(variant: str) -> tuple[SampleRequest, ConditionImages]:
    """Request and pictures with everything that a model of this variant accepts."""
    row = VARIANTS[variant]
    starts = row.num_images > 0 or "first_frame" in row.conditions
    pictures = {"image": noise_picture(1)} if starts else {}
    pictures |= {"last_image": noise_picture(2)} if row.num_images > 1 else {}
    more = {"guidance_scale_2": 3.0} if row.boundary_ratio else {}
    return REQUEST.model_copy(update=more), pictures


def sample(folder: Path, variant: str) -> torch.Tensor:
    request, pictures = asked_of(variant)
    view = sampling.pipeline_for(loaded(folder), request, pictures)
    view.set_progress_bar_config(disable=True)
    return sampling.sample_latents(view, request, pictures)


@pytest.mark.parametrize("variant", SAMPLED)
def test_equals_the_stock_pipeline(tiny_variant: Callable[[str], Path], variant: str) -> None:
    folder = tiny_variant(variant)
    request, pictures = asked_of(variant)
    stock = (WanImageToVideoPipeline if pictures else WanPipeline).from_pretrained(folder)
    stock.scheduler = type(stock.scheduler).from_config(stock.scheduler.config, flow_shift=6.0)
    stock.set_progress_bar_config(disable=True)
    call = request.model_dump(
        exclude={"seed", "flow_shift", "image", "last_image", "inputs", "guidance_scale_2", "later_prompts"}
    )
    call |= pictures
    call |= {"guidance_scale_2": 3.0} if request.guidance_scale_2 else {}
    wanted = stock(**call, generator=torch.Generator().manual_seed(7), output_type="latent").frames[0]
    assert torch.equal(sample(folder, variant), wanted)
    # Each thing that was given counts.
    for key in ("image", "last_image", "guidance_scale_2"):
        if key in call:
            other = {key: noise_picture(3) if key != "guidance_scale_2" else 5.0}
            changed = stock(**call | other, generator=torch.Generator().manual_seed(7), output_type="latent")
            assert not torch.equal(changed.frames[0], wanted), key


def test_the_whole_way_with_pictures_and_without(
    tiny_variant: Callable[[str], Path], clips_dir: Path, tmp_path: Path
) -> None:
    """TI2V samples both kinds in one run; the picture is a video's first frame."""
    folder = tiny_variant("wan2.2-ti2v-5b")
    lines = [{"prompt": "a bike", "image": "bikes.mp4"}, {"prompt": "a cat"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "bikes.mp4").symlink_to(clips_dir / "bikes.mp4")
    asked = read_prompts(tmp_path / "prompts.jsonl")
    results = infer(folder, asked, out_dir=tmp_path / "out", save_latents=True, **SMALL)
    rows = records(tmp_path / "out")
    assert [row["image"] for row in rows] == [str(tmp_path / "bikes.mp4"), None]
    assert [row["fps"] for row in rows] == [24, 24]
    latents = [load_file(result.latents)["latents"] for result in results]

    first = next(
        decode_clip(
            clips_dir / "bikes.mp4", ClipSpec(24, height=32, width=64, center_crop=True, max_frames=1)
        )
    ).frames
    clean = WanVideoEncoder.load(folder).encode(to_pixels(first))
    assert torch.allclose(latents[0][:, :1], clean, atol=1e-5)
    assert not torch.allclose(latents[0][:, 1:2], clean, atol=0.1)
    stock = WanPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    plain = stock("a cat", **SMALL, generator=torch.Generator().manual_seed(1), output_type="latent")
    assert torch.equal(latents[1], plain.frames[0])


def check_first_frame(folder: Path) -> None:
    _, pictures = asked_of("wan2.2-ti2v-5b")
    clean = WanVideoEncoder(loaded(folder).vae).encode(to_pixels(np.array(pictures["image"])[None]))
    assert torch.allclose(sample(folder, "wan2.2-ti2v-5b")[:, :1], clean, atol=1e-5)


def test_the_first_frame_is_put_back(
    tiny_variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_variant("wan2.2-ti2v-5b")
    check_first_frame(folder)
    prepare = WanImageToVideoPipeline.prepare_latents

    def all_noise(*args: object, **options: object) -> tuple:
        latents, _, mask = prepare(*args, **options)
        return latents, latents[:, :, :1], torch.ones_like(mask)

    monkeypatch.setattr(WanImageToVideoPipeline, "prepare_latents", all_noise)
    with pytest.raises(AssertionError):
        check_first_frame(folder)


@pytest.mark.slow
def test_offloaded_pipelines_sample_both_kinds(tiny_variant: Callable[[str], Path]) -> None:
    folder = tiny_variant("wan2.2-ti2v-5b")
    request, pictures = asked_of("wan2.2-ti2v-5b")
    plain = WanPipeline.from_pretrained(folder)
    offloaded = load_pipeline(find_pipeline(folder), offload="model")
    given = [pictures, {}, pictures]
    for images in given:
        view = sampling.pipeline_for(offloaded, request, images)
        found = sampling.sample_latents(view, request, images)
        if images:
            assert torch.equal(found, sample(folder, "wan2.2-ti2v-5b"))
        else:
            stock = sampling.pipeline_for(plain, request)
            assert torch.equal(found, sampling.sample_latents(stock, request))


# ----------------------------------------------------------------------------------------------- two experts

TIMESTEPS = {"wan2.2-t2v-a14b": (876.0, 875.0, 874.0), "wan2.2-i2v-a14b": (901.0, 900.0, 899.0)}


def experts_called(pipeline: DiffusionPipeline, variant: str) -> list[tuple[float, str]]:
    """(timestep, expert) of each call, at timesteps near the boundary."""
    timesteps = torch.tensor(TIMESTEPS[variant])
    scheduler = FlowMatchEulerDiscreteScheduler()

    def set_timesteps(*_: object, **__: object) -> None:
        FlowMatchEulerDiscreteScheduler.set_timesteps(scheduler, 3)
        scheduler.timesteps = timesteps
        scheduler.sigmas = torch.cat([timesteps / 1000, torch.zeros(1)])

    scheduler.set_timesteps = set_timesteps
    seen: list[tuple[float, str]] = []
    hooks = [
        getattr(pipeline, part).register_forward_pre_hook(
            lambda _, args, options, part=part: seen.append((options["timestep"].item(), part)),
            with_kwargs=True,
        )
        for part in ("transformer", "transformer_2")
    ]
    request, pictures = asked_of(variant)
    before = pipeline.scheduler
    pipeline.scheduler = scheduler
    try:
        sampling.sample_latents(
            pipeline, request.model_copy(update={"guidance_scale": 1.0, "guidance_scale_2": None}), pictures)  # fmt: skip
    finally:
        pipeline.scheduler = before
        for hook in hooks:
            hook.remove()
    return seen


def check_experts(pipeline: DiffusionPipeline, variant: str) -> None:
    """Sampling asks the expert that was trained at that timestep."""
    trained = {
        timestep: expert.subfolder
        for timestep in TIMESTEPS[variant]
        for expert in VARIANTS[variant].experts
        if expert.sigma_range[0] <= timestep / 1000 < expert.sigma_range[1]
    }
    assert experts_called(pipeline, variant) == list(trained.items())
    assert list(trained.values()) == ["transformer", "transformer", "transformer_2"]


@pytest.mark.parametrize("variant", TIMESTEPS)
def test_the_expert_of_a_timestep_is_the_one_trained_there(
    tiny_variant: Callable[[str], Path], variant: str
) -> None:
    pipeline = load_pipeline(find_pipeline(tiny_variant(variant)))
    check_experts(pipeline, variant)
    boundary = pipeline.config.boundary_ratio
    for ratio in (boundary + 1e-6, 1 - boundary):  # > for >=, and a boundary taken from the other end
        pipeline.register_to_config(boundary_ratio=float(ratio))
        with pytest.raises(AssertionError):
            check_experts(pipeline, variant)
    pipeline.register_to_config(boundary_ratio=boundary)
    check_weights(pipeline, tiny_variant(variant))
    pipeline.register_modules(transformer=pipeline.transformer_2, transformer_2=pipeline.transformer)
    with pytest.raises(AssertionError):
        check_weights(pipeline, tiny_variant(variant))


def check_weights(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Each expert is where its folder says."""
    for part in ("transformer", "transformer_2"):
        stored = load_file(folder / part / "diffusion_pytorch_model.safetensors")
        assert torch.equal(getattr(pipeline, part).proj_out.weight, stored["proj_out.weight"])


@pytest.mark.slow
def test_either_expert_is_replaced(tiny_variant: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tiny_variant("wan2.2-t2v-a14b")
    own = {
        part: WanTransformer3DModel.from_pretrained(str(folder), subfolder=part)
        for part in ("transformer", "transformer_2")
    }
    own["transformer"].save_pretrained(tmp_path / "high")

    def weights(**options: Path) -> dict[str, torch.Tensor]:
        source = source_of(folder, **options)
        pipeline = load_pipeline(source)
        return {part: getattr(pipeline, part).proj_out.weight for part in source.dits}

    high, low = (own[part].proj_out.weight for part in own)
    found = weights(transformer_2=tmp_path / "high")
    assert torch.equal(found["transformer"], high)
    assert torch.equal(found["transformer_2"], high)
    assert torch.equal(weights(transformer=folder, transformer_2=folder)["transformer_2"], low)

    # A run of the low-noise expert alone, and of both.
    trained = make_checkpoint(tmp_path / "run", own["transformer"], 1)
    state = load_state(trained)
    for parts in (["transformer_2"], ["transformer", "transformer_2"]):
        hashes = {}
        for part in parts:
            name = f"{part}/{state_file(0)}"
            hashes[name] = write_state(
                trained / name, {key: value + 1 for key, value in own[part].state_dict().items()}
            )
        replace(state, parts=parts).write(trained, hashes)
        found = weights(checkpoint=tmp_path / "run")
        assert torch.equal(found["transformer"], high + ("transformer" in parts))
        assert torch.equal(found["transformer_2"], low + 1)
    with pytest.raises(ConfigError, match=r"--transformer-2=.* replace the same DiT; remove one"):
        source_of(folder, transformer_2=folder, checkpoint=trained)
    with pytest.raises(
        ConfigError,
        match=r"^--checkpoint=.* is a low-noise expert \(transformer_2\), but --model=.* has only one expert",
    ):
        source_of(tiny_variant("wan2.2-ti2v-5b"), checkpoint=trained)


# --------------------------------------------------------------------------------------------- several ranks


def sample_on_ranks(folders: dict[str, Path], ring: int, ulysses: int) -> dict[str, torch.Tensor]:
    grid = ParallelDims(ring * ulysses, int(os.environ["RANK"]), ring_degree=ring, ulysses_degree=ulysses)
    found = {}
    for variant, folder in folders.items():
        share_pipeline(loaded(folder), grid)
        found[variant] = sample(folder, variant)
    loaded.cache_clear()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "degrees"), [(2, (2, 1)), (4, (2, 2))])
def test_ranks_sample_what_one_process_does(
    run_world, tiny_variant: Callable[[str], Path], world_size: int, degrees: tuple[int, int]
) -> None:
    folders = {variant: tiny_variant(variant) for variant in SAMPLED}
    ranks = run_world(world_size, sample_on_ranks, folders, *degrees)
    for variant, folder in folders.items():
        wanted = sample(folder, variant)
        for found in ranks:
            assert (found[variant] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), variant


def compare_pictures_on_ranks(folder: Path) -> str:
    rank = int(os.environ["RANK"])
    request, _ = asked_of("wan2.2-ti2v-5b")
    images = [{"image": noise_picture(rank)}]
    try:
        dims = ParallelDims(2, rank, ring_degree=2)
        check_ranks(find_pipeline(folder), {"dtype": "fp32"}, [request], images, [{}], dims)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_other_pictures_are_refused(run_world, tiny_variant: Callable[[str], Path]) -> None:
    """Files of one name may differ from node to node; the sample would be a mixture."""
    first, second = run_world(2, compare_pictures_on_ranks, tiny_variant("wan2.2-ti2v-5b"))
    assert first == second
    assert first.startswith("the command of rank 1 (prompt 1.contents of image=")


# ---------------------------------------------------------------------------------------------- command line


def test_command_line(tiny_variant: Callable[[str], Path], clips_dir: Path, tmp_path: Path) -> None:
    """Pictures once for each prompt, a LoRA with its scale, the second expert's guidance."""
    lora = tmp_path / "lora.safetensors"
    names = (f"transformer.blocks.0.attn1.to_q.lora_{half}.weight" for half in "AB")
    save_file(dict(zip(names, (torch.ones(1, 48), torch.ones(48, 1)), strict=True)), lora)
    noise_picture(1).save(tmp_path / "a.png")
    sizes = ["--height", "32", "--width", "64", "--frames", "5", "--steps", "2"]
    asked = [
        "--prompt",
        "a",
        "--prompt",
        "b",
        "--image",
        tmp_path / "a.png",
        "--image",
        clips_dir / "bikes.mp4",
    ]
    more = [
        "--guidance-2",
        3.5,
        "--shift",
        4,
        "--lora-1",
        f"{lora}=0.25",
        "--lora-2",
        lora,
        "--out",
        tmp_path / "out",
    ]
    call = ["infer", "--model", tiny_variant("wan2.2-i2v-a14b"), *sizes, *asked, *more]
    done = CliRunner().invoke(main, [str(part) for part in call], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows = records(tmp_path / "out")
    assert [row["image"] for row in rows] == [str(tmp_path / "a.png"), str(clips_dir / "bikes.mp4")]
    assert [(row["guidance_scale_2"], row["flow_shift"], row["fps"]) for row in rows] == [(3.5, 4.0, 16)] * 2
    assert [(one["part"], one["scale"]) for one in rows[0]["loras"]] == [
        ("transformer", 0.25),
        ("transformer_2", 1.0),
    ]
