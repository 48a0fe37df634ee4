"""ControlNets of a pipeline's folder and beside it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.diffusion_folders import SDXL, UNET, write_component, write_folder

from fornax.config.errors import ConfigError
from fornax.diffusion.pipelines import (
    ImageRequest,
    load_pipeline,
    plan,
    save_pipeline,
    with_controls,
)
from fornax.diffusion.pipelines.control import Controlled

pytestmark = pytest.mark.slow
SIDE = 16


def of_unet(unet: dict) -> dict:
    """The config of a ControlNet of a U-Net's."""
    shared = {k: v for k, v in unet.items() if k not in ("up_block_types", "sample_size")}
    return {**shared, "conditioning_embedding_out_channels": [8, 16]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion with two ControlNets, as `MultiControlNetModel` saves them."""
    folder = write_folder(tmp_path_factory.mktemp("controls") / "two", "sd")
    for number, name in enumerate(("controlnet", "controlnet_1"), start=7):
        write_component(folder / name, "ControlNetModel", of_unet(UNET), number)
    index = json.loads((folder / "model_index.json").read_text())
    index["controlnet"] = ["diffusers", "MultiControlNetModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def plain(folder: Path, tmp_path: Path) -> Path:
    """The same without ControlNets."""
    index = json.loads((folder / "model_index.json").read_text())
    del index["controlnet"]
    shutil.copytree(folder, tmp_path / "plain", ignore=lambda *_: ["controlnet", "controlnet_1"])
    (tmp_path / "plain" / "model_index.json").write_text(json.dumps(index))
    return tmp_path / "plain"


def images(count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.uniform(size=(count, SIDE, SIDE, 3)).astype(np.float32))


def drawn(pipeline, count: int) -> np.ndarray:
    request = ImageRequest(
        prompt="a fox", steps=1, guidance=1.0, size=(SIDE, SIDE), controls=images(count)
    )
    return np.asarray(pipeline.run(plan(pipeline, request)))


@pytest.mark.exhaustive
def test_those_beside_a_folder_draw_as_those_in_it(folder: Path, plain: Path) -> None:
    """In their order, at their scales; at 0 they change nothing."""
    scales, names = [0.5, 2.0], ("controlnet", "controlnet_1")
    inside = drawn(with_controls(load_pipeline(folder), (), scales), 2)
    beside = [folder / name for name in names]
    np.testing.assert_array_equal(
        drawn(with_controls(load_pipeline(plain), beside, scales), 2), inside
    )
    other = drawn(with_controls(load_pipeline(plain), beside[::-1], scales), 2)
    assert np.abs(other - inside).max() > 0.01
    none = drawn(with_controls(load_pipeline(plain), beside, [0.0, 0.0]), 2)
    np.testing.assert_allclose(none, drawn(load_pipeline(plain), 0), atol=1e-5)


def test_a_folder_with_several_is_read_and_written_whole(folder: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(folder)
    assert isinstance(pipeline.denoiser, Controlled)
    assert pipeline.follows == 2
    for count in (0, 1, 3):
        with pytest.raises(ConfigError, match=f"{count} images to follow .* one for each"):
            plan(pipeline, ImageRequest(size=(SIDE, SIDE), controls=images(count)))
    with pytest.raises(ConfigError, match="must be 16x16x3"):
        plan(pipeline, ImageRequest(size=(SIDE, SIDE), controls=(images(1)[0][:8],) * 2))
    save_pipeline(pipeline, tmp_path / "again")
    for name in ("controlnet", "controlnet_1"):
        file = Path(name, "diffusion_pytorch_model.safetensors")
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.exhaustive
def test_what_does_not_go_together_is_refused(folder: Path, plain: Path, tmp_path: Path) -> None:
    write_component(tmp_path / "xl", "ControlNetModel", of_unet(SDXL))
    deep = {**of_unet(UNET), "conditioning_embedding_out_channels": [8, 8, 16]}
    write_component(tmp_path / "deep", "ControlNetModel", deep)
    pipeline = load_pipeline(plain)
    with pytest.raises(ConfigError, match="draws with 1 ControlNets, and its folder names 0"):
        save_pipeline(with_controls(pipeline, [folder / "controlnet"]), tmp_path / "saved")
    with pytest.raises(ConfigError, match="follow an image; add one"):
        plan(pipeline, ImageRequest(size=(SIDE, SIDE), controls=images(1)))
    for path, scales, said in (
        (tmp_path / "xl", (), "of another model: its text_dims is"),
        (tmp_path / "deep", (), "4 times the size of their latents; this model's have 3, 2 times"),
        (plain / "unet", (), "is not a ControlNet"),
        (folder / "controlnet", (1.0, 0.5), "2 images to follow .*, and 1 ControlNets"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_controls(pipeline, [path], scales)
    shutil.rmtree(plain / "unet")
    write_component(plain / "unet", "UNet2DConditionModel", {**UNET, "cross_attention_dim": 64})
    with pytest.raises(ConfigError, match="states of width 32 and the unet reads 64"):
        load_pipeline(plain)
    shutil.rmtree(plain / "unet")
    write_component(plain / "unet", "UNet2DConditionModel", {**UNET, "in_channels": 9})
    with pytest.raises(ConfigError, match="except those that fill masks alone"):
        with_controls(load_pipeline(plain), [folder / "controlnet"])
