"""Run `wands preprocess`: encode clips and captions into a latent cache.

Steps: scan the source (scan.py), encode the captions (encoding.py), decode the clips in subprocesses (decoding.py) and encode
them (encoding.py), and write the index of the cache. UMT5 and the VAE are never in memory at the same time.
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

from wands.conditions.condition import Condition
from wands.conditions.published import clip_files_of, conditions_of
from wands.config.options import PreprocessOptions
from wands.data.cache.format import disk_error, write_whole
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.cache.write_ahead_log import WriteAheadLog
from wands.data.clips.clip import ClipSpec
from wands.data.clips.isolated import Crash, IsolatedWorker
from wands.data.clips.records import REJECTS_NAME, Rejection
from wands.data.clips.video_file import ASSUMED
from wands.encoders.components import CONFIG_FILES, find_part, read_config, read_variant
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.text import CLEANING_VERSION, TextSpool
from wands.encoders.vae import TILE, TILE_STRIDE
from wands.errors import CacheError, ConfigError, DataError, WandsError
from wands.plugin import load_plugins, plugin_importer
from wands.preprocess.clip_rules import plan_samples, read_source
from wands.preprocess.decoding import ClipEnd, EncodeSettings
from wands.preprocess.encoding import Done, WorkerTimes, encode_captions, encode_clips
from wands.preprocess.preprocess_report import PreprocessReport
from wands.preprocess.progress import progress
from wands.preprocess.scan import Clip, SourceScan, parse_part, select_part
from wands.preprocess.workers import Event, Lost, Task, WorkerPool
from wands.sampling.pipeline import check_encoders
from wands.texts import plural
from wands.variants import TEXT_LEN, Variant

QUARANTINE_NAME = "quarantine.jsonl"
ROUNDS = 3
"""Number of rounds in a row without progress after which the run ends with an error.

