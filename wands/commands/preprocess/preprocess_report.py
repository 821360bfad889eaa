"""Results of a run of `wands preprocess`, and their text for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wands.commands.length_histogram import token_histogram
from wands.data.clips.records import REJECTS_NAME, Rejection
from wands.variants import TEXT_LEN

SHOWN_REJECTIONS = 50


@dataclass(frozen=True)
class PreprocessReport:
    """Results of one run.

    Attributes:
        out: cache folder.
        variant: name of the model variant.
        num_accepted: number of samples in the cache.
        num_reused: accepted samples that an earlier run had encoded.
        num_left_out: samples of earlier runs that the source lacks or whose size is not requested; the shards keep them,
            the index does not.
        num_cut_captions: captions that fill all 512 text tokens; longer text is cut.
        rejected: every clip that is not in the cache, with its reason.
        tokens: int64 [num_accepted], video tokens of each sample.
        num_shards: number of HDF5 files.
        num_bytes: size of the HDF5 files.
        seconds: wall time.
        num_relabelled: samples whose latents come from the cache, because only the clip's caption or name is new.
        num_workers: number of processes that encoded.
        waited: share of the encoding time, 0 to 1, in which encoders waited for decoding; None if nothing was encoded.
        seconds_encoding: time of the slowest process for its clips, loading of the models included.
        losses: workers that ended early, with the reason.
        quarantine: file that names clips which crash or hang a process; None if there are none.
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
    losses: tuple[str, ...] = ()
    quarantine: Path | None = None

    def render(self) -> str:
        """Return the text for the terminal."""
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
            lines.append(
                f"{self.num_relabelled:,} samples keep their latents: only the caption or name is new"
            )
        lines += [f"{loss}; its remaining work was done in another round" for loss in self.losses]
        if self.num_left_out:
            lines.append(
                f"{self.num_left_out:,} samples of earlier runs are not in the source or have a size that is not "
                "requested: left out of the index"
            )
        if self.num_cut_captions:
            lines.append(
                f"{self.num_cut_captions:,} captions fill {TEXT_LEN} text tokens: longer text is cut"
            )
        lines.append(
            f"{len(self.rejected):,} rejected" + (f", listed in {REJECTS_NAME}:" if self.rejected else "")
        )
        lines += [f"  {item.key}: {item.reason}" for item in self.rejected[:SHOWN_REJECTIONS]]
        if len(self.rejected) > SHOWN_REJECTIONS:
            lines.append(f"  ... and {len(self.rejected) - SHOWN_REJECTIONS:,} more")
        if self.quarantine:
            lines.append(
                f"clips that crash or hang a process are skipped until the file changes or {self.quarantine} is deleted"
            )
        return "\n".join(lines)
