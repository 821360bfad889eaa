"""A worker's share: decoding ahead, errors in a thread or of one worker alone, devices, ranks of a launcher."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launch.test_preprocess_workers import wait_for
from tests.support.commands import preprocess
from tests.support.preprocessed import SMALL, contents
from wands.data.cache.reader import LatentCache
from wands.data.cache.write_ahead_log import WriteAheadLog
from wands.encoders.vae import WanVideoEncoder
from wands.errors import CacheError, ConfigError, WandsError
from wands.preprocess import decoding, encoding, workers
from wands.preprocess import preprocess as module
from wands.preprocess.decoding import NUM_DECODERS, NUM_READY
from wands.preprocess.encoding import NUM_WRITES, _ClipEncoder
from wands.preprocess.workers import WorkerPool

WINDOWS = SMALL | {"clip_mode": "slide", "max_frames": 5}


@pytest.fixture
def source(clips_dir: Path, tmp_path: Path) -> Path:
    return make_source(clips_dir, tmp_path / "source")


@pytest.fixture(scope="module")
def whole(clips_dir: Path, tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    preprocess(str(make_source(clips_dir, folder / "source")), folder / "cache", tiny_pipeline, **WINDOWS)
    return folder / "cache"


def make_source(clips_dir: Path, folder: Path) -> Path:
    folder.mkdir()
    for stem in ("man", "woman"):
        shutil.copy(clips_dir / "carphone_pristine.mp4", folder / f"{stem}.mp4")
        (folder / f"{stem}.txt").write_text("A man in a dark suit sits in a moving car.")
    return folder


@pytest.mark.slow
def test_decoding_runs_ahead_but_not_away(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded windows wait for the encoder, never more than the queue and the threads have room for. For a GPU, they wait in
    pinned memory."""
    meta = decoding._meta
    encode = WanVideoEncoder.encode
    mutex = threading.Lock()
    counts = {"decoded": 0, "encoded": 0, "pinned": 0}
    ahead: list[int] = []
    full = threading.Event()

    def decoded(*args: Any) -> dict[str, Any]:
        with mutex:
            counts["decoded"] += 1
            ahead.append(counts["decoded"] - counts["encoded"])
            if ahead[-1] == NUM_READY + NUM_DECODERS + 1:
                full.set()
        return meta(*args)

    def encoded(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        assert full.wait(60), "decoding waits for the encoder"
        result = encode(self, pixels)
        with mutex:
            counts["encoded"] += 1
        return result

    def pinned(frames: torch.Tensor) -> torch.Tensor:
        with mutex:
            counts["pinned"] += 1
        return frames

    def decode_for_gpu(clips: Any, settings: Any, pin_memory: bool) -> Any:
        assert not pin_memory  # this device is a CPU
        return decoding.decode_clips(clips, settings, pin_memory=True)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(encoding, "decode_clips", decode_for_gpu)
    monkeypatch.setattr(decoding, "_meta", decoded)
    monkeypatch.setattr(WanVideoEncoder, "encode", encoded)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert report is not None
    assert report.num_accepted == counts["encoded"] == counts["pinned"] > 20
    # The encoder has one window, each thread has one, the queue has the others.
    assert max(ahead) == NUM_READY + NUM_DECODERS + 1
    assert report.waited is not None
    assert f"encoder waited {report.waited:.1%} of the time for decoding" in str(report)


@pytest.mark.slow
def test_the_encoder_does_not_wait_for_the_disk(
    source: Path, whole: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first sample is written, the encoder encodes as many windows as may wait, and no more."""
    add = WriteAheadLog.add
    encode = WanVideoEncoder.encode
    encoded = 0
    full = threading.Event()
    seen: list[int] = []

    def counted(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        nonlocal encoded
        encoded += 1
        if encoded == NUM_WRITES + 1:
            full.set()
        return encode(self, pixels)

    def slow(self: WriteAheadLog, *args: Any) -> None:
        if self.path.name.startswith("samples") and not seen:
            assert full.wait(60), "the encoder waits for the disk"
            time.sleep(0.3)
            seen.append(encoded)
        add(self, *args)

    monkeypatch.setattr(WriteAheadLog, "add", slow)
    monkeypatch.setattr(WanVideoEncoder, "encode", counted)
    preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    assert seen == [NUM_WRITES + 1]
    assert contents(tmp_path / "cache") == contents(whole)


@pytest.mark.slow
def test_a_full_disk_ends_the_run(
    source: Path, whole: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes reports it, at the first sample as at the last."""
    add = WriteAheadLog.add
    for last in (1, len(LatentCache(whole).keys)):
        calls = iter(range(1, last))

        def fill_up(self: WriteAheadLog, *args: Any, calls: Iterator[int] = calls) -> None:
            if self.path.name.startswith("samples") and next(calls, None) is None:
                raise CacheError("the disk is full.")
            add(self, *args)

        monkeypatch.setattr(WriteAheadLog, "add", fill_up)
        with pytest.raises(CacheError, match=r"the disk is full\."):
            preprocess(str(source), tmp_path / f"cache{last}", tiny_pipeline, **WINDOWS)


@pytest.mark.slow
@pytest.mark.parametrize("out_of_memory", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_windows_of_one_size_are_encoded_together(
    source: Path,
    whole: Path,
    tiny_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    out_of_memory: bool,
) -> None:
    """Up to --vae-batch windows; one by one, if the memory is too small for the batch."""
    encode = WanVideoEncoder.encode
    sizes = Counter[int]()

    def counted(self: WanVideoEncoder, pixels: torch.Tensor) -> torch.Tensor:
        if out_of_memory and len(pixels) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes[len(pixels)] += 1
        return encode(self, pixels)

    monkeypatch.setattr(WanVideoEncoder, "encode", counted)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS, vae_batch=4)
    assert report is not None
    assert not report.rejected
    caches = LatentCache(tmp_path / "cache"), LatentCache(whole)
    assert caches[0].keys == caches[1].keys
    if out_of_memory:
        assert set(sizes) == {1}
        assert contents(tmp_path / "cache") == contents(whole)
    else:
        assert sizes[4] >= report.num_accepted // 4 - 2
        for row in range(report.num_accepted):
            batched, alone = (cache.read(row).latents.float() for cache in caches)
            torch.testing.assert_close(batched, alone, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_a_failure_in_a_thread_ends_the_run(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ending in ("mp4", "txt"):
        (source / f"woman.{ending}").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_meta", None)
        with pytest.raises(TypeError, match="not callable"):
            preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    wait_for(lambda: not any(thread.name == "run_in_threads" for thread in threading.enumerate()))
    preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS)
    preprocess(str(source), tmp_path / "whole", tiny_pipeline, **WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_an_error_of_one_worker_leaves_its_share_to_the_others(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 fails: worker 0 encodes everything, and the report names the error."""

    def run(self: WorkerPool, task: Any, settings: Any, shares: dict[int, Any]) -> Iterator[Any]:
        for slot, share in shares.items():
            if slot == 1:
                yield from workers._with_losses(slot, failing())
            else:
                yield from task(settings, slot, self.devices(slot), share)

    def failing() -> Iterator[Any]:
        raise ConfigError("model=broken cannot be loaded.")
        yield

    monkeypatch.setattr(WorkerPool, "run", run)
    report = preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS, workers=2)
    assert report is not None
    assert (
        "worker 1 ended early (model=broken cannot be loaded); the worker's other captions or clips were"
        in str(report)
    )
    monkeypatch.undo()
    preprocess(str(source), tmp_path / "whole", tiny_pipeline, **WINDOWS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "whole")


@pytest.mark.parametrize("fails", ["error", "death"])
def test_a_run_whose_workers_all_fail_ends(
    source: Path, tiny_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    rounds: list[int] = []

    def run(self: WorkerPool, task: Any, settings: Any, shares: dict[int, Any]) -> Iterator[Any]:
        rounds.append(len(shares))
        for slot in shares:
            error = ConfigError("model=broken cannot be loaded.") if fails == "error" else None
            yield workers.Lost(
                slot, f"worker {slot} ended early (the process ended with signal SIGKILL)", error
            )

    monkeypatch.setattr(WorkerPool, "run", run)
    message = {
        "error": "model=broken cannot be loaded",
        "death": "is unfinished: worker 0 ended early .*SIGKILL",
    }
    with pytest.raises(WandsError, match=message[fails]):
        preprocess(str(source), tmp_path / "cache", tiny_pipeline, **WINDOWS, workers=2)
    assert rounds == {"error": [2], "death": [2] * module.ROUNDS}[fails]


def test_both_ways_of_having_workers_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    pool = WorkerPool(1, "cpu", None)
    assert (pool.size, pool.rank, pool.launched) == (4, 3, True)
    with pytest.raises(
        ConfigError, match=r"--workers 2 starts processes, but a launcher has started 4 already\. Remove"
    ):
        WorkerPool(2, "cpu", None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    pool = WorkerPool(2, "cpu", None)
    assert (pool.size, pool.rank, pool.launched) == (2, 0, False)
    pool.limit(1)
    assert (pool.size, pool.slots) == (1, [0])


def test_workers_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.empty", lambda *_, **__: None)  # there is no GPU to try it on

    def devices(device: str | None, text_device: str | None) -> list[str]:
        pairs = [WorkerPool(4, device, text_device).devices(number) for number in range(4)]
        return [f"{vae} {text}".replace("cuda:", "") for vae, text in pairs]

    assert devices(None, None) == devices("cuda", None) == ["0 0", "1 1", "2 2", "0 0"]
    assert devices("cuda:1", None) == ["1 1"] * 4
    assert devices(None, "cpu") == ["0 cpu", "1 cpu", "2 cpu", "0 cpu"]
    assert devices("cpu", "cuda") == ["cpu 0", "cpu 1", "cpu 2", "cpu 0"]


@pytest.mark.parametrize("how", ["nothing", "error"])
def test_the_end_of_rank_0_ends_the_other_ranks(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Rank 0 sends one last message: nothing more to do, or its error."""
    sent: list[Any] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(workers.dist, name, lambda *args, **options: None)
    monkeypatch.setattr(workers.dist, "scatter_object_list", lambda received, orders: sent.append(orders))
    try:
        with WorkerPool(1, "cpu", None):
            if how == "error":
                raise ConfigError("a sentence.")
    except ConfigError:
        assert how == "error"
    assert len(sent) == 1
    monkeypatch.setattr(
        workers.dist, "scatter_object_list", lambda received, _: received.__setitem__(0, sent[0][1])
    )
    monkeypatch.setenv("RANK", "1")
    with WorkerPool(1, "cpu", None) as pool:
        if how == "nothing":
            pool.follow()
        else:
            with pytest.raises(WandsError, match=r"^a sentence\.$") as caught:
                pool.follow()
            assert caught.value.agreed


def test_a_rank_without_the_shared_disk_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings:
        work = tmp_path / "nowhere"

    gathered: list[Any] = []
    orders = [(None, Settings(), [1]), None]
    monkeypatch.setattr(workers, "_SHARED_DISK_SECONDS", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(
        workers.dist, "scatter_object_list", lambda received, _: received.__setitem__(0, orders.pop(0))
    )
    monkeypatch.setattr(workers.dist, "gather_object", gathered.append)
    WorkerPool(1, "cpu", None).follow()
    assert (
        f"rank 1 does not see {tmp_path / 'nowhere'}. All nodes need the same --out" in gathered[0][0].reason
    )


@pytest.mark.parametrize(("device", "num_workers"), [(None, 3), ("cuda", 3), ("cpu", 1)])
def test_one_worker_per_gpu(monkeypatch: pytest.MonkeyPatch, device: str | None, num_workers: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(WorkerPool, "devices", lambda *_: None)
    assert WorkerPool(None, device, None).size == num_workers
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert WorkerPool(None, device, None).size == 1


def test_the_note_of_the_clips_in_the_encoder_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "encoding-0").symlink_to(tmp_path / "precious")
    with pytest.raises(WandsError, match="must be a regular file, and no link"):
        _ClipEncoder._note(SimpleNamespace(in_encoder=tmp_path / "encoding-0"), "a video")
    assert (tmp_path / "precious").read_text() == "keep me"
