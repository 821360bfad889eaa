"""Host memory: few blocks, used again, and an error with a fix when there is too little."""

from __future__ import annotations

import pytest
import torch

from wands.checkpoint import buffers
from wands.checkpoint.buffers import HostBuffers, TensorFile, allocate
from wands.errors import ConfigError
from wands.model.files.tensor_files import LazyTensor

TEXTS = ("ema.device=cpu", "set ema.device=gpu")
CPU = torch.device("cpu")


def test_copies_use_the_same_memory_again():
    value = torch.arange(5.0)
    host = HostBuffers()
    files = [TensorFile("a", [LazyTensor.of("x", value), LazyTensor.of("y", value.to(torch.uint8))], {})]
    first = host.copy_files(files)[0].tensors
    value += 1
    assert first[0].read().tolist() == [0, 1, 2, 3, 4]
    second = host.copy_files(files)[0].tensors
    assert second[0].read().tolist() == [1, 2, 3, 4, 5]
    assert [tensor.read().data_ptr() for tensor in first] == [tensor.read().data_ptr() for tensor in second]
    assert second[1].read().dtype == torch.uint8


def test_a_tensor_of_another_size_gets_other_memory():
    host = HostBuffers()
    for values in (torch.arange(3.0), torch.arange(300.0)):
        [copied] = host.copy_files([TensorFile("a", [LazyTensor.of("x", values)], {})])
        assert torch.equal(copied.tensors[0].read(), values)


def test_large_vectors_are_in_several_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffers, "_BLOCK", 640)
    found = allocate([256, 320, 10, 1920, 8], CPU, False, *TEXTS)
    assert [len(vector) for vector in found] == [256, 320, 10, 1920, 8]
    assert all(vector.data_ptr() % 64 == 0 for vector in found)
    assert len({vector.untyped_storage().data_ptr() for vector in found}) == 3
    assert allocate([], CPU, False, *TEXTS) == []


def test_host_memory_that_runs_out_has_a_cure(monkeypatch: pytest.MonkeyPatch):
    def pin(*_: object, pin_memory: bool, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(torch, "empty", pin)
    said = r"ema\.device=cpu needs 2\.0 GiB of pinned .*\(CUDA error: out of memory\); set ema\.device=gpu"
    with pytest.raises(ConfigError, match=said):
        allocate([2**30, 2**30], CPU, True, *TEXTS)
    with pytest.raises(RuntimeError, match="more"):
        allocate([2**30], torch.device("cuda"), False, *TEXTS)
