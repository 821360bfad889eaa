"""Every stage of scripts/gpu.sh, rehearsed on the CPU with tiny sizes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_peers
import gpu_blocks
import gpu_clock
import gpu_kernels
import gpu_stages
import gpu_steps
import pytest
import torch
from bench_peers import KINDS
from bench_record import Results
from torch import Tensor

from wands.attention.kernels.registry import get_backend
from wands.attention.packed import Segments

STEP = ["attention.backend=cpu", "model.checkpointing=full"]


def rehearse(
    stages: Sequence[str],
    out: Path,
    overrides: Sequence[str] = (),
    kinds: Sequence[str] = KINDS,
    runs: Sequence[str] = tuple(gpu_steps.STEP_RUNS),
) -> dict[str, Any]:
    """Run stages in this process, with commands of wands in the same process. Return the parts of each stage."""
    from click.testing import CliRunner

    from wands.cli import main

    def run_wands(arguments: Sequence[str]) -> None:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output

    gpu_steps.run_wands = run_wands
    bench_peers.KINDS = kinds
    gpu_steps.STEP_RUNS = {name: gpu_steps.STEP_RUNS[name] for name in runs}
    gpu_clock.time_calls = lambda work, device, rounds=5: (work(), (2.0, 1.0))[1]
    parts = {}
    for stage in stages:
        sys.argv = ["gpu_stages.py", stage, "--device", "cpu", "--out", str(out)]
        sys.argv += [part for text in overrides for part in ("--set", text)]
        gpu_stages.main()
        parts[stage] = json.loads((out / f"{stage}.json").read_text())["parts"]
    return parts


def rows_of(parts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    assert "rows" in parts[name], parts[name]
    return parts[name]["rows"]


def check_comparison(parts: dict[str, Any], kind: str) -> None:
    table = {row["variant"]: row for row in rows_of(parts, kind)}
    kind = kind.removesuffix(", compiled peer")
    assert table.keys() == {f"{kind}, {name}" for name in ("wands", "one at a time", "padded")}
    losses = [row["loss"] for row in table.values()]
    assert losses == pytest.approx([2.0] * 3, rel=0.2)  # E[(noise - latents)^2], as the head is zero


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path, new_world: Callable[..., list[Any]]):
    stages = ("attention", "block", "step", "memory", "infer", "encode", "compare", "causal")
    (found,) = new_world(1, rehearse, stages, tmp_path, STEP, ("lora",), ["wan2.1-t2v-1.3b"])
    for stage in stages:
        errors = {name: part["error"] for name, part in found[stage].items() if "error" in part}
        assert not errors
    attention = rows_of(found["attention"], "2 heads, 1 x 96 tokens")
    flops = 4 * 2 * 128 * 96**2
    assert attention[0]["forward TFLOP/s"] == pytest.approx(
        flops / 1e12
    )  # the patched clock: one second per call
    assert attention[0]["backward TFLOP/s"] == pytest.approx(2.5 * flops / 1e12)
    names = {row["kernel"] for row in rows_of(found["attention"], "cross-attention, 2 heads")}
    assert names == {"cpu"}
    step = rows_of(found["step"], "wan2.1-t2v-1.3b, 3 clips")[0]
    assert step["s"] > 0
    assert step["estimated GiB"] > 0
    parts = [row["part"] for row in rows_of(found["infer"], "tiny")]
    assert parts == ["load", "text", "denoising", "decode", "write mp4", "one denoising step"]
    check_comparison(found["compare"], "lora")
    check_comparison(found["compare"], "lora, compiled peer")
    causal = found["causal"]
    assert rows_of(causal, "24 tokens")[0]["FLOPs"] > 1.1  # the text costs as much as the few tokens
    assert rows_of(causal, "packing")[0]["speed of packing"] > 0
    cached = [row["cached MiB"] for row in rows_of(causal, "rollout")]
    assert len(cached) == 1
    assert cached[0] > 0
    speeds = {row["speed"]: row["value"] for row in rows_of(found["step"], "calibrate")}
    assert speeds["cpu forward"] > 0
    losses = rows_of(found["step"], "20 losses in bf16 and fp8")
    assert [row["step"] for row in losses] == list(range(1, 21))
    assert all(abs(row["fp8 / bf16"] - 1) < 0.05 for row in losses)
    assert any(row["fp8"] != row["bf16"] for row in losses)
    assert len(rows_of(found["memory"], "tiny")) == 6
    assert {row["clips/s"] for row in rows_of(found["encode"], "VAE, bfloat16, batch 2")} == {2.0}
    assert rows_of(found["encode"], "VAE, bfloat16, batch 1, channels last")
    assert {row["captions/s"] for row in rows_of(found["encode"], "UMT5")} == {2.0}
    assert rows_of(found["block"], "wan2.1-t2v-1.3b, 1 clip")[0]["U"] > 100


def measure_without_memory(kind: str) -> list[dict[str, Any]]:
    """Compare, where the padded batch does not fit into memory."""
    import bench_peers
    import bench_step
    import torch

    def padded(self: bench_peers.Peer) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench_peers.Peer.padded = padded
    bench_step.GRIDS["cpu"] = [(1, 4, 4), (2, 4, 4)]
    bench_step.WIDTHS["cpu"] |= {"num_layers": 1, "ffn_dim": 96, "text_dim": 32}
    return bench_peers.measure("cpu", kind, rounds=1)


@pytest.mark.slow
def test_a_variant_without_enough_memory_loses_no_other(new_world: Callable[..., list[Any]]):
    (rows,) = new_world(1, measure_without_memory, "lora")
    assert [row["variant"] for row in rows] == [
        f"lora, {name}" for name in ("wands", "one at a time", "padded")
    ]
    assert all(row["s"] > 0 for row in rows[:2])
    assert rows[2] == {"variant": "lora, padded", "peak MiB": "out of memory"}


def test_a_part_that_does_not_exist_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = ["step", "--device", "cpu", "--out", str(tmp_path), "--part", "9 clips"]
    monkeypatch.setattr(sys, "argv", ["gpu_stages.py", *options])
    assert gpu_stages.main() == 2
    steps = [f"{name}, 3 clips" for name in gpu_steps.STEP_RUNS]
    names = "; ".join(["calibrate", *steps, "20 losses in bf16 and fp8"])
    sentence = f"--part 9 clips: no part of step has this text in its name; use one of: {names}\n"
    assert capsys.readouterr().out.endswith(sentence)


def test_overrides_reach_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same block with other recipe settings does other work."""
    args = gpu_stages.argparse.Namespace(device="cpu", out=tmp_path, overrides=[])
    monkeypatch.setattr(gpu_clock, "time_calls", lambda work, device, rounds=5: (work(), (2.0, 1.0))[1])
    counts = {}
    for mode in ("none", "full"):
        args.overrides = [f"model.checkpointing={mode}"]
        counts[mode] = gpu_blocks.block(args, "wan2.1-t2v-1.3b", ((2, 8, 8),))[0]
    assert counts["none"]["operators"] < counts["full"]["operators"]
    assert counts["none"]["GB"] < counts["full"]["GB"]


