"""`wands push` end to end over HTTP against the hub of `fake_hub.py`, and the ways it can go wrong."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from tests.support.commands import push
from tests.support.fake_hub import FakeHub, Repo
from tests.support.pushed import (
    NAME,
    RECORD,
    TOKEN,
    _quiet_machine,
    folder,
    hub,
    send,
    small,
    tree,
    write_record,
)
from wands import __version__
from wands.errors import WandsError
from wands.export import upload as hub_repo

__all__ = ["_quiet_machine", "folder", "hub", "small"]  # fixtures


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


# ---- the whole way


@pytest.mark.slow
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
@pytest.mark.parametrize(
    "body", [*ANSWERS[:3], *(pytest.param(body, marks=pytest.mark.slow) for body in ANSWERS[3:])]
)
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
