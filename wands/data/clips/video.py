"""Decode clips to uint8 frames [F, H, W, 3] (frames, height, width, RGB), and encode frames to mp4.

Times are seconds from the first timestamp of the video stream. Frames are chosen by timestamp, never by number. torch is imported
only inside functions, because the processes of `wands check` do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter

from wands.conditions.clip_files import FoundFile
from wands.data.clips.clip import TIME_SLACK, ClipSpec, Crop, FrameSize, plan_sizes, plan_windows
from wands.data.clips.file_kinds import IMAGE_EXTENSIONS
from wands.data.clips.video_file import (
    ASSUMED,
    LONGEST_HOLD,
    RECODE,
    VideoFrame,
    VideoInfo,
    VideoReader,
    open_video,
)
from wands.errors import DataError
from wands.files import atomic_path

if TYPE_CHECKING:
    import torch

FILE_RATIO = 0.01
"""Largest allowed relative difference between the aspect ratios of a clip and of a file next to it, such as a mask."""


@dataclass
class DecodedClip:
    """One window of a clip, decoded and resized for the VAE.

    Attributes:
        frames: uint8 [F, H, W, 3] RGB. F is 1 + a multiple of `ClipSpec.frame_stride`; H and W are multiples of
            `ClipSpec.size_multiple`.
        fps: frames per second of ``frames``.
        start_seconds: time of ``frames[0]`` in the file.
        suffix: suffix of the sample's key, see `wands.data.clips.clip`.
        source: properties of the file. With a crop, width and height are those of the rectangle in stored pixels.
        variable_fps: whether the time between frames varies, up to the end of this window.
        interlaced: whether any frame up to the end of this window is interlaced.
        span: (start, end) in seconds of the part of the file that the clip uses.
        files: result of `ClipFile.of_window` by column of each file next to the clip, such as "mask".
    """

    frames: np.ndarray
    fps: float
    start_seconds: float
    suffix: str
    source: VideoInfo
    variable_fps: bool = False
    interlaced: bool = False
    span: tuple[float, float] = (0.0, 0.0)
    files: dict[str, np.ndarray] = field(default_factory=dict)


def _choose(reader: VideoReader, times: Iterator[float]) -> Iterator[VideoFrame]:
    """Yield, for each time, the last frame that starts at or before it, until the end of the video.

    Raises:
        DataError: if a frame is damaged or missing, or timestamps jump or run backwards.
    """
    start = next(times)
    frames = reader.frames(start)
    current = next(frames, None)
    following = next(frames, None)
    if current is None:
        return
    for time in chain([start], times):
        while following is not None and following.time <= time + TIME_SLACK:
            if following.time < current.time - TIME_SLACK:
                raise reader.error(f"has timestamps that run backwards at {current.time:.3f} s", RECODE)
            current = following
            following = next(frames, None)
        past_current = time >= current.end - TIME_SLACK
        if following is None and past_current:
            return
        if current.damaged or (following is not None and following.after_loss and past_current):
            raise reader.error(f"is corrupt at {time:.3f} s", "replace the file, or end the range earlier")
        if time >= current.time + LONGEST_HOLD:
            raise reader.error(
                f"shows one image from {current.time:.3f} s to at least {time:.3f} s",
                f"choose a range with motion (an image may last at most {LONGEST_HOLD:g} s)",
            )
        yield current


class _Cropper:
    """Callable that cuts a rectangle out of a decoded image, and the properties `info` of the result.

    In formats such as yuv420p, where 2 x 2 pixels share a color, the rectangle is rounded down to even numbers.
    """

    def __init__(self, reader: VideoReader, crop: Crop) -> None:
        info = reader.info
        (x, y, width, height) = map(Fraction, crop)
        frame_width, frame_height = info.display_size
        fits = x + width <= math.ceil(frame_width) and y + height <= math.ceil(frame_height)
        shown = f"{float(frame_width):.0f}x{float(frame_height):.0f}"
        if info.mirrored:
            x = frame_width - x - width
        for _ in range(info.rotation // 90):  # undo one counterclockwise turn
            x, y, width, height = frame_height - y - height, x, height, width
            frame_width, frame_height = frame_height, frame_width
        box = (round(width / info.sar), round(height), round(x / info.sar), round(y))
        if not fits or min(box[:2]) < 2:  # two pixels may share a color
            reason = f"has frames of {shown} pixels, but crop={','.join(map(str, crop))}"
            raise reader.error(f"{reason} must be in the frame and at least 2x2 pixels", "correct the crop")
        image = reader.first.image
        self._graph = av.filter.Graph()
        source = self._graph.add_buffer(
            width=image.width, height=image.height, format=image.format, time_base=Fraction(1)
        )
        nodes = source, self._graph.add("crop", ":".join(map(str, box))), self._graph.add("buffersink")
        self._graph.link_nodes(*nodes).configure()
        first = self(image)
        self.info = replace(info, width=first.width, height=first.height)

    def __call__(self, image: Any) -> Any:
        self._graph.push(image)
        return self._graph.pull()


class _Renderer:
    """Callable that converts decoded images to upright RGB images, scaled and cropped to one `FrameSize`."""

    def __init__(self, reader: VideoReader, size: FrameSize, crop: _Cropper | None) -> None:
        self.size = size.target[::-1]  # height and width of the result
        self._reader = reader
        self._scaled = size.scaled
        self._crop = crop
        self._turns = reader.info.rotation // 90
        self._reformatter = VideoReformatter()

    def __call__(self, image: Any) -> np.ndarray:
        info = self._reader.info
        if (image.width, image.height) != (info.width, info.height):
            raise self._reader.error(
                f"changes size from {info.width}x{info.height} to {image.width}x{image.height}",
                "split the video where the size changes",
            )
        image = self._crop(image) if self._crop else image
        stored = self._scaled[::-1] if self._turns % 2 else self._scaled
        grows = stored[0] > image.width or stored[1] > image.height
        method = "BICUBIC" if grows else "AREA"
        # threads=1: swscale's threads are slower (0.5 ms against 4 ms for a 720p frame).
        matrix = Colorspace.ITU709 if info.matrix == ASSUMED else None
        rgb = self._reformatter.reformat(
            image, *stored, "rgb24", src_colorspace=matrix, interpolation=method, threads=1
        )
        upright = np.rot90(rgb.to_ndarray(), self._turns)
        if info.mirrored:
            upright = upright[:, ::-1]
        height, width = self.size
        top = (upright.shape[0] - height) // 2
        left = (upright.shape[1] - width) // 2
        return upright[top : top + height, left : left + width]


def _read_file(
    file: FoundFile,
    clip: VideoReader,
    crop: Crop | None,
    sizes: Mapping[str, FrameSize],
    side: int,
    times: Iterator[float],
) -> Iterator[dict[str, np.ndarray]]:
    """Yield, for each time, what `ClipFile.of_frame` keeps of a file next to a clip, by the suffixes in `sizes`.

    An image stands for every frame. The iterator does not end: it repeats the last item. `side` is the side of a token in pixels.

    Raises:
        DataError: if the file cannot be decoded, or its aspect ratio or duration differs from the clip's.
    """
    kind = file.kind
    what = file.kind.column
    with open_video(file.path) as reader:
        info = reader.info
        of_clip = clip.info
        is_image = file.path.suffix.lower() in IMAGE_EXTENSIONS
        if is_image and not kind.allows_image and clip.path.suffix.lower() not in IMAGE_EXTENSIONS:
            raise reader.error(
                f"is an image, but a {what} of a video must be a video", f"make a video of the {what}"
            )
        (width, height) = info.display_size
        (clip_width, clip_height) = of_clip.display_size
        ratio = float(width / height)
        wanted = float(clip_width / clip_height)
        # Many programs make a mask with the stored pixels of the clip, and forget their aspect ratio.
        stored = wanted * float(of_clip.sar) ** (1 if of_clip.rotation % 180 else -1)
        if all(abs(ratio / allowed - 1) > FILE_RATIO for allowed in (wanted, stored)):
            shape = f"is a {what} of aspect ratio {ratio:.3f} for a clip of aspect ratio {wanted:.3f}"
            raise reader.error(shape, f"make a {what} with the aspect ratio of the clip")
        # A file may have one or two frames less or more: programs round durations.
        if not is_image and abs(info.duration - of_clip.duration) > 2.1 / min(info.fps, of_clip.fps):
            length = f"is a {what} of {info.duration:.2f} s for a clip of {of_clip.duration:.2f} s"
            raise reader.error(length, f"make a {what} as long as the clip")
        cropper = None
        scale = (width / clip_width, height / clip_height) * 2
        if crop:
            x, y, w, h = (int(value * factor) for value, factor in zip(crop, scale, strict=True))
            cropper = _Cropper(reader, (x, y, w, h))
        renders = {suffix: _Renderer(reader, size, cropper) for suffix, size in sizes.items()}
        chosen = repeat(reader.first) if is_image else _choose(reader, times)
        latest = None
        for found in chain(chosen, repeat(None)):
            frame = found or latest or reader.first  # after the end of the file, its last frame
            if frame is not latest:
                kept = {
                    suffix: kind.of_frame(render(frame.image), side) for suffix, render in renders.items()
                }
            latest = frame
            yield kept


def _render_window(
    frames: Iterator[VideoFrame], renders: Mapping[str, _Renderer], length: int
) -> tuple[dict[str, np.ndarray], int]:
    """Return (images, count): at most `length` frames rendered at each size, by the suffixes in `renders`.

    The images are uint8 [length, H, W, 3], of which `count` are written: fewer than `length` if the video has ended.
    """
    # The arrays are filled in place. Stacking a list of frames would halve the speed.
    images = {suffix: np.empty((length, *render.size, 3), np.uint8) for suffix, render in renders.items()}
    filled = 0
    latest = None
    for frame in islice(frames, length):
        for suffix, rendered in images.items():
            rendered[filled] = rendered[filled - 1] if frame is latest else renders[suffix](frame.image)
        filled = filled + 1
        latest = frame
    return images, filled


def _span(reader: VideoReader, start: float | None, end: float | None) -> tuple[float, float]:
    duration = reader.info.duration
    if end is not None and end > duration + reader.tolerance(duration):
        raise reader.error(f"lasts {duration:.3f} s, less than end={end:g}", "correct the end in the row")
    return max(start or 0.0, reader.first.time), min(end or duration, duration)


def _too_short(reader: VideoReader, start: float, end: float) -> DataError:
    return reader.error(
        f"is too short: no frame between {start:.3f} s and {end:.3f} s (duration {reader.info.duration:.3f} s)",
        "correct start and end in the row, or remove the row",
    )


def _truncated(reader: VideoReader, start: float, end: float) -> DataError:
    return reader.error(
        f"is truncated: the header says {reader.info.duration:.2f} s, but the video ends at {reader.reached:.2f} s, inside the "
        f"window [{start:.2f}, {end:.2f}) s",
        "replace the file, or lower --max-frames",
    )


def _add_files(
    clip: DecodedClip, files: Sequence[tuple[FoundFile, list[np.ndarray]]], stride: int
) -> tuple[str, str] | None:
    """Add the arrays of a clip's other files to it. Return what makes a file unusable, and the fix; None if nothing does."""
    for file, frames in files:
        column = file.kind.column
        images = np.stack(frames)
        try:
            clip.files[column] = file.kind.of_window(images, stride)
        except ValueError as error:
            return f"has the {column} {file.path}, which {error}", f"correct the {column}"
    return None


