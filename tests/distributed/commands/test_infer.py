"""`wands infer` end to end through diffusers' own pipeline, on a tiny model of real classes."""

from __future__ import annotations

import resource
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file

from tests.support.infer_runs import SMALL, make_checkpoint, read_video, records
from tests.support.sampling import infer, source_of
from wands.errors import WandsError
from wands.sampling import sample as sampling
from wands.sampling.pipeline import DiTSource, find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest, build_requests
from wands.variants import VARIANTS


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
    call = request.model_dump(
        exclude={"seed", "flow_shift", "image", "last_image", "inputs", "later_prompts"}
    )
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


@pytest.mark.slow
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