def test_one_call_of_cudnn_is_compared_with_torch(monkeypatch: pytest.MonkeyPatch):
    """No CPU has the operators. Here, functions with their arguments compute with the CPU's kernel."""
    kernel = get_backend("cpu")

    def segments_of(starts: Tensor, longest: int) -> Segments:
        lens = starts.diff().tolist()
        assert longest == max(lens)
        return Segments.build(lens)

    def forward(
        query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp, *, scale
    ):
        assert attn_bias is None
        assert compute_log_sumexp
        out, lse = kernel.forward(query, key, value, segments_of(cum_seq_q, max_q), scale)
        return out, lse, cum_seq_q, cum_seq_k, max_q, max_k, "seed", "offset", None

    def backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        philox_seed,
        philox_offset,
        attn_bias,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        *,
        scale,
    ):
        assert (philox_seed, philox_offset, attn_bias, dropout_p, is_causal) == (
            "seed",
            "offset",
            None,
            0,
            False,
        )
        given = grad_out, query, key, value, out, logsumexp
        return kernel.backward(*given, segments_of(cum_seq_k, max_k), scale)

    aten = torch.ops.aten
    for name, call in (("forward", forward), ("backward", backward)):
        schema = getattr(aten, f"_cudnn_attention_{name}").default._schema
        names = [argument.name for argument in schema.arguments]
        own = list(inspect.signature(call).parameters)
        assert own == [one for one in names if one in own]
        monkeypatch.setattr(aten, f"_cudnn_attention_{name}", call)
    monkeypatch.setattr(gpu_kernels, "choose_backend", lambda *_: kernel)
    monkeypatch.setattr(gpu_clock, "time_calls", lambda work, device, rounds=5: (work(), (2.0, 1.0))[1])
    (row,) = gpu_kernels.cudnn_varlen("cpu", 2, (5, 3, 7))
    assert row["error of out"] == row["error of gradients"] == 0
    assert row["backward TFLOP/s"] == pytest.approx(2.5 * row["forward TFLOP/s"])


