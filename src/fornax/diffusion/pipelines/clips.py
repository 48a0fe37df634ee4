"""Videos as files: animated pictures, and MP4 where PyAV is installed.

Legend: F frames, H height, W width, C channels.
"""

import io
from fractions import Fraction

import numpy as np
from PIL import Image

from fornax.config.errors import ConfigError
from fornax.diffusion.data.videos import import_av

__all__ = ["VIDEO_FORMATS", "check_video", "encode_video"]

VIDEO_FORMATS = {"mp4": "MP4", "webp": "WEBP", "gif": "GIF", "png": "PNG"}
"""By ending."""
_UNITS = {"webp": 1, "gif": 10, "png": 1}
"""Milliseconds in which a picture's time is written."""
_FASTEST_GIF = 50
"""Frames per second; browsers slow what is faster down to ten."""
_MOST_FRAMES = 240
"""A second."""
_INSTEAD = "write .webp, .gif or .png"


def check_video(form: str, rate: float) -> None:
    """Refuse a file that cannot be written, before anything is drawn.

    Args:
      form: a key of `VIDEO_FORMATS`.
      rate: frames per second.

    Raises:
      ConfigError: a rate that the format has not, or MP4 without PyAV.
    """
    if not 0 < rate <= _MOST_FRAMES:
        raise ConfigError(f"fps={rate:g} must be above 0 and at most {_MOST_FRAMES}")
    if form == "gif" and rate > _FASTEST_GIF:
        raise ConfigError(
            f"fps={rate:g}: a GIF shows at most {_FASTEST_GIF} frames per second; write .webp, "
            ".png or .mp4, or fewer"
        )
    if form == "mp4":
        import_av(_INSTEAD)


def encode_video(frames_FHWC: np.ndarray, form: str, rate: float) -> bytes:
    """A video as a file's bytes; animated pictures repeat.

    WebP and GIF lose a little colour, MP4 (H.264, 4:2:0) more; PNG loses nothing.

    Args:
      frames_FHWC: uint8, of 3 channels, or of 1 for grey.
      form: a key of `VIDEO_FORMATS`.
      rate: frames per second.

    Raises:
      ConfigError: as `check_video`; odd sides, which H.264's colours have not.
    """
    check_video(form, rate)
    frames_FHWC = np.broadcast_to(frames_FHWC, (*frames_FHWC.shape[:-1], 3))
    if form == "mp4":
        return _mp4(frames_FHWC, rate)
    first, *rest = (Image.fromarray(pixels_HWC) for pixels_HWC in frames_FHWC)
    # Rounded times, not durations: so long videos keep their length.
    unit = _UNITS[form]
    ends = np.round(np.arange(len(frames_FHWC) + 1) * (1000 / rate / unit)) * unit
    file = io.BytesIO()
    first.save(
        file,
        VIDEO_FORMATS[form],
        save_all=True,
        append_images=rest,
        duration=np.diff(ends).astype(int).tolist(),
        loop=0,
        **({"quality": 95} if form == "webp" else {}),
    )
    return file.getvalue()


def _mp4(frames_FHWC: np.ndarray, rate: float) -> bytes:
    _, height, width, _ = frames_FHWC.shape
    if height % 2 or width % 2:
        raise ConfigError(
            f"a video of {width}x{height} cannot be MP4, whose colours are of 2 x 2 pixels; use "
            "even sides, or write .webp, .gif or .png"
        )
    av, file = import_av(_INSTEAD), io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=Fraction(rate).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = {"crf": "16"}
        for pixels_HWC in frames_FHWC:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_HWC), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
