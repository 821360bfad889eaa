"""What is printed and published obeys nobody: control characters are escaped, secrets and user names are hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wands.commands.check.check_report import CheckedClip, CheckReport, render_page
from wands.data.clips.clip import ClipSpec
from wands.texts import hide_secrets, printable, redact, safe_lines

CLEAR = "a\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202egpj"
"""Name of a clip that clears the screen, sets the title of the window, returns to the start of the line and turns the text."""
HARMLESS = "kätzchen 猫 👩‍👧 .mp4"


def test_control_characters_are_escaped() -> None:
    assert printable(CLEAR) == r"a\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202egpj"
    assert printable("a\nwands: complete\udcff") == r"a\nwands: complete\udcff"
    assert printable(HARMLESS) == HARMLESS
    assert safe_lines(f"{CLEAR}\nnext") == f"{printable(CLEAR)}\nnext"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bearer hf_abcdefghijklmnopqrstuvwxyz!", "Bearer REDACTED!"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ and AKIA0123456789ABCDEF", "REDACTED and REDACTED"),
        ("https://carol:geheim@hub.example/a", "https://REDACTED@hub.example/a"),
        ("the key is value-of-the-variable", "the key is REDACTED"),
        ("hf_hub_download, hf_transfer, true", "hf_hub_download, hf_transfer, true"),
        ("hf://datasets/a/b@main", "hf://datasets/a/b@main"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "value-of-the-variable")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert hide_secrets(text) == redact(text) == shown


def test_the_user_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "carol")
    monkeypatch.setenv("HOME", "/home/caroline")
    assert redact("/home/caroline/x and /data/carol.") == "/home/$USER/x and /data/$USER."
    assert redact("/data/carol-2/x carol carol/x") == "/data/carol-2/x carol carol/x"
    assert redact("https://huggingface.co/carol/model") == "https://huggingface.co/carol/model"
    monkeypatch.setenv("HOME", "/data/home")
    assert redact("/home/dave/x and /data/carol.") == "/home/dave/x and /data/$USER."
    for name in ("HOME", "USER", "LOGNAME"):
        monkeypatch.setenv(name, "/root" if name == "HOME" else "root")
    assert redact("/root/x /x/carol") == "/root/x /x/carol"


def test_reports_of_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "carol")
    clip = CheckedClip(
        CLEAR, f"/home/carol/{CLEAR}", reason=f"/home/carol/{CLEAR} cannot be read; download it"
    )
    report = CheckReport(
        "/home/carol/clips", "wan2.1-t2v-1.3b", ClipSpec(fps=16), (clip,), True, 0, None, 0.0
    )
    page = render_page(report)
    text = report.render()
    assert "owned" in page
    assert "owned" in text
    assert set("\x1b\x07\x9b\r\u202e").isdisjoint(page + text)
    assert "carol" not in page + text
    assert "$USER/clips" in page


def test_a_process_logs_safe_texts(tmp_path: Path) -> None:
    """Logs, and the error that ends a command, are escaped in a real process."""
    code = (
        "import logging, sys; from pathlib import Path; from click.testing import CliRunner; import wands.cli as cli\n"
        "from wands.errors import WandsError\n"
        "def fail(_):\n"
        "    logging.getLogger('wands').warning('log %s', sys.argv[1]); raise WandsError(f'error {sys.argv[1]}')\n"
        "cli.main.add_command(cli.build_command(cli.opts.RecipesOptions, fail)); cli.main(['recipes'])"
    )
    names = {"USER": "carol", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz"}
    text = f"{CLEAR} /home/carol/x {names['HF_TOKEN']}"
    done = subprocess.run(
        [sys.executable, "-c", code, text], env=os.environ | names, capture_output=True, timeout=60
    )
    assert done.returncode == 2
    shown = f"{printable(CLEAR)} /home/$USER/x REDACTED"
    lines = done.stderr.decode().splitlines()
    assert lines == [f"log {shown}", f"wands: error {shown}"]
