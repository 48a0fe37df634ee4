"""Videos with captions: frames at a rate, buckets of frames and aspects, broken files."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fornax.config.errors import ConfigError, DataError
from fornax.diffusion.data import ImagesConfig, open_examples
from fornax.diffusion.data.videos import decode_video, look_at_video
from fornax.diffusion.pipelines.clips import encode_video

RATE = 16
COUNTS = (17, 9, 12)
"""Frames of the videos that the tests make."""


def video(number: int) -> np.ndarray:
    """Grey levels that say which video and which frame it is, wider for the second video."""
    count = COUNTS[number]
    levels = np.uint8(60 * number + 3 * np.arange(count))
    width = 48 if number == 1 else 32
    return np.broadcast_to(levels[:, None, None, None], (count, 32, width, 3)).copy()


def encoded(number: int, form: str = "png") -> bytes:
    return encode_video(video(number), form, RATE)


def folder(path: Path, form: str = "png") -> Path:
    path.mkdir(parents=True)
    for number in range(len(COUNTS)):
        (path / f"{number}.{form}").write_bytes(encoded(number, form))
        (path / f"{number}.txt").write_text(f"video {number}")
    return path


def tars(path: Path) -> Path:
    path.mkdir(parents=True)
    with tarfile.open(path / "a.tar", "w") as tar:
        for number in range(len(COUNTS)):
            record = json.dumps({"text": f"video {number}"}).encode()
            for name, content in (
                (f"{number}.gif", encoded(number, "gif")),
                (f"{number}.json", record),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    rows = range(len(COUNTS))
    texts = [f"video {n}" for n in rows]
    table = pa.table({"image": [encoded(n, "webp") for n in rows], "text": texts})
    path.mkdir()
    pyarrow.parquet.write_table(table, path / "a.parquet")
    return path


def config(path: Path, **options: object) -> ImagesConfig:
    given = {"resolution": 32, "multiple": 8, "threads": 2, "frames": (5, 9), **options}
    return ImagesConfig(path=str(path), upscale=True, **given)


def levels(pixels: np.ndarray) -> np.ndarray:
    """The grey level of each frame."""
    return np.round((pixels.mean((1, 2, 3)) + 1) * 127.5).astype(int)


@pytest.mark.parametrize("make", [folder, tars, parquet])
def test_each_store_gives_the_same_clips(tmp_path, make):
    """GIF and WebP are not exact; frames are in order, of the most frames that a file fills."""
    examples = open_examples(config(make(tmp_path / "data"), frames=(5, 9, 12)), "train")
    assert sorted(examples.sizes) == [(9, 24, 40), (12, 32, 32)]
    for number in range(len(COUNTS)):
        pixels, caption = examples.get(number)
        size = examples.sizes[examples.bucket[number]]
        assert caption == f"video {number}"
        assert pixels.shape == (*size, 3)
        np.testing.assert_allclose(levels(pixels), 60 * number + 3 * np.arange(size[0]), atol=2)
    assert examples.frame(1) == (32, 48, 1, 0, 24, 40)


def test_a_clip_is_a_run_of_frames_and_each_is_an_example(tmp_path):
    data = folder(tmp_path / "data")
    examples = open_examples(config(data, frames=(5,), clips="all"), "train")
    assert [examples.caption(i)[-1] for i in range(len(examples.bucket))] == list("000122")
    starts = [int(levels(examples.get(i)[0])[0]) for i in range(6)]
    assert starts == [0, 15, 30, 60, 120, 135]
    contents = {examples.content(i) for i in range(6)}
    assert len(contents) == 6
    assert open_examples(config(data, frames=(5,)), "train").identity != examples.identity


@pytest.mark.parametrize("form", ["png", "webp", "gif"])
@pytest.mark.parametrize(("rate", "step"), [(RATE, 1), (RATE / 2, 2), (RATE / 4, 4)])
def test_frames_at_a_rate_are_those_shown_at_its_times(form, rate, step):
    """At the file's own rate, whose 62.5 ms no format writes, each once."""
    file = encoded(0, form)
    _, count = look_at_video(file, "it", rate=rate, whole=True)
    assert count == -(-17 // step)
    frames = decode_video(file, "it", 1, rate=rate, start=1, count=count - 1)
    found = np.asarray([np.asarray(frame).mean() / 3 for frame in frames])
    np.testing.assert_allclose(found, step * np.arange(1, count), atol=0.5)
    fast = look_at_video(file, "it", rate=2 * RATE, whole=True)[1]
    assert abs(fast - 34) <= 1


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("form", ["png", "webp", "gif"])
def test_a_file_cut_anywhere_is_refused(form, whole):
    """Noise, so that every frame has many bytes."""
    noise = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), np.uint8)
    file = encode_video(noise, form, RATE)
    assert look_at_video(file, "it", rate=None, whole=whole) == ((16, 16), 6)
    for end in np.linspace(8, len(file) - 1, 23).astype(int):
        with pytest.raises(DataError, match=r"^it: "):
            look_at_video(file[:end], "it", rate=None, whole=whole)


