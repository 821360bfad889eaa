"""FLOPs of self-attention, and snapshots of the memory of a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wands.attention.ring import RingAttention, attention_flops, pairs_of_rank
from wands.attention.varlen import choose_backend
from wands.config.recipe import ProfileConfig
from wands.train import profiler
from wands.train.profiler import format_scopes, memory_snapshots, profiled_steps


@pytest.mark.parametrize(
    ("visible", "pairs"), [((), 10 * 10 + 14 * 14), (((0, 0, 1), (1, 0, 2)), 10 * 10 + 14 * 24)]
)
def test_pytorch_counts_self_attention(visible: tuple[tuple[int, int, int], ...], pairs: int):
    q = torch.randn(24, 2, 32, requires_grad=True)
    backend = choose_backend("auto", "cpu", torch.float32, 32)
    with FlopCounterMode(display=False) as counter:
        RingAttention(backend)(
            q, q, q, SimpleNamespace(chunk_lens=((10, 14),), visible=visible)
        ).sum().backward()
    forward = 4 * 2 * 32 * pairs
    flops = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    assert flops == {"wands.ring_forward": forward, "wands.ring_backward": 2.5 * forward}


def test_a_profile_counts_long_lists_of_units():
    """PyTorch's profiler drops lists of more than 30 numbers, but not the number of pairs."""
    lens = (2,) * 40
    visible = tuple((unit, 0, unit + 1) for unit in range(40))
    q = torch.randn(80, 2, 32)
    backend = choose_backend("auto", "cpu", torch.float32, 32)
    with torch.profiler.profile(record_shapes=True) as recorded:
        RingAttention(backend)(q, q, q, SimpleNamespace(chunk_lens=(lens,), visible=visible))
    flops = sum(profiler._attention_flops(event) for event in recorded.events())
    assert flops == 4 * 2 * 32 * sum(2 * 2 * (unit + 1) for unit in range(40))


def test_the_ranks_of_a_ring_share_the_flops():
    lens = ((3, 5), (4, 0), (1, 7))
    shares = [attention_flops((8, 2, 32), pairs_of_rank(lens, (), rank)) for rank in range(3)]
    assert sum(shares) == 4 * 2 * 32 * (8 * 8 + 12 * 12)
    assert shares[1] == 4 * 2 * 32 * 4 * 8


def test_shares_are_of_the_gpu_where_there_is_one():
    rows = {"ffn": [4.0, 10e3, 1e6, 6e9], "data wait": [2.0, 200e3, 0.0, 0.0]}
    _, ffn, wait, total = format_scopes(rows, 2.0, 2).splitlines()
    assert ffn.split() == ["ffn", "2", "5.0", "500.0", "50.0%", "3.000"]
    assert wait.split() == ["data", "wait", "1", "100.0", "0.0", "10.0%", "0.000"]
    assert total == "one step: 1000.0 ms, 3.000 GFLOP, 0.003 TFLOP/s"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Calls of functions of torch.cuda, which do nothing here."""
    made: list[tuple[str, Any]] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(
        memory,
        "_record_memory_history",
        lambda enabled="all", context="all", **_: made.append(("record", enabled and context)),
    )

    def dump(path: str) -> None:
        Path(path).write_bytes(b"snapshot")
        made.append(("dump", kept_name(path)))

    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append(("synchronize", None)))
    profile = profiler.profile
    monkeypatch.setattr(profiler, "profile", lambda activities, **more: profile(**more))
    return made


def kept_name(path: str) -> str:
    """The name under which a temporary file is kept."""
    return re.sub(r"^\.(.+)\.\d+\.tmp(\..+)$", r"\1\2", Path(path).name)


def training_of(out: Path, device: str, profile: ProfileConfig | None = None) -> Any:
    """Training process of 5 steps, with the attributes that the profiler uses."""
    return SimpleNamespace(
        recipe=SimpleNamespace(profile=profile),
        output_dir=out,
        total_steps=5,
        rank=0,
        device=torch.device(device),
        groups=SimpleNamespace(ring=None),
        engines={},
        log=lambda text: None,
    )


def run_out_of_memory(found: Any) -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_snapshots(found):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return caught.value


def test_out_of_memory_leaves_a_snapshot(calls: list[tuple[str, Any]], tmp_path: Path):
    error = run_out_of_memory(training_of(tmp_path, "cuda"))
    assert calls == [("dump", "rank0_out_of_memory.pickle")]
    path = tmp_path / "profile" / "rank0_out_of_memory.pickle"
    assert error.__notes__ == [
        f"A snapshot of the GPU memory is in {path}; https://pytorch.org/memory_viz shows it."
    ]


def test_the_memory_of_profiled_steps_is_recorded(calls: list[tuple[str, Any]], tmp_path: Path):
    def batches() -> Iterator[int]:
        for step in range(1, 6):
            calls.append(("step", step))
            yield step

    found = training_of(tmp_path, "cuda", ProfileConfig(start=2, steps=2))
    assert list(profiled_steps(found, batches(), 0)) == [1, 2, 3, 4, 5]
    steps = [("step", number) for number in range(1, 6)]
    window = [("record", "alloc"), *steps[1:3], ("synchronize", None), ("dump", "rank0_step_000002.pickle")]
    assert calls == [steps[0], *window, ("record", None), *steps[3:]]


def test_a_cpu_has_no_snapshots(calls: list[tuple[str, Any]], tmp_path: Path):
    found = training_of(tmp_path, "cpu", ProfileConfig(start=1, steps=1))
    assert list(profiled_steps(found, range(1, 6), 0)) == [1, 2, 3, 4, 5]
    assert not hasattr(run_out_of_memory(found), "__notes__")
    assert calls == []


@pytest.mark.slow
def test_libkineto_prints_no_marks_on_a_cpu(tmp_path: Path):
    """In a new process: libkineto reads its level once."""
    code = (
        "import sys; from pathlib import Path; from tests.unit.train.test_profiler import *; "
        "found = training_of(Path(sys.argv[1]), 'cpu', ProfileConfig(start=1, steps=1)); "
        "list(profiled_steps(found, range(1, 3), 0))"
    )
    env = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "USDT" not in done.stderr
    assert list((tmp_path / "profile").iterdir())


@pytest.mark.parametrize(
    ("section", "start_step", "traces"),
    [
        (None, 0, []),
        ({"start": 2}, 3, ["000004"]),
        ({"start": 9}, 0, []),
        ({"start": 5, "steps": 9}, 0, ["000005"]),
    ],
)
def test_which_steps(section: Any, start_step: int, traces: list[str], tmp_path: Path):
    """A run that resumes later profiles its first steps; a window after the last step does nothing."""
    found = training_of(tmp_path, "cpu", section and ProfileConfig(**section))
    steps = list(range(start_step + 1, 6))
    assert list(profiled_steps(found, iter(steps), start_step)) == steps
    assert [path.name for path in tmp_path.glob("profile/*.txt")] == [
        f"rank0_step_{name}.txt" for name in traces
    ]
