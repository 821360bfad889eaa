"""`wands push` end to end over HTTP against the hub of `fake_hub.py`, and the ways it can go wrong."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants, snapshot_download
from PIL import Image

from tests.support.commands import push
from tests.support.fake_hub import FakeHub, File, Repo
from tests.support.secret_texts import ORDINARY_TEXTS, SECRET_TEXTS
from tests.support.train_state import train_state
from wands import __version__
from wands.commands import push as push_module
from wands.errors import WandsError
from wands.export import model_card
from wands.export import upload as hub_repo
from wands.export.export_record import RECORD_FILE
from wands.texts import without_paths

TOKEN = "hf_SecretOfAlice0123456789"
NAME = "alice/wan-tiny"
RECORD: dict[str, Any] = {
    "base": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "step": 1200,
    "checkpoint": "step_00001200",
    "variant": "wan2.1-t2v-1.3b",
    "recipe": {
        "output_dir": "/home/alice/runs/x",
        "data": {"cache": "/mnt/secret/cache"},
        "optim": {"lr": 1e-5},
    },
    "data": {"num_samples": 1234, "num_tokens": 5678901, "num_frames_total": 98765, "fingerprint": "ab12cd"},
    "loss": [[step, 1.0 / (1 + step)] for step in range(60)],
    "events": {"restart": [20, 40], "skipped update": [33], "slow-rank report": [50]},
    "dtype": "bf16",
    "wands_version": "0.1.0",
}
JUNK = {
    "transformer/model.safetensors.tmp": "half a file",
    "transformer/__pycache__/x.py": "text",
    ".idea/workspace.xml": "",
    "step_00000003.tmp/anything.bin": "state",
    "global_step2/anything.bin": "state",
    ".DS_Store": "",
    "latest": "step_2",
    "zero_to_fp32.py": "import torch",
    "metrics.jsonl": "{}",
    "global_step2/mp_rank_00_model_states.pt": "weights",
    "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "moments",
    "checkpoints/step_00000002/wands_state.json": "{}",
    "checkpoints/step_00000002/anything.bin": "state",
    "checkpoints/step_00000003.tmp/weights.safetensors": "state",
    "transformer/optimizer.safetensors": "moments",
    "transformer/optimizer.bin": "moments",
    "transformer/pytorch_model.bin": "pickle",
    "id_rsa": "key",
    "deploy.pem": "key",
    "credentials.json": "{}",
    "service-account.json": "{}",
    "token.txt": "hf",
    "notes/model.safetensors": "of another program",
    "samples/notes.txt": "text",
}


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token, no offline mode, plain LFS: the Hub library reads these from its constants at each call."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub" / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    monkeypatch.setattr(push_module, "RETRY_WAITS", (0.01, 0.01))
    monkeypatch.setattr(hub_repo, "FIRST_CONTACT_WAITS", (0.01, 0.01))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({TOKEN: "alice", "hf_bob": "bob"}) as server:
        yield server


@pytest.fixture
def folder(tiny_pipeline: Path, tmp_path: Path) -> Path:
    """What `wands export` leaves: a pipeline, its record, samples; one part is a folder linked from the Hub's cache."""
    directory = tmp_path / "export"
    shutil.copytree(tiny_pipeline, directory)
    cached = Path(constants.HF_HUB_CACHE, "base_text_encoder")
    cached.parent.mkdir(parents=True)
    shutil.move(directory / "text_encoder", cached)
    (directory / "text_encoder").symlink_to(cached, target_is_directory=True)
    (directory / "samples").mkdir()
    (directory / "samples" / "000_a cat.mp4").write_bytes(b"\0\0\0\x18ftypmp42" * 100)
    Image.new("RGB", (8, 8), "red").save(directory / "samples" / "contact.png")
    row = {"prompt": "a cat [walks] / runs", "file": "000_a cat.mp4", "model": "/home/alice/model"}
    (directory / "samples" / "samples.jsonl").write_text(json.dumps(row) + "\n")
    write_record(directory, RECORD)
    return directory


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The least that is a pipeline, for what does not look at weights."""
    directory = tmp_path / "small"
    (directory / "vae").mkdir(parents=True)
    index = {
        "_class_name": "WanPipeline",
        "vae": ["diffusers", "AutoencoderKLWan"],
        "tokenizer": [None, None],
    }
    (directory / "model_index.json").write_text(json.dumps(index))
    (directory / "vae" / "weights.safetensors").write_bytes(os.urandom(30_000))
    (directory / "vae" / "more.safetensors").write_bytes(os.urandom(25_000))
    return directory


def write_record(directory: Path, record: dict[str, Any]) -> None:
    (directory / "wands_export.json").write_text(json.dumps(record))


def read_card(text: str) -> tuple[dict[str, Any], str]:
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def tree(directory: Path) -> dict[str, bytes]:
    """Files below a folder, links followed."""
    found = {}
    for place, _, names in os.walk(directory, followlinks=True):
        for name in names:
            path = Path(place, name)
            found[path.relative_to(directory).as_posix()] = path.read_bytes()
    return found


def send(directory: Path, hub: FakeHub, repo_id: str = NAME, **options: Any) -> str:
    return push(directory, repo_id, **{"token": TOKEN, "endpoint": hub.url, **options})


# ---- the whole way


def test_push_then_download_gives_the_same_files(folder: Path, hub: FakeHub, tmp_path: Path) -> None:
    wanted = set(tree(folder)) | {"README.md", "loss.png"}
    for name, text in JUNK.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    assert send(folder, hub) == f"{hub.url}/{NAME}"

    assert hub.repos[NAME].private
    assert hub.repos[NAME].messages == [f"Upload the pipeline of step 1200 with wands {__version__}"]
    there = hub.files(NAME)
    assert set(there) == wanted
    assert hub.count()["put"] == sum(file.lfs for file in hub.repos[NAME].branches["main"].values()) > 2
    local = tree(folder)
    cleaned = {"wands_export.json", "samples/samples.jsonl"}
    assert [name for name in sorted(wanted - cleaned) if there[name] != local[name]] == []

    got = Path(snapshot_download(NAME, token=TOKEN, endpoint=hub.url, cache_dir=tmp_path / "cache"))
    assert tree(got) == there
    from diffusers import WanPipeline

    assert WanPipeline.from_pretrained(got).transformer.config.num_layers == 2

    hub.requests.clear()
    send(folder, hub)  # nothing has changed
    assert {"commit", "put"} & set(hub.count()) == set()
    assert len(hub.repos[NAME].messages) == 1

    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    hub.requests.clear()
    send(folder, hub, message="another VAE")
    assert hub.count()["put"] == 1
    assert hub.repos[NAME].messages[1:] == ["another VAE"]
    assert hub.files(NAME)["vae/diffusion_pytorch_model.safetensors"] == weights.read_bytes()


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


# ---- repositories


def test_visibility(small: Path, hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    send(small, hub, "alice/open", public=True)
    assert not hub.repos["alice/open"].private
    assert "is public, not" not in caplog.text
    send(small, hub, "alice/open")
    assert not hub.repos["alice/open"].private
    assert "alice/open is public, not private" in caplog.text
    send(small, hub, "alice/closed")
    send(small, hub, "alice/closed", public=True)
    assert hub.repos["alice/closed"].private
    assert "alice/closed is private, not public" in caplog.text


def test_a_bare_name_goes_to_the_tokens_account(
    small: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push(small, "mine", endpoint=hub.url) == f"{hub.url}/alice/mine"
    assert "vae/weights.safetensors" in hub.files("alice/mine")


def test_another_branch(small: Path, hub: FakeHub) -> None:
    send(small, hub)
    (small / "vae" / "weights.safetensors").write_bytes(b"x" * 40_000)
    send(small, hub, revision="step-2")
    send(small, hub, revision="step-2")
    assert hub.files(NAME)["vae/weights.safetensors"] != b"x" * 40_000
    assert hub.files(NAME, "step-2")["vae/weights.safetensors"] == b"x" * 40_000


# ---- trouble on the way


@pytest.mark.parametrize("status", [503, 500, 429, None])
def test_a_commit_is_tried_again(
    small: Path, hub: FakeHub, status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("commit", status, times=2)
    send(small, hub)
    assert hub.count()["commit"] == 3
    assert hub.count()["put"] == 2  # each large file once
    assert caplog.text.count("the upload failed") == 2
    assert hub.files(NAME)["vae/weights.safetensors"] == (small / "vae" / "weights.safetensors").read_bytes()


def test_a_commit_whose_answer_is_lost_is_not_made_twice(small: Path, hub: FakeHub) -> None:
    hub.fail("commit", None, after=True)
    send(small, hub)
    assert len(hub.repos[NAME].messages) == 1


def test_a_second_push_goes_on_where_the_first_gave_up(small: Path, hub: FakeHub) -> None:
    hub.fail("commit", 503, times=3)
    with pytest.raises(
        WandsError, match=r"REPO_ID alice/wan-tiny: the upload was rejected \(HTTP 503.*sent twice"
    ):
        send(small, hub)
    assert hub.files(NAME) == {}
    assert hub.count()["put"] == 2
    hub.requests.clear()
    send(small, hub)
    assert hub.count()["put"] == 0
    assert len(hub.files(NAME)) == 4


def test_a_dropped_file_is_sent_again_the_others_are_not(small: Path, hub: FakeHub) -> None:
    hub.fail("put", None)
    send(small, hub)
    assert hub.count()["put"] == 3
    hub.fail("put", 403, text="signature expired")
    (small / "vae" / "weights.safetensors").write_bytes(b"y" * 50_000)
    with pytest.raises(WandsError, match="HTTP 403: signature expired"):
        send(small, hub)


def test_the_way_of_the_library_with_xet(small: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product leaves Xet on: another path in the library. The server asks for no large storage here."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.lfs_from = None
    send(small, hub)
    assert hub.files(NAME)["vae/weights.safetensors"] == (small / "vae" / "weights.safetensors").read_bytes()
    hub.requests.clear()
    send(small, hub)
    assert hub.count()["commit"] == 0
    hub.lfs_from = 20_000
    (small / "vae" / "weights.safetensors").write_bytes(b"z" * 50_000)
    with pytest.raises(WandsError, match=r"has no Xet storage .* set HF_HUB_DISABLE_XET=1"):
        send(small, hub)


@pytest.mark.parametrize("name", ["vae/weights.safetensors", "model_index.json"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_the_hub_leaves_out_is_named(
    small: Path, hub: FakeHub, name: str, is_there: bool
) -> None:
    """Also if an earlier push has left another file of this name."""
    if is_there:
        send(small, hub)
        with (small / name).open("ab") as file:
            file.write(b" ")
    hub.ignored = (name,)
    with pytest.raises(WandsError, match=rf"the Hub left out {name}, because a \.gitignore"):
        send(small, hub)


@pytest.mark.parametrize("kind", ["whoami", "info", "create"])
def test_a_hub_that_never_answers_is_one_sentence(
    small: Path, hub: FakeHub, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_repo, "ANSWER_SECONDS", 0.2)
    hub.fail(kind, None, times=3, silence=0.6)
    with pytest.raises(WandsError, match=rf"--endpoint {hub.url} cannot be reached \(ReadTimeout"):
        send(small, hub, NAME if kind != "whoami" else "wan-tiny")


ANSWERS = (
    b"<html><form>Log in</form></html>",
    b"",
    b"null",
    b"[]",
    b"{}",
    b"7",
    b'"text"',
    b'{"files": [1]}',
    b"\xff\x00",
)


@pytest.mark.parametrize(
    "kind", ["whoami", "info", "create", "preupload", "batch", "commit", "tree", "branch", "validate"]
)
@pytest.mark.parametrize("body", ANSWERS)
def test_an_answer_of_another_shape_is_one_sentence(
    small: Path, hub: FakeHub, kind: str, body: bytes
) -> None:
    """Such as the login page of a proxy. An answer that says nothing may also be accepted, if all files arrive."""
    hub.fail(kind, 200, times=9, body=body)
    branch = "other" if kind == "branch" else None
    try:
        send(small, hub, NAME if kind != "whoami" else "wan-tiny", revision=branch)
    except WandsError:
        return
    assert "vae/weights.safetensors" in hub.files(NAME, branch or "main")


# ---- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": None}, "No Hub token was found for REPO_ID alice/wan-tiny; make a token"),
        ({"token": "  "}, "No Hub token was found"),
        ({"token": "hf_wrong"}, r"rejects the token \(HTTP 401: .*\); make a token with write access"),
        ({"token": "hf_two\nlines"}, "The Hub token contains spaces or invalid characters"),
        ({"repo_id": "bob/free"}, r"REPO_ID bob/free cannot be written with this token \(HTTP 403"),
        ({"repo_id": "bob/hidden"}, r"REPO_ID bob/hidden cannot be written with this token \(HTTP 403"),
        ({"repo_id": "bob/open"}, r"REPO_ID bob/open cannot be written with this token \(HTTP 403"),
        ({"repo_id": "a/b/c"}, "REPO_ID a/b/c is not a valid name of a repository; use owner/name"),
        ({"repo_id": "alice/a--b"}, "is not a valid name of a repository"),
        ({"endpoint": "hub.example"}, "--endpoint hub.example is not a web address; write https://host"),
        (
            {"endpoint": "http://127.0.0.1:9"},
            r"--endpoint http://127.0.0.1:9 cannot be reached \(ConnectError",
        ),
    ],
)
def test_mistakes_of_name_token_and_address(
    small: Path, hub: FakeHub, options: dict[str, Any], message: str
) -> None:
    hub.repos |= {"bob/hidden": Repo(private=True), "bob/open": Repo(private=False)}
    with pytest.raises(WandsError, match=message):
        send(small, hub, **options)
    assert all(not files for repo in hub.repos.values() for files in repo.branches.values())


def test_offline_mode(small: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WandsError, match=r"HF_HUB_OFFLINE forbids every request .* unset HF_HUB_OFFLINE"):
        send(small, hub)
    assert hub.requests == []


def test_somebody_else_commits_at_the_same_time(small: Path, hub: FakeHub) -> None:
    hub.fail("commit", 409, text="A commit has happened since")
    with pytest.raises(
        WandsError, match=r"was changed by another commit in the meantime \(HTTP 409.*run the same command"
    ):
        send(small, hub)


def test_the_server_refuses_a_card_of_ones_own(small: Path, hub: FakeHub) -> None:
    (small / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(WandsError, match=r"the upload failed \(ValueError: Invalid metadata in README.md"):
        send(small, hub)


def _no_index(folder: Path) -> None:
    (folder / "model_index.json").unlink()


def _damaged_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")


def _index_is_list(folder: Path) -> None:
    (folder / "model_index.json").write_text("[]")


def _no_part(folder: Path) -> None:
    shutil.rmtree(folder / "vae")


def _damaged_record(folder: Path) -> None:
    (folder / "wands_export.json").write_text("{")


def _broken_link(folder: Path) -> None:
    (folder / "vae" / "gone.safetensors").symlink_to(folder / "nowhere")


def _loop(folder: Path) -> None:
    (folder / "vae" / "again").symlink_to(folder, target_is_directory=True)


def _card_is_folder(folder: Path) -> None:
    (folder / "README.md").mkdir()


def _plot_is_folder(folder: Path) -> None:
    write_record(folder, RECORD)
    (folder / "loss.png" / "x").mkdir(parents=True)


def _damaged_samples(folder: Path) -> None:
    (folder / "samples").mkdir()
    (folder / "samples" / "samples.jsonl").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            _no_index,
            r"is not a diffusers pipeline \(no model_index.json\) and has no LoRA; set DIRECTORY to a run folder, or to a "
            r"folder that `wands export` wrote",
        ),
        (_damaged_index, "model_index.json cannot be read .* run `wands export` again"),
        (_index_is_list, "model_index.json must contain a JSON object, not a list"),
        (_no_part, "lacks the folders vae that model_index.json lists; run `wands export` again"),
        (_damaged_record, "wands_export.json cannot be read"),
        (_broken_link, "gone.safetensors is a broken link"),
        (_loop, "again is a link to a folder that contains the link"),
        (_card_is_folder, "README.md cannot be read"),
        (_plot_is_folder, "loss.png cannot be written"),
        (_damaged_samples, "samples.jsonl cannot be read"),
    ],
)
def test_mistakes_of_the_folder(small: Path, hub: FakeHub, spoil: Any, message: str) -> None:
    spoil(small)
    with pytest.raises(WandsError, match=message):
        send(small, hub)
    assert hub.count()["commit"] == 0


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
