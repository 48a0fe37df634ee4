"""Pipelines written as folders of diffusers, and the command that does it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tests.diffusion_folders import write_folder

from fornax import export
from fornax.cli.main import main
from fornax.config.errors import CheckpointError, ConfigError
from fornax.diffusion import Objective
from fornax.diffusion.config import DiffusionConfig, SampleConfig, UNet
from fornax.diffusion.data import EncodedConfig
from fornax.diffusion.load import load_run
from fornax.diffusion.models import (
    COMPONENTS,
    Condition,
    create,
    files,
    load_component,
    save_component,
)
from fornax.diffusion.pipelines import (
    ImageRequest,
    load_pipeline,
    plan,
    save_pipeline,
    with_denoiser,
)
from fornax.diffusion.predictions import Point
from fornax.diffusion.run import train

VAE = {
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "mid_block_add_attention": False,
}
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 1,
    "sample_size": 4,
    "num_embeds_ada_norm": 10,
}
UNET = {
    "block_out_channels": [4, 8],
    "norm_num_groups": 2,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "layers_per_block": 1,
    "sample_size": 4,
}
CLIP = {
    "vocab_size": 6,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 5,
    "eos_token_id": 5,
}


def component(folder, name, values, seed=0):
    kind = COMPONENTS[name]
    module = create(kind, kind.read(files.Fields(values, name)), seed=seed)
    graph, state = nnx.split(module)  # fresh networks of zeros would hide what is written
    rng = np.random.default_rng(seed)
    state = jax.tree.map(lambda x: jnp.float32(x + rng.normal(0, 0.1, x.shape)), state)
    save_component(nnx.merge(graph, state), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A DiT, which needs neither tokenizer nor text encoder."""
    path = tmp_path_factory.mktemp("pipeline") / "dit"
    component(path / "transformer", "DiTTransformer2DModel", DIT)
    component(path / "vae", "AutoencoderKL", VAE)
    (path / "scheduler").mkdir()
    scheduler = {"_class_name": "DDIMScheduler", "clip_sample": False}
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": "DiTPipeline",
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "id2label": {"3": "fox"},
    }
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def contents(folder):
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_pipeline_is_written_as_it_was_read(folder, tmp_path):
    save_pipeline(load_pipeline(folder), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(folder)
    with pytest.raises(CheckpointError, match="exists"):
        save_pipeline(load_pipeline(folder), tmp_path / "again")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"not a pipeline's folder"):
        save_pipeline(load_pipeline(folder), tmp_path / "mine", overwrite=True)
    with pytest.raises(ConfigError, match="inside each other"):
        save_pipeline(load_pipeline(folder), folder / "transformer", overwrite=True)


def test_another_network_takes_the_place_of_a_pipelines_own(folder, tmp_path):
    component(tmp_path / "other", "DiTTransformer2DModel", DIT, seed=1)
    network = load_component(tmp_path / "other")
    pipeline = with_denoiser(load_pipeline(folder), network)
    save_pipeline(pipeline, tmp_path / "again", dtype=jnp.bfloat16)
    written = load_component(tmp_path / "again" / "transformer")
    for found, want in zip(
        jax.tree.leaves(nnx.state(written)), jax.tree.leaves(nnx.state(network)), strict=True
    ):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, want.astype(jnp.bfloat16))
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["norm_eps"] = 0.5
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"differs from that of .* in blocks"):
        with_denoiser(pipeline, load_component(tmp_path / "other"))


def test_the_command_compares_a_picture(folder, tmp_path, capsys):
    """In bfloat16: rounded weights draw nearly the same."""
    out = tmp_path / "bf16"
    assert main(["convert", str(folder), "--out", str(out), "--dtype", "bfloat16"]) == 0
    parity = json.loads((out / "parity.json").read_text())
    assert f"{parity['parameters']:,} parameters" in capsys.readouterr().out
    assert 0 < parity["max_abs_difference"] < 0.1 * parity["max_abs_latent"]
    assert (parity["pipeline"], parity["prompt"], parity["size"]) == ("DiTPipeline", "0", [8, 8])


