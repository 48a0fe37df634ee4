"""Images with captions from folders, Parquet and tar files; buckets; batches on any hosts."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fornax.config.errors import ConfigError, DataError
from fornax.data import Hosts
from fornax.diffusion.data import BucketStream, ImagesConfig, LettersConfig, open_examples
from fornax.diffusion.data.buckets import assign, bucket_sizes

SIZES = [(48, 64), (64, 48), (64, 64), (80, 64), (40, 72), (64, 64)]
"""Height and width of the images that the tests make."""


def _image(number: int) -> Image.Image:
    """A gradient that tells rows from columns, and images from each other."""
    height, width = SIZES[number]
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([255 * y // height, 255 * x // width, 40 * number + 0 * x], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def _encoded(number: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    _image(number).save(buffer, kind)
    return buffer.getvalue()


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for number in range(len(SIZES)):
        (path / f"{number}.png").write_bytes(_encoded(number))
        (path / f"{number}.txt").write_text(f"image {number}\n")
    return path


def _config(path: Path, **options: object) -> ImagesConfig:
    given = {"resolution": 32, "multiple": 8, "max_aspect": 2.5, "threads": 2, **options}
    return ImagesConfig(path=str(path), **given)


def _with_metadata(path: Path) -> Path:
    path.mkdir()
    lines = []
    for number in range(len(SIZES)):
        (path / f"{number}.png").write_bytes(_encoded(number))
        lines.append(json.dumps({"file_name": f"{number}.png", "text": f"image {number}"}))
    (path / "metadata.jsonl").write_text("\n".join(lines))
    return path


def _parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = range(len(SIZES))
    table = pa.table(
        {
            "image": [{"bytes": _encoded(n), "path": f"{n}.png"} for n in rows],
            "text": [f"image {n}" for n in rows],
        }
    )
    path.mkdir()
    parquet.write_table(table, path / "a.parquet", row_group_size=2)
    return path


def _tar(path: Path) -> Path:
    path.mkdir()
    for shard in range(2):
        with tarfile.open(path / f"{shard}.tar", "w") as tar:
            for number in range(shard * 3, shard * 3 + 3):
                for name, content in (
                    (f"{number:04d}.png", _encoded(number)),
                    (f"{number:04d}.json", json.dumps({"text": f"image {number}"}).encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("make", [_folder, _with_metadata, _parquet, _tar])
def test_each_store_gives_the_same_examples(tmp_path: Path, make) -> None:
    examples = open_examples(_config(make(tmp_path / "data")), "train")
    assert len(examples.bucket) == len(SIZES)
    for number, (height, width) in enumerate(SIZES):
        pixels, caption = examples.get(number)
        size = examples.sizes[examples.bucket[number]]
        assert caption == f"image {number}"
        assert pixels.shape == (*size, 3)
        assert pixels.min() >= -1
        assert pixels.max() <= 1
        # The gradients survive scaling and the cut of the middle: they are of rows and columns.
        rows = np.diff(pixels[..., 0].mean(1))
        columns = np.diff(pixels[..., 1].mean(0))
        assert (rows > 0).all()
        assert (columns > 0).all()
        assert abs(np.log((size[1] / size[0]) / (width / height))) < 0.35
        assert pixels[..., 2].mean() == pytest.approx(40 * number / 127.5 - 1, abs=0.02)


def test_buckets_are_bounded_and_images_go_to_the_nearest_aspect() -> None:
    buckets = bucket_sizes(256, 32, 2.0)
    assert (256, 256) in buckets
    for height, width in buckets:
        assert height % 32 == width % 32 == 0
        assert height * width <= 256 * 256
        assert max(height, width) <= 2 * min(height, width)
        assert (width, height) in buckets
    found = assign([(100, 100), (100, 190), (300, 200)], buckets)
    ratios = [buckets[b][1] / buckets[b][0] for b in found]
    assert ratios[0] == 1
    assert ratios[1] > 1.5
    assert ratios[2] < 0.8
    assert bucket_sizes(64, 64, 4.0) == [(64, 64)]


def test_an_image_of_exactly_the_bucket_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    examples = open_examples(_config(folder, prompt="noise"), "train")
    found, caption = examples.get(0)
    assert caption == "noise"
    np.testing.assert_array_equal(np.round((found + 1) * 127.5), pixels)
    np.testing.assert_array_equal(examples.get(0, mirrored=True)[0], found[:, ::-1])


def test_a_turned_photo_stands_upright_and_what_is_transparent_is_white(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    turned = _image(0)
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(folder / "a.jpg", exif=exif)
    Image.new("RGBA", (32, 32), (255, 0, 0, 0)).save(folder / "b.png")
    examples = open_examples(_config(folder, prompt="x"), "train")
    height, width = examples.sizes[examples.bucket[0]]
    assert height > width  # stored 48 high and 64 wide
    assert (examples.get(1)[0] == 1).all()


def _caption_by_table(lines: bytes):
    """What gives 2.png its caption by `metadata.jsonl`."""

    def spoil(folder: Path) -> None:
        (folder / "2.txt").unlink()
        (folder / "metadata.jsonl").write_bytes(lines)

    return spoil


def test_captions_of_other_editors_are_read(tmp_path: Path) -> None:
    """A byte order mark is not part of a word, and U+2028 ends no line of JSON."""
    folder = _folder(tmp_path / "data")
    (folder / "1.txt").write_bytes("\ufeffa red cat\r\n".encode())
    _caption_by_table('\ufeff{"file_name": "2.png", "text": "one\u2028two"}\r\n'.encode())(folder)
    examples = open_examples(_config(folder), "train")
    assert [examples.caption(1), examples.caption(2)] == ["a red cat", "one\u2028two"]


@pytest.mark.parametrize(
    ("spoil", "options", "said"),
    [
        (
            lambda d: (d / "2.png").write_bytes(_encoded(2, "JPEG")[:500]),
            {},
            "cannot be decoded.*2.png",
        ),
        (lambda d: (d / "2.png").write_bytes(b"<html>"), {}, "not an image that Pillow knows"),
        (lambda d: (d / "2.txt").unlink(), {}, "have no caption.*2.png.*data.prompt"),
        (lambda d: (d / "2.txt").write_text(" \n"), {}, "have no caption.*2.png"),
        (lambda d: (d / "2.png").write_bytes(b""), {}, "2.png: it has no bytes"),
        (lambda d: (d / "2.txt").write_bytes(b"\xff\xfe\x00"), {}, "2.txt.*save it as UTF-8"),
        (_caption_by_table(b'{"file_name": "2.png", "text": "caf\xe9"}'), {}, "jsonl.*as UTF-8"),
        (_caption_by_table(b'{"file_name": "2.png", "te'), {}, "jsonl:1 is not JSON.*write it"),
        (lambda d: (d / "a.heic").write_bytes(b"x"), {}, "would not be read: .*a.heic; convert"),
        (lambda d: (d / "a.mp4").write_bytes(b"x"), {}, "a.mp4; .* set data.frames for videos"),
        (lambda d: None, {"resolution": 128}, "smaller than their bucket.*data.upscale"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, spoil, options, said) -> None:
    folder = _folder(tmp_path / "data")
    spoil(folder)
    with pytest.raises(DataError, match=said):
        open_examples(_config(folder, **options), "train")


def test_places_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        open_examples(ImagesConfig(), "train")
    with pytest.raises(ConfigError, match="does not exist"):
        open_examples(_config(tmp_path / "none"), "train")
    with pytest.raises(DataError, match="holds no image"):
        open_examples(_config(tmp_path), "train")
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(DataError, match="compressed"):
        open_examples(_config(tmp_path), "train")
    (tmp_path / "a.tar").write_bytes(b"no tar")
    with pytest.raises(DataError, match="cannot be read as a tar file"):
        open_examples(_config(tmp_path), "train")


def test_a_truncated_tar_and_a_missing_column_are_refused(tmp_path: Path) -> None:
    folder = _tar(tmp_path / "tar")
    whole = (folder / "1.tar").read_bytes()
    (folder / "1.tar").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError, match=r"1\.tar"):
        open_examples(_config(folder), "train")
    with pytest.raises(DataError, match=r"no column .label.*data\.caption"):
        open_examples(_config(_parquet(tmp_path / "p"), caption="label"), "train")


def test_the_held_out_images_are_others(tmp_path: Path) -> None:
    config = _config(_folder(tmp_path / "data"), holdout=0.34)
    captions = {
        split: {e.get(i)[1] for i in range(len(e.bucket))}
        for split in ("train", "eval")
        for e in [open_examples(config, split)]
    }
    assert len(captions["eval"]) == 2
    assert not captions["eval"] & captions["train"]
    assert len(captions["eval"] | captions["train"]) == len(SIZES)
    with pytest.raises(DataError, match=r"holdout=0\.99 of 6 images leaves none to train on"):
        open_examples(dataclasses.replace(config, holdout=0.99), "train")
    letters = LettersConfig(count=10, holdout=3)
    assert len(open_examples(letters, "eval").bucket) == 3


WHOLE = Hosts()


def _stream(hosts: Hosts = WHOLE, *, endless: bool = True, batch_size: int = 4) -> BucketStream:
    bucket = np.array([0, 1, 0, 0, 1, 0, 2, 0, 1, 0, 0])

    def rows(picks, over):
        there = picks.index >= 0
        assert (bucket[picks.index[there]] == picks.bucket).all()
        return {"index": picks.index, "epoch": picks.epoch, "place": picks.place}

    return BucketStream(
        bucket, rows, batch_size=batch_size, seed=3, endless=endless, hosts=hosts, identity="x"
    )


def test_hosts_share_the_same_global_batches() -> None:
    whole = _stream()
    parts = [_stream(Hosts(index=i, count=2)) for i in range(2)]
    seen = []
    for _ in range(20):
        batch = next(whole)
        rows = [next(part) for part in parts]
        for name, values in batch.items():
            np.testing.assert_array_equal(values, np.concatenate([r[name] for r in rows]))
        seen += zip(batch["epoch"].tolist(), batch["index"].tolist(), strict=True)
    assert len(seen) == len(set(seen))  # no example twice in an epoch
    for stream in (whole, *parts):
        stream.close()


def test_a_stream_goes_on_where_it_was_saved() -> None:
    first = _stream()
    for _ in range(7):
        next(first)
    state = json.loads(json.dumps({str(k): v for k, v in first.state().items()}))
    second = _stream(Hosts(index=0, count=1))
    second.restore({int(k): v for k, v in state.items()})
    for _ in range(9):
        one, other = next(first), next(second)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    with pytest.raises(DataError, match="batch_size was 4 and is 2"):
        _stream(batch_size=2).restore(first.state())


def test_one_pass_gives_every_example_once_and_pads() -> None:
    batches = list(_stream(endless=False))
    found = np.concatenate([batch["index"] for batch in batches])
    assert sorted(found[found >= 0].tolist()) == list(range(11))
    assert all(len(batch["index"]) == 4 for batch in batches)
