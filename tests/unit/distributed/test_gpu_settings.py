"""Every caller gets the settings without which ranks can hang: before CUDA and NCCL start, unless the user has set others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from wands.distributed import bootstrap
from wands.distributed.gpu_settings import GPU_SETTINGS, set_gpu_settings

EXPANDABLE = GPU_SETTINGS["PYTORCH_ALLOC_CONF"]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the environment nor the allocator of this process has settings, before and after the test."""
    before = torch._C._accelerator_getAllocatorSettings()
    for name in (*GPU_SETTINGS, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # undoes what the test sets
        monkeypatch.delenv(name)
    torch._C._accelerator_setAllocatorSettings("")
    yield
    torch._C._accelerator_setAllocatorSettings(before)


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in GPU_SETTINGS}


def test_an_allocator_that_has_read_the_environment_still_gets_the_setting() -> None:
    """As in a notebook that has used PyTorch before wands."""
    set_gpu_settings()
    assert variables() == GPU_SETTINGS
    assert torch._C._accelerator_getAllocatorSettings() == EXPANDABLE


def test_torch_without_the_newer_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", given.append)
    with monkeypatch.context() as older:
        older.delattr(torch._C, "_accelerator_getAllocatorSettings")
        older.delattr(torch._C, "_accelerator_setAllocatorSettings")
        set_gpu_settings()
    assert given == [EXPANDABLE]


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPU_SETTINGS:
        monkeypatch.setenv(name, "mine")
    set_gpu_settings()
    assert variables() == dict.fromkeys(GPU_SETTINGS, "mine")
    assert torch._C._accelerator_getAllocatorSettings() == ""


def test_the_earlier_name_of_the_allocators_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    set_gpu_settings()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
    assert torch._C._accelerator_getAllocatorSettings() == ""


def test_settings_that_the_program_gave_the_allocator_stay() -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
    set_gpu_settings()
    assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:128"


def test_they_are_set_before_the_accelerator_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str | None]] = []

    def accelerator_type() -> str:
        seen.append(variables())
        raise NotImplementedError

    monkeypatch.setattr(bootstrap, "accelerator_type", accelerator_type)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(NotImplementedError):
        bootstrap.init_process_group()
    assert seen == [GPU_SETTINGS]


def test_they_are_set_before_the_checks_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with bootstrap.start_together():
        assert variables() == GPU_SETTINGS


@pytest.mark.parametrize(("backend", "warns"), [("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_a_group_that_was_made_without_them_is_named(
    backend: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for _ in range(2):
        with bootstrap.start_together():
            pass
    named = [message for message in caplog.messages if "made without NCCL_LAUNCH_ORDER_IMPLICIT=1" in message]
    assert len(named) == warns
