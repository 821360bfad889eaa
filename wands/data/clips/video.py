"""Clips in and out: a file on disk <-> uint8 [F, H, W, 3]. The only file that imports PyAV.

Time is in seconds from the first timestamp of the video stream. Frames are chosen by timestamp, never by
number. Headers and seek tables lie: they are only trusted where they were seen to be right.
torch is imported where it is used: the processes of `wands check` do without it.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import av
import numpy as np
from av.stream import Disposition
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, VideoReformatter

from wands.data.clips.clip import TIME_SLACK, ClipSpec, Geometry, TooSmallError, plan_sizes, plan_windows
from wands.errors import DataError

if TYPE_CHECKING:
    import torch

# What PyAV was seen to raise on damaged files: FFmpegError is not all.
_BROKEN = (av.FFmpegError, IndexError, OSError, ValueError)
# Only these were seen to seek to the frame that was asked for; MPEG-PS, MPEG-TS, AVI and FLV give others.
_SEEKABLE = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
# FFmpeg guesses these durations from the file's size or last timestamp: some frames short, blind to a cut.
_GUESSED_DURATION = {"avi", "mpeg", "mpegts"}
# A damaged timestamp can lie hours ahead, and a still teaches nothing: seconds one picture may be held.
_LONGEST_HOLD = 10.0
# Transfer functions of HDR: taken for those of SDR, their pictures come out grey and flat.
_HDR = {ColorTrc.SMPTE2084: "PQ", ColorTrc.ARIB_STD_B67: "HLG"}
# Seconds by which rounded timestamps may lie off (FLV: 1 ms each).
_ROUNDING = 2.5e-3
# Text that names other files, or is drawn as a terminal: never what a person means by a clip.
_PLAYLISTS = {"concat", "dash", "hls", "imf", "sdp", "tty"}


@dataclass(frozen=True)
class VideoInfo:
    """What a file says of itself.

    Attributes:
        container: FFmpeg's name(s) of the format.
        codec: FFmpeg's name of the codec.
        fps: average frames per second.
        num_frames: header's count, 0 when it has none; may lie.
        duration: seconds of video that the file promises; less can be readable when it is truncated.
        width: stored pixels per row, before rotation and pixel aspect.
        height: stored rows.
        rotation: counterclockwise degrees by which the stored picture is to be turned: 0, 90, 180 or 270.
        sar: width / height of a stored pixel.
        mirrored: once turned, its left and right are to be exchanged.
        hdr: "PQ" or "HLG" where that is how brightness is stored, else "". Nothing maps it to SDR.
    """

    container: str
    codec: str
    fps: float
    num_frames: int
    duration: float
    width: int
    height: int
    rotation: int
    sar: Fraction
    mirrored: bool = False
    hdr: str = ""

    @property
    def display_size(self) -> tuple[Fraction, Fraction]:
        """Width and height as a player shows them: pixel aspect applied to the width, then turned."""
        width, height = self.width * self.sar, Fraction(self.height)
        return (height, width) if self.rotation % 180 else (width, height)


@dataclass(frozen=True)
class DecodedClip:
    """One window of a clip, ready for the VAE.

    Attributes:
        frames: uint8 [F, H, W, 3] RGB, F = 1 + k * frame_stride, H and W multiples of size_multiple.
        fps: frames per second of ``frames``.
        start_seconds: time of ``frames[0]``.
        suffix: to be appended to the clip's key: "" or, in slide mode, "#0000", "#0001", ...; then the size, if it
            is not that of the first bound.
        source: the file it came from.
        variable_fps: the pictures read up to its end do not lie at even distances in time.
        interlaced: some of these hold two moments in alternate lines, and so do the frames made of them.
    """

    frames: np.ndarray
    fps: float
    start_seconds: float
    suffix: str
    source: VideoInfo
    variable_fps: bool = False
    interlaced: bool = False


@dataclass(frozen=True)
class _Frame:
    """A decoded picture, shown from ``time`` to ``end``; ``after_loss``: pictures before it were lost."""

    time: float
    end: float
    picture: Any
    damaged: bool
    after_loss: bool


def _open_container(path: Path) -> Any:
    # Absolute, for FFmpeg reads a relative name such as "a:b.mp4" as protocol a.
    return av.open(str(path.absolute()), metadata_errors="replace", timeout=60.0)


def _orientation(path: Path, picture: Any) -> tuple[int, bool]:
    """Counterclockwise degrees by which a picture is to be turned, and whether it is to be mirrored then.

    PyAV's `rotation` is where the display matrix takes the x axis, so a picture that is mirrored left to right
    reads as one that stands on its head.
    """
    try:
        found = picture.side_data.get("DISPLAYMATRIX")
        # Of the 3 x 3 numbers in 16.16 the upper left 2 x 2: where x goes, and where y goes.
        x_to_x, x_to_y, _, y_to_x, y_to_y, *_ = struct.unpack("=9i", bytes(found)) if found else (0,) * 9
        mirrored = x_to_x * y_to_y < x_to_y * y_to_x
    except ValueError:  # PyAV 18 has no name for EXIF, and shows no side data at all of a picture that has it
        mirrored = _is_mirrored_by_exif(path)
    along_x = picture.rotation % 180 == 0
    return (picture.rotation + (180 if mirrored and along_x else 0)) % 360, mirrored


def _is_mirrored_by_exif(path: Path) -> bool:
    from PIL import ExifTags, Image

    try:
        with Image.open(path) as image:
            return image.getexif().get(ExifTags.Base.Orientation) in (2, 4, 5, 7)
    except Exception:  # no picture, or damaged EXIF: Pillow's types of error are as many as its formats
        return False


class _Reader:
    """An open video stream. Damage inside it does not raise: the frames concerned are marked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached = 0.0  # seconds up to which frames were decoded
        self.interlaced = False  # some of these are
        self._steps = (math.inf, 0.0)  # shortest and longest time from one frame to the next
        self._open()
        try:
            self._frames = self._decode()
            first = next(self._frames, None)
            if first is None:
                raise self.error("has no frame that can be decoded", "replace the file")
            self.first = first
            self.info = self._describe()
        except BaseException:
            self._container.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._container.close()

    def error(self, problem: str, cure: str) -> DataError:
        return DataError(f"video={self.path} {problem}; {cure}")

    def _open(self) -> None:
        if not self.path.is_file():  # a pipe or a device would block for ever
            raise self.error("is not a regular file", "check the path")
        self._container = _open_container(self.path)
        try:
            name = self._container.format.name
            if name in _PLAYLISTS:
                raise self.error(f"is a {name} text, not a video", "give the clip itself")
            # Cover art of an audio file is a video stream of one picture.
            streams = [
                s for s in self._container.streams.video if not s.disposition & Disposition.attached_pic
            ]
            if not streams:
                raise self.error("has no video stream", "remove it or replace it by a video")
            self._stream = streams[0]
            if self._stream.codec_context is None:
                raise self.error("is in a codec that FFmpeg does not know", "convert it to H.264")
            self._stream.thread_type = "AUTO"
            if self._stream.codec_context.name == "mjpeg":
                # Left to itself it fills what is missing of a cut picture with grey and calls it whole.
                self._stream.codec_context.options = {"err_detect": "explode"}
        except BaseException:
            self._container.close()
            raise
        self._is_avi = name == "avi"
        self._can_seek = name in _SEEKABLE and len(self._stream.index_entries) > 0
        self._rate = float(self._stream.average_rate or self._stream.guessed_rate or 25)
        self._origin = float((self._stream.start_time or 0) * self._stream.time_base)

    def _describe(self) -> VideoInfo:
        picture = self.first.picture
        if picture.rotation % 90:
            raise self.error(
                f"is rotated by {picture.rotation} degrees", "re-encode it upright (ffmpeg -i IN OUT)"
            )
        rotation, mirrored = _orientation(self.path, picture)
        return VideoInfo(
            container=self._container.format.name,
            codec=self._stream.codec_context.name,
            fps=self._rate,
            num_frames=self._stream.frames,
            duration=self._duration(),
            width=picture.width,
            height=picture.height,
            rotation=rotation,
            sar=Fraction(self._stream.sample_aspect_ratio or 1),
            mirrored=mirrored,
            hdr=_HDR.get(picture.color_trc, ""),
        )

    @property
    def variable_fps(self) -> bool:
        """Whether the frames decoded so far lie at distances that no rounding explains."""
        shortest, longest = self._steps
        return longest - shortest > max(_ROUNDING, 0.1 * shortest) if longest else False

    def tolerance(self, duration: float) -> float:
        """Seconds by which an honest header may overstate: 2 %, at least two frames."""
        return max(0.02 * duration, 2 / self._rate)

    def _duration(self) -> float:
        """Seconds of video that the header promises; where it is silent or guesses, those in the packets."""
        whole = float((self._container.duration or 0) / av.time_base)
        if self._container.format.name not in _GUESSED_DURATION:
            if self._stream.duration:
                return float(self._stream.duration * self._stream.time_base)
            hours, _, rest = self._stream.metadata.get("DURATION", "").partition(":")  # Matroska: 00:00:03.2
            minutes, _, seconds = rest.partition(":")
            if seconds:
                tagged = int(hours) * 3600 + int(minutes) * 60 + float(seconds) - self._origin
                if 0 < tagged <= whole + self.tolerance(whole):
                    return tagged
        video, anything = self._scan()
        # AVI keeps the frame count of the uncut file; its duration follows the file's size.
        promised = self._stream.frames / self._rate if self._is_avi and self._stream.frames else whole
        return video if anything >= promised - self.tolerance(promised) else promised

    def _scan(self) -> tuple[float, float]:
        """Read every packet of the file: (seconds of video, seconds of the longest stream)."""
        video = anything = 0.0
        with _open_container(self.path) as container:
            started = float((container.start_time or 0) / av.time_base)
            try:
                for packet in container.demux():
                    is_video = packet.stream.index == self._stream.index
                    length = float((packet.duration or 0) * packet.time_base) or (
                        1 / self._rate if is_video else 0
                    )
                    stamp = packet.dts if self._is_avi else packet.pts
                    if stamp is not None:
                        moment = float(stamp * packet.time_base) + length
                        anything = max(anything, moment - started)
                        video = max(video, moment - self._origin) if is_video else video
                    elif is_video and packet.size:  # a raw stream has no timestamps at all
                        video += length
            except _BROKEN:
                pass  # what lies beyond cannot be read: exactly what the caller wants to know
        return video, max(anything, video)

    def frame_times(self) -> tuple[float, ...] | None:
        """As the function of this name; reads packets, decodes nothing."""
        # Where timestamps are those of packets, not of pictures: broadcasts store a picture as two fields, AVI
        # numbers what it stores. Their rate is constant.
        if self._container.format.name in _GUESSED_DURATION:
            return None
        unit, index = self._stream.time_base, self._stream.index_entries
        if 0 < self._stream.frames == len(index):  # of every frame, so the file need not be read
            stored = [entry.timestamp for entry in index]
            if self._is_even([float((stamp - stored[0]) * unit) for stamp in stored]):
                return None
        times, end = [], 0.0
        with _open_container(self.path) as container:
            try:
                for packet in container.demux(container.streams[self._stream.index]):
                    if not packet.size or packet.is_discard or self._is_hidden(packet):
                        continue
                    if packet.pts is None:
                        return None
                    times.append(float(packet.pts * unit) - self._origin)
                    end = max(end, times[-1] + (float((packet.duration or 0) * unit) or 1 / self._rate))
            except _BROKEN:
                pass  # frames beyond cannot be shown either
        times.sort()  # from the order of decoding
        return None if self._is_even(times) else (*times, min(end, self.info.duration))

    def _is_even(self, times: Sequence[float]) -> bool:
        """Whether frame k begins at k / rate, but for rounding."""
        allowed = min(_ROUNDING, 0.5 / self._rate)
        return all(abs(time - number / self._rate) <= allowed for number, time in enumerate(times))

    def _is_hidden(self, packet: Any) -> bool:
        # VP8 alone stores its reference pictures, which are never shown, in packets with times of their own.
        return self._stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10

    def frames(self, start: float) -> Iterator[_Frame]:
        """Frames in display order, the first at or before ``start``. To be called once."""
        if start > 0 and self._can_seek:
            self._container.seek(
                round((start + self._origin) / self._stream.time_base), stream=self._stream, backward=True
            )
            sought = self._decode()
            first = next(sought, None)
            if first is not None and first.time <= start + TIME_SLACK:
                return chain([first], sought)
            self._container.close()  # the seek landed too late: read from the beginning instead
            self._open()
            return self._decode()
        return chain([self.first], self._frames)

    def _packets(self) -> Iterator[Any]:
        try:
            yield from self._container.demux(self._stream)
        except _BROKEN:
            return  # seen on FLV only: nothing behind it can be read, so the file is a truncated one

    def _decode(self) -> Iterator[_Frame]:
        damaged = lost = False
        end, before = 0.0, None
        clock: deque[int] = deque()  # timestamps of packets that have not come out as a frame yet
        for packet in self._packets():
            if packet.size and packet.dts is not None:
                clock.append(packet.dts)
            try:
                pictures = self._stream.decode(packet)
            except _BROKEN:
                damaged = lost = True
                continue
            for picture in pictures:
                # AVI numbers packets in decoding order: with B-frames a picture's own pts is wrong, but the
                # k-th picture shown has the k-th packet's time. A lost packet breaks that count for good.
                stamp = clock.popleft() if self._is_avi and clock else picture.pts
                time = end if stamp is None else float(stamp * self._stream.time_base) - self._origin
                end = time + (float((picture.duration or 0) * self._stream.time_base) or 1 / self._rate)
                self.reached = max(self.reached, end)
                self.interlaced = self.interlaced or picture.interlaced_frame
                if before is not None:
                    shortest, longest = self._steps
                    self._steps = (min(shortest, time - before), max(longest, time - before))
                before = time
                healed = picture.key_frame and not self._is_avi
                damaged = picture.is_corrupt or (damaged and not healed)
                yield _Frame(time, end, picture, damaged, lost)
                lost = False


