"""report.html of several runs, of other starts than the base model, of a small run on a CPU, and of a resumed run."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from tests.support.report_page import Page
from tests.support.run_folder import write_rows, write_run
from wands.report.page import render_page
from wands.report.run_data import read_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "fox", steps=40, every=10)


def render(*folders: Path, place: Path | None = None) -> str:
    return render_page([read_run(folder) for folder in folders], place or folders[0])


def sample_table(text: str) -> list[list[str]]:
    """Return the cells of the table of samples: steps, names of runs, or labels of the weights."""
    table = text[text.index('<table class="samples">') :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")], re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return [
        [" ".join(re.findall(r"<small>(.*?)</small>", cell)) or cell.strip() for cell in row] for row in cells
    ]


@pytest.mark.slow
def test_samples_of_two_runs_are_side_by_side(run: Path, tmp_path: Path) -> None:
    other = write_run(
        tmp_path / "dog", 40, 20, overrides=("lora.init_from=other-lora",)
    )  # samples of the steps 0 and 40; the first run also has those of step 20
    text = render(run, other, place=tmp_path)
    steps, names, *rows = sample_table(text)
    assert steps[1:] == ["step 0", "step 40"]
    assert names[1:] == ["fox", "dog", "fox", "dog"]
    assert [row[1:] for row in rows] == [["base", "initial", "weights EMA", "weights EMA"]] * 2
    assert "Step 0 is each run before its training" in text
    assert Page(text).tags.count("video") == 12
    shorter = write_run(tmp_path / "cat", 40, 40)  # one common step: all steps are shown
    _, _, *rows = sample_table(render(run, shorter, place=tmp_path))
    assert [row[1:] for row in rows] == [["base", "base", "weights EMA", "", "weights EMA", ""]] * 2
    write_rows(tmp_path / "empty" / "metrics.jsonl", [{"step": 1}])
    assert sample_table(render(run, tmp_path / "empty", place=tmp_path))[0][1:] == [
        "step 0",
        "step 20",
        "step 40",
    ]


@pytest.mark.parametrize(
    ("overrides", "label", "text"),
    [
        pytest.param((), "base", "Step 0 is the base model.", marks=pytest.mark.slow),
        pytest.param(
            ("lora.init_from=other-lora",),
            "initial",
            "Step 0 is the base model with the LoRA of lora.init_from.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("model.init=random",),
            "random",
            "Step 0 is the model with random weights.",
            marks=pytest.mark.slow,
        ),
        (
            ("model.merge_loras=[{path: a}]",),
            "base",
            "Step 0 is the base model with the LoRAs of model.merge_loras.",
        ),
    ],
)
def test_step_0_is_what_the_recipe_starts_from(
    overrides: tuple[str, ...], label: str, text: str, tmp_path: Path
) -> None:
    page = render(write_run(tmp_path / "fox", 40, 10, overrides=overrides))
    assert text in page
    assert page.count(f"<small>{label}</small>") == 2


@pytest.mark.slow
def test_a_small_run_on_a_cpu_has_its_own_units(run: Path, tmp_path: Path) -> None:
    assert "tokens/s per GPU" in render(run)
    assert "41.9 M tokens" in render(run)
    small = write_run(tmp_path / "hen", 40, 10, media=False)
    data = {"num_samples": 4, "num_tokens": 3_456}
    start = {"step": 0, "event": "start", "device": "cpu", "world_size": 2, "total_steps": 50, "data": data}
    write_rows(small / "events.jsonl", [start])
    text = render(small)
    assert "3,456 tokens" in text
    assert "tokens/s per rank" in text
    assert "on 2 ranks" in text
    assert "GPU" not in text[: text.index("Recipe: keys")]
    assert "it memorizes its 4 train clips" in html.unescape(text)


def test_changed_settings_are_an_event(tmp_path: Path) -> None:
    start = {"step": 6, "event": "start", "changed": "train.max_steps=7 (checkpoint: 6)"}
    write_rows(tmp_path / "events.jsonl", [start])
    assert "start, changed: train.max_steps=7 (checkpoint: 6)" in render(tmp_path)
