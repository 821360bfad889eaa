"""`wands preprocess`: clips and captions in, a latent cache out.

The phases: scan the source, hand out what the cache lacks, encode captions and then clips (`wands/commands/encoding.py`; UMT5 and
the VAE are never in memory together), write the index. What cannot be used is left out, and said.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from wands.commands.claims import Claims
from wands.commands.encoding import WORK_NAME, Row, WorkerStats, encode_share
from wands.commands.scan import Scan
from wands.commands.workers import Crew, follow_leader, lock_work, start_workers, tell_followers
from wands.data.cache import CacheWriter, LatentCache
from wands.data.cache_format import disk_error, write_whole
from wands.data.clip import ClipSpec
from wands.data.histogram import token_histogram
from wands.data.source import Rejection, load_source
from wands.encode.pipeline import CONFIG_FILES, find_part, fingerprint_pipeline, read_json
from wands.encode.spool import TextSpool
from wands.encode.text import CLEANING_VERSION
from wands.errors import CacheError, ConfigError, DataError, WandsError
from wands.variants import TEXT_LEN, Variant, variant_of

REJECTS_NAME = "rejects.jsonl"
SHOWN_REJECTIONS = 50
CAPTIONS_IN_PIECE = 32


@dataclass(frozen=True)
class PreprocessReport:
    """What a run of `wands preprocess` did.

    Attributes:
        out: the cache.
        variant: name of the model variant that it is made for.
        num_accepted: samples in the cache.
        num_reused: those of them that an earlier run had already encoded.
        num_left_out: samples of earlier runs that are not in the source: the shards keep them, the index does
            not.
        num_cut_captions: captions that fill all 512 text tokens; what goes beyond is cut.
        rejected: every clip that is not in the cache, with its reason.
        tokens: int64 [num_accepted], video tokens of each sample.
        num_shards: HDF5 files.
        num_bytes: their size.
        seconds: wall time.
        num_relabelled: samples whose latents were taken from the cache, because only the caption or the name
            of the clip is new.
        num_workers: processes that encoded.
        waited: share of the encoders' time in the pass over clips that they stood still for a clip to be
            decoded; None when nothing was encoded.
        seconds_encoding: of the pass over clips, the models loaded, in the process that was longest at it.
        lost_workers: what ended processes early, while the others went on.
    """

    out: Path
    variant: str
    num_accepted: int
    num_reused: int
    num_left_out: int
    num_cut_captions: int
    rejected: tuple[Rejection, ...]
    tokens: np.ndarray
    num_shards: int
    num_bytes: int
    seconds: float
    num_relabelled: int = 0
    num_workers: int = 1
    waited: float | None = None
    seconds_encoding: float = 0.0
    lost_workers: tuple[str, ...] = ()

    def render(self) -> str:
        """The report as the terminal shows it."""
        reused = f", {self.num_reused:,} of them from an earlier run" if self.num_reused else ""
        lines = [
            f"{self.out}: {self.num_accepted:,} samples for {self.variant}{reused}",
            token_histogram(self.tokens),
        ]
        lines.append(f"  {self.num_bytes:,} bytes in {self.num_shards:,} shard(s), {self.seconds:.1f} s")
        if self.waited is not None:
            by = f"{self.num_workers} processes, encoders" if self.num_workers > 1 else "encoder"
            lines.append(f"  {by} waited {self.waited:.1%} of the time for decoding")
        if self.num_relabelled:
            lines.append(f"{self.num_relabelled:,} samples keep their latents: only caption or name is new")
        lines += [f"{lost}; the others took over its work" for lost in self.lost_workers]
        if self.num_left_out:
            lines.append(
                f"{self.num_left_out:,} samples of earlier runs are not in the source: left out of the index"
            )
        if self.num_cut_captions:
            lines.append(
                f"{self.num_cut_captions:,} captions fill {TEXT_LEN} text tokens: anything beyond is cut"
            )
        lines.append(
            f"{len(self.rejected):,} rejected" + (f", listed in {REJECTS_NAME}:" if self.rejected else "")
        )
        lines += [f"  {item.key}: {item.reason}" for item in self.rejected[:SHOWN_REJECTIONS]]
        if len(self.rejected) > SHOWN_REJECTIONS:
            lines.append(f"  ... and {len(self.rejected) - SHOWN_REJECTIONS:,} more")
        return "\n".join(lines)


def preprocess(
    source: str,
    out: str | Path,
    model: str | Path,
    *,
    height: int | None = None,
    width: int | None = None,
    center_crop: bool = False,
    max_pixels: int | None = None,
    max_frames: int | None = 81,
    clip_mode: Literal["head", "middle", "slide"] = "head",
    fps: float | None = None,
    device: str | None = None,
    text_device: str | None = None,
    text_dtype: Literal["bf16", "fp32"] = "bf16",
    split: str = "train",
    video_column: str | None = None,
    caption_column: str | None = None,
    max_samples: int = 512,
    workers: int = 1,
) -> PreprocessReport | None:
    """Encode a source of clips into a latent cache, or go on with one that an earlier run began.

    A clip that is already in the cache, made from the same file, caption and range, is not encoded again.
    If only its caption or its name is new, its latents are kept. Settings other than those the cache was begun
    with are refused. Afterwards the index holds what the source holds, no more.

    Under a launcher (RANK, WORLD_SIZE) its processes share the work, otherwise `workers` processes that this one
    starts: each takes the next clip that nobody has. All need the source and `out` on a file system they share.

    Args:
        source: folder, table or Hugging Face dataset, see `wands.data.source.load_source`.
        out: cache folder.
        model: diffusers pipeline folder or Hub id; its VAE, text encoder and tokenizer are used, and the
            config of its DiT names the variant.
        height: exact height in pixels, with `width`; a multiple of the VAE's stride times the patch.
        width: exact width in pixels.
        center_crop: fill height x width by cutting rather than by stretching.
        max_pixels: scale larger clips down to this area, each keeping its aspect. Default: 399,360, which is
            480 x 832; no bound with `height` and `width`.
        max_frames: longest sample; None keeps whole clips.
        clip_mode: which frames of a longer clip: the first, the middle ones, or all as several samples.
        fps: frames per second of the samples. Default: the variant's own.
        device: where the VAE runs. Default: cuda if there is one, else cpu.
        text_device: where UMT5 runs. Default: `device`.
        text_dtype: of UMT5's weights; embeddings are stored in bf16 either way.
        split: of a dataset.
        video_column: of a table or dataset.
        caption_column: of a table or dataset.
        max_samples: of one shard.
        workers: processes to start; 1 encodes in this one.

    Returns:
        What was done; None on the ranks of a launcher but the first.

    Raises:
        ConfigError: options that exclude each other, or a model that is not complete.
        DataError: the source holds nothing that can be used.
        CacheError: the cache was begun with other settings, or the disk is full.
    """
    crew = Crew.find(workers, device, text_device)
    if crew.rank > 0:
        follow_leader(Path(out) / WORK_NAME, crew)
        return None
    with tell_followers(crew) as begin:
        started = time.monotonic()
        variant = _read_variant(model)
        spec = ClipSpec.of_variant(
            variant,
            fps=fps,
            height=height,
            width=width,
            center_crop=center_crop,
            max_pixels=max_pixels,
            max_frames=max_frames,
            clip_mode=clip_mode,
        )
        rows, rejected = load_source(
            source, split=split, video_column=video_column, caption_column=caption_column
        )
        fingerprint = fingerprint_pipeline(model) | {"settings": _settings(spec, text_dtype)}
        with CacheWriter(out, variant, fingerprint, max_samples=max_samples) as writer:
            job = _Job(writer, crew, {"model": str(model), "clip": asdict(spec), "text_dtype": text_dtype})
            with job.work_folder():
                scan = Scan.of(rows, writer.entries, rejected)
                null_text = _known_null_text(writer.path)
                if scan.pending or null_text is None:
                    job.hand_out(scan.pending, null_text is None)
                    begin(job.token)
                    job.run()
                return _finish(job, scan, null_text, source=source, variant=variant, started=started)


def _settings(spec: ClipSpec, text_dtype: str) -> dict[str, Any]:
    """What of the options decides the bits of a sample."""
    return {
        "clip": asdict(spec),
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": text_dtype,
        "vae_dtype": "fp32",
        "vae_tiling": False,
        "stored_dtype": "bf16",
    }


def _read_variant(model: str | Path) -> Variant:
    """The variant that the DiT's config names, once the encoders are known to be its own."""
    find_part(model, "tokenizer", CONFIG_FILES)
    dit, vae, text_encoder = (
        read_json(find_part(model, part, CONFIG_FILES) / "config.json")
        for part in ("transformer", "vae", "text_encoder")
    )
    try:
        variant = variant_of(dit)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model={model}: {error}; give a text-to-video pipeline of Wan 2.1.") from None
    for what, ours, theirs in (
        ("its VAE gives z_dim", vae.get("z_dim", 16), f"in_channels={variant.dit.in_channels}"),
        ("its text encoder gives d_model", text_encoder.get("d_model"), f"text_dim={variant.dit.text_dim}"),
    ):
        if str(ours) != theirs.partition("=")[2]:
            raise ConfigError(
                f"model={model}: {what}={ours} but its DiT takes {theirs}; give a pipeline of one piece."
            )
    return variant