@pytest.mark.slow
def test_a_bundle_of_its_denoiser_says_what_it_says(folder, tmp_path, capsys):
    out = tmp_path / "dit" / "1"
    command = ["export", "--model", str(folder), "--function", "denoise", "--out", str(out)]
    assert main([*command, "--batch", "2", "--platforms", "cpu"]) == 0
    pipeline = load_pipeline(folder)
    job = plan(pipeline, ImageRequest(prompt="3", count=2))
    time, classes = np.float32([900, 20]), np.int32([3, 10])
    denoise = export.load(out)["denoise"]
    found = denoise(x=np.asarray(job.start_BX), time=time, classes=classes)["output"]
    condition = Condition(classes_B=jnp.asarray(classes))
    wanted = pipeline.network(pipeline.denoiser, condition, None, 1.0)(
        job.start_BX, Point(jnp.asarray(time), jnp.ones(2), jnp.asarray(time))
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    capsys.readouterr()
    for flags, said in (
        (["--length", "8"], "is for language models"),
        (["--size", "16x16"], "this model draws only 8x8"),
        (["--frames", "5"], "frames is of videos, and this model draws images"),
    ):
        assert main([*command, *flags, "--overwrite"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_bundle_of_what_draws_after_a_first_frame_takes_what_it_is_told(tmp_path):
    """Mask and latents of the frame, and CLIP's states, as sampling has them."""
    folder = write_folder(tmp_path / "wan", "wan-first")
    out = tmp_path / "wan-first" / "1"
    command = ["export", "--model", str(folder), "--function", "denoise", "--out", str(out)]
    flags = ["--size", "16x16", "--frames", "5", "--batch", "1", "--platforms", "cpu"]
    assert main([*command, *flags]) == 0
    pipeline = load_pipeline(folder)
    image = np.random.default_rng(0).uniform(-1, 1, (16, 16, 3)).astype(np.float32)
    request = ImageRequest(prompt="a fox", image=image, size=(16, 16), frames=5)
    job, time = plan(pipeline, request), jnp.float32([900])
    given = {"text": "text_BSD", "image": "image_BX", "text2": "text2_BSD"}
    arrays = {name: np.asarray(getattr(job.condition, field)) for name, field in given.items()}
    found = export.load(out)["denoise"](x=np.asarray(job.start_BX), time=np.asarray(time), **arrays)
    network = pipeline.network(pipeline.denoiser, job.condition, None, 1.0)
    wanted = network(job.start_BX, Point(time, jnp.ones(1), time))
    np.testing.assert_allclose(found["output"], wanted, atol=1e-5)


@pytest.mark.exhaustive
def test_a_runs_network_goes_into_a_pipeline(tmp_path, capsys):
    base = tmp_path / "base"
    component(base / "unet", "UNet2DConditionModel", {**UNET, "sample_size": [6, 4]})
    component(base / "vae", "AutoencoderKL", VAE)
    component(base / "text_encoder", "CLIPTextModel", CLIP)
    for name in ("scheduler", "tokenizer"):
        (base / name).mkdir()
    words = ["a</w>", "x", "f", "o", "<|startoftext|>", "<|endoftext|>"]
    vocab = json.dumps({word: number for number, word in enumerate(words)})
    (base / "tokenizer" / "vocab.json").write_text(vocab)
    (base / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    scheduler = {"_class_name": "DDIMScheduler", "clip_sample": False}
    (base / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "safety_checker": [None, None],
    }
    (base / "model_index.json").write_text(json.dumps(index))
    factor = load_component(base / "vae").config.factor
    assert load_pipeline(base).size == (6 * factor, 4 * factor)
    rng, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    arrays = {"latents": rng.normal(size=(8, 4, 4, 4)), "text": rng.normal(size=(8, 5, 8))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    save_file(arrays, data / "some.safetensors")
    config = DiffusionConfig(
        data=EncodedConfig(path=str(data), shape=(4, 4, 4), text_length=5, text_width=8),
        text=None,
        model=UNet(config=load_component(base / "unet").config),
        objective=Objective(path="cosine", prediction="noise", density="uniform"),
        caption_dropout=0.0,
        batch_size=8,
        steps=2,
        save_every=1,
        sample=SampleConfig(every=None, guidance=1.0),
    )
    train(config, tmp_path / "run", progress="none")
    command = ["convert", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    for refused in (command, ["export", "--model", *command[1:], "--function", "denoise"]):
        assert main(refused) == 2
        assert "--pipeline DIR" in capsys.readouterr().err
    assert main([*command, "--pipeline", str(base)]) == 0
    parity = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert parity["max_abs_difference"] < 1e-5 * parity["max_abs_latent"]
    trained = nnx.state(load_run(tmp_path / "run").denoiser)
    written = nnx.state(load_component(tmp_path / "out" / "unet"))
    jax.tree.map(np.testing.assert_array_equal, written, trained)
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        assert contents(tmp_path / "out" / name) == contents(base / name)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--pipeline", "x"], "is for a run of fornax diffusion train"),
        (["--step", "3"], "is for a run of fornax diffusion train"),
        (["--merge-lora"], "is for language models"),
        (["--tokenizer", "x"], "is for language models"),
    ],
)
def test_options_of_other_sources_are_refused(folder, tmp_path, capsys, more, message):
    assert main(["convert", str(folder), "--out", str(tmp_path / "x"), *more]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
