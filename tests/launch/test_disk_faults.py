"""A disk that fails one call, or all calls from one on: nothing is lost, and a command continues or can be restarted.

The table is kind of call x error x command. Each row runs a command with a fault, then the same command without, and compares
the result with that of an undisturbed command, bit for bit.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.fake_hub import FakeHub
from tests.support.faults import NEVER, Fault, FaultServer, Outcome
from tests.support.runs import make_run
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.data.cache.reader import LatentCache
from wands.data.cache.writer import CacheWriter
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.errors import DiskError
from wands.files import read_rows

ERRORS = ("EIO", "ESTALE", "EDQUOT", "ENOSPC", "EACCES", "EROFS")
OF_READS = ("EIO", "ESTALE", "EACCES")
STEPS = 4
TRAIN = (
    *(f"train.max_steps={STEPS}", "train.bins_per_step=1", "packing.max_tokens=8", "precision.compute=fp32"),
    *("checkpoint.every=1", "checkpoint.keep=9", "ema.decay=0.9", "logging.trackers=[tensorboard]"),
    *("eval.every=2", "eval.max_clips=2", "data.holdout=0.25"),
)
TOKEN = "hf_disk_faults"


@dataclass
class Place:
    """Folders of the commands, and the results of undisturbed commands."""

    folder: Path
    server: FaultServer
    hub: FakeHub

    def train(self, out: Path, fault: Fault | None = None, *more: object) -> Outcome:
        settings = (*TRAIN, f"model.path={self.folder / 'model'}", f"data.cache={self.folder / 'cache'}")
        sets = [word for setting in (*settings, f"output_dir={out}") for word in ("--set", setting)]
        return self.server.run(["train", "--force", *sets, *more], fault)

    def preprocess(self, out: Path, fault: Fault | None = None) -> Outcome:
        args = ["--out", out, "--model", self.folder / "model", "--max-pixels", "4096", "--device", "cpu"]
        return self.server.run(["preprocess", self.folder / "clips", *args], fault)

    def export(self, out: Path, fault: Fault | None = None) -> Outcome:
        return self.server.run(["export", self.folder / "whole", "--out", out], fault)

    def push(self, name: str, fault: Fault | None = None) -> Outcome:
        return self.server.run(["push", self.folder / "exported", f"alice/{name}"], fault)


@pytest.fixture(scope="module")
def place(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(tiny_pipeline, folder / "model")
    run = make_run(tiny_pipeline, folder, world_size=1)
    draw = torch.Generator().manual_seed(0)
    with CacheWriter(
        folder / "cache", run.model.variant, fingerprint_pipeline(str(tiny_pipeline)), max_samples=2
    ) as writer:
        for number in range(8):
            shape = run.model.shape
            latents = torch.randn(shape.in_channels, 1, 4, 4, generator=draw).bfloat16()
            text = torch.randn(3, shape.text_dim, generator=draw).bfloat16()
            meta = {"num_frames": 1, "fps": 16.0, "content": str(number)}
            writer.add(f"clip{number}", {"latents": latents, "text_embeds": text}, meta)
        writer.commit(torch.zeros(1, run.model.shape.text_dim, dtype=torch.bfloat16))
    (folder / "clips").mkdir()
    for number in range(3):
        Image.effect_noise((64, 64), 40 + number).convert("RGB").save(folder / "clips" / f"{number}.png")
        (folder / "clips" / f"{number}.txt").write_text(f"noise {number}")
    with FakeHub({TOKEN: "alice"}, lfs_from=None) as hub:
        names = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        with FaultServer(folder, **names) as server:
            yield Place(folder, server, hub)


def made_once(place: Place, name: str, command: Callable[[Path], Outcome]) -> Path:
    """The result of an undisturbed command."""
    out = place.folder / name
    if not out.exists():
        outcome = command(out)
        assert outcome.code == 0, outcome.text
    return out


def whole_run(place: Place) -> Path:
    return made_once(place, "whole", place.train)


def check_end(outcome: Outcome, fault: Fault) -> None:
    """It went on, or ended in one sentence that names the error and blames no intact file, with a code that restarts."""
    assert "Traceback" not in outcome.text, outcome.text
    assert outcome.code in (0, DiskError.exit_code), outcome.text
    if outcome.code:
        last = "\n" + outcome.text
        last = last[last.rindex("\nwands: ") :]  # one problem, or a list of problems
        assert os.strerror(fault.number) in last, outcome.text
        if fault.kind in ("read", "open"):
            assert "delete" not in last
            assert not re.search(r"\bencode\b", last)
            assert "damaged" not in last


def state_of(run: Path) -> object:
    """The losses of all steps, and the hashes of the last checkpoint, without the loss of its state file."""
    rows = [(row["step"], row["loss"], row["lr"]) for row in read_rows(run / "metrics.jsonl")]
    evaluations = [
        (row["step"], row["weights"], row["losses"]) for row in read_rows(run / "evaluations.jsonl")
    ]
    checkpoint = find_checkpoint(run, verify=True)
    return rows, evaluations, checkpoint.folder.name, checkpoint.state.hashes


def check_train(place: Place, out: Path, fault: Fault, *more: object) -> Outcome:
    wanted = state_of(whole_run(place))
    before = {path.name for path in out.glob("checkpoints/step_????????")}
    outcome = place.train(out, fault, *more)
    check_end(outcome, fault)
    assert before <= {path.name for path in out.glob("checkpoints/step_????????")}, outcome.text
    if outcome.code:
        again = place.train(out, None, "--resume")
        assert again.code == 0, outcome.text + again.text
    assert state_of(out) == wanted
    assert not list(out.glob("checkpoints/*.abandoned*")), outcome.text
    return outcome


def check_resume(place: Place, out: Path, fault: Fault) -> Outcome:
    whole = whole_run(place)
    shutil.copytree(whole, out)
    for path in sorted((out / "checkpoints").glob("step_*"))[2:]:
        shutil.rmtree(path)
    (out / "checkpoints" / "latest").write_text("step_00000002")
    return check_train(place, out, fault, "--resume")


def contents_of(cache: Path) -> object:
    found = LatentCache(cache, verify=True)
    return [
        (key, found.read(i).latents.tolist(), found.meta(i)["caption"]) for i, key in enumerate(found.keys)
    ]


def check_preprocess(place: Place, out: Path, fault: Fault) -> Outcome:
    wanted = contents_of(made_once(place, "encoded", place.preprocess))
    outcome = place.preprocess(out, fault)
    check_end(outcome, fault)
    if outcome.code:
        again = place.preprocess(out)
        assert again.code == 0, outcome.text + again.text
    assert contents_of(out) == wanted
    return outcome


def hashes_of(export: Path) -> object:
    return json.loads((export / ".wands_hashes.json").read_text())


def check_export(place: Place, out: Path, fault: Fault) -> Outcome:
    whole_run(place)
    wanted = hashes_of(made_once(place, "exported", place.export))
    outcome = place.export(out, fault)
    check_end(outcome, fault)
    if outcome.code:
        # The last call says that the name of the finished folder may not survive a power failure.
        assert not out.exists() or hashes_of(out) == wanted
        again = place.export(out)
        assert again.code == 0, outcome.text + again.text
    assert hashes_of(out) == wanted
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return outcome


def check_push(place: Place, out: Path, fault: Fault) -> Outcome:
    whole_run(place)
    made_once(place, "exported", place.export)
    wanted = {name for name in hashes_of(place.folder / "exported") if name.endswith(".safetensors")}  # type: ignore[attr-defined]
    name = f"model{len(place.hub.repos)}"
    outcome = place.push(name, fault)
    check_end(outcome, fault)
    if outcome.code:
        again = place.push(name)
        assert again.code == 0, outcome.text + again.text
    sent = place.hub.repos[f"alice/{name}"].branches["main"]
    assert wanted <= sent.keys()
    for path in wanted:
        assert sent[path].data == (place.folder / "exported" / path).read_bytes()
    return outcome


CHECKS: dict[str, Callable[[Place, Path, Fault], Outcome]] = {
    "train": check_train,
    "resume": check_resume,
    "preprocess": check_preprocess,
    "export": check_export,
    "push": check_push,
}


def fault_of(place: Place, kind: str, error: str, part: str = "", first: int = 0, times: int = 1) -> Fault:
    return Fault(kind, getattr(errno, error), first, times, str(place.folder / part))


# ---- one of each


@pytest.mark.slow
def test_one_failed_read_of_the_cache_is_repeated_with_a_line(place: Place, tmp_path: Path):
    outcome = check_train(place, tmp_path / "run", fault_of(place, "read", "ESTALE", "cache/shard", 9))
    assert outcome.code == 0
    assert "cannot be read (Stale file handle); trying again" in outcome.text


@pytest.mark.slow
def test_a_cache_that_stays_unreadable_saves_before_the_run_ends(place: Place, tmp_path: Path):
    """No file of the run is lost, and a restart makes no step again."""
    shutil.rmtree(place.folder / "whole", ignore_errors=True)  # the undisturbed run, which counts here
    count = fault_of(place, "open", "EIO", "cache/shard", NEVER)
    reads = place.train(place.folder / "whole", count).num_calls
    fault = fault_of(place, "open", "EACCES", "cache/shard", reads // 2, NEVER)
    outcome = place.train(tmp_path / "run", fault)
    check_end(outcome, fault)
    assert outcome.code == DiskError.exit_code
    assert "a read failed; saving a checkpoint after this step, then stopping" in outcome.text
    last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert 0 < last < STEPS
    assert find_checkpoint(tmp_path / "run").state.step == last
    events = [row["event"] for row in read_rows(tmp_path / "run" / "events.jsonl")]
    assert events[-1] == "error"
    assert place.train(tmp_path / "run", None, "--resume").code == 0
    assert state_of(tmp_path / "run") == state_of(whole_run(place))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "kind", "error", "part", "first", "times"),
    [
        ("train", "write", "EDQUOT", "{out}", 40, 3),
        ("train", "fsync", "EIO", "{out}/checkpoints", 3, 1),
        # HDF5 holds this write back until an array is closed, where h5py ignores errors.
        ("preprocess", "write", "EIO", "{out}", 14, 1),
        ("resume", "read", "EIO", "{out}/checkpoints/step_00000002/wands_state.json", 0, NEVER),
        ("train", "write", "ENOSPC", "{out}", 40, NEVER),
        ("train", "rename", "EROFS", "{out}", 4, 3),
        ("train", "read", "EIO", "model", 0, NEVER),
        ("resume", "read", "EIO", "{out}/metrics.jsonl", 0, NEVER),
        ("resume", "read", "ESTALE", "{out}/checkpoints", 2, 1),
        ("resume", "open", "EACCES", "{out}/checkpoints", 5, NEVER),
        ("preprocess", "write", "ENOSPC", "{out}", 5, NEVER),
        ("preprocess", "read", "EIO", "model", 3, NEVER),
        ("export", "fsync", "EIO", "{out}", 0, NEVER),
        # The last call, for the folder that contains `out`, which is in its place already.
        ("export", "fsync", "EIO", "{out.parent}", 3, 1),
        ("export", "read", "ESTALE", "whole", 4, NEVER),
        ("export", "open", "EACCES", "model/scheduler", 0, 1),
        # The safetensors package opens a file, and PyTorch opens it again.
        (
            "export",
            "open",
            "ESTALE",
            "whole/checkpoints/step_00000004/transformer/state_rank_00000.safetensors",
            1,
            1,
        ),
        ("export", "open", "EACCES", "{out}.tmp", 3, NEVER),  # the temporary folder cannot be deleted either
        ("resume", "open", "EACCES", "model/transformer/diffusion_pytorch_model.safetensors", 0, 1),
        ("resume", "open", "EACCES", "model/transformer/diffusion_pytorch_model.safetensors", 0, NEVER),
        ("push", "read", "EIO", "exported", 2, NEVER),
        ("push", "open", "EACCES", "exported/vae/config.json", 1, NEVER),
    ],
)
def test_a_fault_loses_nothing(
    command: str, kind: str, error: str, part: str, first: int, times: int, place: Place, tmp_path: Path
):
    out = tmp_path / "out"
    path = str(place.folder / part) if "{out" not in part else part.format(out=out)
    CHECKS[command](place, out, Fault(kind, getattr(errno, error), first, times, path))


# ---- the table


@pytest.mark.full
@pytest.mark.parametrize("command", CHECKS)
@pytest.mark.parametrize("kind", ["read", "open", "write", "fsync", "rename", "lock"])
def test_every_call_of_a_command_may_fail_with_every_error(
    command: str, kind: str, place: Place, tmp_path: Path
):
    """Calls are drawn over the whole command; each fails once, and with all calls after it."""
    out = tmp_path / "out"
    parent = str(place.folder.parent)  # also contains the folders of the tests
    num_calls = CHECKS[command](place, out, Fault(kind, errno.EIO, NEVER, 1, parent)).num_calls
    shutil.rmtree(out, ignore_errors=True)
    failed = []
    for error in OF_READS if kind in ("read", "open") else ERRORS:
        for first in sorted({num_calls * part // 12 for part in range(12)}):
            for times in (1, NEVER):
                fault = Fault(kind, getattr(errno, error), first, times, parent)
                try:
                    CHECKS[command](place, out, fault)
                except AssertionError as problem:
                    failed.append(f"{fault}: {problem}")
                shutil.rmtree(out, ignore_errors=True)
    assert not failed, f"{len(failed)} failed\n" + "\n\n".join(failed)
