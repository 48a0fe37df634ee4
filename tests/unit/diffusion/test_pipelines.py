"""Schedulers' files, folders that are not models, pictures."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fornax.config.errors import CheckpointError, ConfigError, DataError
from fornax.diffusion.pipelines import References, load_pipeline, parse_size
from fornax.diffusion.pipelines.load import PIPELINES, open_parts
from fornax.diffusion.pipelines.pictures import (
    FORMATS,
    encode_picture,
    open_picture,
    read_mask,
    to_array,
)
from fornax.diffusion.pipelines.references import bounded, read_reference
from fornax.diffusion.pipelines.scheduler import read_scheduler
from fornax.diffusion.samplers import dpmpp, euler
from fornax.diffusion.schedules import flow

SCALED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def scheduler(folder, name, **values):
    path = folder / "scheduler_config.json"
    path.write_text(json.dumps({"_class_name": name, **values}))
    return read_scheduler(folder)


def test_the_guide_lists_every_pipeline_and_no_other():
    guide = Path(__file__).parents[3] / "docs" / "guides" / "diffusion-serving.md"
    rows = [line.split("|")[1] for line in guide.read_text().splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+Pipeline)`", " ".join(rows))
    assert sorted(named) == sorted(PIPELINES)


def test_angles_of_consistency_models_are_a_flows_levels(tmp_path):
    """Two steps have a second angle of 1.3, others even ones; the network predicts the velocity."""
    read = scheduler(tmp_path, "SCMScheduler", sigma_data=0.5)
    schedule = read.schedule(2, 64)
    ratio = np.tan(1.3)
    np.testing.assert_allclose(schedule.sigma, [1, ratio / (1 + ratio), 0], atol=1e-15)
    np.testing.assert_allclose(schedule.t, 1000 * schedule.sigma)
    half = read.schedule(4, 64)
    assert half.sigma[2] == pytest.approx(0.5)  # at an eighth of a turn
    assert (read.prediction, half.path) == ("flow", "flow")
    table = read.sampler(half)
    np.testing.assert_allclose(table.noise, half.sigma[1:])
    np.testing.assert_allclose(table.update[:, 1], half.alpha[1:])


def test_leading_steps_of_a_chain_that_ends_at_its_smallest_noise(tmp_path):
    """As in Stable Diffusion 1.5's file."""
    read = scheduler(tmp_path, "PNDMScheduler", **SCALED, steps_offset=1, set_alpha_to_one=False)
    schedule = read.schedule(4, 64)
    np.testing.assert_array_equal(schedule.t[:-1], [751, 501, 251, 1])
    assert schedule.sigma[-1] == pytest.approx(0.00085**0.5)
    assert (read.prediction, read.clip) == ("noise", None)
    np.testing.assert_array_equal(read.sampler(schedule).update, dpmpp(schedule).update)


def test_a_flow_is_shifted_by_its_resolution(tmp_path):
    """Flux's file: at 4,096 patches the logarithm of the shift is 1.15."""
    read = scheduler(tmp_path, "FlowMatchEulerDiscreteScheduler", use_dynamic_shifting=True)
    schedule = read.schedule(5, 4096)
    np.testing.assert_allclose(schedule.sigma, flow(5, shift=np.exp(1.15)).sigma)
    assert read.prediction == "flow"
    np.testing.assert_array_equal(read.sampler(schedule).update, euler(schedule).update)


def test_multistep_solvers_leave_out_the_last_timestep(tmp_path):
    """As diffusers takes them: of one timestep more, all but the last."""
    name = "DPMSolverMultistepScheduler"
    schedule = scheduler(tmp_path, name, beta_schedule="linear").schedule(4, 64)
    np.testing.assert_array_equal(schedule.t, [999, 749, 500, 250, 0])
    read = scheduler(tmp_path, name, timestep_spacing="leading", steps_offset=1, **SCALED)
    np.testing.assert_array_equal(read.schedule(4, 64).t, [801, 601, 401, 201, 0])
    options = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
    schedule = scheduler(tmp_path, name, **options).schedule(4, 64)
    np.testing.assert_array_equal(schedule.t, [999, 899, 749, 499, 0])
    sigma = [0.99966644, 0.89963978, 0.74962481, 0.49966656, 0]  # diffusers' own
    np.testing.assert_allclose(schedule.sigma, sigma, atol=1e-8)


def test_unipc_goes_on_to_the_last_timestep(tmp_path):
    """Wan's file: sigmas to 1 / 1000 without it, the first below 1, and whole timesteps."""
    options = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
    schedule = scheduler(tmp_path, "UniPCMultistepScheduler", **options).schedule(4, 64)
    np.testing.assert_array_equal(schedule.t, [999, 900, 750, 500, 0])
    sigma = [0.999999, 0.90011998, 0.75037481, 0.50099900, 0]  # diffusers' own
    np.testing.assert_allclose(schedule.sigma, sigma, atol=1e-8)
    np.testing.assert_allclose(schedule.alpha, 1 - schedule.sigma)


