"""Report of a run of `wands preprocess`, as data and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wands.data.clips.records import REJECTS_NAME, Rejection, shown_key
from wands.preprocess.clip_rules import Footage, count_problems, describe_footage
from wands.preprocess.length_histogram import token_histogram
from wands.texts import plural, printable
from wands.variants import TEXT_LEN

SHOWN_REJECTIONS = 20
SHOWN_KINDS = 10
SHOWN_CLIPS = 5


@dataclass(frozen=True)
class PreprocessReport:
    """Results of one run of `wands preprocess`.

    Attributes:
        out: cache folder.
        variant: name of the model variant.
        num_accepted: samples in the index of the cache after the run.
        num_reused: samples from earlier runs that are in the index.
        num_left_out: samples from earlier runs that are in shards but not in the index, because the source no longer contains
            their clip, or their size was not requested.
        num_cut_captions: samples whose caption fills all 512 text tokens; longer text is cut.
        tokens: int64 [num_accepted], number of video tokens of each sample.
        num_relabelled: samples that reuse cached latents, because only the caption or the name of the clip is new.
        num_assumed: samples whose video has at least 720 lines and does not say its color matrix.
        waited: fraction of the encoding time in which encoders waited for decoded clips; None if there was none to encode.
        seconds_encoding: seconds of the slowest worker, including loading the models.
        footage: `Footage` of each video clip in the index, by key.
        still_clips: keys of the video clips whose sample has only one frame.
        losses: reason for each worker that ended early.
        quarantine: file with the clips that crashed a process or exceeded a time limit; None if `rejected` has no such clip.
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
    num_assumed: int = 0
    num_workers: int = 1
    waited: float | None = None
    seconds_encoding: float = 0.0
    footage: Mapping[str, Footage] = field(default_factory=dict)
    still_clips: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    quarantine: Path | None = None

    def __str__(self) -> str:
        lines = [
            printable(f"  {shown_key(item.key)}: {item.reason}") for item in self.rejected[:SHOWN_REJECTIONS]
        ]
        if len(self.rejected) > SHOWN_REJECTIONS:
            lines.append(f"  ... and {len(self.rejected) - SHOWN_REJECTIONS:,} more")
        listed = f", listed in {REJECTS_NAME}:" if self.rejected else ""
        lines.append(f"{len(self.rejected):,} rejected{listed}")
        kinds = count_problems((item.path, item.reason) for item in self.rejected)
        lines += [printable(f"  {count:7,}  {kind}") for kind, count in kinds[:SHOWN_KINDS]]
        reused = f", {self.num_reused:,} of them from an earlier run" if self.num_reused else ""
        lines.append(f"{self.out}: {plural(self.num_accepted, 'sample')} for {self.variant}{reused}")
        lines.append(token_histogram(self.tokens))
        lines.append(
            f"  {self.num_bytes:,} bytes in {plural(self.num_shards, 'shard')}, {self.seconds:.1f} s"
        )
        if self.waited is not None:
            by = f"{self.num_workers} processes, encoders" if self.num_workers > 1 else "encoder"
            lines.append(f"  {by} waited {self.waited:.1%} of the time for decoding")
        if self.footage:
            lines.append(describe_footage(np.sum([*self.footage.values()], axis=0)))
            unused = sorted(self.footage.items(), key=lambda item: item[1][0] - item[1][2])[:SHOWN_CLIPS]
            lines += [
                f"  {shown_key(key)}: {describe_footage(row)}" for key, row in unused if row[2] > row[0]
            ]
        if self.still_clips:
            names = ", ".join(map(shown_key, self.still_clips[:SHOWN_CLIPS]))
            videos = plural(len(self.still_clips), "video")
            lines.append(f"{videos} with one usable frame became still images: {names}; use longer clips")
        lines += [f"{loss}; the worker's other captions or clips were encoded later" for loss in self.losses]
        notes = [
            (
                self.num_relabelled,
                "sample",
                "with kept latents, because only the caption or the clip's name is new",
            ),
            (
                self.num_left_out,
                "sample",
                "of earlier runs left out of the index: not in the source, or of a size that is not requested",
            ),
            (
                self.num_assumed,
                "sample",
                "decoded as BT.709, as players do: of videos with 720 lines or more that do not say their color matrix",
            ),
            (self.num_cut_captions, "caption", f"with all {TEXT_LEN} text tokens: longer text is cut"),
        ]
        lines += [f"{plural(number, noun)} {text}" for number, noun, text in notes if number]
        if self.quarantine:
            lines.append(
                f"clips that crash or hang a process are skipped until their files change or {self.quarantine} is deleted"
            )
        return "\n".join(lines)
