"""A folder that is pushed, and the Hub that receives it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from PIL import Image

from tests.support.commands import push
from tests.support.fake_hub import FakeHub
from wands.commands import push as push_module
from wands.export import upload as hub_repo

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
    """Folder as from `wands export`: a pipeline, its record, samples; one part is a folder linked from the Hub's cache."""
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
