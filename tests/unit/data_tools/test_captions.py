"""`wands caption`: an endpoint that answers well or badly, a tiny random model, continuing, kept captions, rules for answers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from data_tools.footage import caption_models, write_captions
from data_tools.footage.caption_text import clean_answer
from tests.support.caption_servers import SUNSET, Server, caption, clips, completion, server
from wands.cli import main
from wands.config.options import CaptionOptions
from wands.errors import ConfigError, DataError, WandsError

__all__ = ["clips", "server"]  # fixtures


def drip(data: bytes, seconds: float = 0.01) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return an answer of an endpoint: the data, and then one byte after the other for 3 seconds."""

    def write(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(data)
        for _ in range(round(3 / seconds)):
            handler.wfile.write(b"x")
            time.sleep(seconds)

    return write


def flood(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(5):
        handler.wfile.write(b" " * 1_000_000)


def test_answers_of_an_endpoint_become_a_table(server: Server, clips: Path, tmp_path: Path):
    server.answers = [
        429,
        ("A red square moves. It sto", "length"),
        "I'm sorry, I can't help with that.",
        "a tree, " * 30,
        "Here is a caption: A calm\nblue\x00 sea of sk-local.",
        "",
    ]
    out = tmp_path / "captioned.csv"
    summary, rows = caption(server, clips, out, trigger="sks", prompt=("Describe {film}.",), max_side=32)
    found = {Path(row["video"]).stem: (row["caption"], row["caption_problem"]) for row in rows}
    reason = found.pop("5")[1]
    assert found == {
        "0": ("sks, A red square moves.", ""),
        "1": ("", "the model refused (I'm sorry, I can't help with that.)"),
        "2": ("", "the answer repeats itself"),
        "3": ("sks, A calm blue sea of ***.", ""),
        "4": ("", "the answer is empty"),
    }
    assert "5.mp4" in reason or "HTML" in reason
    assert {row["license"] for row in rows} == {"CC0"}
    assert "2 clips captioned, 0 captions kept, 4 without caption" in summary
    assert server.prompts() == [f"Describe film {k}." for k in (0, 0, 1, 2, 3, 4)]
    assert [part["type"] for part in server.requests[0]["messages"][0]["content"]] == [
        *["image_url"] * 3,
        "text",
    ]
    assert set(server.keys) == {"Bearer sk-local"}
    summary, rows = caption(server, clips, out, prompt=("Describe {film}.",))
    assert server.prompts()[6:] == [f"Describe film {k}." for k in (1, 2, 4)]  # only clips without a caption
    assert [row["caption"] for row in rows][:3] == ["sks, A red square moves.", SUNSET, SUNSET]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == [out.name]


@pytest.mark.parametrize(
    ("answers", "num_requests", "reason"),
    [
        ([401], 1, "status 401"),
        ([b"<html>hi"] * 2, 2, ""),
        ([b'{"choices": []}'] * 2, 2, ""),
        ([b'{"choices": [{"message": {"content": [1]}}]}'] * 2, 2, ""),
        ([b"[" * 200_000] * 2, 2, ""),
        ([lambda handler: time.sleep(5)] * 2, 2, "Timeout"),
        ([503] * 5, 5, "status 503"),
        ([drip(b"HTTP/1.1 200 OK\r\nX: ")] * 2, 2, "Timeout"),
        ([drip(b"HTTP/1.1 200 OK\r\n\r\n" + completion(SUNSET))] * 2, 2, "Timeout"),
        ([flood] * 2, 2, "more than 1,048,576 bytes"),
        ([(307, {"Location": "file:///etc/passwd"})], 1, "status 307"),
        ([(307, {"Location": "/v1/chat/completions"})], 1, "status 307"),
        ([lambda handler: handler.wfile.write(b"Bearer sk-local\r\n\r\n")] * 2, 2, ""),
    ],
)
def test_a_bad_endpoint_is_one_sentence(
    server: Server,
    clips: Path,
    tmp_path: Path,
    answers: list,
    num_requests: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(caption_models, "time", SimpleNamespace(sleep=lambda seconds: None))
    server.answers = list(answers)
    message = (
        rf"--endpoint={server.url} does not answer as an OpenAI-compatible server \(.*{reason}.*\); check"
    )
    began = time.monotonic()
    with pytest.raises(ConfigError, match=message) as caught:
        caption(server, clips, tmp_path / "out.csv", timeout=0.15 if "Timeout" in reason else 5)
    assert "\n" not in str(caught.value)
    assert "sk-local" not in str(caught.value)
    assert (
        len(server.requests) == num_requests or reason == "Timeout"
    )  # a slow machine may read no request in time
    assert time.monotonic() - began < 4
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "endpoint",
    ["file:///etc/passwd", "localhost:8000/v1", "http://u:sk-1@host/v1", "http://host/v1?key=sk-1"],
)
def test_the_url_of_an_endpoint_has_no_key(server: Server, clips: Path, tmp_path: Path, endpoint: str):
    with pytest.raises(ConfigError, match="--endpoint must be a URL without password and query") as caught:
        caption(server, clips, tmp_path / "out.csv", endpoint=endpoint)
    assert "sk-1" not in str(caught.value)


def test_a_busy_endpoint_says_when_to_ask_again(
    server: Server, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    monkeypatch.setattr(caption_models, "time", SimpleNamespace(sleep=pauses.append))
    server.answers = [
        (429, {"Retry-After": text}) for text in ("7", "9" * 5_000, "Wed, 21 Oct 2026 07:28:00 GMT")
    ]
    caption(server, clips, tmp_path / "out.csv", timeout=30)
    assert pauses == [7, 30, 2]


def test_an_interrupted_run_continues(server: Server, clips: Path, tmp_path: Path):
    """With another batch and another URL, too. Nothing remains of a run with other settings."""
    server.answers = ["Another setting.", 401]
    with pytest.raises(ConfigError, match="status 401"):
        caption(server, clips, tmp_path / "out.csv", max_tokens=10)
    server.requests.clear()
    server.answers = [f"Clip {k} shows a square." for k in range(3)] + [401]
    with pytest.raises(ConfigError, match="status 401"):
        caption(server, clips, tmp_path / "out.csv")
    server.answers = ["Clip 3 or 4 shows a square."] * 2
    _, rows = caption(server, clips, tmp_path / "out.csv", batch=2, endpoint=f"{server.url}/", timeout=9)
    wanted = [*(f"Clip {k} shows a square." for k in range(3)), *["Clip 3 or 4 shows a square."] * 2, ""]
    assert [row["caption"] for row in rows] == wanted
    assert len(server.requests) == 4 + 2
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_captions_are_kept_unless_asked(server: Server, clips: Path, tmp_path: Path):
    table = clips / "kept.csv"
    table.write_text("video,caption,start,end\n0.mp4,One.,,\n0.mp4,Two.,,\n1.mp4,,0,0.5\n1.mp4,,0.5,1\n")
    _, rows = caption(server, clips, tmp_path / "out.csv", table.name)
    assert [row["caption"] for row in rows] == ["One.", "Two.", SUNSET, SUNSET]
    assert [row["start"] for row in rows][2:] == ["0.0", "0.5"]
    _, rows = caption(server, clips, tmp_path / "out.csv", table.name, overwrite=True)
    assert [row["caption"] for row in rows] == [SUNSET] * 3
    assert len(server.requests) == 2 + 3


def test_only_clips_that_meet_a_condition_are_captioned(server: Server, clips: Path, tmp_path: Path):
    table = clips / "measured.csv"
    table.write_text("video,motion\n0.mp4,0.5\n1.mp4,0.001\n2.mp4,\n")
    summary, rows = caption(server, clips, tmp_path / "out.csv", table.name, where="motion > 0.01")
    assert [(Path(row["video"]).name, row["motion"], row["caption"]) for row in rows] == [
        ("0.mp4", "0.5", SUNSET)
    ]
    assert "2 left out by --where" in summary
    assert len(server.requests) == 1
    with pytest.raises(DataError, match="none of the 3 clips of SOURCE meets --where motion > 9"):
        caption(server, clips, tmp_path / "none.csv", table.name, where="motion > 9")
    with pytest.raises(ConfigError, match="--where names the column sharpness"):
        caption(server, clips, tmp_path / "none.csv", table.name, where="sharpness > 9")
    assert not (tmp_path / "none.csv").exists()


def test_several_captions_of_each_clip(server: Server, clips: Path, tmp_path: Path):
    table = clips / "one.csv"
    table.write_text("video\n0.mp4\n")
    server.answers = ["First.", "Second.", "Third."]
    _, rows = caption(server, clips, tmp_path / "out.csv", table.name, captions=3, prompt=("a", "b"))
    assert [row["caption"] for row in rows] == ["First.", "Second.", "Third."]
    assert server.prompts() == ["a", "b", "a"]
    assert [request["temperature"] for request in server.requests] == [0, 0, caption_models.TEMPERATURE]


@pytest.mark.parametrize("prompt", ["{video.__class__}", "{0}", "{}", "{missing!r}"])
def test_a_prompt_names_columns_and_runs_nothing(server: Server, clips: Path, tmp_path: Path, prompt: str):
    with pytest.raises(ConfigError, match=r"--prompt contains \{.*which is not a column of SOURCE"):
        caption(server, clips, tmp_path / "out.csv", prompt=(prompt,))
    table = clips / "hostile.jsonl"
    table.write_text(json.dumps({"video": "0.mp4", "film": "{video.__class__} \\1 {film}"}) + "\n")
    caption(server, clips, tmp_path / "out.csv", table.name, prompt=("See {film}",))
    assert server.prompts() == ["See {video.__class__} \\1 {film}"]


def test_the_command_has_a_prompt(monkeypatch: pytest.MonkeyPatch):
    given: list[CaptionOptions] = []
    monkeypatch.setattr(write_captions, "caption", given.append)
    for more in ([], ["--prompt", "one", "--prompt", "two"]):
        result = CliRunner().invoke(main, ["caption", "clips", "--model", "m", "--out", "a.csv", *more])
        assert result.exit_code == 0, result.output
    assert given[0].prompt == ()  # then write_captions.PROMPT
    assert given[1].prompt == ("one", "two")


def test_wrong_options(server: Server, clips: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must end in .csv or .jsonl"):
        caption(server, clips, tmp_path / "out.txt")
    shutil.copytree(clips, tmp_path / "copy")
    link = tmp_path / "link.csv"
    table = tmp_path / "copy/metadata.csv"
    table.write_text('video\n0.mp4\n1.mp4,"unreadable\n')
    link.symlink_to(table)
    for source, out, reason in (
        (table, table, ""),
        (table, link, ""),
        (table.parent, table, "a table in the folder SOURCE"),
    ):
        with pytest.raises(ConfigError, match=rf"is (SOURCE|{reason}).* choose another file"):
            caption(server, clips, out, str(source))
    assert "unreadable" in table.read_text()
    with pytest.raises(DataError):
        caption(server, clips, tmp_path / "out.csv", "missing")
    table.write_text("video\n0.mp4\n")
    caption(server, clips, tmp_path / "out.csv", str(table))
    assert server.prompts() == [write_captions.PROMPT]
    with pytest.raises(WandsError, match="nowhere"):
        caption(server, clips, tmp_path / "out.csv", model=str(tmp_path / "nowhere"), endpoint=None)


@pytest.mark.parametrize(
    ("answer", "is_cut", "caption", "problem"),
    [
        (SUNSET, False, SUNSET, ""),
        ("  A dog\n\truns.\x07 ", False, "A dog runs.", ""),
        ("Sure! Here is a detailed caption of the video: A dog runs.", False, "A dog runs.", ""),
        ("Caption: A dog runs.", False, "A dog runs.", ""),
        ('"A dog runs."', False, "A dog runs.", ""),
        ("<think>Is it a dog?</think>A dog runs.", False, "A dog runs.", ""),
        ("<think>Is it", True, "", "cut off"),
        ("A dog runs. It then ju", True, "A dog runs.", ""),
        ("A dog that ru", True, "", "cut off"),
        ("一只狗在跑。它跳", True, "一只狗在跑。", ""),
        ("A sign reads: I can't wait.", False, "A sign reads: I can't wait.", ""),
        ("A man says sorry to a woman.", False, "A man says sorry to a woman.", ""),
        ("I cannot describe this video.", False, "", "refused"),
        ("I can’t do that.", False, "", "refused"),
        ("Sorry, but I can't assist.", False, "", "refused"),
        ("Unfortunately, I am unable to see it.", False, "", "refused"),
        ("I'm not able to see a video.", False, "", "refused"),
        ("I don't see any video.", False, "", "refused"),
        ("As an AI language model, I have no eyes.", False, "", "refused"),
        ("抱歉,我无法描述。", False, "", "refused"),
        ("the the the the the the the the the the the the", True, "", "repeats"),
        ("A man walks to the door. " * 4, False, "", "repeats"),
        (" ".join(f"thing {n}" for n in range(30)) * 4, False, "", "repeats"),  # a long period
        ("...", False, "", "empty"),
        ("word " * 3_000, False, "", "characters"),
    ],
)
def test_rules_for_answers(answer: str, is_cut: bool, caption: str, problem: str):
    found = clean_answer(answer, is_cut)
    assert found[0] == caption
    assert problem in found[1]
    assert bool(problem) == bool(found[1])
