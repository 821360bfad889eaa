"""Files of tensors: written as safetensors reads them, read without running what a pickle holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from wands.errors import CheckpointError
from wands.model.files.tensor_files import LazyTensor, TensorFiles, as_bytes, find_weights, write_sharded


def test_written_files_are_what_safetensors_reads(tmp_path: Path):
    values = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "narrow": torch.randn(7).bfloat16(),
        "byte": torch.arange(5, dtype=torch.uint8),
        "none": torch.tensor(float("nan")),
        "empty": torch.zeros(0, 3),
    }
    entries = [
        LazyTensor(name=n, shape=tuple(v.shape), dtype=v.dtype, read=lambda value=v: value)
        for n, v in values.items()
    ]
    (path,) = write_sharded(tmp_path, "model", entries)
    for name, value in load_file(path).items():
        assert value.dtype == values[name].dtype
        assert value.shape == values[name].shape
        assert torch.equal(as_bytes(value), as_bytes(values[name]))
    files = TensorFiles([path], "here")
    assert files.shapes == {name: tuple(value.shape) for name, value in values.items()}
    assert {n: tensor.dtype for n, tensor in files.tensors.items()} == {n: v.dtype for n, v in values.items()}


def test_shards_hold_no_more_than_they_may(tmp_path: Path):
    values = {f"w{i}": torch.full((10,), float(i)) for i in range(7)}
    entries = [
        LazyTensor(name=n, shape=(10,), dtype=torch.float32, read=lambda value=v: value)
        for n, v in values.items()
    ]
    paths = write_sharded(tmp_path, "model", entries, max_shard_size=100)
    assert [len(load_file(path)) for path in paths] == [2, 2, 2, 1]
    assert find_weights(tmp_path, "model") == paths
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 280
    for damaged in ("{}", "[]", '{"weight_map": {"w0": 3}}'):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="is not an index of weights"):
            find_weights(tmp_path, "model")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_of_tensors(zipped: bool, tmp_path: Path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=zipped)
    assert torch.equal(TensorFiles([path], "here").read("a"), torch.arange(3))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"a": Bomb()}, "is a pickle with objects that are not tensors"),
        ({"a": 3}, "contains a, which is not a tensor"),
        ([torch.zeros(1)], "contains a list"),
        ({"generator": {"a": 3}}, "contains a, which is not a tensor"),
        ({"generator_ema": 3}, "contains a int, not a state dict"),
    ],
)
def test_pickles_of_more(content: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=says):
        TensorFiles([tmp_path / "w.pth"], "here")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_value_that_is_not_finite_is_named_when_it_is_read(dtype: torch.dtype, suffix: str, tmp_path: Path):
    path = tmp_path / f"w{suffix}"
    good = torch.ones(3, 2).to(dtype)
    state = {"good": good, "none": torch.zeros(0), "bad": torch.tensor([1.0, torch.nan]).to(dtype)}
    (torch.save if suffix == ".pth" else save_file)(state, path)
    files = TensorFiles([path], "model.path=here")
    assert torch.equal(files.read("good").float(), good.float())
    assert files.read("none").numel() == 0
    with pytest.raises(
        CheckpointError, match=rf"model\.path=here: .*w\{suffix} has NaN or infinite values in bad"
    ):
        files.read("bad")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_damaged_files(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(CheckpointError, match=r"here: .*cannot be read .*\. Download the file again"):
        TensorFiles([tmp_path / name], "here")
