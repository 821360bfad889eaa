"""Contents that `wands push` does not publish: links out of the folder, secrets, tokens, HTML."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import yaml

from tests.support.commands import push
from tests.support.fake_hub import FakeHub
from tests.support.pushed import (
    NAME,
    RECORD,
    TOKEN,
    _quiet_machine,
    hub,
    read_card,
    send,
    small,
    tree,
    write_record,
)
from tests.support.secret_texts import ORDINARY_TEXTS, SECRET_TEXTS
from wands.errors import WandsError
from wands.export import upload as hub_repo

__all__ = ["_quiet_machine", "hub", "small"]  # fixtures


# ---- what leaves the machine


@pytest.mark.parametrize(
    "name", ["README.md", "vae/config.json", "vae/weights.safetensors", "samples/000.png", "vae", "samples"]
)
def test_a_link_out_of_the_folder_is_not_followed(
    small: Path, hub: FakeHub, tmp_path: Path, name: str
) -> None:
    (tmp_path / "private" / "deep").mkdir(parents=True)
    (tmp_path / "private" / "000.png").write_text("secret")
    target = tmp_path / "private"
    path = small / name
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target / "000.png" if path.suffix else target)
    with pytest.raises(WandsError, match=r" leads to .*/private.* replace the link by a copy"):
        send(small, hub)
    assert hub.requests == []


def test_links_inside_the_folder_are_followed(small: Path, hub: FakeHub) -> None:
    (small / "vae" / "copy.safetensors").symlink_to("weights.safetensors")
    (small / "samples").symlink_to("vae", target_is_directory=True)
    send(small, hub)
    there = hub.files(NAME)
    assert (
        there["vae/copy.safetensors"]
        == there["samples/weights.safetensors"]
        == there["vae/weights.safetensors"]
    )


def test_the_list_is_shown_before_the_upload(
    small: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="wands")
    (small / "id_rsa").symlink_to("/etc/passwd")
    (small / "deploy.pem").write_text("key")
    before = tree(small)
    url = "http://127.0.0.1:9"  # nothing listens
    assert push(small, NAME, endpoint=url, dry_run=True) == f"dry run: nothing was sent to {NAME}"
    assert tree(small) == before
    shown = caplog.text
    assert "3 files to upload, 0.1 MB, and the model card:" in shown
    assert "30,000  vae/weights.safetensors" in shown
    assert "left out: deploy.pem, id_rsa" in shown
    assert "library_name: diffusers" in shown  # the model card
    assert NAME in shown[shown.index("library_name") :]
    caplog.clear()
    hub.fail("info", 403)
    with pytest.raises(WandsError, match="HTTP 403"):
        send(small, hub)
    assert "30,000  vae/weights.safetensors" in caplog.text  # although nothing was sent


@pytest.mark.parametrize(
    "text",
    [
        "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nabc",
        "the value of-an-environment-variable",
    ],
)
def test_a_file_with_a_secret_is_refused(
    small: Path, hub: FakeHub, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of-an-environment-variable")
    (small / "README.md").write_text(text)
    with pytest.raises(WandsError, match=r"README\.md contains a token, a password or a private key"):
        send(small, hub)
    assert hub.requests == []


def test_html_of_a_record_is_only_text_in_the_card(small: Path, hub: FakeHub) -> None:
    evil = '"`|<img src=x onerror=alert(1)>\n```\n<script>'
    index = json.loads((small / "model_index.json").read_text())
    (small / "model_index.json").write_text(json.dumps(index | {"_class_name": f"WanPipeline{evil}"}))
    (small / "samples").mkdir()
    (small / "samples" / "a.mp4").write_bytes(b"video")
    (small / "samples" / "samples.jsonl").write_text(json.dumps({"prompt": evil, "file": "a.mp4"}) + "\n")
    record = {key: evil for key in ("base", "checkpoint", "variant", "dtype", "wands_version")}
    record |= {"events": {evil: [1]}, "step": 3, "data": {"fingerprint": evil}}
    record |= {"recipe": {"lora": {"rank": 2, "alpha": 4.0, "targets": [evil]}, "note": evil}}
    write_record(small, record)
    send(small, hub)
    _, body = read_card(hub.files(NAME)["README.md"].decode())
    parts = body.split("```")
    assert len(parts) == 5  # text, recipe, text, code, text
    for tag in ("<img", "<script"):
        assert all(text.count(tag) == text.count("\\" + tag) for text in parts[::2])
    ast.parse(parts[3].removeprefix("python\n"))


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("LICENSE", KEY),
        ("vae/LICENSE", KEY),
        ("vae/NOTICE.old", "DB_PASS=nightingale"),
        ("vae/merges.txt", "https://blob.example/x?sig=abc"),
        ("vae/vocab.json", "a b\n" * 300_000 + "\nhf_abcdefghijklmnopqrstuvwxyz"),
        ("vae/tokenizer.model", "\0\1" * 50 + "hf_abcdefghijklmnopqrstuvwxyz\0\1"),
        ("samples/a.mp4", "\0\0\0\x18ftypmp42\0comment: of-an-environment-variable\0"),
        ("vae/x.safetensors", "\x60\0\0\0\0\0\0\0" + json.dumps({"__metadata__": {"token": "abcdefghijkl"}})),
    ],
)
def test_a_file_is_searched_for_secrets_whatever_its_name(
    small: Path, hub: FakeHub, name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of-an-environment-variable")
    (small / name).parent.mkdir(exist_ok=True)
    (small / name).write_text(content)
    with pytest.raises(WandsError, match=rf"{name} contains a token, a password or a private key"):
        send(small, hub)
    assert hub.requests == []


def test_ordinary_words_are_no_secrets(small: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a long vocabulary contains the word that somebody took as password."""
    monkeypatch.setenv("POSTGRES_PASSWORD", "postgres")
    (small / "vae" / "vocab.json").write_text("postgres\n" * 200_000)
    (small / "vae" / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "<pad>", "eos_token": "</s>"})
    )
    send(small, hub)
    assert "vae/vocab.json" in hub.files(NAME)


