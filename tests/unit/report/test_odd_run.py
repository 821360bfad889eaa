"""A run folder with values of the wrong type or size: the page and the strips of an export leave them out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from tests.support.odd_values import odd_copies, outcome, to_text
from tests.support.run_folder import write_rows, write_run
from wands.config.options import ReportOptions
from wands.report.page import render_page, report
from wands.report.run_data import read_run, sample_strips

FILES = ("metrics.jsonl", "events.jsonl", "evaluations.jsonl", "samples/samples.jsonl")
DEFAULT = ("samples/samples.jsonl",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", steps=20, every=10)


def read_and_show(folder: Path) -> None:
    read = read_run(folder)
    assert "<html" in render_page([read], folder)
    sample_strips(read, "ema", 10**9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in FILES]
)
def test_any_value_in_any_field_of_a_row_is_left_out(run: Path, name: str) -> None:
    path = run / name
    sound = path.read_text()
    rows = [json.loads(line) for line in sound.splitlines()]
    kinds = {tuple(row): row for row in rows}  # a row of each kind
    odd = [pair for row in kinds.values() for pair in odd_copies(row, share=0.05)]
    try:
        # The last row decides about the state and the totals, so that some odd rows are last.
        for last in [odd[0], *random.Random(0).sample(odd, 4)]:
            path.write_text(
                "".join(to_text(row) + "\n" for row in [*rows, *(row for _, row in odd), last[1]])
            )
            try:
                read_and_show(run)
            except Exception as error:
                raise AssertionError(f"{name}, last: {last[0]}") from error
    finally:
        path.write_text(sound)


@pytest.mark.slow
def test_any_value_in_any_field_of_the_recipe_is_left_out(run: Path) -> None:
    path = run / "recipe.yaml"
    sound = path.read_text()
    recipe = yaml.safe_load(sound)
    try:
        for what, damaged in odd_copies(
            {key: recipe[key] for key in ("model", "lora", "data", "train")}, share=0.02
        ):
            path.write_text(to_text(damaged))
            try:
                read_and_show(run)
            except Exception as error:
                raise AssertionError(what) from error
        outcome(lambda: report(ReportOptions(runs=(run,))))  # with thumbnails
        for text in (
            "1: {2: 3}\n2000-01-01: x\n",
            "&a [*a]",
            "? [1]\n: 2\n",
            "\0",
            "lora: !!python/none x",
            "{" * 5000,
        ):
            path.write_text(text)
            read_and_show(run)
    finally:
        path.write_text(sound)


def test_a_sound_row_stays_beside_a_damaged_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4, every=4, media=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_rows(
        folder / "metrics.jsonl", [rows[0], rows[1] | {"loss": "0.1"}, rows[2] | {"step": True}, rows[3]]
    )
    assert read_run(folder)["steps"].tolist() == [1, 4]


def test_a_gradient_norm_of_a_block_that_is_not_finite_does_not_end_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4, every=4, media=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["grad_norm_blocks"]["blocks.0"] = None  # as the log writes NaN
    rows[-2]["update_ratio_blocks"] = dict.fromkeys(rows[-1]["grad_norm_blocks"])
    write_rows(folder / "metrics.jsonl", rows)
    read_and_show(folder)


def test_an_image_outside_the_run_is_in_no_export(run: Path, tmp_path: Path) -> None:
    """A row of a stranger's run can name a private image of this machine."""
    secret = tmp_path / "secret.webp"
    secret.write_bytes(next(run.glob("samples/step_*/*.webp")).read_bytes())
    path = run / "samples" / "samples.jsonl"
    sound = path.read_text()
    try:
        write_rows(path, [{**json.loads(sound.splitlines()[0]), "thumbnail": str(secret)}])
        assert sample_strips(read_run(run), "raw", 100) == {}
    finally:
        path.write_text(sound)
