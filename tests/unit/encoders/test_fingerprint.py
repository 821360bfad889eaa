"""Fingerprints: equal for equal encoders, different for any change that changes numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import UMT5EncoderModel

from wands.encoders import fingerprint as pipeline_module
from wands.encoders.components import find_part
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.errors import ConfigError
from wands.model.files import hub

VAE_FILE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(tiny_pipeline: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pipeline, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_copy_is_equal(tiny_pipeline: Path, copy: Path) -> None:
    fingerprint = fingerprint_pipeline(tiny_pipeline)
    assert fingerprint == fingerprint_pipeline(str(copy))
    assert list(fingerprint) == ["vae", "text_encoder", "tokenizer"]
    assert all(len(value) == 64 for part in fingerprint.values() for value in part.values())


def test_what_changes_no_number_does_not_count(tiny_pipeline: Path, copy: Path) -> None:
    edit_json(copy / "vae" / "config.json", _diffusers_version="9.9", _name_or_path="elsewhere", new_key=1)
    edit_json(copy / "text_encoder" / "config.json", transformers_version="9.9", dtype="bfloat16")
    shutil.rmtree(copy / "transformer")
    assert fingerprint_pipeline(tiny_pipeline) == fingerprint_pipeline(copy)


def _one_weight(folder: Path) -> None:
    tensors = load_file(folder / VAE_FILE)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 0.1
    save_file(tensors, folder / VAE_FILE)


def _text_weight(folder: Path) -> None:
    model = UMT5EncoderModel.from_pretrained(folder / "text_encoder")
    with torch.no_grad():
        model.shared.weight[3, 3] += 1
    model.save_pretrained(folder / "text_encoder")


def _vocabulary(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab[10], vocab[11] = vocab[11], vocab[10]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_one_weight, "vae"),
        (lambda f: edit_json(f / "vae" / "config.json", latents_mean=[0.01] + [0.0] * 15), "vae"),
        (_text_weight, "text_encoder"),
        (lambda f: edit_json(f / "text_encoder" / "config.json", layer_norm_epsilon=1e-5), "text_encoder"),
        (_vocabulary, "tokenizer"),
    ],
)
def test_what_changes_numbers_counts(tiny_pipeline: Path, copy: Path, change: object, part: str) -> None:
    change(copy)  # type: ignore[operator]
    before = fingerprint_pipeline(tiny_pipeline)
    after = fingerprint_pipeline(copy)
    assert [name for name in before if before[name] != after[name]] == [part]


def test_split_weights_are_all_hashed(copy: Path) -> None:
    """Sharded as UMT5-XXL is: a change in the last shard counts."""
    model = UMT5EncoderModel.from_pretrained(copy / "text_encoder")
    (copy / "text_encoder" / "model.safetensors").unlink()
    model.save_pretrained(copy / "text_encoder", max_shard_size="20kB")
    shards = sorted((copy / "text_encoder").glob("model-*.safetensors"))
    assert len(shards) > 1
    before = fingerprint_pipeline(copy)["text_encoder"]["weights_sha256"]
    content = bytearray(shards[-1].read_bytes())
    content[-1] ^= 1
    shards[-1].write_bytes(content)
    assert fingerprint_pipeline(copy)["text_encoder"]["weights_sha256"] != before


def test_a_bare_dit_has_an_empty_fingerprint(tiny_pipeline: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_pipeline / "transformer", tmp_path / "transformer")
    assert fingerprint_pipeline(tmp_path) == {}


def test_the_hubs_cache_names_files_by_their_hash(copy: Path, tiny_pipeline: Path) -> None:
    wanted = fingerprint_pipeline(tiny_pipeline)["vae"]["weights_sha256"]
    blob = copy / "blobs" / wanted
    blob.parent.mkdir()
    blob.write_bytes(b"not read: hashing 22 GB at every start would be noticed")
    (copy / VAE_FILE).unlink()
    (copy / VAE_FILE).symlink_to(blob)
    assert fingerprint_pipeline(copy)["vae"]["weights_sha256"] == wanted


@pytest.mark.parametrize("variant", ["wan2.1-t2v-1.3b", "wan2.1-i2v-14b", "wan2.2-i2v-a14b"])
def test_from_the_hub_no_weight_is_fetched(
    tiny_variant: Callable[[str], Path], variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(tiny_variant(variant), tmp_path / "copy"))
    local = fingerprint_pipeline(copy)
    assert ("image_encoder" in local) == ("image_processor" in local) == (variant == "wan2.1-i2v-14b")
    hashes = {part: value["weights_sha256"] for part, value in local.items() if "weights_sha256" in value}
    for weights in copy.rglob("*.safetensors"):
        weights.unlink()
    asked: list[str] = []

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: None = None) -> str:
        asked.extend(allow_patterns)
        return str(copy)

    def metadata(url: str) -> SimpleNamespace:
        return SimpleNamespace(etag=hashes[url.split("/")[-2]])

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(pipeline_module, "get_hf_file_metadata", metadata)
    assert fingerprint_pipeline("someone/tiny-wan") == local
    assert asked
    assert not [pattern for pattern in asked if "safetensors" in pattern]


def test_mistakes_are_one_sentence(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model=no/such/path is neither a folder nor a Hub id"):
        fingerprint_pipeline("no/such/path")
    (copy / VAE_FILE).unlink()
    with pytest.raises(ConfigError, match=rf"has no {VAE_FILE}"):
        fingerprint_pipeline(copy)
    (copy / "vae" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"vae/config\.json cannot be read"):
        fingerprint_pipeline(copy)
    with pytest.raises(ConfigError, match="has no image_encoder folder"):
        find_part(copy, "image_encoder")
