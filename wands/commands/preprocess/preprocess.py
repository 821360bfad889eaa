"""Run `wands preprocess`: clips and captions in, a latent cache out.

Data flow: scan the source (scan.py), encode the captions, decode clips in subprocesses (decoding.py), encode them
(encoding.py), commit the index. UMT5 and the VAE are never in memory together. Rejected clips are reported.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from wands.commands.clip_rules import plan_samples, read_source
from wands.commands.preprocess.decoding import EncodeSettings
from wands.commands.preprocess.encoding import Done, WorkerTimes, encode_captions, encode_clips
from wands.commands.preprocess.preprocess_report import PreprocessReport
from wands.commands.preprocess.scan import Clip, SourceScan, parse_part, select_part
from wands.commands.preprocess.workers import Event, Lost, Task, WorkerPool
from wands.commands.progress import progress
from wands.config.options import PreprocessOptions
from wands.data.cache.format import disk_error, write_whole
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.cache.write_ahead_log import WriteAheadLog
from wands.data.clips.clip import ClipSpec
from wands.data.clips.isolated import Crash, IsolatedWorker
from wands.data.clips.records import REJECTS_NAME
from wands.encoders.components import CONFIG_FILES, find_part, read_config, read_variant
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.spool import TextSpool
from wands.encoders.text import CLEANING_VERSION
from wands.encoders.vae import TILE, TILE_STRIDE
from wands.errors import CacheError, ConfigError, DataError, WandsError
from wands.sampling.pipeline import check_encoders
from wands.variants import TEXT_LEN, Variant

QUARANTINE_NAME = "quarantine.jsonl"
ROUNDS = 3
"""A run whose workers die ends after this number of rounds without progress."""
SUSPECT_SECONDS = 1800.0
"""Longest time for encoding one clip again after its encoder process died."""


def preprocess(options: PreprocessOptions, *, max_samples: int = 512) -> PreprocessReport | None:
    """Encode a source of clips into a latent cache, or continue a cache that an earlier run began.

    A clip in the cache, made from the same file, caption and range, is not encoded again. If only its caption or its name is
    new, only the caption is encoded. The settings of an existing cache must be given again. After the run the index contains
    exactly the samples of the source. All captions of a range of a file share one decoding, one pass of the VAE and, in a
    shard, the latents.

    A clip that crashes or hangs its decoder is rejected and named in `quarantine.jsonl`. Later runs skip the clip until the
    file changes or its line in `quarantine.jsonl` is deleted.

    Under a launcher (RANK, WORLD_SIZE) its processes share the work; they need SOURCE and --out on a shared file system.

    Args:
        options: options of the command.
        max_samples: largest number of samples in a shard.

    Returns:
        The report; None on the ranks of a launcher other than rank 0.

    Raises:
        ConfigError: if options exclude each other, or the model is incomplete.
        DataError: if the source has no usable clip.
        CacheError: if the cache has other settings, or the disk is full.
    """
    started = time.monotonic()
    with WorkerPool(options.workers, options.device, options.text_device) as pool:
        if pool.rank > 0:
            pool.follow()
            return None
        return _lead(pool, options, max_samples, started)


def _lead(pool: WorkerPool, options: PreprocessOptions, max_samples: int, started: float) -> PreprocessReport:
    part = parse_part(options.part) if options.part else None
    variant = _read_variant(options.model)
    spec, more_pixels = plan_samples(options, variant)
    rows, rejected = read_source(options)
    out = options.out
    if part:
        rows, rejected = select_part(rows, options.source, part), select_part(rejected, options.source, part)
        out /= "part-{}-of-{}".format(*part)
        if not rows:
            raise DataError(f"--part {options.part} of source={options.source} is empty. Use fewer parts.")
    fingerprint = fingerprint_pipeline(options.model) | {"settings": _fingerprint_of(spec, options)}
    with CacheWriter(out, variant, fingerprint, max_samples=max_samples) as writer:
        settings = EncodeSettings(
            writer.path, options, spec, more_pixels, writer.digest, max_samples, variant.conditions
        )
        run = PreprocessRun(writer, pool, settings)
        run.prepare()
        run.scan(SourceScan(rows, rejected, spec, more_pixels, run.quarantine))
        run.encode()
        return run.commit(variant, started)


class PreprocessRun:
    """Leader of one run: assigns captions and clips to workers, collects the results and writes the index.

    Attributes:
        quarantine: digest of each clip that crashes or hangs a process -> reason.
    """

    def __init__(self, writer: CacheWriter, pool: WorkerPool, settings: EncodeSettings) -> None:
        """Store the arguments; nothing is written."""
        self.writer, self.pool, self.settings = writer, pool, settings
        self.quarantine_path = writer.path / QUARANTINE_NAME
        self.quarantine: dict[str, str] = {}
        self.rejected_videos: set[str] = set()
        self.times: list[WorkerTimes] = []
        self.losses: list[Lost] = []
        self.null_text: Tensor | None = None

    def prepare(self) -> None:
        """Create the work folder, and move samples that an earlier run left there to shards.

        Raises:
            CacheError: if the disk is full, or workers of an earlier run are still alive.
        """
        try:
            self.settings.work.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(self.settings.work, 0, error, cache=self.writer.path) from None
        self._collect_samples()
        with suppress(FileNotFoundError):
            for line in self.quarantine_path.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a line that the user has edited
                    value = json.loads(line)
                    self.quarantine[value["video"]] = value["reason"]
        with suppress(CacheError):  # no index yet, or of an earlier version
            self.null_text = LatentCache(self.writer.path).null_text_embeds

    def _collect_samples(self) -> None:
        """Move the samples in write-ahead logs to shards, and register the shards of the workers."""
        for path in sorted(self.settings.work.glob("samples-*.journal")):
            with closing(WriteAheadLog(path)):  # waits for the worker that writes it
                self.writer.refresh()
                self.writer.adopt(path)
        self.writer.refresh()

    def scan(self, scan: SourceScan) -> None:
        """Compare the source with the cache."""
        self.source = scan
        self.rejected = list(scan.rejected)
        self.contents_before = {key: entry.content for key, entry in self.writer.entries.items()}
        pending = self._pending_clips()
        self.num_relabelled = sum(len(clip.lacks(suffix)) for clip in pending for *_, suffix in clip.latents)
        self.pool.limit(len(pending))

    def _pending_clips(self) -> list[Clip]:
        return self.source.pending(self.writer.entries, self.rejected_videos)

    def _pending_captions(self) -> list[str]:
        captions = {row.caption for clip in self._pending_clips() for row in clip.rows}
        captions |= {""} if self.null_text is None else set()
        spool = TextSpool(self.settings.work.glob("text-*.journal"))
        return sorted(caption for caption in captions if caption not in spool)

    def encode(self) -> None:
        """Encode the missing captions, then the missing clips.

        Raises:
            WandsError: if every worker failed, or workers died again and again.
        """
        self._run_rounds("captions", encode_captions, self._pending_captions)
        self._run_rounds("clips", encode_clips, self._pending_clips)

    def _run_rounds(self, label: str, task: Task, pending: Callable[[], list[Any]]) -> None:
        """Run a task on all pending items. If workers are lost, run the task again on the remaining items."""
        rounds = ROUNDS
        items = pending()
        while items:
            if task is encode_clips and self._encode_suspects(items):
                items = pending()
                continue
            slots, num_losses = self.pool.slots, len(self.losses)
            shares = {slot: items[number :: len(slots)] for number, slot in enumerate(slots)}
            # The events of a launcher's other ranks come at the end: show the share of this rank.
            total = len(shares[slots[0]]) if self.pool.launched else len(items)
            name = f"{label} of rank 0" if self.pool.launched else label
            with progress(name, total) as advance:
                for event in self.pool.run(task, self.settings, shares):
                    if isinstance(event, Done) and (total := total - 1) >= 0:
                        advance()
                    self._handle(event)
            self._collect_samples()
            losses = self.losses[num_losses:]
            if not losses:
                return
            failed = [loss.slot for loss in losses if loss.error]
            self.pool.slots = [slot for slot in slots if slot not in failed]
            num_before, items = len(items), pending()
            rounds = ROUNDS if len(items) < num_before else rounds - 1
            if items and not self.pool.slots:
                raise next(loss.error for loss in losses if loss.error)
            if items and not rounds:
                raise WandsError(
                    f"cache={self.writer.path} is unfinished: {'; '.join(loss.reason for loss in losses)}. Run the "
                    "same command again to continue."
                )

    def _encode_suspects(self, clips: Sequence[Clip]) -> bool:
        """Encode in a subprocess each clip that was in the encoder when a process died; return whether there was such a clip.

        If the subprocess dies too, the clip is rejected.
        """
        suspects = set()
        for path in self.settings.work.glob("encoding-*"):
            suspects.add(path.read_text())
            path.unlink()
        suspected_clips = [clip for clip in clips if clip.video in suspects]
        for clip in suspected_clips:
            with IsolatedWorker(method="spawn") as worker:
                arguments = (self.settings, 0, self.pool.devices(0), [clip])
                try:
                    for event in worker.run(encode_clips, *arguments, limit_seconds=SUSPECT_SECONDS):
                        self._handle(event)
                except Crash as crash:
                    reason = (
                        f"video={clip.path} cannot be encoded: {crash}; lower --max-frames or --max-pixels"
                    )
                    self._handle(Done.rejected(clip, reason, deadly=True))
                    (self.settings.work / "encoding-0").unlink(missing_ok=True)
        self._collect_samples()
        return bool(suspected_clips)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.losses.append(event)
        elif isinstance(event, WorkerTimes):
            self.times.append(event)
        elif event.rejections:
            self.rejected_videos.add(event.video)
            self.rejected += event.rejections
            if event.deadly:  # written at once: a restarted run must not wait for this clip again
                self.quarantine[event.video] = event.rejections[0].reason
                lines = [{"video": video, "reason": reason} for video, reason in self.quarantine.items()]
                _write_lines(self.quarantine_path, lines)

    def commit(self, variant: Variant, started: float) -> PreprocessReport:
        """Write rejects.jsonl and the index, remove the work folder, and return the report.

        Args:
            variant: variant of the model.
            started: time.monotonic() at the start of the run.

        Raises:
            DataError: if there is no sample.
            CacheError: if the disk is full.
        """
        writer = self.writer
        num_found = len(self.source.rejected)
        self.rejected[num_found:] = sorted(self.rejected[num_found:], key=lambda rejection: rejection.key)
        accepted = self.source.accepted(writer.entries)
        null_text = self.null_text
        if null_text is None:
            null_text = TextSpool(self.settings.work.glob("text-*.journal")).read("")
        _write_lines(writer.path / REJECTS_NAME, [asdict(rejection) for rejection in self.rejected])
        if not accepted:
            shutil.rmtree(self.settings.work)
            first = f" (first: {self.rejected[0].reason})" if self.rejected else ""
            raise DataError(
                f"source={self.settings.options.source} gave no sample, {len(self.rejected)} rejected{first}; "
                f"every reason is in {writer.path / REJECTS_NAME}."
            )
        writer.commit(null_text, accepted)
        shutil.rmtree(self.settings.work)
        cache = LatentCache(writer.path)
        waited, worked = (sum(getattr(times, name) for times in self.times) for name in ("waited", "worked"))
        deadly = set(self.quarantine.values())
        return PreprocessReport(
            out=writer.path,
            variant=variant.name,
            num_accepted=len(cache),
            num_reused=sum(self.contents_before.get(key) == writer.entries[key].content for key in accepted),
            num_left_out=len(writer.entries.keys() - accepted),
            num_cut_captions=int((cache.index.text_lens == TEXT_LEN).sum()),
            rejected=tuple(self.rejected),
            tokens=cache.num_tokens(variant.dit.patch_size),
            num_shards=len(cache.index.shard_names),
            num_bytes=cache.num_bytes,
            seconds=time.monotonic() - started,
            num_relabelled=self.num_relabelled,
            num_workers=self.pool.size,
            waited=waited / (waited + worked) if any(times.num_windows for times in self.times) else None,
            seconds_encoding=max((times.waited + times.worked for times in self.times), default=0.0),
            losses=tuple(loss.reason for loss in self.losses),
            quarantine=self.quarantine_path if any(item.reason in deadly for item in self.rejected) else None,
        )


def _write_lines(path: Path, values: Sequence[Any]) -> None:
    write_whole(path, "".join(json.dumps(value) + "\n" for value in values).encode())


def _fingerprint_of(spec: ClipSpec, options: PreprocessOptions) -> dict[str, Any]:
    """Return the options that decide the bits of a sample. Further area limits do not, because keys contain the sizes."""
    return {
        "clip": asdict(spec),
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": options.text_dtype,
        "vae_dtype": options.vae_dtype,
        "vae_tiling": [TILE, TILE_STRIDE] if options.vae_tiling else False,
        "stored_dtype": "bf16",
    }


def _read_variant(model: str) -> Variant:
    """Return the variant of a pipeline after checking that its encoders fit its DiT."""
    variant = read_variant(model)
    has_clip = "clip" in variant.conditions
    parts = ("tokenizer", "vae", "text_encoder", "image_processor", "image_encoder")
    for part in parts if has_clip else parts[:3]:
        root = find_part(model, part, CONFIG_FILES).parent
    check_encoders(f"--model={model}", root, variant, f"--model={model}")
    if has_clip:
        clip = read_config(root / "image_encoder" / "config.json")
        tokens = ((clip.get("image_size", 224) // clip.get("patch_size", 32)) ** 2 + 1) * variant.num_images
        if tokens != variant.dit.image_len:
            raise ConfigError(
                f"--model={model}: its image encoder gives {tokens} tokens, but its transformer takes {variant.dit.image_len}. "
                "Use a pipeline whose parts belong together."
            )
    return variant
