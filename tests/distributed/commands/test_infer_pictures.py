"""Pictures that `wands infer` is given, and what does not fit them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.support.infer_pictures import SMALL, noise_picture
from tests.support.sampling import infer
from wands.commands import infer as infer_module
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip, save_video
from wands.errors import ConfigError
from wands.sampling.images import read_image
from wands.sampling.pipeline import find_pipeline
from wands.sampling.requests import SampleRequest, find_problems

# -------------------------------------------------------------------------------------------------- pictures


def test_a_picture_is_cut_as_a_clip_is(clips_dir: Path, tmp_path: Path) -> None:
    """The same pixels at training and at sampling, of a clip at the size that preprocess gives it."""
    clip = clips_dir / "bikes.mp4"
    trained = next(decode_clip(clip, ClipSpec(16, max_pixels=100 * 190, max_frames=5))).frames
    height, width = trained.shape[1:3]
    np.testing.assert_array_equal(read_image(clip, height, width), trained[0])
    whole = next(decode_clip(clip, ClipSpec(16, max_frames=1, size_multiple=2))).frames[0]
    Image.fromarray(whole).save(tmp_path / "frame.png")
    of_file = np.asarray(read_image(tmp_path / "frame.png", height, width)).astype(int)
    assert abs(of_file - trained[0]).mean() < 1  # YUV is scaled before it becomes RGB
    squeezed = np.asarray(Image.fromarray(whole).resize((width, 2 * height)))  # the mistake
    assert (
        abs(
            np.asarray(read_image(clip, 2 * height // 16 * 16, width)).astype(int)
            - squeezed[: 2 * height // 16 * 16]
        ).mean()
        > 5
    )


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "im"])  # the last is known to Pillow alone
def test_pictures_of_any_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture.{suffix}"
    noise_picture(1, 48, 128).save(path)
    found = np.asarray(read_image(path, 32, 64)).astype(int)
    wanted = np.asarray(
        noise_picture(1, 48, 128).resize((85, 32), Image.Resampling.BOX).crop((10, 0, 74, 32))
    ).astype(int)
    assert abs(found - wanted).mean() < 12, suffix


def test_first_and_last_frame_of_a_video(tmp_path: Path) -> None:
    frames = np.repeat(np.arange(0, 250, 10, dtype=np.uint8), 32 * 64 * 3).reshape(25, 32, 64, 3)
    for fps in (5, 24):
        save_video(tmp_path / "gray.mp4", frames, fps)
        for last, value in ((False, 0), (True, 240)):
            found = np.asarray(read_image(tmp_path / "gray.mp4", 32, 64, last=last))
            assert abs(found.astype(int) - value).max() <= 3


def test_an_upright_picture_stays_upright(tmp_path: Path) -> None:
    turned = noise_picture(1, 64, 32).transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise by whoever shows it
    for suffix in ("png", "jpg"):
        turned.save(tmp_path / f"turned.{suffix}", exif=exif)
        found = np.asarray(read_image(tmp_path / f"turned.{suffix}", 64, 32)).astype(int)
        assert abs(found - np.asarray(noise_picture(1, 64, 32)).astype(int)).mean() < 12


# -------------------------------------------------------------------------------------------------- mistakes

IMAGE = {"image": "first.png"}
LAST = {"last_image": "last.png"}
BOTH = {"image": "first.png", "last_image": "last.png"}


@pytest.mark.parametrize(
    ("variant", "asked", "message"),
    [
        ("wan2.1-t2v-1.3b", IMAGE, "--image=first.png is for models that start from an image, not for wan2.1-t2v"),
        ("wan2.1-t2v-1.3b", {"image": ("my dog.png", None)}, "--image=my dog.png of prompt 1 is for models"),
        ("wan2.1-i2v-14b", {}, "--image is missing, and wan2.1-i2v-tiny starts from an image. Add"),
        ("wan2.1-i2v-14b", BOTH, "--last-image=last.png is for models that end at an image, not for wan2.1"),
        ("wan2.1-flf2v-14b", IMAGE, "--last-image is missing, and wan2.1-flf2v-tiny ends at an"),
        ("wan2.1-flf2v-14b", BOTH | {"num_frames": 1}, "--frames=1 has no room for a first and a last image. Use"),
        ("wan2.2-ti2v-5b", {"height": 48}, "--height=48 must be a multiple of 32 (VAE stride 16 x patch 2). Use 32 or 64."),
        ("wan2.2-ti2v-5b", IMAGE, "--image=first.png cannot be used: video=first.png does not exist; restore"),
        ("wan2.2-ti2v-5b", {"guidance_scale_2": 3.0}, "--guidance-2=3 is for models of two experts, and wan2.2"),
        ("wan2.2-t2v-a14b", {"guidance_scale": 1.0, "guidance_scale_2": 3.0}, "--guidance-2=3 has no effect"),
        ("wan2.1-t2v-1.3b", {"guidance_scale": (1.0, 5.0), "negative_prompt": "no"}, "--negative-prompt='no' of prompt 1"),
        ("wan2.2-t2v-a14b", {"guidance_scale": 0.0, "negative_prompt": "no"}, "--negative-prompt='no' has no effect"),
        ("wan2.2-t2v-a14b", {"image": ("first.png", None)}, "--image=first.png of prompt 1 is for models"),
        ("wan2.2-t2v-a14b", {"lora": ["no/such/lora"]}, "--lora=no/such/lora does not exist. Set --lora to the file"),
        ("wan2.2-t2v-a14b", {"lora_2": ["a/b=much"]}, "--lora-2=a/b=much: there is no file a/b=much, and the scale 'much'"),
        ("wan2.2-ti2v-5b", {"lora_2": ["low.safetensors"]}, "--lora-2=low.safetensors is for one of two experts, but"),
    ],
)  # fmt: skip
def test_one_sentence_before_weights_are_read(
    tiny_variant: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    variant: str, asked: dict, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(infer_module, "load_pipeline", lambda *a, **k: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "low.safetensors")
    with pytest.raises(ConfigError) as caught:
        infer(tiny_variant(variant), ["a", "b"], out_dir=tmp_path / "out", **SMALL | asked)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_negative_prompt_of_a_row_without_guidance(
    tiny_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = [{"prompt": "a", "negative_prompt": "dull, gray"}, {"prompt": "b"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = tiny_variant("wan2.1-t2v-1.3b")
    with pytest.raises(
        ConfigError, match=r"^--negative-prompt='dull, gray' of prompt 1 has no effect with --guidance=1,"
    ):
        infer(folder, [], prompts_file=tmp_path / "p.jsonl", out_dir=tmp_path, guidance_scale=1.0, **SMALL)
    request = SampleRequest(prompt="b", guidance_scale=1)
    assert list(find_problems(request, find_pipeline(folder).variant)) == []


def test_parts_that_do_not_belong_together(tiny_variant: Callable[[str], Path], tmp_path: Path) -> None:
    def changed(variant: str, name: str, **entries: object) -> Path:
        place = tmp_path / f"{variant}-{name.replace('/', '-')}"
        place.mkdir()
        for part in tiny_variant(variant).iterdir():
            (place / part.name).symlink_to(part)
        where = place / name
        config = json.loads(where.read_text()) | entries
        if where.parent != place:
            folder = where.parent.resolve()
            where.parent.unlink()
            where.parent.mkdir()
            for file in folder.iterdir():
                (where.parent / file.name).symlink_to(file)
        where.unlink()
        where.write_text(json.dumps(config))
        return place

    cases = (
        ("wan2.1-i2v-14b", "model_index.json", {"_class_name": "WanPipeline"}, "needs a WanImageToVideoPipeline"),
        ("wan2.1-i2v-14b", "image_encoder/config.json", {"hidden_size": 48}, "hidden_size=48 must equal image_dim=32"),
        ("wan2.2-t2v-a14b", "model_index.json", {"boundary_ratio": None},
         "boundary_ratio=None and DiTs transformer, transformer_2."),
        ("wan2.2-t2v-a14b", "transformer_2/config.json", {"ffn_dim": 97}, "the configs of the two experts differ in ffn_dim"),
    )  # fmt: skip
    for variant, name, entries, message in cases:
        folder = changed(variant, name, **entries)
        with pytest.raises(ConfigError) as caught:
            find_pipeline(folder)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
