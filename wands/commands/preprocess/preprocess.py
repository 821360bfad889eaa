"""`wands preprocess`: clips and captions in, a latent cache out.

The phases: scan the source, hand out what the cache lacks, encode captions and then clips
(`wands/commands/preprocess/encoding.py`; UMT5 and the VAE are never in memory together), write the index. What cannot be
used is left out, and said.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from wands.commands.preprocess.leader import Job
from wands.commands.preprocess.preprocess_report import REJECTS_NAME, PreprocessReport
from wands.commands.preprocess.scan import Scan
from wands.commands.preprocess.work_folder import WORK_NAME, Run
from wands.commands.preprocess.workers import Crew, follow_leader, tell_followers
from wands.data.cache.format import write_whole
from wands.data.cache.reader import CacheWriter, LatentCache
from wands.data.clips.clip import ClipSpec, further_specs, split_bounds
from wands.data.clips.layouts import load_source
from wands.encoders.components import CONFIG_FILES, find_part, read_config, read_variant
from wands.encoders.fingerprint import fingerprint_pipeline
from wands.encoders.spool import TextSpool
from wands.encoders.text import CLEANING_VERSION
from wands.encoders.vae import TILE, TILE_STRIDE
from wands.errors import CacheError, ConfigError, DataError
from wands.variants import TEXT_LEN, Variant


def preprocess(
    source: str,
    out: str | Path,
    model: str | Path,
    *,
    height: int | None = None,
    width: int | None = None,
    center_crop: bool = False,
    max_pixels: int | Sequence[int] | None = None,
    max_frames: int | None = 81,
    clip_mode: Literal["head", "middle", "slide"] = "head",
    fps: float | None = None,
    device: str | None = None,
    text_device: str | None = None,
    text_dtype: Literal["bf16", "fp32"] = "bf16",
    vae_dtype: Literal["bf16", "fp32"] = "fp32",
    vae_tiling: bool = False,
    split: str = "train",
    video_column: str | None = None,
    caption_column: str | None = None,
    max_samples: int = 512,
    workers: int = 1,
) -> PreprocessReport | None:
    """Encode a source of clips into a latent cache, or go on with one that an earlier run began.

    A clip that is already in the cache, made from the same file, caption and range, is not encoded again.
    If only its caption or its name is new, its latents are kept. Settings other than those the cache was begun
    with are refused. Afterwards the index holds what the source holds, no more. All captions of a range of a file share one
    decoding, one pass of the VAE and, in a shard, the latents.

    A clip whose decoder ends a process is found when the next one takes it, or with one process when the same command is
    given again: it is rejected and named in `quarantine.jsonl`, and not tried again unless it changes or that file goes.

    Under a launcher (RANK, WORLD_SIZE) its processes share the work, otherwise `workers` processes that this one
    starts: each takes the next clip that nobody has. All need the source and `out` on a file system they share.

    Args:
        source: folder, table or Hugging Face dataset, see `wands.data.clips.layouts.load_source`.
        out: cache folder.
        model: diffusers pipeline folder or Hub id; its VAE, text encoder and tokenizer are used, and the
            config of its DiT names the variant.
        height: exact height in pixels, with `width`; a multiple of the VAE's stride times the patch.
        width: exact width in pixels.
        center_crop: fill height x width by cutting rather than by stretching.
        max_pixels: scale larger clips down to this area, each keeping its aspect. Default: 399,360, which is
            480 x 832; no bound with `height` and `width`. Several: each clip is kept at the size under each
            of them, at one that several bounds give only once. The first belongs to the settings that a cache
            is begun with, and keys tell the sizes under the others; these may come and go from run to run.
        max_frames: longest sample; None keeps whole clips.
        clip_mode: which frames of a longer clip: the first, the middle ones, or all as several samples.
        fps: frames per second of the samples. Default: the variant's own.
        device: where the VAE runs. Default: cuda if there is one, else cpu.
        text_device: where UMT5 runs. Default: `device`.
        text_dtype: of UMT5's weights; embeddings are stored in bf16 either way.
        vae_dtype: of the VAE's weights and arithmetic; latents are stored in bf16 either way.
        vae_tiling: encode large frames in tiles, see `wands.encoders.vae.WanVideoEncoder`.
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
        first, more_pixels = split_bounds(max_pixels)
        spec = ClipSpec.of_variant(
            variant,
            fps=fps,
            height=height,
            width=width,
            center_crop=center_crop,
            max_pixels=first,
            max_frames=max_frames,
            clip_mode=clip_mode,
        )
        further_specs(spec, more_pixels)  # refuses what cannot be
        rows, rejected = load_source(
            source, split=split, video_column=video_column, caption_column=caption_column
        )
        settings = _settings(spec, text_dtype, vae_dtype, vae_tiling)
        fingerprint = fingerprint_pipeline(model) | {"settings": settings}
        with CacheWriter(out, variant, fingerprint, max_samples=max_samples) as writer:
            run = Run(
                token=uuid.uuid4().hex,
                model=str(model),
                clip=asdict(spec),
                more_pixels=more_pixels,
                text_dtype=text_dtype,
                vae_dtype=vae_dtype,
                vae_tiling=vae_tiling,
                digest=writer.digest,
                max_samples=max_samples,
                conditions=variant.conditions,
            )
            job = Job(writer, crew, run)
            with job.work_folder():
                scan = Scan.of(rows, writer.entries, rejected, spec, more_pixels, job.quarantine())
                null_text = _known_null_text(writer.path)
                if scan.pending or null_text is None:
                    job.hand_out(scan.pending, null_text is None)
                    begin(run.token)
                    job.run_out()
                return _finish(job, scan, null_text, source=source, variant=variant, started=started)


