"""Append benchmark results to a record file, and print the numbers that have changed since the last results.

    bash scripts/gpu.sh --only compare --out gpu_out
    python scripts/bench_record.py record.jsonl gpu_out/compare.json gpu_out/memory.json

The first argument is the record file. The other arguments are JSON files that scripts/gpu.sh wrote. Each JSON file has the
results of one stage (a group of measurements, such as `compare`), and becomes one line of the record. Every number is compared
with the newest earlier line of the same stage, machine and recipe overrides. Counts, sizes and ratios hardly vary on one
machine, so each relative change above --tolerance is printed. Times and speeds vary from run to run, so they are printed only
if they change by more than 10 times --tolerance.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, Any]]
TIMES = ("s", "ms", "/s")
"""Units at the end of the names of columns with times or speeds, such as `peak s` or `tokens/s`."""


class Results:
    """Results of one stage (group of measurements) of scripts/gpu.sh.

    A stage has several parts, such as one part for each model size.

    After every part, the results are written to STAGE.json and STAGE.txt.

    Args:
        folder: folder of the two files.
        stage: name of the stage, which is also the name of the files.
        device: "cuda" or "cpu".
        overrides: recipe overrides of the run.
        part: `run` runs only the parts whose names contain this text.

    Attributes:
        failed: whether at least one part has raised an error.
        skipped: names of the parts that did not run because of `part`.
    """

    def __init__(
        self, folder: Path, stage: str, device: str, overrides: Sequence[str] = (), part: str = ""
    ) -> None:
        self._part = part
        self.skipped = list[str]()
        self.failed = False
        self._path = folder / f"{stage}.json"
        self._device = device
        self._data: dict[str, Any] = {
            "stage": stage,
            "commit": commit(),
            "machine": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
            "torch": torch.__version__,
            "overrides": list(overrides),
            "parts": {},
        }
        folder.mkdir(parents=True, exist_ok=True)
        self._write(f"{stage} on {self._data['machine']}, torch {torch.__version__}, {self._data['commit']}")

    @property
    def ran(self) -> bool:
        """Whether at least one part ran."""
        return bool(self._data["parts"])

    def run(self, name: str, measure: Callable[[], Rows]) -> None:
        """Run `measure`, print its rows as a table, and write all results. If `measure` raises an error, record the error.

        If the name of the part does not contain `part`, do nothing.
        """
        if self._part not in name:
            self.skipped.append(name)
            return
        started = time.perf_counter()
        try:
            part: dict[str, Any] = {"rows": measure()}
            text = format_rows(part["rows"])
        except Exception as error:  # one kernel or size that fails must not lose the others
            self.failed = True
            text = f"error: {type(error).__name__}: {error}"
            part = {"error": text}
        part["seconds"] = round(time.perf_counter() - started, 1)
        self._data["parts"][name] = part
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()
        self._write(f"\n{name} ({part['seconds']} s)\n{text}", mode="a")

    def _write(self, text: str, mode: str = "w") -> None:
        print(text, flush=True)
        with open(self._path.with_suffix(".txt"), mode) as table:
            table.write(text + "\n")
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._data, indent=1))
        os.replace(temporary, self._path)


def commit() -> str:
    """Return the git commit of this checkout, with "+" if tracked files have changed, or "unknown" outside of a checkout."""
    folder = Path(__file__).parent
    texts = []
    for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return "unknown"
        texts.append(done.stdout.strip())
    return texts[0] + "+" * bool(texts[1])


def format_rows(rows: Rows) -> str:
    """Return a text table of `rows`, dictionaries that map columns to values. A column is as wide as its longest cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def numbers_of(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for each number in the results of a stage (group of measurements).

    The name is `part / title / column`. The part is one measurement of the stage. The title is the first text in the row of the
    number.

    Args:
        result: content of a STAGE.json file.
    """
    for part, content in result["parts"].items():
        for row in content.get("rows", ()):
            title = next((str(value) for value in row.values() if isinstance(value, str)), "")
            for column, value in row.items():
                if isinstance(value, int | float):
                    yield f"{part} / {title} / {column}", float(value)


def changes(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> list[str]:
    """Return a line for each number that has changed too much, and for each measurement that fails only in `after`.

    Args:
        before: content of an earlier STAGE.json file.
        after: content of the new STAGE.json file.
        tolerance: largest relative change that is not listed. For times and speeds, 10 times this value is used.
    """
    old = dict(numbers_of(before))
    lines = []
    for name, value in numbers_of(after):
        allowed = tolerance * (
            10 if name.endswith(tuple(f" {unit}" for unit in TIMES)) or name.endswith("/s") else 1
        )
        if name in old and abs(value - old[name]) > allowed * abs(old[name]):
            lines.append(f"{name}: {_cell(old[name])} -> {_cell(value)}")
    for part, content in after["parts"].items():
        if "error" in content and "error" not in before["parts"].get(part, {}):
            lines.append(f"{part}: {content['error']}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path, help="file to append to; it is created if it does not exist")
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of scripts/gpu.sh")
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest change that is not printed")
    args = parser.parse_args()
    lines = args.record.read_text().splitlines() if args.record.is_file() else []
    earlier = [json.loads(line) for line in lines]
    with open(args.record, "a") as record:
        for path in args.results:
            result = json.loads(path.read_text())
            same = [
                row
                for row in earlier
                if all(row[key] == result[key] for key in ("stage", "machine", "overrides"))
            ]
            record.write(json.dumps(result) + "\n")
            if not same:
                print(f"{result['stage']}: the first line for {result['machine']}")
                continue
            found = changes(same[-1], result, args.tolerance)
            print(f"{result['stage']}, {same[-1]['commit']} -> {result['commit']}: {len(found)} changes")
            print("\n".join(f"  {line}" for line in found))


if __name__ == "__main__":
    main()