def _choose(reader: _Reader, frames: Iterator[_Frame], times: Iterable[float]) -> Iterator[_Frame]:
    """For each time the last frame that starts at or before it; ends early where the stream ends.

    Raises:
        DataError: the frame due at a time is damaged or missing, or timestamps leap or run backwards.
    """
    current, following = next(frames, None), next(frames, None)
    if current is None:
        return
    for time in times:
        while following is not None and following.time <= time + TIME_SLACK:
            if following.time < current.time - TIME_SLACK:
                raise reader.error(
                    f"has timestamps that run backwards at {current.time:.3f} s",
                    "rewrite it (ffmpeg -i IN OUT)",
                )
            current, following = following, next(frames, None)
        past_current = time >= current.end - TIME_SLACK
        if following is None and past_current:
            return
        if current.damaged or (following is not None and following.after_loss and past_current):
            raise reader.error(f"is corrupt at {time:.3f} s", "replace the file, or cut the window before it")
        if time >= current.time + _LONGEST_HOLD:
            raise reader.error(
                f"shows one picture from {current.time:.3f} s to {time:.3f} s at least",
                f"take a window of motion (a picture may last {_LONGEST_HOLD:g} s)",
            )
        yield current


class _Renderer:
    """Turns decoded pictures into upright RGB of the planned size."""

    def __init__(self, reader: _Reader, geometry: Geometry) -> None:
        self._reader, self._geometry = reader, geometry
        self._turns = reader.info.rotation // 90
        self._reformatter = VideoReformatter()

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the result."""
        return self._geometry.target[::-1]

    def __call__(self, picture: Any) -> np.ndarray:
        info = self._reader.info
        if (picture.width, picture.height) != (info.width, info.height):
            raise self._reader.error(
                f"changes size from {info.width}x{info.height} to {picture.width}x{picture.height}",
                "split it where it changes",
            )
        stored = self._geometry.scaled[::-1] if self._turns % 2 else self._geometry.scaled
        grows = stored[0] > picture.width or stored[1] > picture.height
        # threads=1: swscale's own threads cost more than they bring (0.5 against 4 ms for a 720p frame).
        rgb = self._reformatter.reformat(
            picture, *stored, "rgb24", interpolation="BICUBIC" if grows else "AREA", threads=1
        )
        upright = np.rot90(rgb.to_ndarray(), self._turns)
        if info.mirrored:
            upright = upright[:, ::-1]
        height, width = self.size
        top, left = (upright.shape[0] - height) // 2, (upright.shape[1] - width) // 2
        return upright[top : top + height, left : left + width]


def _read_windows(
    reader: _Reader, spec: ClipSpec, start: float | None, end: float | None, more_pixels: Sequence[int]
) -> Iterator[DecodedClip]:
    duration = reader.info.duration
    slack = reader.tolerance(duration)
    if end is not None and end > duration + slack:
        raise reader.error(f"lasts {duration:.3f} s, less than end={end:g}", "correct the row's end")
    begin, finish = max(start or 0.0, reader.first.time), min(end or duration, duration)
    first_window = next(plan_windows(spec, begin, finish), None)
    if first_window is None:
        raise reader.error(
            f"is too short: nothing between {begin:.3f} s and {finish:.3f} s (it lasts {duration:.3f} s)",
            "correct the row's start and end, or remove it",
        )
    try:
        sizes = plan_sizes(spec, more_pixels, *reader.info.display_size)
    except TooSmallError as error:
        raise _too_small(reader, error) from None
    renders = {suffix: _Renderer(reader, geometry) for suffix, geometry in sizes.geometries.items()}
    times = (t + i / spec.fps for t, length in plan_windows(spec, begin, finish) for i in range(length))
    chosen = _choose(reader, reader.frames(first_window[0]), times)
    for index, (window_start, length) in enumerate(plan_windows(spec, begin, finish)):
        # Filled in place: stacking a list of frames was seen to halve the speed.
        pictures = {
            suffix: np.empty((length, *render.size, 3), dtype=np.uint8) for suffix, render in renders.items()
        }
        filled, latest = 0, None
        for frame in islice(chosen, length):
            for suffix, frames in pictures.items():
                frames[filled] = frames[filled - 1] if frame is latest else renders[suffix](frame.picture)
            filled, latest = filled + 1, frame
        if filled < length and reader.reached < duration - slack:
            raise reader.error(
                f"is truncated: it promises {duration:.2f} s but ends at {reader.reached:.2f} s, inside the "
                f"window [{window_start:.2f}, {window_start + length / spec.fps:.2f}) s",
                "replace the file, or take fewer frames of it",
            )
        kept = spec.legal_frames(filled)
        if not kept and index == 0:
            raise reader.error(f"has no frame at or after {window_start:.3f} s", "correct the row's start")
        if kept == length or index == 0 or kept > spec.frame_stride:
            window = f"#{index:04d}" if spec.clip_mode == "slide" else ""
            seen = reader.variable_fps, reader.interlaced
            for suffix, frames in pictures.items():
                yield DecodedClip(frames[:kept], spec.fps, window_start, window + suffix, reader.info, *seen)
        if filled < length:
            break
    if sizes.refused:
        raise _too_small(reader, sizes.refused)


def _too_small(reader: _Reader, error: TooSmallError) -> TooSmallError:
    return TooSmallError(f"video={reader.path} {error}")


def decode_clip(
    path: Path,
    spec: ClipSpec,
    start: float | None = None,
    end: float | None = None,
    more_pixels: Sequence[int] = (),
) -> Iterator[DecodedClip]:
    """Decode the windows of a clip that ``spec`` asks for, lazily and in time order.

    The frame for time t is the last one whose timestamp is <= t. Rotation, mirroring and pixel aspect are applied.
    Damage and truncation outside the windows are ignored; windows that slide mode yields before an error are
    whole.

    Args:
        path: the file.
        spec: rate, size and length wanted.
        start: seconds; take nothing before it.
        end: seconds; take nothing at or after it.
        more_pixels: further bounds of a frame's area, each a further clip of every window unless it gives a
            size that is there already.

    Yields:
        For each bound one clip for ``head`` and ``middle``, one per window for ``slide``; at least one.

    Raises:
        DataError: the file cannot be opened, has no video, no frame, is truncated or corrupt inside a window,
            too short or too small. Too small for a further bound alone: after all clips.
    """
    path = Path(path)
    try:
        with _Reader(path) as reader:
            yield from _read_windows(reader, spec, start, end, more_pixels)
    except _BROKEN as error:
        raise DataError(_cannot_read(path, error)) from error
    except MemoryError as error:
        raise DataError(f"video={path} is too long for this machine's memory; set max_frames") from error


def probe(path: Path) -> VideoInfo:
    """Read a file's header and first frame.

    Raises:
        DataError: it cannot be opened, or has no video or no frame that can be decoded.
    """
    path = Path(path)
    try:
        with _Reader(path) as reader:
            return reader.info
    except _BROKEN as error:
        raise DataError(_cannot_read(path, error)) from error


def frame_times(path: Path) -> tuple[float, ...] | None:
    """When each frame of a variable-rate clip begins, in seconds, and at last when the clip ends.

    Returns:
        None for all others: there frame k begins at k / fps, as `probe` tells it.

    Raises:
        DataError: as `probe`.
    """
    try:
        status = path.stat()
        return _frame_times(path, status.st_size, status.st_mtime_ns)
    except _BROKEN as error:
        raise DataError(_cannot_read(path, error)) from error


@lru_cache(maxsize=64)  # a table cuts many windows of one clip, in rows that follow each other
def _frame_times(path: Path, size: int, changed: int) -> tuple[float, ...] | None:
    with _Reader(path) as reader:
        return reader.frame_times()


def _cannot_read(path: Path, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"video={path} cannot be read as a video ({reason}); replace the file"


def to_pixels(frames: np.ndarray) -> torch.Tensor:
    """Scale uint8 [F, H, W, 3] to the VAE's float32 [3, F, H, W] in [-1, 1]."""
    import torch

    assert frames.dtype == np.uint8, frames.dtype
    pixels = torch.from_numpy(np.ascontiguousarray(frames)).permute(3, 0, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(127.5).sub_(1.0)


def to_frames(pixels: torch.Tensor) -> np.ndarray:
    """Inverse of `to_pixels`: [3, F, H, W] in [-1, 1], any float type, clamped, to uint8 [F, H, W, 3]."""
    import torch

    scaled = pixels.detach().float().add(1.0).mul_(127.5).round_().clamp_(0, 255)
    return scaled.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def save_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write H.264 mp4 that every player opens (yuv420p, BT.709, index first); appears whole or not at all.

    Args:
        path: ends in .mp4; its folder is made.
        frames: uint8 [F, H, W, 3] RGB. yuv420p has even sizes only: of an odd height or width the last row or
            column is doubled.
        fps: frames per second.
    """
    path = Path(path)
    assert frames.dtype == np.uint8, frames.dtype
    assert frames.ndim == 4, frames.shape
    assert frames.shape[0] > 0, frames.shape
    height, width = frames.shape[1] + frames.shape[1] % 2, frames.shape[2] + frames.shape[2] % 2
    rate = Fraction(fps).limit_denominator(1001)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with av.open(str(partial), "w", format="mp4", container_options={"movflags": "+faststart"}) as output:
            stream = output.add_stream("libx264", rate=rate, options={"crf": "17"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            context = stream.codec_context
            context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
            context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
            for index, frame in enumerate(frames):
                padded = np.pad(
                    frame, ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)), "edge"
                )
                picture = av.VideoFrame.from_ndarray(padded, format="rgb24").reformat(
                    format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
                )
                picture.pts, picture.time_base = index, 1 / rate
                output.mux(stream.encode(picture))
            output.mux(stream.encode(None))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