def test_times_are_predicted_from_measured_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    file = tmp_path / "speeds.json"
    from_data_sheet = gpu_steps.find_machine("cuda", file)
    assert from_data_sheet.name.startswith("H100")
    file.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "copy_bandwidth": 1.5e12}))
    measured = gpu_steps.find_machine("cuda", file)
    assert (measured.source, measured.copy_bandwidth) == (str(file), 1.5e12)
    assert measured.copy_bandwidth != from_data_sheet.copy_bandwidth
    assert gpu_steps.find_machine("cpu", file).name.startswith("H200")


@pytest.mark.parametrize("fails", [False, True])
def test_the_tests_become_a_row(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = '<testcase name="b"><failure/></testcase>' if fails else '<testcase name="b"/>'
    xml = f'<testsuites><testsuite tests="3" skipped="1"><testcase name="a"/>{case}</testsuite></testsuites>'

    def pytest_run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[2:5] == ["pytest", "-m", "gpu"]
        assert command[-2:] == ["tests/gpu", "tests/launch"]
        Path(command[5].partition("=")[2]).write_text(xml)
        options["stdout"].write("printed\n")
        return subprocess.CompletedProcess(command, int(fails))

    args = gpu_stages.argparse.Namespace(device="cuda", out=tmp_path)
    monkeypatch.setattr(gpu_stages, "TESTS", ("gpu", "launch"))
    results = Results(tmp_path, "tests", "cpu")
    monkeypatch.setattr(gpu_stages.subprocess, "run", pytest_run)
    gpu_stages.tests_stage(args, results)
    part = json.loads((tmp_path / "tests.json").read_text())["parts"]["gpu, launch"]
    if fails:
        assert "b; see" in part["error"]
    else:
        assert part["rows"] == [{"tests": 3, "skipped": 1, "failed": 0}]
    assert (tmp_path / "tests.log").read_text() == "printed\n"


@pytest.mark.slow
def test_a_profile_that_fails_keeps_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_wands(arguments: Sequence[str]) -> None:
        out = Path(arguments[arguments.index("--out") + 1])
        out.mkdir()
        row = {"seconds": 2.0, "tflops": 1.0, "data_wait": 0.0, "mfu": None, "device_peak": None}
        (out / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
        raise RuntimeError("the profiler failed")

    monkeypatch.setattr(gpu_steps, "run_wands", run_wands)
    args = gpu_stages.argparse.Namespace(device="cpu", out=tmp_path, overrides=[])
    results = Results(tmp_path, "step", "cpu")
    gpu_steps.step_stage(args, results)
    row = json.loads((tmp_path / "step.json").read_text())["parts"]["wan2.1-t2v-1.3b, 3 clips"]["rows"][0]
    assert (row["s"], row["profile"]) == (2.0, "failed")
    assert results.failed


@pytest.mark.slow
def test_every_step_runs(tmp_path: Path, new_world: Callable[..., list[Any]]):
    """Full finetune and LoRA, in bf16, in fp8 and with swapped blocks. On a CPU the models have two blocks."""
    (found,) = new_world(1, rehearse, ("step",), tmp_path)
    assert len(gpu_steps.STEP_RUNS) == 5
    for name in gpu_steps.STEP_RUNS:
        assert rows_of(found["step"], f"{name}, 3 clips")[0]["s"] > 0


@pytest.mark.slow
def test_a_full_finetune_is_compared(tmp_path: Path, new_world: Callable[..., list[Any]]):
    (found,) = new_world(1, rehearse, ("compare",), tmp_path)
    check_comparison(found["compare"], "full")
    check_comparison(found["compare"], "lora")