def test_a_card_contains_no_secret_and_no_user(
    small: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("USER", "carol")
    recipe = {"output_dir": "/scratch/carol", "note": "key 0123456789abcdef, hf_abcdefghijklmnopqrstuvwxyz"}
    record = RECORD | {"recipe": recipe, "base": "/home/dave", "checkpoint": "/data/carol/"}
    write_record(small, record | {"variant": "0123456789abcdef"})
    send(small, hub)
    for name in ("README.md", "wands_export.json"):
        text = hub.files(NAME)[name].decode()
        assert [secret for secret in ("carol", "dave", "0123456789abcdef", "hf_abc") if secret in text] == []


def test_no_secret_of_the_recipe_is_in_the_card(small: Path, hub: FakeHub) -> None:
    texts = [text.format(secret) for text, secret in SECRET_TEXTS.items()]
    notes = {"secrets": texts, "ordinary": [*ORDINARY_TEXTS], "objective": {"api_key": "transformer"}}
    write_record(small, RECORD | {"recipe": notes})
    send(small, hub)
    for name in ("README.md", "wands_export.json"):
        text = hub.files(NAME)[name].decode()
        assert [secret for secret in SECRET_TEXTS.values() if len(secret) > 3 and secret in text] == []
    recipe = yaml.safe_load(hub.files(NAME)["README.md"].decode().split("```yaml\n")[1].split("```")[0])
    assert recipe["objective"] == {"api_key": "REDACTED"}


# ---- the token


@pytest.mark.parametrize("kind", ["info", "create", "preupload", "batch", "put", "commit"])
def test_a_server_that_repeats_the_token_cannot_make_us_show_it(
    small: Path, hub: FakeHub, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="wands")  # the rest at its warnings, as `wands -v` has it
    hub.fail(kind, 400, text=f"what is Bearer {TOKEN}?")
    with pytest.raises(WandsError, match=r"what is Bearer \*\*\*\?") as caught:
        send(small, hub)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + "".join(capfd.readouterr())
    assert TOKEN not in shown


@pytest.mark.slow
def test_the_token_is_on_no_output_of_a_process(small: Path, hub: FakeHub, tmp_path: Path) -> None:
    code = (
        "import logging, sys; logging.basicConfig(level=logging.DEBUG)\n"
        "from pathlib import Path; from tests.support.commands import push\n"
        f"for name in ({NAME!r}, 'bob/x'): print(push(Path(sys.argv[1]), name))"
    )
    names = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(small)],
        env=os.environ | names | {"HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"{hub.url}/{NAME}"
    assert "WandsError: REPO_ID bob/x cannot be written with this token (HTTP 403" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert len(hub.files(NAME)) == 4
    assert TOKEN not in repr(hub_repo.connect(NAME, TOKEN, hub.url))
