"""Mistakes in options, pipelines and prompt files of `wands infer`: one report before weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from tests.support.infer_runs import SMALL, make_checkpoint
from tests.support.sampling import infer, source_of
from wands.commands import infer as infer_module
from wands.errors import CheckpointError, ConfigError, WandsError
from wands.sampling.pipeline import find_pipeline, load_pipeline
from wands.sampling.requests import SampleRequest, read_prompts, size_problem
from wands.variants import VARIANTS


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
