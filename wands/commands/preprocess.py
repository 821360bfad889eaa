"""`wands preprocess`: clips and captions in, a latent cache out.

Captions are encoded first, then clips: UMT5 and the VAE are never in memory together. What cannot be used is
left out, and said.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from wands.commands.progress import progress
from wands.data.cache import CacheWriter, LatentCache
from wands.data.cache_format import write_whole
from wands.data.clip import ClipSpec
from wands.data.histogram import token_histogram
from wands.data.source import ManifestRow, Rejection, load_source
from wands.data.video import decode_clip, to_pixels
from wands.encode.pipeline import CONFIG_FILES, find_part, fingerprint_pipeline, read_json
from wands.encode.spool import TextSpool
from wands.encode.text import CLEANING_VERSION, TextEncoder, clean_caption
from wands.encode.vae import WanVideoEncoder
from wands.errors import CacheError, ConfigError, DataError
from wands.variants import TEXT_LEN, Variant, variant_of

MAX_PIXELS = 480 * 832
"""Default bound of a frame's area: Wan's 480p class, whatever the aspect."""
REJECTS_NAME = "rejects.jsonl"
SHOWN_REJECTIONS = 50
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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

    def render(self) -> str:
        """The report as the terminal shows it."""
        reused = f", {self.num_reused:,} of them from an earlier run" if self.num_reused else ""
        lines = [
            f"{self.out}: {self.num_accepted:,} samples for {self.variant}{reused}",
            token_histogram(self.tokens),
        ]
        lines.append(f"  {self.num_bytes:,} bytes in {self.num_shards:,} shard(s), {self.seconds:.1f} s")
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
) -> PreprocessReport:
    """Encode a source of clips into a latent cache, or go on with one that an earlier run began.

    A clip that is already in the cache, made from the same file, caption and range, is not encoded again.
    Settings other than those the cache was begun with are refused. Afterwards the index holds what the source
    holds, no more.

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
        max_samples: of one shard. A run that is killed loses the shard it was writing.

    Raises:
        ConfigError: options that exclude each other, or a model that is not complete.
        DataError: the source holds nothing that can be used.
        CacheError: the cache was begun with other settings, or the disk is full.
    """
    started = time.monotonic()
    place = _device(device)
    text_place = _device(text_device) if text_device else place
    variant = _read_variant(model)
    if max_pixels is None and height is None:
        max_pixels = MAX_PIXELS
    spec = ClipSpec(
        fps=fps if fps is not None else variant.fps,
        height=height,
        width=width,
        center_crop=center_crop,
        max_pixels=max_pixels,
        max_frames=max_frames,
        clip_mode=clip_mode,
        size_multiple=variant.vae_stride[1] * variant.dit.patch_size[1],
        frame_stride=variant.vae_stride[0],
    )
    rows, rejected = load_source(
        source, split=split, video_column=video_column, caption_column=caption_column
    )
    settings = {
        "clip": asdict(spec),
        "cleaning": CLEANING_VERSION,
        "text_len": TEXT_LEN,
        "text_dtype": text_dtype,
    }
    settings |= {"vae_dtype": "fp32", "vae_tiling": False, "stored_dtype": "bf16"}
    fingerprint = fingerprint_pipeline(model) | {"settings": settings}

    with CacheWriter(out, variant, fingerprint, max_samples=max_samples) as writer:
        run = _Run(spec, writer, rows, rejected)
        null_text = _known_null_text(writer.path)
        with TextSpool(writer.path / ".text.tmp") as spool:
            if run.pending or null_text is None:
                encoder = TextEncoder.load(model, text_place, DTYPES[text_dtype])
                null_text = encoder.encode("")
                run.encode_captions(encoder, spool)
                del encoder
                _free_memory()
            if run.pending:
                run.encode_clips(WanVideoEncoder.load(model, place), spool)
        run.write_rejects()
        if not run.accepted:
            first = f" (first: {run.rejected[0].reason})" if run.rejected else ""
            raise DataError(
                f"source={source} gave no sample, {len(run.rejected)} rejected{first}; "
                f"every reason is in {writer.path / REJECTS_NAME}."
            )
        num_left_out = len(writer.keys - run.accepted)
        writer.commit(null_text, run.accepted)
    cache = LatentCache(out)
    return PreprocessReport(
        out=Path(out),
        variant=variant.name,
        num_accepted=len(cache),
        num_reused=len(run.reused),
        num_left_out=num_left_out,
        num_cut_captions=int((cache.index.text_lens == TEXT_LEN).sum()),
        rejected=tuple(run.rejected),
        tokens=cache.num_tokens(variant.dit.patch_size),
        num_shards=len(cache.index.shard_names),
        num_bytes=cache.num_bytes,
        seconds=time.monotonic() - started,
    )


class _Run:
    """The rows of one run, and what has become of them."""

    def __init__(
        self, spec: ClipSpec, writer: CacheWriter, rows: Sequence[ManifestRow], rejected: Sequence[Rejection]
    ) -> None:
        self.spec, self.writer = spec, writer
        self.rejected = list(rejected)
        self.reused: set[str] = set()
        self.added: set[str] = set()
        self.pending: list[
            tuple[ManifestRow, str, str]
        ] = []  # row, cleaned caption, digest of what it is made from
        for row in rows:
            caption = clean_caption(row.caption)
            if not caption:
                self.reject(row, "empty caption once cleaned; write one")
                continue
            try:
                content = _content(row, caption)
            except OSError as error:
                self.reject(row, f"video={row.path} cannot be read ({error.strerror}); mend its permissions")
                continue
            if writer.has(row.key, content):
                self.reused.add(row.key)
            else:
                self.pending.append((row, caption, content))

    @property
    def accepted(self) -> set[str]:
        """Keys of every sample that the source gave."""
        return self.reused | self.added

    def reject(self, row: ManifestRow, reason: str) -> None:
        self.rejected.append(Rejection(row.key, str(row.path), reason))

    def encode_captions(self, encoder: TextEncoder, spool: TextSpool) -> None:
        """Equal captions once."""
        captions = sorted({caption for _, caption, _ in self.pending})
        with progress("captions", len(captions)) as advance:
            for caption in captions:
                spool.add(caption, encoder.encode(caption))
                advance()

    def encode_clips(self, encoder: WanVideoEncoder, spool: TextSpool) -> None:
        """Decode, encode and store; a clip that cannot be used is rejected and the next one taken."""
        with progress("clips", len(self.pending)) as advance:
            for row, caption, content in self.pending:
                try:
                    self._encode_clip(encoder, row, caption, content, spool.read(caption))
                except DataError as error:
                    self.reject(row, str(error))
                except (torch.OutOfMemoryError, MemoryError):
                    _free_memory()
                    self.reject(row, "does not fit into memory; lower --max-frames or --max-pixels")
                advance()

    def _encode_clip(
        self, encoder: WanVideoEncoder, row: ManifestRow, caption: str, content: str, text_embeds: Tensor
    ) -> None:
        for clip in decode_clip(row.path, self.spec, row.start, row.end):
            key = row.key + clip.suffix
            if self.writer.has(key, content):  # a window of a clip that an earlier run did not finish
                self.reused.add(key)
                continue
            latents = encoder.encode(to_pixels(clip.frames))
            if not latents.isfinite().all():
                raise DataError(f"video={row.path} encodes to numbers that are not finite; replace the file")
            meta = {
                "caption": caption,
                "source": str(row.path),
                "start_seconds": clip.start_seconds,
                "num_frames": len(clip.frames),
                "height": clip.frames.shape[1],
                "width": clip.frames.shape[2],
                "fps": clip.fps,
                "content": content,
            }
            self.writer.add(key, latents.to(torch.bfloat16), text_embeds, meta)
            self.added.add(key)

    def write_rejects(self) -> None:
        lines = [json.dumps(asdict(item)) + "\n" for item in self.rejected]
        write_whole(self.writer.path / REJECTS_NAME, "".join(lines).encode())


def _content(row: ManifestRow, caption: str) -> str:
    """Digest of what a sample is made from: the file by its size and both ends, the caption, the range.

    Size and time of change alone would encode a data set anew because it was copied.
    """
    with row.path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        ends = head + file.read(1 << 16)
    rest = json.dumps([size, caption, row.start, row.end])
    return hashlib.blake2b(ends + rest.encode(), digest_size=16).hexdigest()


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


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"device={name} cannot be used ({reason}); use cpu, or cuda with an NVIDIA GPU."
        ) from None


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