def test_zero_terminal_snr_starts_from_pure_noise(tmp_path):
    read = scheduler(
        tmp_path,
        "DDIMScheduler",
        **SCALED,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        prediction_type="v_prediction",
        clip_sample=True,
    )
    assert read.schedule(4, 64).alpha[0] == 0
    assert (read.prediction, read.clip) == ("v", 1.0)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("EulerDiscretScheduler", {}, "did you mean EulerDiscreteScheduler"),
        ("DDIMScheduler", {"beta_schedule": "sigmoid"}, "squaredcos_cap_v2"),
        ("DDIMScheduler", {"prediction_type": "x"}, "v_prediction"),
        ("DDPMScheduler", {"thresholding": True}, "thresholding"),
        ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}, "invert_sigmas"),
        ("FlowMatchEulerDiscreteScheduler", {"shift": "3"}, "shift='3' is not a number"),
        ("DDIMScheduler", {"num_train_timesteps": None}, "None is not a whole number"),
        ("DDIMScheduler", {"beta_start": True}, "True is not a number"),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": "yes"}, "is not true or false"),
        ("EulerDiscreteScheduler", {"timestep_spacing": "even"}, "use one of leading, trailing"),
    ],
)
def test_settings_that_are_not_known_are_refused(tmp_path, name, values, message):
    with pytest.raises(ConfigError, match=message):
        scheduler(tmp_path, name, **values)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_pipeline(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        load_pipeline(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text('{"_class_name": "StableDifusionPipeline"}')
    with pytest.raises(ConfigError, match="did you mean StableDiffusionPipeline"):
        load_pipeline(tmp_path)
    index.write_text('{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet"]}')
    with pytest.raises(ConfigError, match="names no tokenizer"):
        load_pipeline(tmp_path)
    index.write_text(
        '{"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}'
    )
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKLWan"}')
    with pytest.raises(ConfigError, match=r"holds AutoencoderKLWan, and .* says AutoencoderKL;"):
        open_parts(tmp_path).module("vae")
    for text, said in (("{", "is not JSON"), ("[]", "holds a list")):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            load_pipeline(tmp_path)


def test_an_image_to_draw_after_is_cut_around_its_middle():
    rows, columns = np.indices((70, 101))
    picture = np.stack([rows, columns, 0 * rows], -1).astype(np.uint8)
    found = read_reference(picture, References(size=bounded), 16)
    assert found.shape == (64, 96, 3)
    np.testing.assert_array_equal(np.round((found + 1) * 127.5), picture[3:67, 2:98])
    assert bounded((3000, 1500)) == (1448, 724)
    for size in ((63, 64), (64, 520)):
        with pytest.raises(ConfigError, match="an image to draw after is"):
            bounded(size)


def test_pictures_survive_files_without_loss(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(encode_picture(pixels, "png"))
    array = to_array(open_picture(path, "a.png"), (12, 10), 3)
    np.testing.assert_array_equal(np.round((array + 1) * 127.5), pixels)
    for form in FORMATS:
        picture = open_picture(encode_picture(pixels[..., :1], form, 90), form)
        assert (picture.size, picture.format) == ((10, 12), FORMATS[form])


def test_pictures_are_read_upright_and_in_eight_bits(tmp_path):
    """As phones write photographs, and depth maps are."""
    rows = np.arange(12, dtype=np.uint8)[:, None] * 20
    stored = Image.fromarray(np.broadcast_to(rows, (12, 8)).copy())
    exif = stored.getexif()
    exif[0x112] = 6  # to be turned by a quarter, clockwise
    stored.save(tmp_path / "photo.png", exif=exif)
    found = to_array(open_picture(tmp_path / "photo.png", "photo"), (8, 12), 1)[..., 0]
    np.testing.assert_allclose((found + 1) * 127.5, np.broadcast_to(rows[::-1].T, (8, 12)))
    depth = np.linspace(0, 65535, 96).reshape(8, 12).astype(np.uint16)
    Image.fromarray(depth).save(tmp_path / "depth.png")
    found = np.asarray(open_picture(tmp_path / "depth.png", "depth"))
    np.testing.assert_array_equal(found, depth >> 8)


def test_a_mask_is_white_where_to_draw():
    mask = np.zeros((8, 8), np.uint8)
    mask[:, 4:] = 255
    found = read_mask(Image.fromarray(mask), (16, 16))
    assert found.shape == (16, 16)
    assert (found[:, 8:] == 1).all()
    assert (found[:, :8] == 0).all()


def test_pictures_that_cannot_be_read_say_so(tmp_path):
    with pytest.raises(DataError, match="is not a picture"):
        open_picture(b"hello", "image")
    whole = encode_picture(
        np.zeros((64, 64, 3), np.uint8) + np.arange(64, dtype=np.uint8)[:, None, None], "png"
    )
    with pytest.raises(DataError, match="cannot be read"):
        open_picture(whole[:60], "image")
    with pytest.raises(DataError, match="No such file"):
        open_picture(tmp_path / "none.png", "--image none.png")
    Image.new("F", (4, 4)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match="save it with 8 or 16 bits"):
        open_picture(tmp_path / "a.tiff", "image")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "LAB", "I;16"])
def test_pictures_of_all_spaces_are_colours_and_masks(mode, tmp_path):
    """Palettes with several transparent colours too."""
    Image.new(mode, (5, 3)).save(tmp_path / "a.tiff")
    palette = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(4, 4, 4)).quantize(8)
    palette.save(tmp_path / "a.png", transparency=bytes(range(8)))
    for path in (tmp_path / "a.tiff", tmp_path / "a.png"):
        picture = open_picture(path, "image")
        assert to_array(picture, (2, 2), 3).shape == (2, 2, 3)
        assert to_array(picture, (2, 2), 1).shape == (2, 2, 1)
        assert read_mask(picture, (2, 2)).shape == (2, 2)
    assert np.asarray(picture).shape == (4, 4, 4)


@pytest.mark.parametrize("text", ["512", "0x8", "8x", "8x-8", "8X8", "100000x8", " 8x8"])
def test_sizes_are_width_x_height(text):
    assert parse_size("8x16") == (16, 8)
    with pytest.raises(ConfigError, match="WIDTHxHEIGHT"):
        parse_size(text)
