"""Texts that are printed or published: control characters are escaped, secrets and user names are hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.secret_texts import ORDINARY_NAMES, ORDINARY_TEXTS, SECRET_NAMES, SECRET_TEXTS
from wands.commands.check.check_report import CheckedClip, CheckReport, render_check_page
from wands.data.clips.clip import ClipSpec
from wands.secret_patterns import hide_secrets, is_secret_name
from wands.texts import plural, printable, redact, safe_lines, without_paths

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


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_secret_in_any_text_is_hidden(text: str) -> None:
    secret = SECRET_TEXTS[text]
    hidden = hide_secrets(text.format(secret))
    assert secret not in hidden
    assert max(secret.split(), key=len) not in hidden
    assert "REDACTED" in hidden
    assert hide_secrets(hidden) == hidden
    assert secret not in str(without_paths({"a": [text.format(secret)]}))


@pytest.mark.parametrize("text", ORDINARY_TEXTS)
def test_an_ordinary_text_is_not_changed(text: str) -> None:
    assert hide_secrets(text) == text


def test_names_decide_which_variables_and_keys_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_NAMES:
        assert is_secret_name(name), name
        assert without_paths({name: "transformer"}) == {name: "REDACTED"}
        with monkeypatch.context() as variables:
            variables.setenv(name, "transformer")
            assert hide_secrets("a transformer of Wan") == "a REDACTED of Wan", name
    for name in ORDINARY_NAMES:
        assert not is_secret_name(name), name
        assert without_paths({name: "transformer"}) == {name: "transformer"}
        monkeypatch.setenv(name, "transformer")
    assert hide_secrets("a transformer of Wan") == "a transformer of Wan"


@pytest.mark.parametrize(
    ("home", "user", "text", "shown"),
    [
        ("/home/carol", "carol", "/home/carol/x and /data/carol.", "$HOME/x and /data/$USER."),
        ("/home/carol/", "carol", "--out=/home/carol, '/home/carol'", "--out=$HOME, '$HOME'"),
        ("/home/carol", "carol", "/data/carol-2/x carol carol/x", "/data/carol-2/x carol carol/x"),
        ("/home/carol", "carol", "/home/carol-2/x /home/carol.bak/x", "/home/carol-2/x /home/carol.bak/x"),
        ("/home/carol", "carol", "/mnt/home/carol/x", "/mnt/home/$USER/x"),
        ("/home/carol", "carol", "file:///home/carol/x", "file:///home/$USER/x"),
        ("/home/carol", "carol", "https://hf.example/carol/model", "https://hf.example/carol/model"),
        ("/home/carol", "", "/home/carol/x and /data/carol.", "$HOME/x and /data/$USER."),
        ("/home/caroline", "carol", "/home/caroline/x, /x/caroline, /x/carol", "$HOME/x, /x/$USER, /x/$USER"),
        ("/workspace", "", "/workspace/x and /mnt/workspace/x", "$HOME/x and /mnt/workspace/x"),
        ("/data/home", "carol", "/home/dave/x and /data/carol.", "/home/dave/x and /data/$USER."),
        ("/root", "root", "/root/x /x/carol /x/root", "/root/x /x/carol /x/root"),
        ("/", "", "/x /home/carol", "/x /home/carol"),
    ],
)
def test_the_user_has_no_name(
    home: str, user: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("USER", user)
    monkeypatch.delenv("LOGNAME", raising=False)
    assert redact(text) == shown


def test_a_shell_still_finds_a_printed_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the home folder is a link, or if its name is not the name of the user."""
    (tmp_path / "disk" / "carol").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("USER", "carol")
    for home in (tmp_path / "disk" / "carol", tmp_path / "home" / "carol", tmp_path):
        monkeypatch.setenv("HOME", str(home))
        for path in (tmp_path / "disk" / "carol" / "a.h5", home / "a.h5"):
            path.touch()
            assert "carol" not in redact(f"of {path}")
            found = subprocess.run(["sh", "-c", f"ls {redact(str(path))}"], capture_output=True, text=True)
            assert os.path.samefile(found.stdout.strip(), path)


def test_a_published_path_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/carol")
    texts = ["/srv/carol", "/srv/carol/x", "in /srv/carol.", "of /srv/carol/x: no", "of /srv/carol/x/y: no"]
    assert without_paths(texts) == ["~", "x", "in ~.", "of x: no", "of y: no"]


def test_reports_of_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "carol")
    clip = CheckedClip(
        CLEAR, f"/home/carol/{CLEAR}", reason=f"/home/carol/{CLEAR} cannot be read; download it"
    )
    report = CheckReport(
        source="/home/carol/clips",
        variant="wan2.1-t2v-1.3b",
        spec=ClipSpec(fps=16),
        clips=(clip,),
        exact_text=True,
        cache_bytes=0,
        packing=None,
        seconds=0.0,
    )
    page = render_check_page(report)
    text = report.render()
    assert "owned" in page
    assert "owned" in text
    assert set("\x1b\x07\x9b\r\u202e").isdisjoint(page + text)
    assert "carol" not in page + text
    assert "$USER/clips" in page


def test_one_is_singular() -> None:
    assert [plural(number, "clip") for number in (0, 1, 2, 1280)] == [
        "0 clips",
        "1 clip",
        "2 clips",
        "1,280 clips",
    ]


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
