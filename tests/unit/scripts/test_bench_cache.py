"""scripts/bench_cache.py: all layouts give the same samples, and the table has all its rows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench_cache.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_cache", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_layouts_give_the_same_samples(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PER_SHARD", 2)
    wanted = [tuple(t.view(torch.int16) for t in pair) for pair in bench.make_samples(16 << 20)]
    assert len(wanted) > 2
    for name in ("Plain", "Wands", "Safetensors", "TarScanned"):
        (tmp_path / name).mkdir()
        layout = getattr(bench, name)(tmp_path / name)
        layout.write(bench.make_samples(16 << 20))
        layouts = [layout]
        if name == "TarScanned":
            layouts.append(bench.TarIndexed(tmp_path / name))
            layouts[1].share(layout)
        for layout in layouts:
            assert len(layout) == len(wanted)
            order = [*range(1, len(wanted)), 0]
            assert len(list(layout.random(order))) == len(order)
            for i, pair in zip(order, layout.random(order), strict=True):
                assert all(torch.equal(a, b.view(torch.int16)) for a, b in zip(wanted[i], pair, strict=True))
            for i, pair in enumerate(layout.sequential()):
                assert all(torch.equal(a, b.view(torch.int16)) for a, b in zip(wanted[i], pair, strict=True))
            assert i == len(wanted) - 1
            bench.empty_page_cache(layout.folder)


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--mib",
        "8",
        "--rounds",
        "2",
        "--index",
        "1500",
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    large, *table = done.stdout.splitlines()
    assert re.fullmatch(
        r"index of 1,500 samples in 3 shards: opened in [0-9.]+ s, their tokens in [0-9.]+ s", large
    )
    rows = {line[:14].strip(): line[14:] for line in table[3:]}
    assert [*rows] == ["plain", "wands", "safetensors", "tar scanned", "tar indexed"]
    assert rows["plain"].count("1.00 (1.00-1.00)") == 4
    assert all(row.count("(") == 4 for name, row in rows.items() if name != "tar indexed")
    assert rows["tar indexed"].count("(") == 2
    assert not list(tmp_path.iterdir())
