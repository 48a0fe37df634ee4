"""A folder of diffusers tuned on videos by two processes: the files that one process writes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from tests.caches import fresh_cache
from tests.diffusion_folders import write_folder
from tests.integration.train.test_hosts import by_hand, finish_all, series
from tests.ports import held_port
from tests.xla_flags import xla_flags

from fornax.diffusion.pipelines.clips import encode_video


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_two_processes_write_what_one_does(
    adapters: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, clips = write_folder(tmp_path / "wan", "wan"), tmp_path / "clips"
    clips.mkdir()
    random = np.random.default_rng(0)
    for number in range(4):
        video = random.integers(0, 256, (5, 16, 16, 3), np.uint8)
        (clips / f"{number}.png").write_bytes(encode_video(video, "png", 8))
    words = ["diffusion", "tune", "--model", str(folder), "--data", str(clips)]
    words += ["--data.prompt", "a fox", "--data.resolution", "16", "--steps", "2"]
    words += ["--data.frames", "5"]
    words += ["--batch-size", "4", "--mesh.data", "2", "--mesh.fsdp", "1", "--progress", "none"]
    words += ["--sample.every", "2", "--sample.count", "1", "--sample.steps", "1"]
    words += ["--log.no-tensorboard", "--optim.learning-rate", "1e-2"]
    words += ["--lora.rank", "2"] if adapters else []
    kept = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()}
    kept["FORNAX_CACHE_DIR"] = fresh_cache(tmp_path_factory.mktemp("cache"))

    def start(out: Path, **told: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "fornax", *words, "--out", str(out)],
            env={**kept, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    one, two, port = tmp_path / "one", tmp_path / "two", held_port()
    finish_all([start(one, XLA_FLAGS=xla_flags(2), NPROC="16")])
    finish_all([start(two, **by_hand(port, 2, number)) for number in range(2)])
    assert series(two, "loss") == pytest.approx(series(one, "loss"), rel=1e-4)
    file = "lora/pytorch_lora_weights" if adapters else "transformer/diffusion_pytorch_model"
    wanted, found = (load_file(run / f"{file}.safetensors") for run in (one, two))
    assert wanted.keys() == found.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=1e-3, err_msg=name)
    with Image.open(two / "images" / "step-0000002.png") as picture:
        assert picture.n_frames == 5
