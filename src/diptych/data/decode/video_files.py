"""Video files: frames read at given times through PyAV, without decoding more than is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from PIL import Image

from diptych.data.decode.opening import MAX_PIXELS
from diptych.errors import ImageError, MissingExtra, import_extra

# Containers that hold a video themselves. The library knows others that name further files or addresses to open
# (playlists, concatenations), and a suffix does not say which one a file is.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,flv,asf,asf_o,m4v,mpegvideo,h264"
AHEAD = 12.0  # seconds that are decoded through rather than looked up again; a usual distance of key frames


def sample_times(duration: float, every: float, most: int) -> list[float]:
    """Times 0, every, 2·every, ... before the end; at most ``most``, then at equal distances."""
    step = max(every, duration / most)
    count = max(1, min(most, int(duration / step - 1e-9) + 1))
    return [round(n * step, 3) for n in range(count)]


class Video:
    """An open video: its length, and the picture that is shown at a time.

    Times count in seconds from the first picture. Asking for rising times decodes each stretch once; going back, or
    far ahead, starts from the key frame before. Anything unreadable is an ``ImageError``. Not safe to share
    between threads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._av = _library()
        try:
            self._container = self._av.open(
                str(self.path), options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
            )
        except FileNotFoundError as error:
            raise ImageError(f"{self.path} does not exist: check the path.") from error
        except (self._av.FFmpegError, OSError, ValueError) as error:
            raise self._unreadable(error) from error
        try:
            if not self._container.streams.video:
                raise ImageError(f"{self.path} holds no picture track: replace or remove it.")
            self._stream = self._container.streams.video[0]
            pixels = self._stream.codec_context.width * self._stream.codec_context.height
            if pixels > MAX_PIXELS:
                raise ImageError(
                    f"{self.path} has {pixels:,} pixels a frame, over {MAX_PIXELS:,}: shrink it."
                )
            self._stream.thread_type = "AUTO"
            base = self._stream.time_base
            self._start = float((self._stream.start_time or 0) * base) if base is not None else 0.0
            self.duration = self._length()
        except BaseException:
            self._container.close()
            raise
        self._frames: Iterator[Any] = iter(())
        self._current: Any = None  # the last frame at or before the time that was asked for
        self._next: Any = None  # the frame after it
        self._seek(0.0)

    def frame(self, time: float) -> Image.Image:
        """The picture shown at ``time``: the last whose own time is not later; the first before it."""
        at = 0.0 if self._current is None else self._time(self._current)
        try:
            if self._current is None or not at <= time + 1e-6 <= at + AHEAD:
                self._seek(time)
            while self._next is not None and (self._current is None or self._time(self._next) <= time + 1e-6):
                self._current, self._next = self._next, next(self._frames, None)
            if self._current is None:
                raise ImageError(f"{self.path} has no frame at {time:g} s: replace or remove it.")
            return _upright(self._current)
        except (self._av.FFmpegError, OSError, ValueError) as error:
            self._current = self._next = None
            raise self._unreadable(error, time) from error

    def close(self) -> None:
        self._frames, self._current, self._next = iter(()), None, None
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _length(self) -> float:
        """The length in seconds: of the track, else of the file, else of the packets."""
        base = self._stream.time_base
        if self._stream.duration and base is not None:
            return float(self._stream.duration * base)
        if self._container.duration:
            return float(self._container.duration / self._av.time_base)
        ends = [p.pts + (p.duration or 0) for p in self._container.demux(self._stream) if p.pts is not None]
        return max(0.0, float(max(ends, default=0) * base) - self._start) if base is not None else 0.0

    def _seek(self, time: float) -> None:
        base = self._stream.time_base
        self._current = None
        try:
            if base is not None:
                place = int((time + self._start) / base)
                self._container.seek(place, stream=self._stream, backward=True, any_frame=False)
            self._frames = iter(self._container.decode(self._stream))
            self._next = next(self._frames, None)
        except self._av.FFmpegError as error:
            raise self._unreadable(error, time) from error

    def _time(self, frame: Any) -> float:
        return float(frame.time or 0.0) - self._start

    def _unreadable(self, error: Exception, time: float | None = None) -> ImageError:
        where = "" if time is None else f" at {time:g} s"
        reason = getattr(error, "strerror", None) or str(error)
        return ImageError(f"{self.path} cannot be read as a video{where} ({reason}): replace or remove it.")


def clock(time: float) -> str:
    """Seconds as a player shows them: 0:07, 12:30, 1:02:03."""
    seconds = int(time + 1e-6)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    tail = f"{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


def can_read_videos() -> bool:
    """Whether the library for videos is installed."""
    try:
        _library()
    except MissingExtra:
        return False
    return True


def _library() -> Any:
    return import_extra("av", "video", "reading a video")


def _upright(frame: Any) -> Image.Image:
    """A frame as an RGB picture, turned as its rotation says."""
    picture: Image.Image = frame.to_image()
    turn = getattr(frame, "rotation", 0)
    return picture.rotate(turn, expand=True) if turn else picture