def decode_clip(
    path: Path,
    spec: ClipSpec,
    start: float | None = None,
    end: float | None = None,
    crop: Crop | None = None,
    files: Sequence[FoundFile] = (),
) -> Iterator[DecodedClip]:
    """Decode the windows that `spec` selects in a clip, lazily and in time order, each at each frame size (`plan_sizes`).

    The frame of a sample at time t is the last frame of the file with a timestamp <= t. Rotation, mirroring and pixel aspect
    ratio are applied. Damage and truncation outside the windows are ignored. Windows that were yielded before an error are
    complete. Without an error, at least one is yielded.

    `start` and `end` are in seconds, `end` excluded; None is the start or end of the file. `crop` applies before scaling.

    Raises:
        DataError: if the file cannot be opened, has no video or no frame, is too short or too small, or is truncated or corrupt
            inside a window; or if `end`, `crop` or a file does not fit the clip. All usable windows are yielded before the error
            if a file makes a window unusable (such as a black mask), or the frames are too small for some, but not all, sizes.
    """
    with open_video(path) as reader:
        duration = reader.info.duration
        slack = reader.tolerance(duration)
        begin, finish = _span(reader, start, end)
        windows = partial(plan_windows, spec, begin, finish)
        if next(windows(), None) is None:
            raise _too_short(reader, begin, finish)
        cropper = _Cropper(reader, crop) if crop else None
        info = cropper.info if cropper else reader.info
        sizes, size_error = plan_sizes(spec, *info.display_size)
        renders = {suffix: _Renderer(reader, size, cropper) for suffix, size in sizes.items()}

        def times() -> Iterator[float]:
            return (t + i / spec.fps for t, length in windows() for i in range(length))

        chosen = _choose(reader, times())
        others = [
            (file, _read_file(file, reader, crop, sizes, spec.size_multiple, times())) for file in files
        ]
        unusable: tuple[str, str] | None = None
        for index, (window_start, length) in enumerate(windows()):
            images, filled = _render_window(chosen, renders, length)
            kept_of = [(file, list(islice(items, filled))) for file, items in others]
            if filled < length and reader.reached < duration - slack:
                raise _truncated(reader, window_start, window_start + length / spec.fps)
            kept = spec.legal_frames(filled)
            if not kept and index == 0:
                raise reader.error(f"has no frame at or after {window_start:.3f} s", "correct the start")
            is_long_enough = kept == length or index == 0 or kept > spec.frame_stride
            window = f"#{index:04d}" if spec.clip_mode == "slide" else ""
            for suffix, frames in (images if is_long_enough else {}).items():
                clip = DecodedClip(
                    frames=frames[:kept],
                    fps=spec.fps,
                    start_seconds=window_start,
                    suffix=window + suffix,
                    source=info,
                    variable_fps=reader.variable_fps,
                    interlaced=reader.interlaced,
                    span=(begin, finish),
                )
                found = [(file, [item[suffix] for item in items[:kept]]) for file, items in kept_of]
                fault = _add_files(clip, found, spec.frame_stride)
                unusable = fault or unusable
                if not fault:
                    yield clip
            if filled < length:
                break
        if unusable:
            raise reader.error(*unusable)
        if size_error:
            raise size_error


