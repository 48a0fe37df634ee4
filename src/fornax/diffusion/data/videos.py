"""Videos of files as frames: animated pictures by Pillow, all other files by PyAV.

At a rate, frame k is the one that begins nearest to k / rate: files round times, and at their own
rate, or at half of it, every or every second frame is still taken once.
"""

import importlib
import io
import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.data.buckets import Size, coloured, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["VIDEO_ENDINGS", "decode_video", "import_av", "look_at_video"]

VIDEO_ENDINGS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".gif")
"""Files that are videos, beside animated pictures with the ends of images' names."""

_PNG_END = b"IEND\xaeB`\x82"
"""The last chunk and its checksum."""


def decode_video(
    encoded: bytes, where: str, channels: int, *, rate: float | None, start: int, count: int
) -> "list[Image]":
    """Decode some frames, upright, in grey or colour; what is transparent is white.

    Args:
      encoded: the file.
      where: its place, for messages.
      channels: 1 or 3.
      rate: frames of a second; None for all of the file.
      start: the first, counted at the rate.
      count: of frames.

    Raises:
      DataError: not a video, or one that ends before these frames.
      ConfigError: the file needs PyAV, which is not installed.
    """
    taken = islice(_taken(encoded, where, rate), start, start + count)
    found = [coloured(_picture(each), channels) for each in taken]
    if len(found) < count:
        raise DataError(f"{where}: it ends after {start + len(found)} frames: copy it again")
    return found


def look_at_video(
    encoded: bytes, where: str, *, rate: float | None, whole: bool
) -> tuple[Size, int]:
    """Height and width, and the number of frames at a rate; see `decode_video`.

    Args:
      encoded: the file.
      where: its place, for messages.
      rate: frames of a second; None for all of the file.
      whole: whether all frames are decoded; else the file's head is believed where it says how
        many there are.

    Raises:
      DataError, ConfigError: see `decode_video`.
    """
    if not whole and (said := _head(encoded, where, rate)) is not None:
        return said
    size, count = (0, 0), 0
    for each in _taken(encoded, where, rate):
        size, count = size if count else _size(each), count + 1
    if not count:
        raise DataError(f"{where}: it shows no frame at data.rate={rate}; raise the rate")
    return size, count