def _known_null_text(path: Path) -> Tensor | None:
    """The embedding of "" from an earlier run's index, if that can still be read."""
    try:
        return LatentCache(path).null_text_embeds
    except CacheError:
        return None


# ---- encode


class _Job:
    """The leader's side of a run: fills the work folder, has it worked off, collects what the workers made."""

    def __init__(self, writer: CacheWriter, crew: Crew, options: dict[str, Any]) -> None:
        self.writer, self.crew, self.options = writer, crew, options
        self.work = writer.path / WORK_NAME
        self.token = uuid.uuid4().hex
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
            self.take_in()
            yield
        finally:
            os.close(lock)

    def take_in(self) -> None:
        """Samples that no shard holds yet go into shards; waits for workers that have not ended."""
        self.writer.refresh()
        for path in sorted(self.work.glob("samples-*.journal")):
            with path.open("rb") as journal:
                fcntl.flock(journal, fcntl.LOCK_EX)
                self.writer.refresh()
                self.writer.adopt(path)

    def hand_out(self, rows: Sequence[Row], with_null_text: bool) -> None:
        """Write down the work.

        Raises:
            CacheError: the disk is full.
        """
        if not self.crew.launched:
            self.num_workers = max(1, min(self.crew.size, len(rows)))
        spool = TextSpool(self.work.glob("text-*.journal"))
        wanted = {row.caption for row in rows} | ({""} if with_null_text else set())
        captions = sorted(caption for caption in wanted if caption not in spool)
        pieces = [captions[i : i + CAPTIONS_IN_PIECE] for i in range(0, len(captions), CAPTIONS_IN_PIECE)]
        options = self.options | {
            "token": self.token,
            "digest": self.writer.digest,
            "max_samples": self.writer.max_samples,
            "needs_vae": any(not row.latents for row in rows),
        }
        try:
            for path in [*self.work.glob("rejects-*"), *self.work.glob("worker-*")]:
                path.unlink()
            for name, values in (("captions", pieces), ("rows", [asdict(row) for row in rows])):
                lines = (json.dumps(value) + "\n" for value in values)
                (self.work / f"{name}.jsonl").write_text("".join(lines))
                Claims.create(self.work / f"{name}.claims", len(values))
            for slot in range(self.num_workers):
                (self.work / f"text-{slot}.journal").touch()
                (self.work / f"samples-{slot}.journal").touch()
            (self.work / "run.json").write_text(json.dumps(options))
        except OSError as error:
            raise disk_error(self.work, 0, error, cache=self.writer.path) from None
        self.handed_out = True

    def run(self) -> None:
        """Have the work done, by this process and the others.

        Raises:
            WandsError: what ended every worker.
        """
        if self.crew.launched or self.num_workers == 1:
            encode_share(self.work, 0, self.token, *self.crew.devices(0))
        else:
            self.lost = start_workers(self.work, self.token, self.crew, self.num_workers)
        self.take_in()
        errors = [stats.error for stats in self.stats() if stats.error]
        if not all(_all_done(self.work / f"{name}.claims") for name in ("captions", "rows")):
            if errors:
                raise WandsError(errors[0])
            raise WandsError(
                f"cache={self.writer.path} is unfinished: {'; '.join(self.lost)}; run the same command again, "
                "it goes on where it stopped."
            )
        self.lost += [f"a worker ended early ({error})" for error in errors]

    def stats(self) -> list[WorkerStats]:
        """What the workers say of themselves."""
        return [
            WorkerStats(**json.loads(path.read_text())) for path in sorted(self.work.glob("worker-*.json"))
        ]

    def rejections(self) -> list[Rejection]:
        """What the workers could not use, each clip once."""
        found: dict[str, Rejection] = {}
        for path in self.work.glob("rejects-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith(
                    "\n"
                ):  # a killed worker's last one may be torn; another has rejected it again
                    rejection = Rejection(**json.loads(line))
                    found[rejection.key] = rejection
        return [found[key] for key in sorted(found)]

    def clear(self) -> None:
        """Remove the work folder: all of it is done."""
        shutil.rmtree(self.work)


