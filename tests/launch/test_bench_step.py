"""bench_step's three ways as a GPU would see them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_cuda import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_pack_is_less_for_a_gpu_to_do_than_its_clips_alone(tmp_path: Path):
    """What a GPU's time beside matrix products and attention goes by: bytes to move, operators to start."""
    command = [sys.executable, "-m", "tests.support.bench_step_traffic", str(build(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    packed, single, padded = (found[name] for name in ("packed", "single", "padded"))
    assert packed["traffic"] < 0.8 * single["traffic"]
    assert 2 * packed["operators"] < single["operators"]
    factor = 3 * (8 * 40 * 52) / (5 * 30 * 52 + 8 * 35 * 46 + 3 * 40 * 40)
    assert packed["traffic"] * factor < padded["traffic"]