def import_av(instead: str) -> Any:
    """PyAV, which reads and writes MP4.

    Args:
      instead: what does without, for the message.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("av")
    except ImportError:
        raise ConfigError(
            "MP4 needs PyAV, which is not installed: pip install 'fornax-ai[video]'; or "
            f"{instead}, which need nothing more"
        ) from None


def _taken(encoded: bytes, where: str, rate: float | None) -> Iterator[Any]:
    """Frames at a rate, each valid until the next is asked for."""
    count = 0
    for frame, middle in _frames(encoded, where):
        if rate is None or middle is None:
            yield frame
            continue
        if not middle > 0:
            raise DataError(
                f"{where}: its frames have no times, and data.rate={rate:g} takes them by time; "
                "set data.rate to null, which takes every frame"
            )
        while count / rate < middle:
            yield frame
            count += 1


def _frames(encoded: bytes, where: str) -> Iterator[tuple[Any, float | None]]:
    """Each frame of a file, and the middle of its time in seconds; None for a picture alone."""
    from PIL import Image, UnidentifiedImageError

    try:
        _check_length(encoded)
        picture = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:
        yield from _av_frames(encoded, where)
        return
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _broken(where, error) from error
    start = 0.0
    try:
        count = getattr(picture, "n_frames", 1)
        for number in range(count):
            picture.seek(number)
            picture.load()
            seconds = picture.info.get("duration", 0) / 1000
            yield picture, start + seconds / 2 if count > 1 else None
            start += seconds
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise _broken(where, error) from error


def _av_frames(encoded: bytes, where: str) -> Iterator[tuple[Any, float | None]]:
    av = import_av("data of .webp, .gif or .png files")
    try:
        with av.open(io.BytesIO(encoded)) as container:
            stream = container.streams.video[0]
            stream.codec_context.options = {"err_detect": "explode"}
            before, first, start = None, 0.0, 0.0
            for frame in container.decode(stream):
                time = frame.time or 0.0
                if before is None:
                    first = time
                else:
                    yield before, (start + time) / 2 - first
                before, start = frame, time
            if before is not None:
                yield before, start - first + 0.5 / float(stream.average_rate or 25)
    except (av.FFmpegError, IndexError) as error:
        raise _broken(where, error) from error


def _broken(where: str, error: Exception) -> DataError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "<none>" in said or isinstance(error, IndexError):
        said = "it is not a video that Pillow or PyAV knows"
    return DataError(f"{where}: {said}")


def _check_length(encoded: bytes) -> None:
    """Refuse a file that ends before its own head says, which decoders show as fewer frames.

    Raises:
      ValueError: it does.
    """
    size, end = len(encoded), 0
    if encoded[:4] == b"RIFF":
        end = 8 + int.from_bytes(encoded[4:8], "little")
    elif (encoded[:3] == b"GIF" and not encoded.endswith(b";")) or (
        encoded[1:4] == b"PNG" and _PNG_END not in encoded[-64:]
    ):
        end = size + 1
    elif encoded[4:8] == b"ftyp":
        end = _end_of_boxes(encoded)
    elif encoded[:4] == b"\x1aE\xdf\xa3":
        end = _end_of_segment(encoded)
    if end > size:
        raise ValueError("it is truncated: copy it again")


def _end_of_boxes(encoded: bytes) -> int:
    """Of the top boxes of MP4 (ISO/IEC 14496-12, section 4.2)."""
    at = 0
    while at + 8 <= len(encoded):
        size, head = int.from_bytes(encoded[at : at + 4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(encoded[at + 8 : at + 16], "big"), 16
        if size == 0:  # to the end of the file
            return len(encoded)
        at += max(size, head)
    return at if at >= len(encoded) else len(encoded) + 1


def _end_of_segment(encoded: bytes) -> int:
    """Of the segment of Matroska and WebM (RFC 8794, section 6: an id, a size, the content)."""

    def sized(at: int) -> tuple[int, int]:
        """Where content begins, and its bytes; as many as there can be where that is unknown."""
        length = 9 - encoded[at].bit_length()
        value = int.from_bytes(encoded[at : at + length], "big") & ((1 << 7 * length) - 1)
        return at + length, 0 if value == (1 << 7 * length) - 1 else value

    try:
        begin, size = sized(4)
        begin, size = sized(begin + size + 4)
    except IndexError:
        return len(encoded) + 1
    return begin + size


def _head(encoded: bytes, where: str, rate: float | None) -> tuple[Size, int] | None:
    """Size and frames as the file's head says; None where it does not."""
    from PIL import Image, UnidentifiedImageError

    try:
        _check_length(encoded)
        picture = Image.open(io.BytesIO(encoded))
        count = getattr(picture, "n_frames", 1)
        return (upright_size(picture), count) if rate is None or count == 1 else None
    except UnidentifiedImageError:
        pass
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise _broken(where, error) from error
    av = import_av("data of .webp, .gif or .png files")
    try:
        with av.open(io.BytesIO(encoded)) as container:
            stream = container.streams.video[0]
            seconds = float((stream.duration or 0) * stream.time_base)
            count, last = stream.frames, 0.5 / float(stream.average_rate or 25)
            first = next(container.decode(stream), None)
    except (av.FFmpegError, IndexError) as error:
        raise _broken(where, error) from error
    count = count if rate is None else math.ceil((seconds - last) * rate)
    return (_size(first), count) if first is not None and count > 0 else None


def _size(frame: Any) -> Size:
    """Height and width, upright."""
    if not hasattr(frame, "rotation"):
        return upright_size(frame)
    turned = frame.rotation in (90, -90)
    return (frame.width, frame.height) if turned else (frame.height, frame.width)


def _picture(frame: Any) -> "Image":
    """A frame of either library, upright."""
    from PIL import ImageOps

    if not hasattr(frame, "rotation"):
        return ImageOps.exif_transpose(frame)
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