@pytest.mark.parametrize(
    ("spoil", "options", "said"),
    [
        (lambda d: (d / "1.png").write_bytes(encoded(1)[:900]), {}, "1 of 3 videos cannot be dec"),
        (lambda d: None, {"frames": (12,)}, r"fewer frames than.*\[12\].*1.png \(9\)"),
        (lambda d: None, {"frames": (9,), "rate": 8.0}, r"at data.rate=8.*1.png \(5\)"),
        (lambda d: (d / "1.txt").unlink(), {}, "1 of 3 files have no caption"),
        (lambda d: None, {"resolution": 64, "upscale": False}, "videos are smaller than their"),
        (lambda d: None, {"frames": ()}, "resolution"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path, spoil, options, said):
    data = folder(tmp_path / "data")
    spoil(data)
    if options == {"frames": ()}:
        for file in data.glob("*.png"):
            file.rename(file.with_suffix(".gif"))
        said = "holds videos and no images; set data.frames"
    with pytest.raises(DataError, match=said):
        open_examples(ImagesConfig(**{**vars(config(data)), "upscale": True, **options}), "train")


@pytest.mark.parametrize(
    "options",
    [{"frames": (0,)}, {"rate": 0.0}, {"frames": (), "rate": 8.0}, {"rate": float("nan")}],
)
def test_options_without_meaning_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=r"frames=|rate="):
        config(tmp_path, **options)


def test_images_are_videos_of_one_frame(tmp_path):
    data = folder(tmp_path / "data")
    Image.new("RGB", (32, 32), "white").save(data / "3.jpg")
    (data / "3.txt").write_text("white")
    examples = open_examples(config(data, frames=(1, 9), rate=16.0), "train")
    assert examples.get(3)[0].shape == (1, 32, 32, 3)
    assert examples.get(0)[0].shape == (9, 32, 32, 3)


def turned(file: bytes) -> bytes:
    """The MP4 with a matrix in its track's head that shows it turned by 90 degrees clockwise."""
    at = file.index(b"tkhd") + 44
    matrix = np.array([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    return file[:at] + matrix + file[at + 36 :]


def test_mp4_at_a_rate_upright_and_whole():
    file = encoded(1, "mp4")
    for whole in (True, False):
        assert look_at_video(file, "it", rate=None, whole=whole) == ((32, 48), 9)
        assert look_at_video(file, "it", rate=8.0, whole=whole)[1] == 5
        assert look_at_video(turned(file), "it", rate=None, whole=whole)[0] == (48, 32)
        for end in np.linspace(8, len(file) - 1, 9).astype(int):
            with pytest.raises(DataError, match=r"^it: "):
                look_at_video(file[:end], "it", rate=None, whole=whole)
    frames = decode_video(file, "it", 3, rate=None, start=2, count=7)
    found = np.stack(frames).mean((1, 2, 3))
    np.testing.assert_allclose(found, 60 + 3 * np.arange(2, 9), atol=2)
    left = np.zeros((2, 32, 48, 3), np.uint8)
    left[:, :, :8] = 250
    (upright,) = decode_video(
        turned(encode_video(left, "mp4", 8)), "it", 1, rate=None, start=1, count=1
    )
    assert upright.size == (32, 48)
    rows = np.asarray(upright).mean(1)
    assert rows[:6].min() > 200  # what was on the left is above
    assert rows[12:].max() < 50


def test_mp4_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"fornax-ai\[video\].*\.webp"):
        look_at_video(b"\0\0\0\x08ftyp", "it", rate=None, whole=True)
