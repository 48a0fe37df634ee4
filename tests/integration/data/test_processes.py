"""Data across real processes: other numbers of them, kills, full disks, no JAX, remote storage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fornax.config import to_mapping
from fornax.config.errors import DataError
from fornax.data import (
    BuildConfig,
    DataConfig,
    Dataset,
    FirstFit,
    Jsonl,
    Mixture,
    Part,
    TrainBpe,
    build,
    read_manifest,
)

READER = Path(__file__).with_name("reader.py")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two built datasets of different lengths."""
    root = tmp_path_factory.mktemp("datasets")
    made = []
    for name, repeat in (("long", 9), ("short", 2)):
        lines = (
            json.dumps({"text": f"{name} {i} " + "words of some length " * (i % repeat + 1)})
            for i in range(120)
        )
        (root / f"{name}.jsonl").write_text("\n".join(lines))
        source = Jsonl(path=str(root / f"{name}.jsonl"))
        tokenizer = TrainBpe(vocab_size=280)
        config = BuildConfig(
            source=source, output=root / name, tokenizer=tokenizer, shard_bytes=2000, holdout=0.1
        )
        build(config)
        made.append(root / name)
    return made


def read(
    config: DataConfig, hosts: int, batches: int, state: dict | None, tmp: Path
) -> tuple[dict[str, np.ndarray], dict]:
    """Start `hosts` processes; their global batches `[batches, B, T]` and all shards' states."""
    settings = tmp / "settings.json"
    settings.write_text(json.dumps({"data": to_mapping(config), "state": state}))
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(READER),
                str(settings),
                *map(str, (h, hosts, batches, tmp / f"h{h}")),
            ]
        )
        for h in range(hosts)
    ]
    assert [process.wait(timeout=400) for process in processes] == [0] * hosts
    parts = [np.load(tmp / f"h{h}.npz") for h in range(hosts)]
    joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    states: dict = {}
    for h in range(hosts):
        states.update(json.loads((tmp / f"h{h}.json").read_text()))
    return joined, states


@pytest.mark.slow
def test_two_processes_then_one_and_four_give_the_batches_of_one(
    datasets: list[Path], tmp_path: Path
):
    parts = tuple(
        Part(name=path.name, source=Dataset(path=str(path)), weight=weight)
        for path, weight in zip(datasets, (2.0, 1.0), strict=True)
    )
    config = DataConfig(source=Mixture(parts=parts), packing=FirstFit(bins=4), seed=5)
    first, state = read(config, 2, 5, None, tmp_path)
    alone, _ = read(config, 1, 5, state, tmp_path)
    four, _ = read(config, 4, 5, state, tmp_path)
    whole, _ = read(config, 1, 10, None, tmp_path)
    for name in whole:
        np.testing.assert_array_equal(whole[name][:5], first[name])
        np.testing.assert_array_equal(whole[name][5:], alone[name])
        np.testing.assert_array_equal(whole[name][5:], four[name])


def test_no_jax_is_needed(datasets: list[Path]):
    """A machine that only prepares data has no JAX."""
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from fornax.data import DataConfig, Dataset, inspect, open_batches\n"
        f"config = DataConfig(source=Dataset(path={str(datasets[0])!r}))\n"
        "with open_batches(config, batch_size=8, seq_len=32) as batches:\n"
        "    assert next(batches)['tokens'].shape == (8, 32)\n"
        f"inspect({str(datasets[0])!r})\n"
        "assert sys.modules['jax'] is None and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


@pytest.mark.slow
@pytest.mark.fault
def test_a_killed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path):
    lines = (json.dumps({"text": f"{i} " + "some words here " * 200}) for i in range(4000))
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    code = (
        "from pathlib import Path\n"
        "from fornax.data import *\n"
        f"build(BuildConfig(source=Jsonl(path={str(tmp_path / 'd.jsonl')!r}), holdout=0.1,\n"
        f"      output=Path({str(tmp_path / 'out')!r}), tokenizer=TrainBpe(vocab_size=300)))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob(".out.building-*/*.array_record")):
        assert process.poll() is None, "the build ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)
    manifest = read_manifest(tmp_path / "out")
    assert sum(split.records for split in manifest.splits.values()) == 4000
    assert not list(tmp_path.glob(".out.building-*"))


@pytest.mark.fault
def test_a_full_disk_is_named_and_keeps_the_old_dataset(datasets: list[Path], tmp_path: Path):
    """A limit on file size stands in for a disk that fills up."""
    (tmp_path / "d.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i} " + "x y z " * 500}) for i in range(500))
    )
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from fornax.config.errors import DataError\n"
        "from fornax.data import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))\n"
        "try:\n"
        f"    build(BuildConfig(source=Jsonl(path={str(tmp_path / 'd.jsonl')!r}), holdout=0.0,\n"
        f"          output=Path({str(tmp_path / 'out')!r}), tokenizer=None))\n"
        "except DataError as error:\n"
        "    assert 'cannot be written' in str(error) and 'too large' in str(error), error\n"
        "    sys.exit(7)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, timeout=400)
    assert found.returncode == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.jsonl"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    config = BuildConfig(
        source=Jsonl(path=str(tmp_path / "d.jsonl")), output=tmp_path / "file" / "out"
    )
    with pytest.raises(DataError, match="cannot be made"):
        build(config)
