"""Process group start-up under each launcher, and errors that all ranks raise together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from wands.distributed import bootstrap
from wands.distributed.bootstrap import check_gpus, init_process_group, ranks_per_node, start_together
from wands.errors import CacheError, ConfigError


def _group_timeout(minutes: str | None) -> float:
    from torch.distributed.distributed_c10d import _get_default_group

    if minutes is not None:
        os.environ["DEEPSPEED_TIMEOUT"] = minutes
    init_process_group()
    return _get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.slow
def test_process_group_timeout_is_an_hour_unless_set(new_world):
    assert new_world(2, _group_timeout, None) == [3600.0] * 2
    assert new_world(2, _group_timeout, "3") == [180.0] * 2


def _shared_memory(folder: str) -> list[str]:
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # as DeepSpeed's launcher does
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    init_process_group()
    torch.distributed.barrier()
    return [name for name in os.listdir("/dev/shm") if os.environ["MASTER_PORT"] in name]


def test_nothing_is_compiled_or_left_in_shared_memory(new_world, tmp_path: Path):
    """DeepSpeed would compile an all-reduce for half a minute, and leave 132 MiB in /dev/shm."""
    assert new_world(2, _shared_memory, str(tmp_path)) == [[], []]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        # torchrun on four nodes, DeepSpeed's launcher on two, another launcher, a launcher without the number of nodes
        ({"WORLD_SIZE": "32", "GROUP_WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"WORLD_SIZE": "16", "CROSS_SIZE": "2", "LOCAL_SIZE": "8"}, 8),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"WORLD_SIZE": "4"}, 4),
    ],
)
def test_ranks_per_node_under_each_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: int
):
    set_launcher(monkeypatch, environment)
    assert ranks_per_node() == expected


@pytest.mark.parametrize("slots", [(8, 4), (2, 4, 3), (1, 1, 7)])
def test_uneven_nodes_give_every_rank_the_mean(monkeypatch: pytest.MonkeyPatch, slots: tuple[int, ...]):
    """Each rank chooses the parallel degrees alone; the number of processes of its node would give different degrees."""
    names = (("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("CROSS_SIZE", "LOCAL_SIZE"))
    for nodes, local in names:
        seen = set()
        for here in slots:
            set_launcher(
                monkeypatch, {"WORLD_SIZE": str(sum(slots)), nodes: str(len(slots)), local: str(here)}
            )
            seen.add(ranks_per_node())
        assert seen == {sum(slots) // len(slots)}


def set_launcher(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "CROSS_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def _start_with_errors_on(ranks: tuple[int, ...]) -> tuple[str, bool] | None:
    try:
        with start_together():
            if int(os.environ["RANK"]) in ranks:
                raise CacheError(f"cache={os.environ['RANK']} is not there")
    except CacheError as error:
        return str(error), error.agreed
    assert torch.distributed.is_initialized()
    return None


def _start_with_crash_on_rank_1() -> str:
    try:
        with start_together():
            if os.environ["RANK"] == "1":
                raise PermissionError("secret.yaml")
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "started"


def _start_four_times() -> tuple[list[tuple[str, bool] | None], str]:
    return [_start_with_errors_on(ranks) for ranks in ((1,), (0, 1), ())], _start_with_crash_on_rank_1()


def test_an_error_of_one_rank_is_raised_on_all_ranks(new_world):
    """An exception other than WandsError stays as it is on its rank; the other ranks raise a RankError that names it."""
    (errors, other), (same_errors, own) = new_world(2, _start_four_times)
    assert errors == same_errors
    assert errors == [("[rank 1] cache=1 is not there", True), ("cache=0 is not there", True), None]
    assert (other, own) == ("RankError [rank 1] PermissionError: secret.yaml", "PermissionError secret.yaml")


def test_more_processes_than_gpus_raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="4 processes were started on a node with 2 GPUs"), start_together():
        raise AssertionError("not reached")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_gpus()


def test_without_a_launcher_the_error_is_unchanged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(CacheError, match=r"^no cache$") as caught, start_together():
        raise CacheError("no cache")
    assert not caught.value.agreed
    with start_together():
        pass
    assert not torch.distributed.is_initialized()