def _settings(spec: ClipSpec, text_dtype: str, vae_dtype: str, vae_tiling: bool) -> dict[str, Any]:
    """What of the options decides the bits of a sample; further bounds do not, their sizes are in the keys."""
    return {
        "clip": asdict(spec),
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": text_dtype,
        "vae_dtype": vae_dtype,
        "vae_tiling": [TILE, TILE_STRIDE] if vae_tiling else False,
        "stored_dtype": "bf16",
    }


def _read_variant(model: str | Path) -> Variant:
    """The variant of a pipeline, once the encoders are known to be its own."""
    variant = read_variant(model)
    find_part(model, "tokenizer", CONFIG_FILES)
    vae, text_encoder = (
        read_config(find_part(model, part, CONFIG_FILES) / "config.json") for part in ("vae", "text_encoder")
    )
    stride = (vae.get("scale_factor_temporal", 4), *[vae.get("scale_factor_spatial", 8)] * 2)
    pairs = [
        ("its VAE gives z_dim", vae.get("z_dim", 16), f"out_channels={variant.dit.out_channels}"),
        ("its VAE gives stride", stride, f"stride={variant.vae_stride}"),
        ("its text encoder gives d_model", text_encoder.get("d_model"), f"text_dim={variant.dit.text_dim}"),
    ]
    if "clip" in variant.conditions:
        find_part(model, "image_processor", CONFIG_FILES)
        clip = read_config(find_part(model, "image_encoder", CONFIG_FILES) / "config.json")
        rows = (clip.get("image_size", 224) // clip.get("patch_size", 32)) ** 2 + 1
        pairs += [
            (
                "its image encoder gives hidden_size",
                clip.get("hidden_size"),
                f"image_dim={variant.dit.image_dim}",
            ),
            ("its image encoder gives tokens", rows * variant.num_images, f"tokens={variant.dit.image_len}"),
        ]
    for what, ours, theirs in pairs:
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


def _finish(
    job: Job, scan: Scan, null_text: Tensor | None, *, source: str, variant: Variant, started: float
) -> PreprocessReport:
    """Write rejects and index, and say what was done.

    Raises:
        DataError: there is no sample.
        CacheError: the disk is full.
    """
    writer = job.writer
    stats = job.stats() if job.handed_out else []
    deadly = set(job.quarantine().values())
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
        num_relabelled=scan.num_relabelled,
        num_workers=job.num_workers,
        waited=waited / (waited + worked) if any(worker.num_windows for worker in stats) else None,
        seconds_encoding=max((worker.waited + worker.worked for worker in stats), default=0.0),
        lost_workers=tuple(job.lost),
        quarantine=job.quarantine_path if any(item.reason in deadly for item in rejected) else None,
    )
