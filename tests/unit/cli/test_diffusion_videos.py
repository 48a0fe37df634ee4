"""`fornax diffusion sample` of a model that draws videos: a tiny Wan with its texts, to files."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from fornax.cli.main import main
from fornax.diffusion.models import COMPONENTS, create, save_component
from fornax.diffusion.models.autoencoders import AUTOENCODER_KL_WAN, WanAutoencoderConfig
from fornax.diffusion.models.files import Fields
from fornax.diffusion.models.text import UMT5, T5Config

SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """A folder as diffusers saves it, of components that Fornax made."""
    folder = tmp_path_factory.mktemp("wan")
    kind = COMPONENTS["WanTransformer3DModel"]
    keys = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 2,
        "out_channels": 2,
        "text_dim": 8,
        "freq_dim": 16,
        "ffn_dim": 16,
        "num_layers": 1,
    }
    vae = WanAutoencoderConfig(
        channels=4, multipliers=(1, 2), layers=1, temporal=(True,), latent_channels=2
    )
    encoder = T5Config(
        vocab_size=4,
        hidden_size=8,
        head_dim=4,
        num_heads=2,
        intermediate_size=8,
        num_layers=1,
        layer_biases=True,
    )
    parts = {
        "transformer": create(kind, kind.read(Fields(keys, "config"))),
        "vae": create(AUTOENCODER_KL_WAN, vae),
        "text_encoder": create(UMT5, encoder),
    }
    index = {"_class_name": "WanPipeline"}
    for name, module in parts.items():
        save_component(module, folder / name)
        index[name] = ["diffusers", module.config.class_name]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "fox": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("tokenizer", "scheduler"):
        (folder / name).mkdir()
        index[name] = ["transformers", name]
    words.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.slow
def test_a_prompt_becomes_a_video(wan, tmp_path, capsys):
    out = tmp_path / "fox.png"
    words = f"diffusion sample {wan} --prompt fox --frames 5 --fps 8 --size 16x8 --steps 2"
    assert main([*words.split(), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    with Image.open(out) as picture:
        assert (picture.size, picture.n_frames) == ((16, 8), 5)
        first = np.asarray(picture.convert("RGB"))
        assert picture.info["duration"] == 125
        picture.seek(4)
        assert (np.asarray(picture.convert("RGB")) != first).any()


@pytest.mark.exhaustive
def test_a_video_begins_with_its_image_whatever_the_seed(wan, tmp_path):
    """As Wan 2.2's 5B model: the image's latents have the place of the video's first."""
    folder = tmp_path / "wan"
    shutil.copytree(wan, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "WanImageToVideoPipeline", "expand_timesteps": True}
    (folder / "model_index.json").write_text(json.dumps(index))
    picture = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(picture)
    found = []
    for seed in (0, 1):
        out = tmp_path / f"{seed}.png"
        words = f"diffusion sample {folder} --prompt fox --frames 5 --size 16x8 --steps 2"
        more = ["--image", str(picture), "--seed", str(seed), "--out", str(out)]
        assert main([*words.split(), *more]) == 0
        with Image.open(out) as video:
            frames = []
            for number in (0, video.n_frames - 1):
                video.seek(number)
                frames.append(np.asarray(video.convert("RGB")))
        found.append(frames)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert (found[0][1] != found[1][1]).any()


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ("--frames 6 --out v.png", "1 + 2 n frames; use 5"),
        ("--frames 0 --out v.png", "frames=0"),
        ("--fps 0 --out v.gif", "fps=0"),
        ("--fps 60 --out v.gif", "at most 50"),
        ("--size 15x8 --out v.webp", "multiples of 4"),
        ("--out v.jpg", ".mp4, .webp, .gif or .png"),
        ("--image p.png --out v.png", "cannot be read"),
    ],
)
def test_what_no_video_can_be(wan, words, needle, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["diffusion", "sample", str(wan), *words.split()]) == 2
    message = capsys.readouterr().err
    assert needle in message
    assert "Traceback" not in message


def test_the_server_refuses_videos(wan, capsys):
    assert main(["diffusion", "serve", str(wan), "--port", "0"]) == 2
    assert "draws videos" in capsys.readouterr().err