A round gives all unfinished captions or clips to the workers. It makes no progress if workers end early and none is finished.
"""
SUSPECT_SECONDS = 1800.0
"""Time limit for the second attempt to encode a clip, if a worker process died in the first."""


def preprocess(
    options: PreprocessOptions, *, max_samples: int = 512, conditions: Sequence[Condition] = ()
) -> PreprocessReport | None:
    """Encode a source of clips into a latent cache, or continue a cache that an earlier run began with the same settings.

    A clip is encoded only if the cache lacks its samples, or its file content, time range, crop or mask changed. If only the
    file's name or the caption changed, the cached latents are reused, and only a new caption is encoded. Captions of one time
    range share its latents. After the run, the index contains exactly the samples of the source.

    A clip that crashes its decoder or exceeds the time limit is listed in `quarantine.jsonl`. Later runs skip it until its file
    changes or the line is deleted.

    All processes of a launcher such as torchrun share the work, and need SOURCE and --out on a shared file system. Ranks other
    than rank 0 return None. `conditions` of outside code are added to those of `--import`.

    Raises:
        ConfigError: if options exclude each other, or the model is incomplete.
        DataError: if the source has no usable clip.
        CacheError: if the cache was made with other settings, or the disk is full.
    """
    started = time.monotonic()
    conditions = (*conditions, *load_plugins(options.imports).conditions)
    with WorkerPool(
        workers=options.workers,
        device=options.device,
        text_device=options.text_device,
        imports=options.imports,
    ) as pool:
        if pool.rank > 0:
            pool.follow()
            return None
        return _lead(pool, options, max_samples, started, conditions)


def _lead(
    pool: WorkerPool,
    options: PreprocessOptions,
    max_samples: int,
    started: float,
    extra: Sequence[Condition],
) -> PreprocessReport:
    part = parse_part(options.part) if options.part else None
    variant = _read_variant(options.model, extra)
    conditions = conditions_of(variant)
    spec = plan_samples(options, variant)
    rows, rejected = read_source(options, files=clip_files_of(conditions))
    out = options.out
    if part:
        rows = select_part(rows, options.source, part)
        rejected = select_part(rejected, options.source, part)
        out /= "part-{}-of-{}".format(*part)
        if not rows:
            raise DataError(
                f"--part {options.part} contains no clip of SOURCE={options.source}. Use fewer parts: a smaller N in --part I/N."
            )
    if options.limit:
        clips = dict.fromkeys((row.path, row.range_suffix) for row in rows)
        chosen = set(list(clips)[: options.limit])
        rows = [row for row in rows if (row.path, row.range_suffix) in chosen]
    fingerprint = fingerprint_pipeline(options.model) | {"settings": _fingerprint_of(spec, options)}
    with CacheWriter(out, variant, fingerprint, max_samples=max_samples) as writer:
        settings = EncodeSettings(
            cache=writer.path,
            options=options,
            spec=spec,
            fingerprint=writer.digest,
            max_samples=max_samples,
            conditions=conditions,
            arrays=writer.arrays,
            patch_size=variant.dit.patch_size,
        )
        run = PreprocessRun(writer, pool, settings)
        run.prepare()
        run.scan(SourceScan(rows=rows, rejected=rejected, spec=spec, quarantine=run.quarantine))
        run.encode()
        return run.commit(variant, started)


class PreprocessRun:
    """One run in the leading process, which assigns captions and clips to workers and writes the index of the cache.

    Attributes:
        quarantine: rejection reason of each clip that crashed a process or exceeded a time limit, by digest of the clip.
    """

    def __init__(self, writer: CacheWriter, pool: WorkerPool, settings: EncodeSettings) -> None:
        self.writer = writer
        self.pool = pool
        self.settings = settings
        self.quarantine_path = writer.path / QUARANTINE_NAME
        self.quarantine: dict[str, str] = {}
        self.rejected: list[ClipEnd] = []
        self.times: list[WorkerTimes] = []
        self.losses: list[Lost] = []
        self.null_text: Tensor | None = None

    def prepare(self) -> None:
        """Create the work folder, read the quarantine, and move samples of an interrupted run to shards.

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
                    row = json.loads(line)
                    self.quarantine[row["video"]] = row["reason"]
        with suppress(CacheError):  # the index does not exist yet
            self.null_text = LatentCache(self.writer.path).null_text_embeds

    def _collect_samples(self) -> None:
        """Move samples from write-ahead logs to shards, and let the cache writer read the index entries of all new shards."""
        for path in sorted(self.settings.work.glob("samples-*.journal")):
            with closing(WriteAheadLog(path)):  # waits until no worker writes this log
                self.writer.refresh()
                self.writer.add_log(path)
                path.unlink()
        self.writer.refresh()

    def scan(self, scan: SourceScan) -> None:
        """Store the scan of the source, and limit the number of workers to the number of clips with missing samples."""
        self.source = scan
        self.contents_before = {key: entry.content for key, entry in self.writer.entries.items()}
        pending = self._pending_clips()
        self.num_relabelled = sum(len(clip.lacks(suffix)) for clip in pending for *_, suffix in clip.latents)
        self.pool.limit(len(pending))

    def _pending_clips(self) -> list[Clip]:
        return self.source.pending(self.writer.entries, {end.clip.video for end in self.rejected})

    def _pending_captions(self) -> list[str]:
        captions = {row.caption for clip in self._pending_clips() for row in clip.rows}
        captions |= {""} if self.null_text is None else set()
        spool = TextSpool(self.settings.work.glob("text-*.journal"))
        return sorted(caption for caption in captions if caption not in spool)

    def encode(self) -> None:
        """Encode the captions that the cache lacks, then the clips that the cache lacks.

        Raises:
            WandsError: if every worker failed, or workers died repeatedly without finishing a caption or clip.
        """
        self._run_rounds("captions", encode_captions, self._pending_captions)
        self._run_rounds("clips", encode_clips, self._pending_clips)

    def _run_rounds(self, label: str, task: Task, pending: Callable[[], list[Any]]) -> None:
        """Run a task on all pending captions or clips, again on the remaining ones if workers end early."""
        rounds = ROUNDS
        items = pending()
        while items:
            if task is encode_clips and self._encode_suspects(items):
                items = pending()
                continue
            slots = self.pool.slots
            num_losses = len(self.losses)
            shares = {slot: items[number :: len(slots)] for number, slot in enumerate(slots)}
            # Events of other ranks arrive only at the end. The progress bar therefore counts the items of this rank.
            total = len(shares[slots[0]]) if self.pool.launched else len(items)
            name = f"{label} of rank 0" if self.pool.launched else label
            with progress(name, total) as advance:
                for event in self.pool.run(task, self.settings, shares):
                    if isinstance(event, Done) and (total := total - 1) >= 0:
                        advance()
                    self._handle(event)
                    self.writer.check_lock()
            self._collect_samples()
            losses = self.losses[num_losses:]
            if not losses:
                return
            failed = [loss.slot for loss in losses if loss.error]
            self.pool.slots = [slot for slot in slots if slot not in failed]
            num_before = len(items)
            items = pending()
            rounds = ROUNDS if len(items) < num_before else rounds - 1
            if items and not self.pool.slots:
                raise next(loss.error for loss in losses if loss.error)
            if items and not rounds:
                raise WandsError(
                    f"the cache {self.writer.path} is unfinished: {'; '.join(loss.reason for loss in losses)}. Run wands "
                    "preprocess again with equal options to continue."
                )

    def _encode_suspects(self, clips: Sequence[Clip]) -> bool:
        """Encode in a subprocess each clip on which a worker process died. Return whether there was one.

        If the subprocess dies too, the clip is rejected.
        """
        suspects = set()
        for path in self.settings.work.glob("encoding-*"):
            suspects.update(path.read_text().splitlines())
            path.unlink()
        suspected_clips = [clip for clip in clips if clip.video in suspects]
        for clip in suspected_clips:
            initialize = plugin_importer(self.settings.options.imports)
            with closing(IsolatedWorker(method="spawn", initialize=initialize)) as worker:
                arguments = (self.settings, 0, self.pool.devices(0), [clip])
                try:
                    for event in worker.run(encode_clips, *arguments, limit_seconds=SUSPECT_SECONDS):
                        self._handle(event)
                except Crash as crash:
                    fix = "lower --max-frames or --max-pixels"
                    reason = f"video={clip.path} cannot be encoded: {crash}; {fix}"
                    self._handle(Done(ClipEnd(clip, reason, deadly=True)))
                    (self.settings.work / "encoding-0").unlink(missing_ok=True)
        self._collect_samples()
        return bool(suspected_clips)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            self.losses.append(event)
        elif isinstance(event, WorkerTimes):
            self.times.append(event)
        elif event.rejected:
            self.rejected.append(event.rejected)
            if event.rejected.deadly:  # written immediately, so that a restarted run skips this clip
                self.quarantine[event.rejected.clip.video] = event.rejected.reason or ""
                lines = [{"video": video, "reason": reason} for video, reason in self.quarantine.items()]
                _write_lines(self.quarantine_path, lines)

    def commit(self, variant: Variant, started: float) -> PreprocessReport:
        """Write rejects.jsonl and the index of the cache, remove the work folder, and return the report.

        `started` is the value of time.monotonic() at the start of the run.

        Raises:
            DataError: if the source gave no sample.
            CacheError: if the disk is full.
        """
        writer = self.writer
        ends = [(row.key, end.clip.path, end.reason or "") for end in self.rejected for row in end.clip.rows]
        rejected = (
            *self.source.rejected,
            *(Rejection(key, path, reason) for key, path, reason in sorted(ends)),
        )
        accepted = self.source.accepted(writer.entries)
        null_text = self.null_text
        if null_text is None:
            null_text = TextSpool(self.settings.work.glob("text-*.journal")).read("")
        _write_lines(writer.path / REJECTS_NAME, [asdict(rejection) for rejection in rejected])
        if not accepted:
            shutil.rmtree(self.settings.work)
            first = f" (first: {rejected[0].reason})" if rejected else ""
            raise DataError(
                f"SOURCE={self.settings.options.source} gave no sample: {plural(len(rejected), 'clip')} rejected{first}. "
                f"Correct the clips: {writer.path / REJECTS_NAME} lists every reason."
            )
        writer.commit(null_text, accepted)
        shutil.rmtree(self.settings.work)
        cache = LatentCache(writer.path)
        footage = self.source.footage(writer.entries)
        still_clips = [key for key, (used, *_) in footage.items() if used <= 1 / self.settings.spec.fps]
        waited, worked = (sum(getattr(times, name) for times in self.times) for name in ("waited", "worked"))
        deadly = set(self.quarantine.values())
        return PreprocessReport(
            out=writer.path,
            variant=variant.name,
            num_accepted=len(cache),
            num_reused=sum(self.contents_before.get(key) == writer.entries[key].content for key in accepted),
            num_left_out=len(writer.entries.keys() - accepted),
            num_cut_captions=int((cache.index.text_lens == TEXT_LEN).sum()),
            rejected=rejected,
            tokens=cache.num_tokens(variant.dit.patch_size),
            num_shards=len(cache.index.shard_names),
            num_bytes=cache.num_bytes,
            seconds=time.monotonic() - started,
            num_relabelled=self.num_relabelled,
            num_assumed=sum(writer.entries[key].matrix == ASSUMED for key in accepted),
            num_workers=self.pool.size,
            waited=waited / (waited + worked) if self.times else None,
            seconds_encoding=max((times.waited + times.worked for times in self.times), default=0.0),
            footage=footage,
            still_clips=tuple(still_clips),
            losses=tuple(loss.reason for loss in self.losses),
            quarantine=self.quarantine_path if any(item.reason in deadly for item in rejected) else None,
        )


