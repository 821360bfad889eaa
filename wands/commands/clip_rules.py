"""Settings, limits and messages that `wands check` and `wands preprocess` share, so that they agree on every clip."""

from __future__ import annotations

from wands.config.options import ClipOptions
from wands.data.clips.clip import ClipSpec, further_specs
from wands.data.clips.isolated import Crash
from wands.data.clips.layouts import load_source
from wands.data.clips.records import ClipRecord, Rejection
from wands.variants import Variant

LIMIT_SECONDS = 300.0
"""Longest time for decoding a clip in `wands check`, or a window of a clip in `wands preprocess`."""
NO_MEMORY = "does not fit into memory; lower --max-frames or --max-pixels"
EMPTY_CAPTION = "empty caption once cleaned; write one"


def crash_reason(path: object, crash: Crash) -> str:
    """Return the reason of a rejected clip that crashes or hangs its decoder."""
    return f"video={path} cannot be decoded: {crash}; replace or re-encode the file"


def no_access_reason(path: object, error: str) -> str:
    """Return the reason of a rejected clip whose file cannot be opened."""
    return f"video={path} cannot be read ({error}); fix its permissions"


def read_source(options: ClipOptions) -> tuple[list[ClipRecord], list[Rejection]]:
    """Return the usable and the rejected rows of the source.

    Raises:
        DataError: if the source does not exist or contains no clip.
    """
    return load_source(
        options.source, **options.model_dump(include={"split", "video_column", "caption_column"})
    )


def plan_samples(options: ClipOptions, variant: Variant) -> tuple[ClipSpec, tuple[int, ...]]:
    """Return rate, size and length of the samples, and the further area limits of --max-pixels.

    Raises:
        ConfigError: if an option is invalid or options exclude each other.
    """
    first_limit, *more_limits = options.max_pixels or (None,)
    keys = {"fps", "height", "width", "center_crop", "max_frames", "clip_mode"}
    spec = ClipSpec.of_variant(variant, max_pixels=first_limit, **options.model_dump(include=keys))
    further_specs(spec, more_limits)  # raises if a limit is invalid
    return spec, tuple(more_limits)
