"""`fornax diffusion sample` and `serve`: help, flags, and mistakes before a model is loaded."""

import numpy as np
import pytest
from PIL import Image
from tests.unit.diffusion.server.conftest import SIDE, After, make_pipeline
from tests.unit.diffusion.test_step_caches import random_transformer

from fornax.cli.main import main
from fornax.diffusion.models.transformer import RopeConfig
from fornax.diffusion.pipelines import References
from fornax.diffusion.pipelines.calibration import CALIBRATION, Calibration
from fornax.diffusion.server.config import ImageServerConfig


@pytest.mark.parametrize("command", ["sample", "serve", "calibrate"])
def test_the_help_fits_a_screen(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["diffusion", command, "--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 100


@pytest.mark.slow
def test_pictures_are_drawn_after_and_with_a_strength_started_from(monkeypatch, tmp_path, capsys):
    """One or several, in their order; what is started from is one."""
    pipeline = make_pipeline(denoiser=After(), references=References(size=lambda size: size))
    monkeypatch.setattr("fornax.diffusion.pipelines.load_pipeline", lambda *_, **__: pipeline)
    dark, light = tmp_path / "dark.png", tmp_path / "light.png"
    for path, value in ((dark, 60), (light, 200)):
        Image.new("RGB", (SIDE, SIDE), (value,) * 3).save(path)

    def drawn(*words):
        out = tmp_path / "out.png"
        command = ["diffusion", "sample", "m", "--prompt", "R", "--steps", "2", "--out", str(out)]
        assert main([*command, *map(str, words)]) == 0
        return np.asarray(Image.open(out)).astype(int)

    ways = [(), (dark, light), (light, dark), (light,)]
    found = [drawn(*(("--image", *way) if way else ())) for way in ways]
    found.append(drawn("--image", light, "--strength", "0.5"))
    for index, one in enumerate(found):
        for other in found[:index]:
            assert np.abs(one - other).max() > 5
    several = ["--image", str(dark), str(light), "--strength", "0.5"]
    assert main(["diffusion", "sample", "m", *several]) == 2
    assert "starts from one" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mask_is_filled_after_the_picture_that_has_it(monkeypatch, tmp_path):
    """A model that edits sees the picture, where others only get what is kept of it."""
    picture, mask, out = (tmp_path / f"{name}.png" for name in ("picture", "mask", "out"))
    pixels = np.random.default_rng(0).integers(128, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(picture)
    where = np.zeros((SIDE, SIDE), np.uint8)
    where[:3] = 255
    Image.fromarray(where).save(mask)

    def drawn(references, *words):
        pipeline = make_pipeline(denoiser=After(), references=references)
        monkeypatch.setattr("fornax.diffusion.pipelines.load_pipeline", lambda *_, **__: pipeline)
        command = ["diffusion", "sample", "m", "--prompt", "R", "--steps", "2", "--out", str(out)]
        assert main([*command, "--image", str(picture), *words]) == 0
        return np.asarray(Image.open(out)).astype(int)

    one = References(size=lambda size: size, most=1, needed=True)
    found, other = (drawn(each, "--mask", str(mask)) for each in (one, None))
    kept = np.asarray(Image.fromarray(pixels).convert("L"))[where == 0]
    for each in (found, other):
        assert np.abs(each[where == 0] - kept).max() <= 1
    assert np.abs(found - other)[where > 0].max() > 5
    # What needs a picture to draw after has the one that it starts from.
    assert np.abs(drawn(one, "--strength", "0.5") - drawn(None, "--strength", "0.5")).max() > 5


@pytest.mark.slow
def test_a_model_that_edits_is_calibrated_with_a_picture(monkeypatch, tmp_path, capsys):
    positions = RopeConfig(axes=(4, 2, 2), sample_axes=(1, 2), reference_axis=0)
    pipeline = make_pipeline(
        denoiser=random_transformer(positions=positions),
        references=References(size=lambda size: size, needed=True),
        to_latents=lambda image_BHWC: image_BHWC[..., :1],
    )
    monkeypatch.setattr("fornax.diffusion.pipelines.load_pipeline", lambda *_, **__: pipeline)
    pictures = []
    for value in (60, 200):
        pictures.append(str(tmp_path / f"{value}.png"))
        Image.new("RGB", (SIDE, SIDE), (value,) * 3).save(pictures[-1])
    command = ["diffusion", "calibrate", str(tmp_path), "--prompt", "R", "--steps", "4"]
    assert main(command) == 2
    assert "give one (--image)" in capsys.readouterr().err
    found = []
    for picture in pictures:
        assert main([*command, "--image", picture]) == 0
        assert "teacache at 0.1" in capsys.readouterr().out
        found.append(Calibration.load(tmp_path / CALIBRATION))
    assert found[0] != found[1]
    plain = make_pipeline(denoiser=random_transformer())
    monkeypatch.setattr("fornax.diffusion.pipelines.load_pipeline", lambda *_, **__: plain)
    assert main([*command, "--image", pictures[0]]) == 2
    assert "leave it out" in capsys.readouterr().err


def test_flags_reach_the_server(monkeypatch):
    calls = []
    target = "fornax.diffusion.server.launch.serve_pipeline"
    monkeypatch.setattr(target, lambda *given: calls.append(given) or 0)
    words = "diffusion serve m --port 9000 --widths 1 4 --sizes 64x32 --api-key k --dtype bfloat16"
    assert main(words.split()) == 0
    [(model, config, _)] = calls
    assert (model, config.port, config.widths) == ("m", 9000, (1, 4))
    assert (config.sizes, config.api_key, config.dtype) == (("64x32",), ("k",), "bfloat16")
    assert isinstance(config, ImageServerConfig)


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ("sample nowhere", "nowhere does not exist"),
        ("sample nowhere --out a.txt", "end it in .png"),
        ("sample nowhere --out no/folder/a.png", "there is no folder no/folder"),
        ("sample nowhere --count 0", "at least 1"),
        ("sample", "needs MODEL"),
        ("sample nowhere --promt x", "did you mean --prompt"),
        ("sample nowhere --cache teecache", "did you mean teacache"),
        ("sample nowhere --cache magcache:-1", "must be a number of at least 0"),
        ("sample nowhere --compare", "choose one with --cache"),
        ("sample nowhere --size big", "is not WIDTHxHEIGHT"),
        ("sample nowhere --control a.png:nan", "scale nan is not finite"),
        ("sample nowhere --image a.png --mask b.png", "--image a.png cannot be read"),
        (f"sample {__file__}", "from_single_file"),
        ("calibrate nowhere", "nowhere does not exist"),
        ("serve", "fornax diffusion serve MODEL"),
        ("serve m --cache teacache:x", "teacache:0.2 is usual"),
        ("serve m --widths 0", "each at least 1"),
        ("serve m --sizes 64", "is not WIDTHxHEIGHT"),
        ("serve m --mesh.context 2", "give its devices to mesh.tensor"),
        ("serve m --max-images 0", "below 1"),
        ("serve m --max-step 3", "did you mean"),
        ("serve m --lora rex", "is not NAME=FILE"),
        ("serve m --lora rex=a rex=b", "two adapters have one name"),
        ("serve nowhere --port 0", "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_paragraph(words, needle, capsys):
    assert main(["diffusion", *words.split()]) == 2
    message = capsys.readouterr().err
    assert needle in message
    assert "Traceback" not in message
