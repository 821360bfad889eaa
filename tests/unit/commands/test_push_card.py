"""The model card that `wands push` writes."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.support.fake_hub import FakeHub, File, Repo
from tests.support.pushed import (
    NAME,
    RECORD,
    _quiet_machine,
    folder,
    hub,
    read_card,
    send,
    small,
    write_record,
)
from tests.support.train_state import train_state
from wands.commands import push as push_module
from wands.export import model_card
from wands.export.export_record import RECORD_FILE
from wands.texts import without_paths

__all__ = ["_quiet_machine", "folder", "hub", "small"]  # fixtures


def test_no_place_on_this_machine_is_uploaded(folder: Path, hub: FakeHub) -> None:
    config = json.loads((folder / "vae" / "config.json").read_text())
    origin = {"_name_or_path": "/home/alice/base/vae"}
    (folder / "vae" / "config.json").write_text(json.dumps(config | origin))
    write_record(folder, RECORD | {"base": "/home/alice/base", "checkpoint": "/home/alice/runs/step_3"})
    send(folder, hub)
    there = hub.files(NAME)
    told = [name for name, data in there.items() if b"/home/" in data or b"/mnt/" in data or b"/tmp/" in data]
    assert told == []
    assert json.loads(there["vae/config.json"]) == config
    assert json.loads(there["wands_export.json"])["recipe"]["data"]["cache"] == "cache"
    assert json.loads(there["samples/samples.jsonl"])["prompt"] == "a cat [walks] / runs"
    head, body = read_card(there["README.md"].decode())
    assert "base_model" not in head
    assert "| Base | unknown: the training read it from a folder named `base` |" in body


def test_the_card_shows_the_held_out_loss_and_samples_during_training(
    folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    plot = push_module.save_loss_plot
    monkeypatch.setattr(
        push_module,
        "save_loss_plot",
        lambda path, series, **more: (drawn.update(series), plot(path, series, **more)),
    )
    Image.new("RGB", (8, 8)).save(folder / model_card.STRIPS_FILE)
    write_record(folder, RECORD | {"held_out": [[0, 0.5], [50, 0.4]]})
    send(folder, hub)
    assert drawn["held-out"] == ([0, 50], [0.5, 0.4])
    assert len(drawn["train"][0]) == 60
    body = hub.files(NAME)["README.md"].decode()
    assert "clips that were not trained on" in body
    assert f"({model_card.STRIPS_FILE})" in body
    assert model_card.STRIPS_FILE in hub.files(NAME)


def test_the_card(folder: Path, hub: FakeHub) -> None:
    send(folder, hub)
    head, body = read_card(hub.files(NAME)["README.md"].decode())
    assert head["license"] == "apache-2.0"
    assert head["base_model"] == RECORD["base"]
    assert (head["pipeline_tag"], head["library_name"]) == ("text-to-video", "diffusers")
    assert {"wan", "wan2.1-t2v-1.3b"} <= set(head["tags"])
    assert head["widget"] == [
        {"text": "a cat (walks) / runs", "output": {"url": "samples/000_a%20cat.mp4"}},
        {"text": "contact", "output": {"url": "samples/contact.png"}},
    ]
    assert "<Gallery />" in body
    for told in (
        "1,200",
        "1,234",
        "98,765",
        "5,678,901",
        "`ab12cd`",
        "bf16",
        "![loss curve](loss.png)",
        "| 2 restarts, 1 skipped update, 1 slow-rank report |",
    ):
        assert told in body
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe == {"output_dir": "x", "data": {"cache": "cache"}, "optim": {"lr": 1e-5}}
    with Image.open(folder / "loss.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # something is drawn
    code = body.split("```python\n")[1].split("```")[0]
    import diffusers

    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert all(hasattr(diffusers, alias.name) for alias in imported[0].names)
    assert f'repo = "{NAME}"' in code


def test_the_card_lists_the_licences_of_the_data(small: Path, hub: FakeHub) -> None:
    odd = "https://a.b/by | <b>x</b> [y](z) `q` *s*\n# t\x1b"
    counts = [["CC-BY-4.0", 1200], [odd, 3], ["/home/alice/secret/LICENSE.txt", 2], ["not stated", 29]]
    write_record(small, RECORD | {"data": RECORD["data"] | {"licenses": counts}})
    send(small, hub)
    files = hub.files(NAME)
    head, body = read_card(files["README.md"].decode())
    (row,) = (line for line in body.splitlines() if line.startswith("| Licenses of the clips"))
    assert row == (
        r"| Licenses of the clips | CC-BY-4.0 (1,200), https://a.b/by \| \<b\>x\</b\> \[y\](z) \`q\` \*s\*\\n\# t\\x1b (3), "
        r"LICENSE.txt (2), not stated (29) |"
    )
    assert head["license"] == "apache-2.0"  # of the model
    assert b"secret" not in files["README.md"] + files[RECORD_FILE]


def test_the_card_is_silent_about_licences_that_nobody_stated(small: Path, hub: FakeHub) -> None:
    write_record(small, RECORD | {"data": RECORD["data"] | {"licenses": []}})
    send(small, hub)
    assert b"Licenses" not in hub.files(NAME)["README.md"]


@pytest.mark.parametrize(
    ("missing", "trace"),
    [
        ("recipe", "## Recipe"),
        ("data", "## Training data"),
        pytest.param("loss", "## Loss", marks=pytest.mark.slow),
        pytest.param("base", "| Base |", marks=pytest.mark.slow),
        pytest.param("step", "steps |", marks=pytest.mark.slow),
    ],
)
def test_the_card_leaves_out_what_is_not_known(small: Path, hub: FakeHub, missing: str, trace: str) -> None:
    write_record(small, RECORD)
    send(small, hub)
    assert trace in hub.files(NAME)["README.md"].decode()
    write_record(small, {key: value for key, value in RECORD.items() if key != missing})
    send(small, hub)
    text = hub.files(NAME)["README.md"].decode()
    assert trace not in text
    assert all(other in text for other in {"## Recipe", "## Training data", "## Loss"} - {trace})


def test_what_the_record_lacks_comes_from_a_checkpoint(small: Path, hub: FakeHub, tmp_path: Path) -> None:
    state = train_state(
        data_fingerprint="fe01",
        data_summary={"num_samples": 3, "num_tokens": 99},
        recipe={"train": {"seed": 5}},
        base="/somewhere/base",
        loss=[(1, 2.0), (2, 1.0)],
    )
    step = tmp_path / "run" / "checkpoints" / "step_00000007"
    step.mkdir(parents=True)
    (step / "wands_state.json").write_text(json.dumps(state.to_json()))
    write_record(small, {"step": 6})
    send(small, hub, training=tmp_path / "run")
    text = hub.files(NAME)["README.md"].decode()
    for told in (
        "seed: 5",
        "`fe01`",
        "![loss curve](loss.png)",
        "`step_00000007`",
        "| Optimizer steps | 6 |",
    ):
        assert told in text
    assert "loss.png" in hub.files(NAME)


def test_a_prompt_may_hold_any_line_separator(small: Path, hub: FakeHub) -> None:
    prompt = "one\u2028two\x85three\x0cfour"
    (small / "samples").mkdir()
    (small / "samples" / "a.mp4").write_bytes(b"video")
    row = {"prompt": prompt, "file": "a.mp4"}
    text = json.dumps(row, ensure_ascii=False) + "\n"  # as `wands infer` writes it
    (small / "samples" / "samples.jsonl").write_text(text, encoding="utf-8")
    send(small, hub)
    files = hub.files(NAME)
    assert json.loads(files["samples/samples.jsonl"]) == row
    assert read_card(files["README.md"].decode())[0]["widget"][0]["text"] == "one two three four"


@pytest.mark.parametrize(("base", "linked"), [("/models/wan", False), ("someone/wan", True)])
def test_a_folder_is_not_credited_as_a_repository(
    small: Path, hub: FakeHub, tmp_path: Path, base: str, linked: bool
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_00000007"
    step.mkdir(parents=True)
    state = train_state(variant="", base=base)
    (step / "wands_state.json").write_text(json.dumps(state.to_json()))
    send(small, hub, training=tmp_path / "run")
    head, body = read_card(hub.files(NAME)["README.md"].decode())
    assert ("base_model" in head, "https://huggingface.co/" in body) == (linked, linked)
    assert linked or "folder named `wan` |" in body


def test_a_card_of_ones_own_is_kept(small: Path, hub: FakeHub) -> None:
    (small / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    write_record(small, RECORD)
    send(small, hub)
    assert hub.files(NAME)["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    assert "loss.png" not in hub.files(NAME)


def test_the_licence_is_the_bases(small: Path, hub: FakeHub, tmp_path: Path) -> None:
    card = b"---\nlicense: cc-by-nc-4.0\n---\n"
    hub.repos["org/base"] = Repo(private=False, branches={"main": {"README.md": File(card, lfs=False)}})
    write_record(small, {"base": "org/base"})
    send(small, hub)
    assert read_card(hub.files(NAME)["README.md"].decode())[0]["license"] == "cc-by-nc-4.0"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    write_record(small, {"base": str(tmp_path / "base")})
    send(small, hub)
    assert read_card(hub.files(NAME)["README.md"].decode())[0]["license"] == "mit"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/home/a/b c/model", "model"),
        ("~/runs/x/", "x"),
        ("../up/x", "x"),
        (r"C:\Users\a\model", "model"),
        ("file:///srv/data/x.csv", "x.csv"),
        ("read from /srv/data/x.csv at noon", "read from x.csv at noon"),
        ("Wan-AI/Wan2.1-T2V-14B", "Wan-AI/Wan2.1-T2V-14B"),
        ("runs/default", "runs/default"),
        ("https://host/a/b", "https://host/a/b"),
        ("/home/alice", "~"),
        ("of /Users/alice/ and", "of ~/ and"),
        ("alice@host:/home/alice/x", "alice@host:x"),
        ("see file:///home/alice/x.csv", "see x.csv"),
        ("https://bob:pass@host/a", "https://REDACTED@host/a"),
        ("token hf_abcdefghijklmnopqrstuvwxyz", "token REDACTED"),
        ("1/2 and/or 3", "1/2 and/or 3"),
    ],
)
def test_paths_are_cut(text: str, kept: str) -> None:
    assert without_paths({"a": [text, 1, None]}) == {"a": [kept, 1, None]}
