"""What a run of `wands preprocess` did, and how a terminal is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wands.commands.length_histogram import token_histogram
from wands.data.clips.records import Rejection
from wands.variants import TEXT_LEN

REJECTS_NAME = "rejects.jsonl"
SHOWN_REJECTIONS = 50


@dataclass(frozen=True)
class PreprocessReport:
    """What a run of `wands preprocess` did.

    Attributes:
        out: the cache.
        variant: name of the model variant that it is made for.
        num_accepted: samples in the cache.
        num_reused: those of them that an earlier run had already encoded.
        num_left_out: samples of earlier runs that are not in the source, or of a size that is not asked for: the
            shards keep them, the index does not.
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
        quarantine: the file that names clips which end a process; None where there are none.
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
    quarantine: Path | None = None

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
                f"{self.num_left_out:,} samples of earlier runs are not in the source, or of a size that is not asked "
                "for: left out of the index"
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
        if self.quarantine:
            lines.append(
                f"clips that end a process are tried again once they change or {self.quarantine} goes"
            )
        return "\n".join(lines)
