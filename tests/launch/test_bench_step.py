"""bench_step's three ways as a GPU would see them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_cuda import build
from wands.planning.step_time import ACTIVATION_BYTES, POINTWISE_BYTES

ROOT = Path(__file__).resolve().parents[2]


def count(folder: Path, *more: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "tests.support.bench_step_traffic", str(build(folder)), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_pack_is_less_for_a_gpu_to_do_than_its_clips_alone(tmp_path: Path):
    """Bytes to move and operators to start: they decide a GPU's time outside matrix products and attention."""
    found = count(tmp_path)
    packed, single, padded = (found[name] for name in ("packed", "single", "padded"))
    assert packed["traffic"] < 0.8 * single["traffic"]
    assert 2 * packed["operators"] < single["operators"]
    factor = 3 * (8 * 40 * 52) / (5 * 30 * 52 + 8 * 35 * 46 + 3 * 40 * 40)
    assert packed["traffic"] * factor < padded["traffic"]


@pytest.mark.slow
def test_a_compiled_block_moves_a_third_of_the_bytes(tmp_path: Path):
    """A block of the 1.3B model on 21 clips of 32,760 tokens in all, with recomputation: traffic in parts of tokens x width."""
    found = count(tmp_path, "block")
    ratio = 8960 / 1536  # hidden width of the feed-forward / width
    assert found["compiled"]["traffic"] <= 240 + 16 * ratio
    predicted = [4 * (number + ACTIVATION_BYTES * ratio) for number in POINTWISE_BYTES]
    assert [found[way]["traffic"] for way in ("packed", "compiled")] == pytest.approx(predicted, rel=0.05)
    assert found["compiled"]["traffic"] < 0.3 * found["packed"]["traffic"]
    assert found["compiled"]["operators"] <= 60
    assert found["packed"]["operators"] > 460