def probe(path: Path) -> VideoInfo:
    """Return the properties of a video from its header and first frame. DataError if it has no decodable frame."""
    with open_video(path) as reader:
        return reader.info


def frame_times(path: Path) -> tuple[float, ...] | None:
    """Return the start of each frame and the end of the clip in seconds.

    None if the file has no usable timestamps, or if the frame rate is constant: then frame k begins at k / `VideoInfo.fps`.

    Raises:
        DataError: if the file cannot be opened, or has no video or no decodable frame.
    """
    status = path.stat()
    return _frame_times(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)  # consecutive rows of a table often select ranges of one clip
def _frame_times(path: Path, size: int, changed: int) -> tuple[float, ...] | None:
    with open_video(path) as reader:
        return reader.frame_times()


def to_pixels(frames: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Convert uint8 frames [F, H, W, 3] or [B, F, H, W, 3] to float32 [3, F, H, W] or [B, 3, F, H, W] in [-1, 1]."""
    import torch

    if isinstance(frames, np.ndarray):
        frames = torch.from_numpy(np.ascontiguousarray(frames))
    assert frames.dtype == torch.uint8, frames.dtype
    pixels = frames.movedim(-1, -4).to(torch.float32, memory_format=torch.contiguous_format)
    # CUDA replaces the division by a number by a product with its reciprocal, which gives other bits than the CPU.
    return pixels.div_(torch.full((), 127.5, device=pixels.device)).sub_(1.0)


def to_frames(pixels: torch.Tensor) -> np.ndarray:
    """Convert pixels [3, F, H, W] of any float type, clamped to [-1, 1], to uint8 frames [F, H, W, 3]."""
    import torch

    scaled = pixels.detach().float().add(1.0).mul_(127.5).round_().clamp_(0, 255)
    return scaled.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def save_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write an H.264 mp4 that every player opens (yuv420p, BT.709, index before the frames).

    `path` ends in .mp4, and its folder is created. An interrupted write leaves no partial file. Each of `frames` is uint8 [H, W,
    3] RGB; the last row or column of an odd side is repeated, because yuv420p needs even sides.
    """
    frames = iter(frames)
    first = next(frames)
    assert first.dtype == np.uint8, first.dtype
    height = first.shape[0] + first.shape[0] % 2
    width = first.shape[1] + first.shape[1] % 2
    rate = Fraction(fps).limit_denominator(1001)
    with (
        atomic_path(path) as partial,
        av.open(str(partial), "w", format="mp4", container_options={"movflags": "+faststart"}) as output,
    ):
        stream = output.add_stream("libx264", rate=rate, options={"crf": "17"})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = Colorspace.ITU709
        context.color_range = ColorRange.MPEG
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709
        for index, frame in enumerate(chain([first], frames)):
            margins = (0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)
            padded = np.pad(frame, margins, "edge")
            image = av.VideoFrame.from_ndarray(padded, format="rgb24").reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            image.pts = index
            image.time_base = 1 / rate
            output.mux(stream.encode(image))
        output.mux(stream.encode(None))
