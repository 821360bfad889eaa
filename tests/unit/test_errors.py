"""Text functions that error messages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from wands.errors import CacheError, WandsError, one_line, suggest
from wands.files import read_json_object


def test_one_line():
    assert one_line(ValueError("a\n  b.")) == "a b"
    assert one_line(ValueError("x" * 300)) == "x" * 200
    assert one_line(KeyError()) == "KeyError"
    assert one_line(FileNotFoundError(2, "No such file or directory", "a/b")) == "No such file or directory"


def test_suggest():
    assert suggest("heigth", ["height", "width"], "data.") == "did you mean data.height?"
    assert suggest("zzz", ["height", "width"]) == "use one of height, width."


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file"), ("{", "Expecting"), (b"\xff", "codec"), ("[" * 100000, "recursion")],
)
def test_read_json_reports_a_bad_file_in_one_line(tmp_path: Path, content: str | bytes | None, reason: str):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CacheError, match=reason) as caught:
        read_json_object(path, label="--deepspeed a.json", error=CacheError)
    assert str(caught.value).startswith("--deepspeed a.json cannot be read (")
    assert "\n" not in str(caught.value)


def test_read_json(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read_json_object(path) == {"a": 1}
    assert issubclass(CacheError, WandsError)


def test_a_message_with_a_value_of_many_pages_keeps_its_fact_and_its_fix():
    error = WandsError(f"model.path={'x' * 100_000} is not a folder; use a folder.")
    assert len(str(error)) < 5000
    assert str(error).startswith("model.path=xxx")
    assert str(error).endswith("is not a folder; use a folder.")
