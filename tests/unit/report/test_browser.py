"""The page in a real browser: nothing on the console, no request, values on hover, videos that play, readable on a phone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Tab, find_chromium, open_browser
from tests.support.run_folder import write_run
from wands.report.page import render_page, write_report
from wands.report.run_data import read_run

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium; `bash scripts/fetch_browser.sh` installs it"
)

POINT = """(at => {
  const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + at * box.width, clientY: box.top + 9}));
  const rows = [...document.querySelectorAll("#tip > div")].map(row => [...row.children].map(cell => cell.textContent));
  return document.getElementById("tip").hidden ? null : Object.fromEntries(rows);
})"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "fox", steps=40, every=10)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert CHROMIUM
    with open_browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_the_page_works(tab: Tab, run: Path) -> None:
    tab.open((run / "report.html").as_uri())
    data = read_run(run)
    shown = tab.run(f"{POINT}(0.5)")
    step = int(shown["step"])
    assert 15 < step < 25
    assert float(shown["train, each step"]) == pytest.approx(data["metrics"][step - 1]["loss"], rel=1e-4)
    assert float(shown["held-out" if step == 20 else "held-out (20)"]) == pytest.approx(
        data["evaluations"]["raw"][2]["held_out"], rel=1e-4
    )
    assert "bad update" in tab.run(f"{POINT}(24 / 40)")["step 24"]
    tab.run("document.querySelector('.plot').dispatchEvent(new PointerEvent('pointerleave'))")
    assert tab.run("document.getElementById('tip').hidden")
    assert tab.run("document.querySelectorAll('video').length") == 10
    for area in (".cell", ".samples td:first-child"):
        tab.run(f"document.querySelector('{area}').dispatchEvent(new PointerEvent('pointerenter'))")
        tab.wait_for("document.querySelector('video').currentTime > 0.1")
        tab.run(f"document.querySelector('{area}').dispatchEvent(new PointerEvent('pointerleave'))")
        assert tab.run("document.querySelector('video').paused")
    assert tab.run("document.querySelector('time').textContent")
    assert tab.problems == []


def test_an_error_of_the_page_would_be_seen(tab: Tab, run: Path) -> None:
    text = (
        (run / "report.html")
        .read_text()
        .replace('querySelectorAll(".plot")', 'querySelectorAll(".plot").nothing')
    )
    (run / "broken.html").write_text(text)
    tab.open((run / "broken.html").as_uri())
    tab.run("1")
    assert tab.problems
    tab.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(tab: Tab, run: Path, scheme: str, tmp_path: Path) -> None:
    """Text and background differ, and nothing is wider than the window, also with two runs."""
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page = run / "comparison.html"
    page.write_text(render_page([read_run(run), read_run(run)], run))
    for name, width in (("report.html", 1400), ("report.html", 420), ("comparison.html", 420)):
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        tab.open((run / name).as_uri())
        assert tab.run("document.documentElement.scrollWidth") <= width
        light = "(color => color.match(/\\d+/g).slice(0, 3).reduce((sum, x) => sum + +x, 0) / 765)"
        paper, ink = (
            tab.run(f"{light}(getComputedStyle(document.body).{key})") for key in ("backgroundColor", "color")
        )
        assert (paper > 0.9 and ink < 0.2) if scheme == "light" else (paper < 0.2 and ink > 0.8)
        png = base64.b64decode(tab.call("Page.captureScreenshot")["data"])
        (tmp_path / f"{name}-{width}.png").write_bytes(png)
    assert tab.problems == []