def _write_lines(path: Path, values: Sequence[Any]) -> None:
    write_whole(path, "".join(json.dumps(value) + "\n" for value in values).encode())


def _fingerprint_of(spec: ClipSpec, options: PreprocessOptions) -> dict[str, Any]:
    """Return the settings that change the stored values of a sample by more than rounding errors, for the cache's fingerprint.

    Leave a new setting out while it has its default value: otherwise `wands preprocess` adds no samples to older caches. The
    further values of --max-pixels are left out, because they only add samples of other sizes.
    """
    return {
        "clip": {name: value for name, value in asdict(spec).items() if name != "more_pixels"},
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": options.text_dtype,
        "vae_dtype": options.vae_dtype,
        "vae_tiling": [TILE, TILE_STRIDE] if options.vae_tiling else False,
        "stored_dtype": "bf16",
    }


def _read_variant(model: str, extra: Sequence[Condition]) -> Variant:
    """Check that the encoders of a pipeline fit its DiT, and return the model variant."""
    variant = read_variant(model, extra)
    has_clip = any("image" in condition.encoders for condition in conditions_of(variant))
    parts = ("tokenizer", "vae", "text_encoder", "image_processor", "image_encoder")
    for part in parts if has_clip else parts[:3]:
        root = find_part(model, part, CONFIG_FILES).parent
    check_encoders(f"--model={model}", root, variant, f"--model={model}")
    if variant.published_dit.image_len:
        clip = read_config(root / "image_encoder" / "config.json")
        tokens = ((clip.get("image_size", 224) // clip.get("patch_size", 32)) ** 2 + 1) * variant.num_images
        if tokens != variant.published_dit.image_len:
            raise ConfigError(
                f"--model={model} has an image encoder that gives {tokens} tokens, but a transformer that takes "
                f"{variant.published_dit.image_len}. Use a pipeline whose components belong to one model."
            )
    return variant