def _all_done(path: Path) -> bool:
    claims = Claims(path)
    try:
        return claims.num_done() == claims.num_pieces
    finally:
        claims.close()


# ---- finish


def _finish(
    job: _Job, scan: Scan, null_text: Tensor | None, *, source: str, variant: Variant, started: float
) -> PreprocessReport:
    """Write rejects and index, and say what was done.

    Raises:
        DataError: there is no sample.
        CacheError: the disk is full.
    """
    writer = job.writer
    stats = job.stats() if job.handed_out else []
    rejected = scan.rejected + (job.rejections() if job.handed_out else [])
    accepted = scan.accepted(writer.entries)
    if null_text is None:
        null_text = TextSpool(job.work.glob("text-*.journal")).read("")
    lines = [json.dumps(asdict(item)) + "\n" for item in rejected]
    write_whole(writer.path / REJECTS_NAME, "".join(lines).encode())
    if not accepted:
        job.clear()
        first = f" (first: {rejected[0].reason})" if rejected else ""
        raise DataError(
            f"source={source} gave no sample, {len(rejected)} rejected{first}; "
            f"every reason is in {writer.path / REJECTS_NAME}."
        )
    writer.commit(null_text, accepted)
    job.clear()
    cache = LatentCache(writer.path)
    waited, worked = (sum(getattr(worker, name) for worker in stats) for name in ("waited", "worked"))
    return PreprocessReport(
        out=writer.path,
        variant=variant.name,
        num_accepted=len(cache),
        num_reused=sum(scan.before.get(key) == writer.entries[key].content for key in accepted),
        num_left_out=len(writer.keys - accepted),
        num_cut_captions=int((cache.index.text_lens == TEXT_LEN).sum()),
        rejected=tuple(rejected),
        tokens=cache.num_tokens(variant.dit.patch_size),
        num_shards=len(cache.index.shard_names),
        num_bytes=cache.num_bytes,
        seconds=time.monotonic() - started,
        num_relabelled=sum(len(row.latents) for row in scan.pending),
        num_workers=job.num_workers,
        waited=waited / (waited + worked) if any(worker.num_windows for worker in stats) else None,
        seconds_encoding=max((worker.waited + worker.worked for worker in stats), default=0.0),
        lost_workers=tuple(job.lost),
    )
