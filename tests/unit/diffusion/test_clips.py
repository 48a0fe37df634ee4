"""Videos as files, numbers of frames, and two networks as one denoiser."""

import io
import sys

import av
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageSequence

from fornax.config.errors import ConfigError
from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines import Frames
from fornax.diffusion.pipelines.clips import VIDEO_FORMATS, check_video, encode_video
from fornax.diffusion.pipelines.experts import Experts


def moving(frames: int = 17) -> np.ndarray:
    """A bright square that moves over a ramp."""
    video = np.zeros((frames, 32, 48, 3), np.uint8)
    video[...] = np.linspace(0, 120, 48, dtype=np.uint8)[:, None]
    for at in range(frames):
        video[at, 8:24, at : at + 16] = (250, 200, 40)
    return video


@pytest.mark.parametrize("form", ["png", "webp", "gif"])
def test_animated_pictures_keep_frames_and_time(form):
    """At 16 frames per second, whose 62.5 ms no format writes: the last frame ends on time."""
    video = moving()
    picture = Image.open(io.BytesIO(encode_video(video, form, 16)))
    frames, duration = [], 0
    for frame in ImageSequence.Iterator(picture):
        frames.append(np.asarray(frame.convert("RGB"), np.int32))
        duration += frame.info["duration"]
    assert len(frames) == 17
    assert abs(duration - 17 * 62.5) <= 10
    worst = np.abs(np.stack(frames) - video).mean()
    assert worst == 0 if form == "png" else worst < 4


def test_mp4_holds_every_frame_at_its_rate():
    video = moving()
    with av.open(io.BytesIO(encode_video(video, "mp4", 23.976)), "r") as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        assert float(stream.average_rate) == pytest.approx(23.976, rel=1e-3)
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert np.stack(frames).shape == video.shape
    assert np.abs(np.stack(frames).astype(int) - video).mean() < 8


def test_mp4_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"fornax-ai\[video\].*\.webp"):
        check_video("mp4", 16)


@pytest.mark.parametrize(("form", "rate"), [("png", 0), ("png", float("nan")), ("gif", 60)])
def test_rates_that_no_file_has_are_refused(form, rate):
    with pytest.raises(ConfigError, match="fps="):
        encode_video(moving(2), form, rate)
    assert form in VIDEO_FORMATS


def test_frames_of_latents():
    frames = Frames(count=81, factor=4, rate=16)
    assert [frames.latent(count) for count in (1, 5, 81)] == [1, 2, 21]
    for count, near in ((16, 17), (0, 1), (-3, 1), (82, 81)):
        with pytest.raises(ConfigError, match=f"use {near}$"):
            frames.latent(count)
    late = Frames(count=81, factor=4, rate=16, cut=4)
    assert late.latent(9) == 3
    for count, near in ((0, "5"), (3, "5"), (1, "5 or more"), (12, "13")):
        with pytest.raises(ConfigError, match=f"use {near}$"):
            late.latent(count)


class _Factor(nnx.Module):
    """Multiplies, and keeps what config a denoiser has of its output."""

    def __init__(self, by: float):
        self.by = nnx.Param(jnp.float32(by))
        self.config = type("Outputs", (), {"outputs": 2})

    def __call__(self, x_BX, time_B, condition):
        return x_BX * self.by[...]


@pytest.mark.parametrize("times", [(900.0, 875.0), (874.0, 0.0), (900.0, 100.0)])
def test_each_row_is_of_the_network_of_its_time(times):
    experts = Experts(_Factor(2.0), _Factor(3.0), boundary=875.0)
    x = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 1, 2)
    found = nnx.jit(lambda m, *given: m(*given))(experts, x, jnp.float32(times), Condition())
    by = np.where(np.asarray(times) >= 875, 2.0, 3.0)[:, None, None, None, None]
    np.testing.assert_array_equal(found, x * by)
