"""Read video files with PyAV: header, frames in display order, seeking, and detection of damage.

Times are seconds from the first timestamp of the video stream. Header durations and seek tables can be wrong; the code relies on
them only in container formats in which they proved correct.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import av
from av.stream import Disposition
from av.video.reformatter import ColorTrc

from wands.data.clips.clip import TIME_SLACK, TooSmallError
from wands.data.clips.file_kinds import explain_content, explain_no_file
from wands.errors import DataError, one_line

# Exceptions that PyAV raises for damaged files.
BROKEN = (av.FFmpegError, IndexError, OSError, ValueError)
# Only these containers seek to the requested frame; MPEG-PS, MPEG-TS, AVI and FLV return other frames.
_SEEKABLE = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}
# FFmpeg estimates durations of these formats from the file's size or last timestamp, which is wrong for a truncated file.
_GUESSED_DURATION = {"avi", "mpeg", "mpegts"}
# Fix for a video with wrong timestamps, or with a rotation that is not a multiple of 90 degrees.
RECODE = "re-encode the video (ffmpeg -i IN OUT)"
# Seconds that one image may last. A damaged timestamp can be hours ahead, and a still has no motion.
LONGEST_HOLD = 10.0
# Transfer functions of HDR: read as SDR, the images look gray and flat.
HDR = {ColorTrc.SMPTE2084: "PQ", ColorTrc.ARIB_STD_B67: "HLG"}
# Largest error of rounded timestamps in seconds (FLV: 1 ms each).
ROUNDING = 2.5e-3
# Brands of images in the format of .mp4 files. Phones store an image as tiles, of which FFmpeg decodes one.
_HEIF = {"avif", "heic", "heix", "mif1"}
# Formats of text files that FFmpeg opens as a playlist or a terminal. These are never clips.
_PLAYLISTS = {"concat", "dash", "hls", "imf", "sdp", "tty"}


HD_LINES = 720
"""Lines from which an untagged video is taken to be BT.709, as in players. Smaller videos are taken to be BT.601."""
ASSUMED = "BT.709, assumed"
TAGGED = "as the file says"
_UNSPECIFIED = 2  # AVCOL_SPC_UNSPECIFIED, for which PyAV has no name


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video, from the header and the first frame.

    Attributes:
        container: FFmpeg's name(s) of the container format.
        fps: average number of frames per second.
        num_frames: number of frames according to the header, which may be wrong; 0 if it has none.
        duration: seconds of video according to the header. A truncated file contains less video.
        width: stored pixels per row, before rotation and pixel aspect ratio are applied.
        height: stored rows, before rotation is applied.
        rotation: counterclockwise degrees (0, 90, 180 or 270) that make the stored image upright.
        sar: sample aspect ratio: width / height of a stored pixel.
        mirrored: whether the image must be mirrored horizontally after the rotation.
        hdr: "PQ" or "HLG" for HDR videos, otherwise "". The decoder does not convert HDR to SDR.
        matrix: `ASSUMED` or `TAGGED` color conversion from `HD_LINES` lines on. "" for smaller videos.
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
    matrix: str = ""

    @property
    def display_size(self) -> tuple[Fraction, Fraction]:
        """Displayed (width, height) in pixels, with the pixel aspect ratio and the rotation applied."""
        width = self.width * self.sar
        height = Fraction(self.height)
        return (height, width) if self.rotation % 180 else (width, height)


@dataclass(frozen=True)
class VideoFrame:
    """A decoded image (PyAV's frame), displayed from `time` to `end` in seconds.

    `after_loss` is true if images directly before this image were lost.
    """

    time: float
    end: float
    image: Any
    damaged: bool
    after_loss: bool


@contextmanager
def open_video(path: Path) -> Iterator[VideoReader]:
    """Context manager that yields a `VideoReader`.

    In its block, errors of a damaged video (`BROKEN`), TooSmallError and MemoryError become a DataError that names the file.
    """
    try:
        with _open_container(path) as container:
            yield VideoReader(path, container)
    except TooSmallError as error:
        raise TooSmallError(f"video={path} {error}") from None
    except (MemoryError, *BROKEN) as error:
        reason = f"cannot be read as a video ({one_line(error)}); replace the file"
        if isinstance(error, MemoryError):
            reason = "is too long for this machine's memory; set a smaller --max-frames"
        raise DataError(f"video={path} {reason}") from error


def _open_container(path: Path) -> Any:
    if not path.is_file():  # a pipe or a device would block forever
        raise DataError(f"video={path} {explain_no_file(path)}")
    if reason := explain_content(path):  # FFmpeg would report "Invalid data" or no frame
        raise DataError(f"video={path} {reason}")
    # Absolute: FFmpeg reads a relative name such as "a:b.mp4" as protocol a.
    # pattern_type: FFmpeg reads an image a%d.png as the sequence a0.png, a1.png ...
    options = {"pattern_type": "none"}
    return av.open(str(path.absolute()), options=options, metadata_errors="replace", timeout=60.0)


def _readable_packets(container: Any, *streams: Any) -> Iterator[Any]:
    """Yield the packets of the streams (default: all) up to the first damage that makes the rest of the file unreadable."""
    with suppress(*BROKEN):
        yield from container.demux(*streams)


def _orientation(path: Path, image: Any) -> tuple[int, bool]:
    """Return (counterclockwise degrees, whether to mirror horizontally afterwards) to show a stored image upright.

    PyAV's `rotation` is the direction of the x axis, so it is 180 for an image that is only mirrored: (0, True).
    """
    try:
        data = image.side_data.get("DISPLAYMATRIX")
        # 3 x 3 numbers in 16.16 fixed point; the upper left 2 x 2 maps x and y.
        x_to_x, x_to_y, _, y_to_x, y_to_y, *_ = struct.unpack("=9i", bytes(data)) if data else (0,) * 9
        mirrored = x_to_x * y_to_y < x_to_y * y_to_x
    except ValueError:  # PyAV 18 has no name for EXIF, and hides all side data of an image with EXIF
        mirrored = _is_mirrored_by_exif(path)
    along_x = image.rotation % 180 == 0
    return (image.rotation + (180 if mirrored and along_x else 0)) % 360, mirrored


def _is_mirrored_by_exif(path: Path) -> bool:
    from PIL import ExifTags, Image

    try:
        with Image.open(path) as image:
            return image.getexif().get(ExifTags.Base.Orientation) in (2, 4, 5, 7)
    except Exception:  # not an image, or damaged EXIF: Pillow raises many types of errors
        return False


class VideoReader:
    """An open video stream. A corrupt frame raises no error, but has `VideoFrame.damaged`.

    Attributes:
        reached: time in seconds up to which frames were decoded.
        interlaced: whether any frame decoded so far is interlaced.
    """

    def __init__(self, path: Path, container: Any) -> None:
        self.path = path
        self.reached = 0.0
        self.interlaced = False
        self._steps = (math.inf, 0.0)  # shortest and longest time between two frames
        self._container = container
        self._choose_stream()
        self._frames = self._decode()
        first = next(self._frames, None)
        if first is None:
            raise self.error("has no frame that can be decoded", "replace the file")
        self.first = first
        self.info = self._describe()

    def error(self, problem: str, cure: str) -> DataError:
        return DataError(f"video={self.path} {problem}; {cure}")

    def _choose_stream(self) -> None:
        name = self._container.format.name
        if name in _PLAYLISTS:
            raise self.error(f"is a text file in {name} format, not a video", "use a video file")
        if self._container.metadata.get("major_brand") in _HEIF:
            raise self.error("is a HEIC, HEIF or AVIF image, which is not read", "convert the file to .png")
        # Cover art of an audio file is a video stream of one image.
        streams = [s for s in self._container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            raise self.error("has no video stream", "remove the file or replace it by a video")
        self._stream = streams[0]
        if self._stream.codec_context is None:
            raise self.error("uses a codec that FFmpeg does not know", "convert the video to H.264")
        self._stream.thread_type = "AUTO"
        if self._stream.codec_context.name == "mjpeg":
            # By default the decoder fills missing parts of a truncated image with gray and reports no error.
            self._stream.codec_context.options = {"err_detect": "explode"}
        self._is_avi = name == "avi"
        self._can_seek = name in _SEEKABLE and len(self._stream.index_entries) > 0
        self._rate = float(self._stream.average_rate or self._stream.guessed_rate or 25)
        self._origin = float((self._stream.start_time or 0) * self._stream.time_base)

    def _describe(self) -> VideoInfo:
        image = self.first.image
        if image.rotation % 90:
            raise self.error(f"is rotated by {image.rotation} degrees, not by a multiple of 90", RECODE)
        rotation, mirrored = _orientation(self.path, image)
        return VideoInfo(
            container=self._container.format.name,
            codec=self._stream.codec_context.name,
            fps=self._rate,
            num_frames=self._stream.frames,
            duration=self._duration(),
            width=image.width,
            height=image.height,
            rotation=rotation,
            sar=Fraction(self._stream.sample_aspect_ratio or 1),
            mirrored=mirrored,
            hdr=HDR.get(image.color_trc, ""),
            matrix=self._matrix(image),
        )

    def _matrix(self, image: Any) -> str:
        if min(image.width, image.height) < HD_LINES:
            return ""  # FFmpeg uses BT.601 for a video without a tag
        # JPEG and VP8 always use BT.601.
        has_rule = image.format.is_rgb or self._stream.codec_context.name in ("mjpeg", "vp8", "webp")
        return TAGGED if has_rule or image.colorspace != _UNSPECIFIED else ASSUMED

    @property
    def variable_fps(self) -> bool:
        """Whether the frames decoded so far have unequal distances in time. Rounding errors are ignored."""
        shortest, longest = self._steps
        return longest - shortest > max(ROUNDING, 0.1 * shortest) if longest else False

    def tolerance(self, duration: float) -> float:
        """Return the seconds that a video may be shorter than its header says: 2 %, but at least two frames."""
        return max(0.02 * duration, 2 / self._rate)

    def _duration(self) -> float:
        """Return the seconds of the video: from the header if it is exact, else from every packet."""
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
        video, anything = self._scan_packets()
        # A truncated AVI keeps its number of frames in the header; FFmpeg estimates its duration from the file's size.
        promised = self._stream.frames / self._rate if self._is_avi and self._stream.frames else whole
        return video if anything >= promised - self.tolerance(promised) else promised

    def _scan_packets(self) -> tuple[float, float]:
        """Read every packet, and return the seconds of the video stream and of the longest (perhaps audio) stream."""
        video = anything = 0.0
        with _open_container(self.path) as container:
            started = float((container.start_time or 0) / av.time_base)
            for packet in _readable_packets(container):
                is_video = packet.stream.index == self._stream.index
                default = 1 / self._rate if is_video else 0.0
                length = float((packet.duration or 0) * packet.time_base) or default
                stamp = packet.dts if self._is_avi else packet.pts
                if stamp is not None:
                    moment = float(stamp * packet.time_base) + length
                    anything = max(anything, moment - started)
                    video = max(video, moment - self._origin) if is_video else video
                elif is_video and packet.size:  # a raw stream has no timestamps
                    video += length
        return video, max(anything, video)

    def frame_times(self) -> tuple[float, ...] | None:
        """Return the start of each frame and the end of the clip in seconds, without decoding.

        None if the frame rate is constant, or if the file has no usable timestamps.
        """
        # Timestamps of these containers belong to packets, not to images: broadcasts store an image as two fields, AVI
        # numbers packets. Their rate is constant.
        if self._container.format.name in _GUESSED_DURATION:
            return None
        unit = self._stream.time_base
        index = self._stream.index_entries
        # If the index has an entry for every frame, the file need not be read.
        if 0 < self._stream.frames == len(index):
            stored = [entry.timestamp for entry in index]
            if self._is_even([float((stamp - stored[0]) * unit) for stamp in stored]):
                return None
        times = []
        end = 0.0
        with _open_container(self.path) as container:
            for packet in _readable_packets(container, container.streams[self._stream.index]):
                if not packet.size or packet.is_discard or self._is_hidden(packet):
                    continue
                if packet.pts is None:
                    return None
                times.append(float(packet.pts * unit) - self._origin)
                end = max(end, times[-1] + (float((packet.duration or 0) * unit) or 1 / self._rate))
        times.sort()  # packets are in decoding order
        return None if self._is_even(times) else (*times, min(end, self.info.duration))

    def _is_even(self, times: Sequence[float]) -> bool:
        # With a constant frame rate, frame k begins at k / frame rate, up to rounding errors.
        allowed = min(ROUNDING, 0.5 / self._rate)
        return all(abs(time - number / self._rate) <= allowed for number, time in enumerate(times))

    def _is_hidden(self, packet: Any) -> bool:
        # VP8 stores reference images, which are never displayed, in separate packets with timestamps.
        return self._stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10

    def frames(self, start: float) -> Iterator[VideoFrame]:
        """Yield frames in display order from the last one that starts at or before `start` seconds. Call it only once."""
        if start > 0 and self._can_seek:
            time = round((start + self._origin) / self._stream.time_base)
            self._container.seek(time, stream=self._stream)
            sought = self._decode()
            first = next(sought, None)
            if first is not None and first.time <= start + TIME_SLACK:
                yield from chain([first], sought)
                return
            # The seek ended too late: read from the beginning.
            with _open_container(self.path) as self._container:
                self._choose_stream()
                yield from self._decode()
        else:
            yield from chain([self.first], self._frames)

    def _decode(self) -> Iterator[VideoFrame]:
        damaged = lost = False
        end = 0.0
        before = None
        clock: deque[int] = deque()  # timestamps of packets without a decoded frame yet
        for packet in _readable_packets(self._container, self._stream):
            if packet.size and packet.dts is not None:
                clock.append(packet.dts)
            try:
                images = self._stream.decode(packet)
            except BROKEN:
                damaged = lost = True
                continue
            for image in images:
                # AVI numbers packets in decoding order. With B-frames the pts of an image is wrong, but the k-th
                # displayed image has the time of the k-th packet. A lost packet breaks this count permanently.
                stamp = clock.popleft() if self._is_avi and clock else image.pts
                time = end if stamp is None else float(stamp * self._stream.time_base) - self._origin
                end = time + (float((image.duration or 0) * self._stream.time_base) or 1 / self._rate)
                self.reached = max(self.reached, end)
                self.interlaced = self.interlaced or image.interlaced_frame
                if before is not None:
                    shortest, longest = self._steps
                    self._steps = (min(shortest, time - before), max(longest, time - before))
                before = time
                healed = image.key_frame and not self._is_avi
                damaged = image.is_corrupt or (damaged and not healed)
                yield VideoFrame(time=time, end=end, image=image, damaged=damaged, after_loss=lost)
                lost = False
