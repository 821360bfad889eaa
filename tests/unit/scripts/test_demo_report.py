"""The demo's own arithmetic: which clips, which prompts, how many steps, and a verdict that can fail."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import demo_report
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.samples import narrow_text
from wands.cli import main
from wands.commands.score import correlation
from wands.data.cache.format import cache_contract
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.errors import CacheError, DataError
from wands.sampling.requests import SampleRequest, find_problems, read_prompts
from wands.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (3, 6, 8)  # latent frames, height, width: 3 * 3 * 4 = 36 tokens
LARGE = (6, 12, 16)  # 6 * 6 * 8 = 288 tokens: the largest that the demo's settings allow; one fits a bin


def make_cache(
    path: Path, shapes: Sequence[tuple[int, int, int]], variant: str = "wan2.1-t2v-1.3b", **more: object
) -> Path:
    row = narrow_text(variant)
    with CacheWriter(path, row, {"vae": "aa"}) as writer:
        for i, shape in enumerate(shapes):
            meta = {
                "num_frames": 4 * shape[0] - 3,
                "fps": 16.0,
                "content": "c",
                "caption": f"clip, number {i}",
                **more,
            }
            latents = torch.zeros(row.dit.out_channels, *shape).bfloat16()
            arrays = {"latents": latents, "text_embeds": torch.zeros(2, 8).bfloat16()}
            writer.add(f"clip{i:03d}", arrays, meta)
        writer.commit(torch.zeros(1, 8).bfloat16())
    return path


def test_clips_are_those_that_are_there(clips_dir: Path, tmp_path: Path):
    demo_report.write_clips(clips_dir, tmp_path / "clips", held_out=False)
    with (tmp_path / "clips" / "metadata.csv").open(newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [Path(row["file_name"]).stem for row in rows] == list(demo_report.WINDOWS)
    assert len({row["caption"] for row in rows}) == len(rows)
    for row in rows:
        assert (tmp_path / "clips" / row["file_name"]).read_bytes() == (
            clips_dir / row["file_name"]
        ).read_bytes()
        assert 0 <= float(row["start"]) < float(row["end"])


def test_prompts_have_the_size_of_their_sample(tmp_path: Path):
    cache = make_cache(tmp_path / "cache", [SHAPE, LARGE])
    demo_report.write_prompts(cache, tmp_path / "prompts.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": "clip, number 0", "height": 48, "width": 64, "num_frames": 9, "seed": 0},
        {"prompt": "clip, number 1", "height": 96, "width": 128, "num_frames": 21, "seed": 1},
    ]


def test_prompts_have_the_strides_and_pictures_of_their_variant(clips_dir: Path, tmp_path: Path):
    source = {"source": str(clips_dir / "carphone_pristine.mp4"), "start_seconds": 0.5}
    cache = make_cache(tmp_path / "cache", [(2, 6, 8)], "wan2.2-ti2v-5b", **source)
    demo_report.write_prompts(cache, tmp_path / "prompts.jsonl")
    (request,) = read_prompts(tmp_path / "prompts.jsonl")
    assert (request.height, request.width, request.num_frames, request.last_image) == (96, 128, 5, None)
    frames = demo_report.source_frames(LatentCache(cache), 0)
    assert frames.shape == (5, 96, 128, 3)
    assert request.image is not None
    picture = np.asarray(Image.open(request.image))
    errors = [np.abs(picture.astype(int) - frame).mean() for frame in frames]
    assert errors[0] == 0 < min(errors[1:])


def test_frames_taken_are_those_that_the_variant_needs():
    taken = {
        name: demo_report.frames_taken(cache_contract(row)["conditions"]) for name, row in VARIANTS.items()
    }
    both = [name for name, frames in taken.items() if frames == {"image": 0, "last_image": -1}]
    assert both == ["wan2.1-flf2v-14b"]
    first = [name for name, frames in taken.items() if frames == {"image": 0}]
    assert first == ["wan2.1-i2v-14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"]
    for name, frames in taken.items():
        request = SampleRequest(prompt="a", **dict.fromkeys(frames, "f.png"))
        problems = list(find_problems(request, VARIANTS[name]))
        assert not problems, problems


def test_given_frames_say_nothing_about_a_sample():
    video = torch.arange(4.0).view(1, 4, 1, 1)
    assert demo_report.made(video, {}).flatten().tolist() == [0, 1, 2, 3]
    assert demo_report.made(video, {"image": 0}).flatten().tolist() == [1, 2, 3]
    assert demo_report.made(video, {"image": 0, "last_image": -1}).flatten().tolist() == [1, 2]
    assert demo_report.made(video[:, :1], {"image": 0}).flatten().tolist() == [0]


def test_losses_of_two_experts_are_told_apart():
    one = {"loss": 3.0}
    two = {"loss": 3.0, "loss_high": 2.0, "loss_low": 4.0}
    assert demo_report.loss_columns([one, one]) == {"training loss": [3.0, 3.0]}
    assert demo_report.loss_columns([two]) == {"high-noise expert": [2.0], "low-noise expert": [4.0]}


def test_correlation_is_pearsons():
    a, b = torch.randn(2, 16, *SHAPE)
    assert correlation(a, a) == pytest.approx(1, abs=1e-5)
    assert correlation(a, 3 - 2 * a) == pytest.approx(-1, abs=1e-5)
    assert abs(correlation(a, b)) < 0.1
    expected = np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1]
    assert correlation(a, b) == pytest.approx(expected, abs=1e-5)


def test_correlation_resizes_the_clip():
    ramp = torch.linspace(0, 1, 8).expand(16, 3, 6, 8)
    wide = torch.linspace(0, 1, 16).expand(16, 5, 12, 16)
    assert correlation(ramp, wide) > 0.99


def table_of(samples: torch.Tensor, clips: torch.Tensor) -> np.ndarray:
    return np.array([[correlation(mine, clip) for clip in clips] for mine in samples])


def test_the_verdict_on_noisy_copies_and_on_exchanged_samples():
    clips = torch.randn(3, 16, *SHAPE)
    samples = clips + torch.randn_like(clips)
    right, verdict = demo_report.judge(table_of(samples, clips), "abc")
    assert right.tolist() == [True, True, True]
    assert verdict == "each sample is closest to its own clip"
    right, verdict = demo_report.judge(table_of(samples[[1, 0, 2]], clips), "abc")
    assert right.tolist() == [False, False, True]
    assert verdict == "2 samples are closer to another clip"


def test_a_flat_or_broken_sample_is_wrong():
    clips = torch.randn(2, 16, *SHAPE)
    samples = torch.stack([torch.zeros_like(clips[0]), clips[1]])
    assert demo_report.judge(table_of(samples, clips), "ab")[0].tolist() == [False, True]
    assert demo_report.judge(np.full((2, 2), np.nan), "aa")[0].tolist() == [False, False]


def test_clips_of_one_caption_cannot_be_told_apart():
    clips = torch.randn(3, 16, *SHAPE)
    right, verdict = demo_report.judge(table_of(clips[[1, 0, 2]], clips), "aab")
    assert right.all()
    assert verdict.endswith("(2 clips share a caption and cannot be distinguished)")
    right, verdict = demo_report.judge(table_of(clips[[2, 0, 1]], clips), "aab")
    assert right.tolist() == [False, True, False]
    assert verdict.startswith("2 samples are closer to another clip")
    right, verdict = demo_report.judge(table_of(clips[[1, 2, 0]], clips), "aaa")
    assert right.all()
    assert "all clips have the same caption" in verdict


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([LARGE] * 4, 500),  # two steps for each pass, but few clips
        ([SHAPE] * 8, 500),  # all in one step
        ([LARGE] * 5, 1000),
        ([LARGE] * 3 + [SHAPE] * 3, 1000),
        ([LARGE] * 40, 1000),
    ],
)
def test_steps_grow_with_the_passes(tmp_path: Path, shapes: list[tuple[int, int, int]], expected: int):
    cache = make_cache(tmp_path / "cache", shapes)
    steps, why = demo_report.choose_steps(cache, None)
    assert steps == expected
    assert why.startswith(f"{expected} steps, ")
    assert f"{len(shapes)} clips; about {round((expected * 0.31 + 130) / 60)} minutes" in why
    assert demo_report.choose_steps(cache, 7)[0] == 7
    assert demo_report.choose_steps(cache, None, heavy=True)[0] == expected * 0.9


def test_steps_need_two_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    one = make_cache(tmp_path / "one", [SHAPE])
    with pytest.raises(DataError, match="needs at least two usable clips, not 1"):
        demo_report.choose_steps(one, None)
    with pytest.raises(CacheError):
        demo_report.choose_steps(tmp_path / "none", None)
    monkeypatch.setattr("sys.argv", ["demo_report.py", "steps", str(one)])
    assert demo_report.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(
        "sys.argv", ["demo_report.py", "steps", str(make_cache(tmp_path / "two", [SHAPE] * 2))]
    )
    assert demo_report.main() == 0
    assert capsys.readouterr().out == "500\n"


def test_progress_keeps_the_log_and_shows_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    lines = ["[INFO] launcher", *(f"step  {i}/40  loss {2 - i / 40:.5f}  lr 1e-3" for i in range(1, 41))]
    output = "\n".join([*lines, "wands: model.path=x is not a folder", ""])
    monkeypatch.setattr("sys.stdin", io.StringIO(output))
    assert demo_report.show_progress(tmp_path / "log.txt", "training") == 0
    assert (tmp_path / "log.txt").read_text() == output
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "training: step 4 of 40, loss 1.900"
    assert len(out.splitlines()) == 10
    assert err == "wands: model.path=x is not a folder\n"


@pytest.mark.parametrize(
    ("accelerator", "gpus", "expected"), [("cpu", 0, 2), ("cpu", 1, 2), ("cuda", 1, 1), ("cuda", 8, 2)]
)
def test_no_process_shares_a_gpu(
    accelerator: str, gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr("wands.distributed.bootstrap.accelerator_type", lambda: accelerator)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("sys.argv", ["demo_report.py", "processes"])
    assert demo_report.main() == 0
    assert capsys.readouterr().out == f"{expected}\n"


def demo(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Only for calls that are refused: set-up and everything after it does not run."""
    shutil.copytree(ROOT / "scripts", cwd / "checkout" / "scripts", ignore=shutil.ignore_patterns("setup.sh"))
    (cwd / "checkout" / "scripts" / "setup.sh").write_text(
        'echo "${settings[@]}"; echo "out=$out clips=$clips"; exit 9\n'
    )
    command = ["bash", "checkout/scripts/demo.sh", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--out", "demo", "--clips", "demo/clips"), "is inside --out"),
        (("--out", "demo", "--clips", "demo"), "is inside --out"),
        (("--out", "demo", "--clips", "link"), "is inside --out"),
        (("--out", "demo", "--clips", "demo/clips/metadata.csv"), "is inside --out"),
        (("--out", "mine"), "contains files that no demo wrote"),
        (("--out",), "--out needs a folder"),
        (("--variant",), "--variant needs a name"),
        (("--variant", "wan3"), f"unknown variant wan3; one of {' '.join(VARIANTS)}"),
        (("--lora", "high"), "--lora high is not a rank"),
        (("--set",), "--set needs KEY=VALUE"),
        (("--what",), "unknown option --what"),
    ],
)
def test_folders_that_would_be_lost_are_refused(tmp_path: Path, args: tuple[str, ...], says: str):
    for name in ("demo/clips/metadata.csv", "demo/.wands-demo", "mine/precious.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("demo/clips")
    found = demo(tmp_path, *args)
    assert (found.returncode, found.stdout) == (2, "")
    assert says in found.stderr
    assert found.stderr.count("\n") == 1
    assert (tmp_path / "demo" / "clips" / "metadata.csv").exists()


def test_paths_are_the_callers(tmp_path: Path):
    (tmp_path / "my clips").mkdir()
    found = demo(tmp_path, "--clips", "my clips", "--out", "new")
    assert found.stdout.endswith(f"\nout={tmp_path}/new clips={tmp_path}/my clips\n"), found.stderr


def test_the_name_of_a_dataset_stays(tmp_path: Path):
    stdout = demo(tmp_path, "--clips", "owner/name").stdout
    assert stdout.endswith(f"\nout={tmp_path}/checkout/demo_out clips=owner/name\n")


def test_the_minutes_come_before_the_set_up(tmp_path: Path):
    first, _, last = demo(tmp_path).stdout.splitlines()
    assert "about 6 minutes" in first
    assert last.startswith("out=")


def test_settings_of_the_training_are_passed_on(tmp_path: Path):
    stdout = demo(tmp_path, "--set", "optim.name=muon", "--set", "flow.flow_shift=3").stdout
    assert stdout.splitlines()[1] == "--set optim.name=muon --set flow.flow_shift=3"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b", "wan2.1-flf2v-14b"])
def test_the_next_commands_have_all_that_they_need(variant: str, lora: bool, tmp_path: Path):
    taken = demo_report.frames_taken(cache_contract(VARIANTS[variant])["conditions"])
    row = {"prompt": 'a man\'s "car"', "height": 96, "width": 128, "num_frames": 9, "seed": 0}
    row |= {name: f"pictures/000-{name}.png" for name in taken}
    infer, push = demo_report.next_commands(tmp_path, "wands", row, lora)
    for program, name, *arguments in (infer, push):
        assert program == "wands"
        main.commands[name].make_context(name, arguments)  # raises for a missing or unknown option
    values = dict(zip(infer[2::2], infer[3::2], strict=True))
    assert (values["--height"], values["--width"], values["--frames"]) == ("96", "128", "9")
    assert values["--guidance"] == "1"  # the demo trains without caption dropout
    assert values["--model"] == str(tmp_path / ("model" if lora else "exported"))
    assert {name for name in values if "image" in name} == {f"--{name.replace('_', '-')}" for name in taken}
    for name in taken:
        assert values[f"--{name.replace('_', '-')}"] == str(tmp_path / row[name])


@pytest.mark.parametrize(("held_out", "overfits"), [(1.4, True), (0.5, False)])
def test_an_overfit_is_called_one(held_out: float, overfits: bool, capsys: pytest.CaptureFixture):
    rows = [
        {"train": 1.0, "held_out": 1.1},
        {"train": 0.5, "held_out": None},
        {"train": 0.4, "held_out": held_out},
    ]
    demo_report.print_evaluations(rows)
    lines = capsys.readouterr().out.splitlines()
    assert "trained clips 1.000 -> 0.400, other parts of the same films 1.100 ->" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["overfit,"] * overfits
    demo_report.print_evaluations(rows[1:2])
    assert capsys.readouterr().out == ""


def test_longer_prompts_have_twice_the_latent_frames(tmp_path: Path):
    rows = [{"prompt": "a", "num_frames": 21, "seed": 3}, {"prompt": "b", "num_frames": 5}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    demo_report.double_frames(tmp_path / "prompts.jsonl", tmp_path / "longer.jsonl")
    longer = [json.loads(line) for line in (tmp_path / "longer.jsonl").read_text().splitlines()]
    assert longer == [{**rows[0], "num_frames": 41}, {**rows[1], "num_frames": 9}]
