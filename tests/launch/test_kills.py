"""Fifty kills at random moments, each followed by the same command: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.launch.test_stop import MIDDLE, RUNNER, TORCHRUN, Job, kill
from tests.support.fake_hub import FakeHub
from tests.support.runs import run_training
from tests.support.world import WorldPool
from wands.checkpoint.checkpoint_files import find_checkpoint
from wands.cli import main
from wands.commands.export import export
from wands.config.options import ExportOptions
from wands.files import read_rows

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVES = ("checkpoint.every=4", "checkpoint.keep=2", "ema.decay=0.9")
SEED = int(os.environ.get("WANDS_KILL_SEED", "0"))
"""Another seed kills at other moments."""


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "pym-"))}


# ---- training


def final(run: Path) -> tuple[list[tuple[float, ...]], dict[str, str]]:
    """Losses and gradient norms of all steps, and the hashes of the weights, moments and averages of the last step."""
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(run / "metrics.jsonl")]
    return rows, dict(find_checkpoint(run, verify=True).state.hashes)


def train_calmly(
    launcher: str, steps: int, model: Path, run: Path, worlds: WorldPool, *settings: str
) -> None:
    if launcher == "wands":  # the same bits in a process that has imported everything
        worlds[1].run(run_training, model, run, (f"train.max_steps={steps}", *SAVES, *settings))
        return
    job = Job(launcher, model, run, steps, *SAVES, *settings)
    try:
        job.wait_for(lambda: "done: " in job.output(), 400)
        job.wait_for(lambda: not job.processes())
    finally:
        job.close()


def is_saving(job: Job) -> bool:
    return any((job.run / "checkpoints").glob("*.tmp"))


def send(job: Job, launcher: str, rng: random.Random) -> str:
    """Send a random signal to a worker, to the launcher or to all processes of the run."""
    number = rng.choice(SIGNALS)
    target = rng.choice(("worker", "launcher", "all"))
    if launcher == "wands":
        target = "all"
    try:
        if target == "worker":
            os.kill(job.worker(rng.randrange(2)), number)
        else:
            kill(*(("",) if target == "all" else (RUNNER, MIDDLE, TORCHRUN)), number=number)(job)
    except (ProcessLookupError, StopIteration):  # it has just ended
        pass
    return f"{number.name} to {target}"


def wait_for_moment(job: Job, is_time: Callable[[], bool], rng: random.Random) -> None:
    """Wait until a training is to be killed: in its start, or from `is_time` on, half of the times during a save."""
    if rng.random() < 0.15:  # before the first step
        job.wait_for(job.processes)
        time.sleep(rng.uniform(0, 8))
        return
    job.wait_for(is_time, 200)
    if rng.random() < 0.5:
        job.wait_for(lambda: is_saving(job) or not job.processes(), 60)


def train_through_kills(
    launcher: str, steps: int, seed: int, num_kills: int, model: Path, folder: Path, *settings: str
) -> None:
    """Train a run that is killed again and again, and compare it with the run in `folder`/calm."""
    before = shared_memory()
    rng = random.Random(seed)
    log = []
    done = 0
    for number in range(num_kills + 1):
        job = Job(launcher, model, folder / "killed", steps, *SAVES, *settings, "--resume")
        try:
            if number < num_kills:
                goal = rng.randrange(1, max(2 * (steps - done) // (num_kills - number + 1), 2))
                start = done

                def is_time(job: Job = job, target: int = start + goal) -> bool:
                    ended = "done: " in job.output() or "already the end" in job.output()
                    return ended or len(job.rows()) >= target

                wait_for_moment(job, is_time, rng)
                log.append(f"{send(job, launcher, rng)} at step {len(job.rows())}")
            else:
                job.wait_for(
                    lambda job=job: "done: " in job.output() or "already the end" in job.output(), 400
                )  # type: ignore[misc]
            # A launcher that was killed in its start still starts workers, which leave when they have imported torch.
            job.wait_for(lambda job=job: not job.processes(), 240)  # type: ignore[misc]
            # deepspeed's own launcher prints a traceback at SIGINT.
            assert f'File "{ROOT}/wands' not in job.output(), (log, job.output())
            done = find_checkpoint(job.run).state.step if any(job.run.rglob("wands_state.json")) else 0
        finally:
            job.close()
    assert final(folder / "killed") == final(folder / "calm"), log
    left = [
        path.name
        for path in (folder / "killed").rglob("*")
        if path.name.endswith((".tmp", ".lock", ".abandoned")) or path.name == "next"
    ]
    assert not left, log
    assert shared_memory() <= before


TRAINING = [
    pytest.param("wands", 12, 0, 1, marks=pytest.mark.slow),
    *(
        pytest.param(launcher, 120, seed, 9, marks=pytest.mark.kill)
        for seed, launcher in enumerate(("deepspeed", "torchrun", "deepspeed"), start=1)
    ),
]


@pytest.mark.parametrize(("launcher", "steps", "seed", "num_kills"), TRAINING)
def test_a_run_that_is_killed_ends_like_one_that_is_not(
    launcher: str,
    steps: int,
    seed: int,
    num_kills: int,
    tiny_pipeline: Path,
    tmp_path: Path,
    worlds: WorldPool,
):
    train_calmly(launcher, steps, tiny_pipeline, tmp_path / "calm", worlds)
    train_through_kills(launcher, steps, seed + SEED, num_kills, tiny_pipeline, tmp_path)


@pytest.mark.kill
def test_a_causal_run_that_is_killed_ends_like_one_that_is_not(
    tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    settings = (
        *("objective.name=teacher_forcing", "objective.chunk_frames=1", "objective.context_noise=0.1"),
        "packing.max_tokens=48",
    )
    train_calmly("torchrun", 60, tiny_pipeline, tmp_path / "calm", worlds, *settings)
    train_through_kills("torchrun", 60, 6 + SEED, 3, tiny_pipeline, tmp_path, *settings)


@pytest.mark.kill
@pytest.mark.parametrize(("launcher", "seed"), [("deepspeed", 4), ("torchrun", 5)])
def test_kills_during_asynchronous_saves(
    launcher: str, seed: int, tiny_pipeline: Path, tmp_path: Path, worlds: WorldPool
):
    """Ten kills each. The calm run saves while it waits, and has the same bits."""
    train_calmly(launcher, 300, tiny_pipeline, tmp_path / "calm", worlds)
    settings = ("checkpoint.asynchronous=true",)
    train_through_kills(launcher, 300, seed + SEED, 10, tiny_pipeline, tmp_path, *settings)


# ---- export, convert, push


@pytest.fixture(scope="module")
def run(tiny_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, worlds: WorldPool) -> Path:
    run = tmp_path_factory.mktemp("export") / "run"
    worlds[1].run(run_training, tiny_pipeline, run, ("train.max_steps=1",))
    return run


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({"hf_secret": "alice"}) as hub:
        yield hub


def start(arguments: Sequence[object], temporary: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "wands", *map(str, arguments)]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png")
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def kill_after(
    process: subprocess.Popen[str], has_begun: Callable[[], bool], rng: random.Random
) -> signal.Signals:
    """Kill a process some time after it has begun to write. Return the signal."""
    while not has_begun() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(rng.choice((0, rng.uniform(0, 0.2), rng.uniform(0, 2))))
    number = rng.choice(SIGNALS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.communicate(timeout=60)
    return number


KILLS = {"few": range(1), "many": range(1, 9)}


@pytest.mark.parametrize(
    ("command", "seeds"),
    [
        pytest.param("export", KILLS["few"], id="export-one", marks=pytest.mark.slow),
        pytest.param("convert", KILLS["few"], id="convert-one", marks=pytest.mark.slow),
        pytest.param("push", KILLS["few"], id="push-one", marks=pytest.mark.slow),
        *(
            pytest.param(command, KILLS["many"], id=f"{command}-eight", marks=pytest.mark.kill)
            for command in ("export", "convert", "push")
        ),
    ],
)
def test_a_killed_command_is_completed_by_the_same_command(
    command: str,
    seeds: range,
    run: Path,
    tiny_pipeline: Path,
    tmp_path: Path,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    made = export(ExportOptions(checkpoint=run, out=tmp_path / "wanted"))
    # (command line, what it makes, whether it has begun to write)
    calls: dict[str, tuple[list[object], Callable[[], dict[str, str]], Callable[[], bool]]] = {
        "export": (
            ["export", run, "--out", tmp_path / "out"],
            lambda: tree(tmp_path / "out"),
            (tmp_path / ".out.lock").exists,
        ),
        "convert": (
            ["convert", tiny_pipeline, "--to", "official", "--out", tmp_path / "out"],
            lambda: tree(tmp_path / "out"),
            (tmp_path / ".out.lock").exists,
        ),
        "push": (
            ["push", made, "alice/wan", "--endpoint", hub.url],
            lambda: {name: hashlib.sha256(data).hexdigest() for name, data in hub.files("alice/wan").items()},
            lambda: bool(hub.requests),
        ),
    }
    arguments, result, has_begun = calls[command]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # read at the import
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def call() -> Result:  # in this process, which has imported everything
        return CliRunner().invoke(main, [str(word) for word in arguments])

    done = call()
    assert done.exit_code == 0, done.output
    wanted = result()
    assert len(wanted) > 3
    names = {path.name for path in tmp_path.iterdir()}
    for seed in seeds:
        rng = random.Random(f"{command} {seed} {SEED}")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        hub.repos.clear()
        hub.requests.clear()
        number = kill_after(start(arguments, temporary), has_begun, rng)
        again = call()
        # If the signal came after the result had its final name, a second conversion to this name is refused.
        if not (command == "convert" and "contains files" in again.output):
            assert again.exit_code == 0, (number, again.output)
        assert result() == wanted, (seed, number, again.output)
        assert {path.name for path in tmp_path.iterdir()} == names, (seed, number)
        assert not list(temporary.iterdir()), (seed, number)
