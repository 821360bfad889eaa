"""data_tools.inspect on a cache of real clips, and that wands never needs data_tools."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image

from data_tools.inspect import main
from tests.support.commands import preprocess
from wands.data.cache.reader import LatentCache
from wands.data.clips.clip import ClipSpec
from wands.data.clips.video import decode_clip

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cache_dir(clips_dir: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("bikes", "carphone_pristine"):
        (folder / "clips").mkdir(exist_ok=True)
        shutil.copy(clips_dir / f"{name}.mp4", folder / "clips")
        (folder / "clips" / f"{name}.txt").write_text(f"A clip called {name}.")
    preprocess(
        str(folder / "clips"), folder / "cache", tiny_pipeline, max_pixels=64 * 96, max_frames=9, device="cpu"
    )
    return folder / "cache"


def test_inspect_prints_what_is_there(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cache_dir)]) == 0
    text = capsys.readouterr().out
    cache = LatentCache(cache_dir)
    assert f"2 samples in 1 shard, {cache.num_bytes:,} bytes" in text
    assert "wan2.1-t2v-tiny: VAE stride 4x8x8, patch 1x2x2, 16 latent channels, text width 32" in text
    assert "conditions    text, mask" in text
    assert "text_embeds   bf16 any length x 32" in text
    assert f"weights_sha256 {cache.fingerprint['vae']['weights_sha256'][:8]}" in text
    assert "max_pixels 6144" in text
    assert "frames        9 to 9, at 16 per second" in text
    for i, key in enumerate(cache.keys):
        assert f"{key}: 9 frames of" in text
        assert f"A clip called {key}." in text
        assert f"{cache.num_tokens((1, 2, 2))[i]:,} video tokens" in text


def test_rows_are_limited(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cache_dir), "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "bikes" in text
    assert "carphone_pristine" not in text
    assert "... and 1 more" in text


def test_decode_to_mp4(
    cache_dir: Path, tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "man.mp4"
    assert (
        main(
            [
                str(cache_dir),
                "--decode",
                "carphone_pristine",
                "--model",
                str(tiny_pipeline),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    video = next(decode_clip(out, ClipSpec(fps=16))).frames
    meta = LatentCache(cache_dir).meta(1)
    assert video.shape == (9, meta["height"], meta["width"], 3)
    assert f"{out}: 9 frames of {meta['width']}x{meta['height']}" in capsys.readouterr().out


def test_decode_to_png_is_the_vaes_picture(cache_dir: Path, tiny_pipeline: Path, tmp_path: Path) -> None:
    out = tmp_path / "strip.png"
    assert main([str(cache_dir), "--decode", "bikes", "--model", str(tiny_pipeline), "--out", str(out)]) == 0
    vae = AutoencoderKLWan.from_pretrained(tiny_pipeline, subfolder="vae")
    mean, std = (torch.tensor(vae.config[f"latents_{s}"]).view(1, -1, 1, 1, 1) for s in ("mean", "std"))
    with torch.no_grad():
        pixels = vae.decode(LatentCache(cache_dir).read(0).latents.float()[None] * std + mean).sample[0]
    frames = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
    strip = np.asarray(Image.open(out))
    assert strip.shape == (frames.shape[1], 8 * frames.shape[2], 3)
    for place, frame in ((0, 0), (7, 8)):
        shown = strip[:, place * frames.shape[2] : (place + 1) * frames.shape[2]].astype(int)
        assert np.abs(shown - frames[frame]).max() <= 1


def test_another_vae_is_refused(
    cache_dir: Path, tiny_pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(tiny_pipeline, tmp_path / "other"))
    vae = AutoencoderKLWan.from_pretrained(other, subfolder="vae")
    with torch.no_grad():
        next(vae.parameters()).add_(0.01)
    vae.save_pretrained(other / "vae")
    out = tmp_path / "a.mp4"
    assert main([str(cache_dir), "--decode", "bikes", "--model", str(other), "--out", str(out)]) == 2
    assert "vae.weights_sha256=" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "out", "message"),
    [
        ("bike", "a.mp4", "key=bike is not in cache"),
        ("zebra", "a.mp4", "use, for example, bikes, carphone_pristine"),
        ("bikes", "a.avi", "must end in .mp4 or .png"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, out: str, message: str
) -> None:
    assert main([str(cache_dir), "--decode", key, "--model", "x", "--out", str(tmp_path / out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_not_a_cache_and_missing_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "is not a latent cache" in capsys.readouterr().err
    assert main([str(tmp_path), "--decode", "bikes"]) == 2
    assert "--decode needs --model and --out; add both options" in capsys.readouterr().err
    assert main([str(tmp_path), "--rows", "many"]) == 2
    assert "Invalid value for '--rows'" in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_wands_never_imports_data_tools_and_they_stay_in_their_layers() -> None:
    def imported(path: Path) -> set[str]:
        nodes = ast.walk(ast.parse(path.read_text()))
        return {name for node in nodes for name in _names(node)}

    sources = sorted((ROOT / "wands").rglob("*.py"))
    assert sources
    assert not [path for path in sources if any(name.startswith("data_tools") for name in imported(path))]
    allowed = (
        *(
            "wands.conditions",
            "wands.data",
            "wands.encoders",
            "wands.errors",
            "wands.files",
            "wands.lock",
            "wands.own_files",
            "wands.texts",
            "wands.variants",
        ),
        *("wands.preprocess.progress", "wands.preprocess.length_histogram"),
        *("wands.config.base", "wands.config.click_options"),
        *(
            "wands.preprocess.clip_rules",
            "wands.preprocess.encoding",
            "wands.preprocess.workers",
            "wands.model.files.hub",
            "wands.config.options",
            "wands.report.page",
        ),  # of programs that are commands of wands
    )
    tools = sorted((ROOT / "data_tools").rglob("*.py"))
    assert len(tools) > 1
    for path in tools:
        wrong = {n for n in imported(path) if n.split(".")[0] == "wands" and not n.startswith(allowed)}
        assert not wrong, f"{path}: {wrong}"


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
