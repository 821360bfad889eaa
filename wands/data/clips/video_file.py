"""An open video file: what it says of itself, its pictures one after the other, seeking, damage.

Time is in seconds from the first timestamp of the video stream. Headers and seek tables lie: they are only trusted where they
were seen to be right.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
from av.stream import Disposition
from av.video.reformatter import ColorTrc

from wands.data.clips.clip import TIME_SLACK
from wands.errors import DataError

# What PyAV was seen to raise on damaged files: FFmpegError is not all.
BROKEN = (av.FFmpegError, IndexError, OSError, ValueError)
# Only these were seen to seek to the frame that was asked for; MPEG-PS, MPEG-TS, AVI and FLV give others.
_SEEKABLE = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
# FFmpeg guesses these durations from the file's size or last timestamp: some frames short, blind to a cut.
_GUESSED_DURATION = {"avi", "mpeg", "mpegts"}
# A damaged timestamp can lie hours ahead, and a still teaches nothing: seconds one picture may be held.
LONGEST_HOLD = 10.0
# Transfer functions of HDR: taken for those of SDR, their pictures come out grey and flat.
HDR = {ColorTrc.SMPTE2084: "PQ", ColorTrc.ARIB_STD_B67: "HLG"}
# Seconds by which rounded timestamps may lie off (FLV: 1 ms each).
ROUNDING = 2.5e-3
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
class VideoFrame:
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


class VideoReader:
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
            hdr=HDR.get(picture.color_trc, ""),
        )

    @property
    def variable_fps(self) -> bool:
        """Whether the frames decoded so far lie at distances that no rounding explains."""
        shortest, longest = self._steps
        return longest - shortest > max(ROUNDING, 0.1 * shortest) if longest else False

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
            except BROKEN:
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
            except BROKEN:
                pass  # frames beyond cannot be shown either
        times.sort()  # from the order of decoding
        return None if self._is_even(times) else (*times, min(end, self.info.duration))

    def _is_even(self, times: Sequence[float]) -> bool:
        """Whether frame k begins at k / rate, but for rounding."""
        allowed = min(ROUNDING, 0.5 / self._rate)
        return all(abs(time - number / self._rate) <= allowed for number, time in enumerate(times))

    def _is_hidden(self, packet: Any) -> bool:
        # VP8 alone stores its reference pictures, which are never shown, in packets with times of their own.
        return self._stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10

    def frames(self, start: float) -> Iterator[VideoFrame]:
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
        except BROKEN:
            return  # seen on FLV only: nothing behind it can be read, so the file is a truncated one

    def _decode(self) -> Iterator[VideoFrame]:
        damaged = lost = False
        end, before = 0.0, None
        clock: deque[int] = deque()  # timestamps of packets that have not come out as a frame yet
        for packet in self._packets():
            if packet.size and packet.dts is not None:
                clock.append(packet.dts)
            try:
                pictures = self._stream.decode(packet)
            except BROKEN:
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
                yield VideoFrame(time, end, picture, damaged, lost)
                lost = False
