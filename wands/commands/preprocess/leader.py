"""The leader's side of `wands preprocess`: fills the work folder, has it worked off, collects what the workers made."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from wands.commands.preprocess.claims import Claims
from wands.commands.preprocess.encoding import encode_share
from wands.commands.preprocess.work_folder import UNTOUCHED, WORK_NAME, Clip, Lines, Marks, Run, WorkerStats
from wands.commands.preprocess.workers import Crew, lock_work, start_workers
from wands.data.cache.format import disk_error, write_whole
from wands.data.cache.writer import CacheWriter
from wands.data.clips.records import Rejection
from wands.encoders.spool import TextSpool
from wands.errors import WandsError

QUARANTINE_NAME = "quarantine.jsonl"
CAPTIONS_IN_PIECE = 32
ROUNDS = 3
"""How often workers are started again without one clip done in between."""


class Job:
    """One run, seen by its leader."""

    def __init__(self, writer: CacheWriter, crew: Crew, run: Run) -> None:
        """Take what is known before the scan; nothing is written.

        Args:
            writer: of the cache.
            crew: the processes.
            run: what workers are told.
        """
        self.writer, self.crew, self.run = writer, crew, run
        self.work = writer.path / WORK_NAME
        self.num_workers = crew.size
        self.lost: list[str] = []
        self.handed_out = False

    @contextmanager
    def work_folder(self) -> Iterator[None]:
        """Make the folder and take in what an earlier run left there; only `clear` removes it."""
        try:
            self.work.mkdir(exist_ok=True)
            lock = lock_work(self.work)
        except OSError as error:
            raise disk_error(self.work, 0, error, cache=self.writer.path) from None
        try:
            self._take_in()
            yield
        finally:
            os.close(lock)

    def _take_in(self) -> None:
        """Samples that no shard holds yet go into shards; waits for workers that have not ended."""
        self.writer.refresh()
        for path in sorted(self.work.glob("samples-*.journal")):
            with path.open("rb") as journal:
                fcntl.flock(journal, fcntl.LOCK_EX)
                self.writer.refresh()
                self.writer.adopt(path)
        if deadly := {line["deadly"]: line["reason"] for line in self._reject_lines() if line["deadly"]}:
            lines = [
                json.dumps({"video": video, "reason": reason}) + "\n"
                for video, reason in sorted((self.quarantine() | deadly).items())
            ]
            write_whole(self.writer.path / QUARANTINE_NAME, "".join(lines).encode())

    def quarantine(self) -> dict[str, str]:
        """Clips that end a process, as earlier runs found: digest of the video -> reason.

        A changed file has another digest; whoever wants to have one tried again deletes the file, or its line.
        """
        found = {}
        with suppress(FileNotFoundError):
            for line in (self.writer.path / QUARANTINE_NAME).read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # edited by hand
                    value = json.loads(line)
                    found[value["video"]] = value["reason"]
        return found

    def hand_out(self, clips: Sequence[Clip], with_null_text: bool) -> None:
        """Write down the work.

        Raises:
            CacheError: the disk is full.
        """
        if not self.crew.launched:
            self.num_workers = max(1, min(self.crew.size, len(clips)))
        spool = TextSpool(self.work.glob("text-*.journal"))
        wanted = {row.caption for clip in clips for row in clip.rows} | ({""} if with_null_text else set())
        captions = sorted(caption for caption in wanted if caption not in spool)
        pieces = [captions[i : i + CAPTIONS_IN_PIECE] for i in range(0, len(captions), CAPTIONS_IN_PIECE)]
        run = replace(self.run, needs_vae=any(clip.decode for clip in clips))
        try:
            marks = self._marks(clips)
            for path in [*self.work.glob("rejects-*"), *self.work.glob("worker-*")]:
                path.unlink()
            for name, values in (("captions", pieces), ("clips", [clip.to_json() for clip in clips])):
                lines = (json.dumps(value) + "\n" for value in values)
                (self.work / f"{name}.jsonl").write_text("".join(lines))
                Claims.create(self.work / f"{name}.claims", len(values))
            Marks.create(self.work / "clips.marks", marks)
            for slot in range(self.num_workers):
                (self.work / f"text-{slot}.journal").touch()
                (self.work / f"samples-{slot}.journal").touch()
            run.write(self.work)
        except OSError as error:
            raise disk_error(self.work, 0, error, cache=self.writer.path) from None
        self.handed_out = True

    def _marks(self, clips: Sequence[Clip]) -> bytes:
        """The marks of clips that a killed run had in hand and of which it stored nothing more."""
        before: dict[tuple[str, str], tuple[int, int]] = {}
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # it was killed as it wrote them: no mark is known
            lines, marks = Lines(self.work / "clips.jsonl"), (self.work / "clips.marks").read_bytes()
            for number, mark in enumerate(marks[: len(lines)]):
                if mark != UNTOUCHED:
                    clip = Clip.from_json(lines[number])
                    before[clip.path, clip.video] = (mark, _num_present(clip))
        found = [before.get((clip.path, clip.video), (UNTOUCHED, 0)) for clip in clips]
        return bytes(
            mark if _num_present(clip) <= num_present else UNTOUCHED
            for clip, (mark, num_present) in zip(clips, found, strict=True)
        )

    def run_out(self) -> None:
        """Have the work done, by this process and the others.

        Raises:
            WandsError: what ended every worker.
        """
        if self.crew.launched or self.num_workers == 1:
            encode_share(self.work, 0, self.run.token, *self.crew.devices(0))
        else:
            self._run_workers()
        self._take_in()
        errors = [stats.error for stats in self.stats() if stats.error]
        if self._num_left():
            if errors:
                raise WandsError(errors[0])
            raise WandsError(
                f"cache={self.writer.path} is unfinished: {'; '.join(self.lost)}; run the same command again, "
                "it goes on where it stopped."
            )
        self.lost += [f"a worker ended early ({error})" for error in errors]

    def _run_workers(self) -> None:
        """Start the workers, and again when all have ended by force: what a clip ended, its mark will tell apart."""
        left, rounds = self._num_left(), ROUNDS
        while rounds:
            ended = start_workers(self.work, self.run.token, self.crew, self.num_workers)
            self.lost += [one.told for one in ended]
            before, left = left, self._num_left()
            if not left or not any(one.by_force for one in ended):
                return
            rounds = ROUNDS if left < before else rounds - 1

    def _num_left(self) -> int:
        left = 0
        for name in ("captions", "clips"):
            claims = Claims(self.work / f"{name}.claims")
            left += claims.num_pieces - claims.num_done()
            claims.close()
        return left

    def stats(self) -> list[WorkerStats]:
        """What the workers say of themselves."""
        return [
            WorkerStats(**json.loads(path.read_text())) for path in sorted(self.work.glob("worker-*.json"))
        ]

    def _reject_lines(self) -> Iterator[dict[str, str]]:
        for path in self.work.glob("rejects-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a killed worker's last one may be torn; another rejects it again
                    yield json.loads(line)

    def rejections(self) -> list[Rejection]:
        """What the workers could not use, each row once."""
        found = {
            line["key"]: Rejection(line["key"], line["path"], line["reason"]) for line in self._reject_lines()
        }
        return [found[key] for key in sorted(found)]

    def clear(self) -> None:
        """Remove the work folder: all of it is done."""
        shutil.rmtree(self.work)

    @property
    def quarantine_path(self) -> Path:
        """The file of `quarantine`."""
        return self.writer.path / QUARANTINE_NAME


def _num_present(clip: Clip) -> int:
    return sum(len(row.present) for row in clip.rows)
