"""Folders of diffusers tuned on photos: what is cached, trained, written, drawn and refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file, save_file
from tests.diffusion_folders import WAN, write_component, write_folder

from fornax.adapters import LoRA
from fornax.cli.main import main
from fornax.config.errors import CheckpointError, ConfigError, DataError, ShardingError
from fornax.diffusion.config import (
    DiffusionTuneConfig,
    EncodeConfig,
    PriorConfig,
    SampleConfig,
    takes,
)
from fornax.diffusion.data import (
    Cache,
    EncodedConfig,
    ImagesConfig,
    WithPrior,
    open_examples,
)
from fornax.diffusion.models import Condition, create, load_component
from fornax.diffusion.models.autoencoders import (
    AUTOENCODER_DC,
    AUTOENCODER_KL_WAN,
    DeepCompressionConfig,
    WanAutoencoderConfig,
    latent_moments,
)
from fornax.diffusion.network import Network
from fornax.diffusion.objectives import Chain, Objective, example_noise, example_uniform
from fornax.diffusion.pipelines import (
    ImageRequest,
    Pipeline,
    load_pipeline,
    plan,
    with_adapters,
)
from fornax.diffusion.pipelines.clips import encode_video
from fornax.diffusion.pipelines.load import open_parts
from fornax.diffusion.pipelines.one_frame import of_images
from fornax.diffusion.run import tuning_images
from fornax.diffusion.task import denoising_loss
from fornax.diffusion.tuning import tune
from fornax.mesh import MeshConfig
from fornax.optim import Constant, OptimConfig

pytestmark = pytest.mark.usefixtures("small_process")

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of two sizes with captions."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(6):
        pixels = RNG.integers(0, 256, (24 + 8 * (number % 2), 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {'fox' if number % 3 else 'hare'}")
    return folder


@pytest.fixture(scope="module")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like Stable Diffusion 1.5's."""
    return write_folder(tmp_path_factory.mktemp("folders") / "sd", "sd")


def config_of(model: Path, photos: Path, **changes) -> DiffusionTuneConfig:
    """Two steps on the photos, 16 pixels square, without grids."""
    fields = {
        "model": str(model),
        "data": ImagesConfig(path=str(photos), resolution=16, multiple=16, threads=1),
        "batch_size": 8,
        "steps": 2,
        "optim": OptimConfig(learning_rate=1e-2, schedule=Constant()),
        "sample": SampleConfig(every=None),
    }
    return DiffusionTuneConfig(**{**fields, **changes})


@pytest.fixture(scope="module")
def tuned(sd: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters on the U-Net, with a grid at its end."""
    out = tmp_path_factory.mktemp("runs") / "lora"
    config = config_of(
        sd, photos, lora=LoRA(rank=4), sample=SampleConfig(every=2, count=1, steps=1)
    )
    assert tune(config, out, progress="none").step == 2
    return out


def drawn(pipeline, prompt: str = "a fox", **fields) -> np.ndarray:
    """Latents of one step."""
    request = ImageRequest(prompt=prompt, size=(16, 16), steps=1, guidance=1.0, **fields)
    return np.asarray(pipeline.run(plan(pipeline, request)))


@pytest.mark.slow
def test_adapters_of_a_run_draw_the_same_merged_from_their_file_and_by_row(tuned, sd):
    """The run, its file merged at half its scale twice, and beside others in a batch."""
    run, file = drawn(load_pipeline(tuned)), f"{tuned / 'lora'}"
    base = load_pipeline(sd)
    plain = drawn(base)
    assert np.abs(run - plain).max() > 1e-3 * np.abs(plain).max()
    tolerance = 1e-4 * np.abs(plain).max()
    several = with_adapters(base, named={"half": f"{file}:0.5", "rex": file})
    by_row = {name: drawn(several, adapter=name) for name in (None, "half", "rex")}
    np.testing.assert_allclose(by_row[None], plain, atol=tolerance)
    np.testing.assert_allclose(by_row["rex"], run, atol=tolerance)
    assert np.abs(by_row["half"] - run).max() > 10 * tolerance
    merged = with_adapters(base, merged=(f"{file}:0.5", f"{file}:0.5"))
    np.testing.assert_allclose(drawn(merged), run, atol=tolerance)
    (grid,) = (tuned / "images").iterdir()
    with Image.open(grid) as picture:
        assert picture.size == (68, 68)
    stored = load_file(tuned / "lora" / "pytorch_lora_weights.safetensors")
    assert {name.partition(".")[0] for name in stored} == {"unet"}
    half = "unet.down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert stored[f"{half}.lora_A.weight"].shape == (8, 16)  # both halves of the gated MLP
    assert {m.rpartition(".")[0] for m in stored if ".attn2.to_k." in m}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_becomes_a_folder_that_draws_the_same(tuned, sd, tmp_path):
    """The network with its adapters merged, all else of the folder that it was tuned from."""
    assert main(["convert", str(tuned), "--out", str(tmp_path / "whole")]) == 0
    found = drawn(load_pipeline(tmp_path / "whole"))
    np.testing.assert_array_equal(found, drawn(load_pipeline(tuned)))
    assert np.abs(found - drawn(load_pipeline(sd))).max() > 1e-3


@pytest.mark.slow
def test_latents_and_texts_are_computed_once(tuned, sd, photos):
    """A second run on the same photos reads the cache, whose latents are the autoencoder's."""
    files = {file: file.stat().st_mtime_ns for file in (tuned / "encoded").rglob("*.safetensors")}
    assert len(files) == 6 + 3  # with the empty caption
    cache = EncodeConfig(cache=str(tuned / "encoded"), latents="mean")
    out = tuned.parent / "whole"
    tune(config_of(sd, photos, encode=cache, steps=1), out, progress="none")
    assert files == {
        file: file.stat().st_mtime_ns for file in (tuned / "encoded").rglob("*.safetensors")
    }
    assert not (out / "encoded").exists()
    found, base = load_pipeline(out), load_pipeline(sd)
    before, after = (dict(nnx.to_flat_state(nnx.state(p.denoiser))) for p in (base, found))
    changed = [path for path in before if (before[path][...] != after[path][...]).any()]
    assert len(changed) > len(before) // 2
    written = load_file(out / "unet" / "diffusion_pytorch_model.safetensors")
    assert written.keys() == load_file(sd / "unet" / "diffusion_pytorch_model.safetensors").keys()
    examples = open_examples(
        ImagesConfig(path=str(photos), resolution=16, multiple=16, threads=1), "train"
    )
    mean = np.asarray(base.to_latents(examples.get(0)[0][None]))[0]
    stored = [load_file(file) for file in files]
    assert any("mean" in s and np.allclose(s["mean"], mean, atol=1e-5) for s in stored)
    deviations = [s["deviation"] for s in stored if "deviation" in s]
    assert all((d > 0).all() for d in deviations)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_other_families_train_and_draw(family, photos, tmp_path):
    folder = write_folder(tmp_path / family, family)
    sample = SampleConfig(every=1, count=1, steps=1, guidance=2.0)
    config = config_of(folder, photos, lora=LoRA(rank=2), steps=1, sample=sample)
    tune(config, tmp_path / "run", progress="none")
    plain = drawn(load_pipeline(folder)) if family != "flux" else None
    base = with_adapters(load_pipeline(folder), merged=(str(tmp_path / "run" / "lora"),))
    run = load_pipeline(tmp_path / "run")
    fields = {"size": (16, 16), "steps": 1, "prompt": "a fox"}
    found, want = (np.asarray(p.run(plan(p, ImageRequest(**fields)))) for p in (base, run))
    np.testing.assert_allclose(found, want, atol=1e-4 * np.abs(want).max())
    assert plain is None or np.isfinite(plain).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encode": EncodeConfig(guidance=2.0)}, "not told its guidance"),
        ({"lora": LoRA(rank=2, dora=True)}, "lora.dora"),
        ({"lora": LoRA(rank=2, targets=("attention9/*",))}, "matches no module"),
    ],
)
def test_what_does_not_fit_a_folder_is_refused(changes, said, sd, photos, tmp_path):
    with pytest.raises(ConfigError, match=said):
        tune(config_of(sd, photos, **changes), tmp_path / "run", progress="none")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like Wan 2.1's, whose videos have 1 + 2 n frames."""
    return write_folder(tmp_path_factory.mktemp("videos") / "wan", "wan")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of two lengths and two aspects with captions."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(4):
        shape = (5 + 4 * (number % 2), 16, 16 + 8 * (number // 2), 3)
        video = RNG.integers(0, 256, shape, np.uint8)
        (folder / f"{number}.png").write_bytes(encode_video(video, "png", 8))
        (folder / f"{number}.txt").write_text(f"a {'fox' if number % 3 else 'hare'}")
    return folder


def of_clips(path: Path, **changes) -> ImagesConfig:
    """Buckets of five and nine frames, square and wide."""
    fields = {"resolution": 16, "multiple": 4, "upscale": True, "threads": 1, "frames": (5, 9)}
    return ImagesConfig(path=str(path), **{**fields, **changes})


@pytest.mark.slow
def test_videos_are_encoded_once_and_tune_a_folder(wan, clips, tmp_path):
    """The cached latents are the autoencoder's; the file of adapters draws what the run does, and
    the grid of samples is animated."""
    config = config_of(
        wan,
        clips,
        data=of_clips(clips),
        lora=LoRA(rank=2),
        batch_size=8,
        sample=SampleConfig(every=2, count=1, steps=1),
    )
    assert tune(config, tmp_path / "run", progress="none").step == 2
    base, run = load_pipeline(wan), load_pipeline(tmp_path / "run")
    stored = [load_file(f) for f in (tmp_path / "run" / "encoded").rglob("*.safetensors")]
    means = [arrays["mean"] for arrays in stored if "mean" in arrays]
    assert len(means) == 4
    assert base.parts is not None
    vae = base.parts.module("vae")
    examples = open_examples(of_clips(clips), "train")
    for index in range(4):
        mean = np.asarray(vae.latents(examples.get(index)[0][None], chunk=None))[0]
        assert any(m.shape == mean.shape and np.allclose(m, mean, atol=1e-4) for m in means)
    merged = with_adapters(load_pipeline(wan), merged=(str(tmp_path / "run" / "lora"),))
    request = ImageRequest(prompt="a fox", size=(16, 16), frames=5, steps=1, guidance=1.0)
    found, same, plain = (np.asarray(p.run(plan(p, request))) for p in (run, merged, base))
    assert found.shape == (1, 3, 8, 8, 4)
    np.testing.assert_allclose(same, found, atol=1e-4 * np.abs(found).max())
    assert np.abs(found - plain).max() > 1e-3 * np.abs(plain).max()
    with Image.open(tmp_path / "run" / "images" / "step-0000002.png") as picture:
        assert picture.n_frames in (5, 9)


@pytest.mark.slow
def test_a_model_of_first_frames_is_tuned_on_those_of_the_videos(clips, tmp_path):
    """What is cached of a frame, mirrored or not, is what sampling tells of it; the grid of samples
    begins with frames of the examples."""
    folder = write_folder(tmp_path / "wan", "wan-first")
    data = of_clips(clips, flip=True)
    sample = SampleConfig(every=2, count=2, steps=1)
    config = config_of(folder, clips, data=data, lora=LoRA(rank=2), sample=sample)
    assert tune(config, tmp_path / "run", progress="none").step == 2
    base, examples = load_pipeline(folder), open_examples(data, "train")
    stored = [load_file(f) for f in (tmp_path / "run" / "encoded").rglob("*.safetensors")]
    kept = [arrays for arrays in stored if "mean" in arrays]
    assert len(kept) == 8
    for index, mirrored in ((0, False), (1, True), (2, False), (3, True)):
        video_FHWC, _ = examples.get(index, mirrored=mirrored)
        size = (video_FHWC.shape[1], video_FHWC.shape[2])
        request = ImageRequest(
            prompt="a fox", image=video_FHWC[0], size=size, frames=len(video_FHWC)
        )
        told = plan(base, request).condition
        assert told.image_BX is not None
        assert told.text2_BSD is not None
        assert any(
            each["image"].shape == told.image_BX.shape[1:]
            and np.allclose(each["image"], told.image_BX[0], atol=1e-5)
            and np.allclose(each["text2"], told.text2_BSD[0], atol=1e-5)
            for each in kept
        )
    run = load_pipeline(tmp_path / "run")
    merged = with_adapters(load_pipeline(folder), merged=(str(tmp_path / "run" / "lora"),))
    found, same, plain = (np.asarray(p.run(plan(p, request))) for p in (run, merged, base))
    np.testing.assert_allclose(same, found, atol=1e-4 * np.abs(found).max())
    assert np.abs(found - plain).max() > 1e-3 * np.abs(plain).max()
    with Image.open(tmp_path / "run" / "images" / "step-0000002.png") as picture:
        assert picture.n_frames in (5, 9)
    for changes, said in (
        ({"frames": (1,)}, "examples of one frame have nothing more; set data.frames to"),
        ({"frames": ()}, "draws videos, and examples are images of"),
    ):
        with pytest.raises(ConfigError, match=said):
            tune(config_of(folder, clips, data=of_clips(clips, **changes)), tmp_path / "no")
    encoded = EncodedConfig(path=str(clips), shape=(3, 8, 8, 4), text_length=4, text_width=24)
    with pytest.raises(ConfigError, match=r"draws from a first frame, of which data\.path="):
        tune(config_of(folder, clips, data=encoded), tmp_path / "no")


def test_a_first_frame_that_is_given_has_no_loss(wan):
    """As Wan 2.2's 5B model is trained: what would be its latents is not read."""
    denoiser = load_component(wan / "transformer", dtype=jnp.float32, compute_dtype=jnp.float32)
    network = Network(denoiser, None, takes(denoiser.config))
    draws = np.random.default_rng(1)
    batch = {
        "images": draws.standard_normal((2, 3, 4, 4, 4), np.float32),
        "first": draws.standard_normal((2, 1, 4, 4, 4), np.float32),
        "text": draws.standard_normal((2, 5, 24), np.float32),
        "weight": np.float32([1.0, 0.5]),
        **{name: np.arange(2, dtype=np.int32) for name in ("example", "step", "place")},
    }
    objective = Objective(density="uniform")

    def loss(batch: dict[str, np.ndarray]) -> float:
        return float(denoising_loss(network, batch, objective, seed=0, strata=None).total)

    unread = batch["images"].copy()
    unread[:, 0] = np.nan
    found = loss({**batch, "images": unread})
    assert found == loss(batch)
    noise_BX = jnp.stack([example_noise(0, i, jnp.int32([i]), (3, 4, 4, 4))[0] for i in range(2)])
    point = objective.point(
        jnp.concatenate([example_uniform(0, i, jnp.int32([i])) for i in range(2)])
    )
    x_BX = objective.noised(batch["images"], noise_BX, point)
    given = {"text_BSD": jnp.asarray(batch["text"]), "first_BX": jnp.asarray(batch["first"])}
    output_BX = np.asarray(denoiser(x_BX, point.t, Condition(**given)), np.float64)
    error_BX = (output_BX - (np.asarray(noise_BX, np.float64) - batch["images"]))[:, 1:]
    want_B = (error_BX**2).mean((1, 2, 3, 4))
    np.testing.assert_allclose(found, want_B @ batch["weight"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frames": (4,)}, r"frames=4: this model draws 1 \+ 2 n frames; use 5"),
        ({"multiple": 2, "resolution": 14}, "must be multiples of 4"),
        ({"frames": ()}, "draws videos, and examples are images of .*set data.frames"),
    ],
)
def test_videos_that_do_not_fit_a_folder_are_refused(changes, said, wan, clips, tmp_path):
    data = of_clips(clips, **{"max_aspect": 1.0, **changes})
    with pytest.raises(ConfigError, match=said):
        tune(config_of(wan, clips, data=data), tmp_path / "run", progress="none")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_draws_from_more_than_a_prompt_is_refused(sd, wan, clips, photos, tmp_path):
    with pytest.raises(ConfigError, match="draws images, and examples are videos of 5 x 12 x 20"):
        tune(config_of(sd, clips, data=of_clips(clips)), tmp_path / "a", progress="none")


@pytest.fixture(scope="module")
def wan_two(wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like Wan 2.2's, of two networks."""
    folder = tmp_path_factory.mktemp("videos") / "wan-two"
    shutil.copytree(wan, folder)
    write_component(folder / "transformer_2", "WanTransformer3DModel", WAN, seed=7)
    index = json.loads((wan / "model_index.json").read_text())
    more = {"transformer_2": index["transformer"], "boundary_ratio": 0.9}
    (folder / "model_index.json").write_text(json.dumps({**index, **more}))
    return folder


@pytest.mark.slow
def test_each_of_two_networks_is_tuned_on_its_times(wan_two, clips, tmp_path):
    """One run after another, each on the other's result; their files draw what the last does, and
    the first changes only what its own network draws."""
    runs, model = [tmp_path / name for name in ("early", "late")], wan_two
    for out, name in zip(runs, ("transformer", "transformer_2"), strict=True):
        config = config_of(
            model,
            clips,
            data=of_clips(clips),
            component=name,
            lora=LoRA(rank=2),
            sample=SampleConfig(every=2, count=1, steps=4),
        )
        assert tune(config, out, progress="none").step == 2
        model = out
    base = load_pipeline(wan_two)
    request = ImageRequest(prompt="a fox", size=(16, 16), frames=5, steps=4, guidance=1.0)
    job = plan(base, request)
    times = job.table.points[:-1, 0]
    assert times.min() < 900 <= times.max()

    def drawn(pipeline: Pipeline, **fields: str) -> np.ndarray:
        return np.asarray(pipeline.run(plan(pipeline, dataclasses.replace(request, **fields))))

    plain, early, both = (drawn(load_pipeline(each)) for each in (wan_two, *runs))
    tolerance = 1e-4 * np.abs(plain).max()
    files = [f"{out / 'lora'}" for out in runs]
    for texts, want in ((f"{files[0]},", early), (",".join(files), both)):
        merged = with_adapters(load_pipeline(wan_two), merged=(texts,))
        np.testing.assert_allclose(drawn(merged), want, atol=tolerance)
    named = with_adapters(base, named={"early": f"{files[0]},", "both": ",".join(files)})
    for adapter, want in ((None, plain), ("early", early), ("both", both)):
        np.testing.assert_allclose(drawn(named, adapter=adapter), want, atol=tolerance)
    assert np.abs(early - plain).max() > 10 * tolerance
    assert np.abs(both - early).max() > 10 * tolerance
    state = nnx.state(load_pipeline(runs[1]).denoiser)
    for name, place in (("transformer", "early"), ("transformer_2", "late")):
        before = nnx.state(load_component(wan_two / name))
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, state[place])
        assert any(jax.tree.leaves(changed))
    assert main(["convert", str(runs[1]), "--out", str(tmp_path / "whole")]) == 0
    np.testing.assert_allclose(drawn(load_pipeline(tmp_path / "whole")), both, atol=tolerance)
    with pytest.raises(ConfigError, match="draws with two networks; write EARLY,LATE"):
        with_adapters(base, merged=(files[0],))


def test_a_network_of_a_folder_is_named_where_it_has_two(wan, wan_two, clips, tmp_path):
    for folder, component, said in (
        (wan_two, "", "has two networks, of which a run trains one: set component to"),
        (wan_two, "unet", "draws with transformer and transformer_2; set it to"),
        (wan, "transformer_2", "draws with transformer; leave it out"),
    ):
        config = config_of(folder, clips, data=of_clips(clips), component=component)
        with pytest.raises(ConfigError, match=said):
            tune(config, tmp_path / "run", progress="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("component", "boundary", "mean"),
    [("transformer", 0.9999, 12.0), ("transformer_2", 1e-6, -14.0)],
)
def test_the_loss_of_one_of_two_networks_is_of_its_times(
    component, boundary, mean, wan, wan_two, clips, tmp_path
):
    """Nearly all noise, or none: as of that network alone at such times. Where nothing is drawn the
    other's weights are not read."""
    two, alone = tmp_path / "two", tmp_path / "alone"
    shutil.copytree(wan_two, two)
    index = json.loads((wan_two / "model_index.json").read_text())
    (two / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": boundary}))
    (other,) = {"transformer", "transformer_2"} - {component}
    next((two / other).glob("*.safetensors")).unlink()
    shutil.copytree(wan, alone)
    shutil.copytree(wan_two / component, alone / "transformer", dirs_exist_ok=True)
    fields = {"data": of_clips(clips), "steps": 1}
    objective = dataclasses.replace(open_parts(wan).scheduler.objective(1), mean=mean)
    found = tune(config_of(two, clips, component=component, **fields), tmp_path / "found")
    want = tune(config_of(alone, clips, objective=objective, **fields), tmp_path / "want")
    assert found.metrics is not None
    assert want.metrics is not None
    assert found.metrics["loss"] == pytest.approx(want.metrics["loss"], rel=1e-3)


@pytest.mark.slow
def test_moments_of_latents_are_those_of_each_autoencoder():
    """Latents that are not a distribution have no deviation; an image in a video's autoencoder is a
    video of one frame."""
    dc = create(
        AUTOENCODER_DC,
        DeepCompressionConfig(
            latent_channels=4,
            head_dim=4,
            encoder_channels=(4, 8),
            decoder_channels=(4, 8),
            encoder_blocks=("ResBlock",) * 2,
            decoder_blocks=("ResBlock",) * 2,
            encoder_layers=(1, 1),
            decoder_layers=(1, 1),
            encoder_scales=((), ()),
            decoder_scales=((), ()),
            decoder_activations=("silu",) * 2,
            scale=0.5,
        ),
    )
    image = RNG.uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)
    mean, deviation = latent_moments(dc, image)
    assert deviation is None
    np.testing.assert_allclose(mean, dc.latents(image), rtol=1e-6)
    wan = create(
        AUTOENCODER_KL_WAN,
        WanAutoencoderConfig(
            channels=4,
            multipliers=(1, 2),
            layers=1,
            temporal=(True,),
            latent_channels=2,
            mean=(0.5, -0.5),
            deviation=(2.0, 4.0),
        ),
    )
    noise = RNG.normal(size=(1, 1, 4, 4, 2)).astype(np.float32)
    mean, deviation = latent_moments(of_images(wan), image)
    assert deviation is not None
    drawn = wan.latents(image[:, None], noise)
    np.testing.assert_allclose(mean + deviation * noise[:, 0], drawn[:, 0], atol=1e-5)


@pytest.mark.slow
def test_images_that_do_not_fit_a_folder_are_refused(sd, photos, tmp_path):
    grey = ImagesConfig(path=str(photos), resolution=16, multiple=16, channels=1)
    with pytest.raises(DataError, match="draws images of 3 channels"):
        tune(config_of(sd, photos, data=grey), tmp_path / "grey", progress="none")
    odd = ImagesConfig(path=str(photos), resolution=15, multiple=5, max_aspect=1)
    with pytest.raises(ConfigError, match=r"must be multiples of 2.*set data\.resolution"):
        tune(config_of(sd, photos, data=odd), tmp_path / "odd", progress="none")
    fine = dataclasses.replace(odd, multiple=16, resolution=16)
    for change, error, said in (
        ({"mesh": MeshConfig(tensor=3)}, ShardingError, "multiple of 3 devices"),
        ({"lora": LoRA(rank=2, targets=("none",))}, ConfigError, "matches no module"),
    ):
        with pytest.raises(error, match=said):
            tune(config_of(sd, photos, data=fine, **change), tmp_path / "run", progress="none")
    assert not (tmp_path / "run" / "encoded").exists()


def write_encoded(folder: Path, channels: int = 4, width: int = 32) -> None:
    """Eight examples in two files; the second has a mask."""
    folder.mkdir()
    for name in ("a", "b"):
        arrays = {
            "latents": RNG.normal(size=(4, 8, 8, channels)).astype(np.float32),
            "text": RNG.normal(size=(4, 12, width)).astype(np.float32),
        }
        if name == "b":
            arrays["text_mask"] = np.ones((4, 12), np.int32)
        save_file(arrays, folder / f"{name}.safetensors")


def test_encoded_examples_are_read_and_checked(tmp_path):
    folder = tmp_path / "encoded"
    write_encoded(folder)
    data = EncodedConfig(path=str(folder), shape=(8, 8, 4), text_length=12, text_width=32)
    found = open_examples(data, "train")
    stored = load_file(folder / "b.safetensors")
    np.testing.assert_array_equal(found.get(5)[0], stored["latents"][1])
    arrays = found.arrays(5)
    np.testing.assert_array_equal(arrays["text"], stored["text"][1])
    assert arrays["text_mask"].dtype == np.int32
    assert not found.arrays(5, dropped=True)["text"].any()
    save_file({**stored, "latents": np.zeros((4, 8, 8, 4), np.uint8)}, folder / "b.safetensors")
    with pytest.raises(DataError, match=r"b\.safetensors: latents are uint8; encode them as"):
        open_examples(data, "train")
    stored["text"][1, 3] = np.inf
    save_file(stored, folder / "b.safetensors")
    with pytest.raises(DataError, match=r"b\.safetensors: text of example 1"):
        open_examples(data, "train")
    stored["text"][1, 3] = 0.0
    stored["latents"][2, 0, 0, 0] = np.nan
    save_file(stored, folder / "b.safetensors")
    with pytest.raises(DataError, match=r"b\.safetensors: latents of example 2"):
        open_examples(data, "train")
    late = open_examples(dataclasses.replace(data, verify=False), "train")
    with pytest.raises(DataError, match="not finite"):
        late.get(6)


@pytest.mark.slow
def test_encoded_examples_of_other_encoders_are_refused(sd, photos, tmp_path):
    for latents, width, said in ((16, 32, "the autoencoder of"), (4, 24, "the text encoders of")):
        other = tmp_path / f"{latents}-{width}"
        write_encoded(other, latents, width)
        wrong = EncodedConfig(
            path=str(other), shape=(8, 8, latents), text_length=12, text_width=width
        )
        with pytest.raises(DataError, match=said):
            tune(config_of(sd, photos, data=wrong), tmp_path / "run", progress="none")
    more = dataclasses.replace(wrong, guidance=3.0)
    with pytest.raises(ConfigError, match=r"has guidance, .* set data\.guidance to null"):
        tune(config_of(sd, photos, data=more), tmp_path / "run", progress="none")


def test_a_prior_has_an_equal_share_and_its_own_weight(photos, tmp_path):
    subject = ImagesConfig(path=str(photos), resolution=16, multiple=16, prompt="sks fox")
    more = tmp_path / "class"
    more.mkdir()
    for number in range(13):
        Image.new("RGB", (20, 20), (number, 0, 0)).save(more / f"{number}.png")
    said = PriorConfig(path=str(more), prompt="a fox", weight=0.5)
    prior = dataclasses.replace(subject, path=said.path, prompt=said.prompt)
    both = WithPrior(open_examples(subject, "train"), open_examples(prior, "train"), said.weight)
    captions = [both.caption(index) for index in range(len(both.bucket))]
    assert (captions.count("sks fox"), captions.count("a fox")) == (12, 13)
    weights = {caption: both.weight(index) for index, caption in enumerate(captions)}
    assert weights == {"sks fox": 1.0, "a fox": 0.5}
    image, caption = both.get(20)
    assert caption == "a fox"
    assert image.shape == (16, 16, 3)
    nowhere = dataclasses.replace(said, path=str(tmp_path / "none"))
    config = DiffusionTuneConfig(data=subject, prior=nowhere)
    with pytest.raises(ConfigError, match=r"images of prior\.path=.*does not exist"):
        tuning_images(config, "train")


def test_a_frame_says_what_was_cut_out_of_an_image(photos):
    data = ImagesConfig(path=str(photos), resolution=16, multiple=16, threads=1)
    examples = open_examples(data, "train")
    assert examples.frame(0) == (24, 24, 0, 0, 16, 16)
    assert examples.frame(1) == (32, 24, 3, 0, 16, 16)  # scaled to 21.3 x 16


def test_a_cache_keeps_arrays_and_says_what_is_gone(tmp_path):
    cache = Cache(tmp_path / "cache")
    key = cache.key("image", "a")
    assert not cache.has(key)
    cache.write(key, {"classes": np.asarray(3, np.int32), "mean": np.eye(2, dtype=np.float32)})
    assert cache.read(key)["classes"] == 3
    assert cache.read(key)["classes"].shape == ()
    with pytest.raises(DataError, match="start it again"):
        cache.read(cache.key("image", "b"))


def test_an_objective_of_a_chain_has_its_levels():
    """Stable Diffusion's, in closed form: the last level's alpha squared is 0.0047."""
    objective = Objective(path="discrete", prediction="v", density="uniform", chain=Chain())
    point = objective.point(np.asarray([0.0, 0.9999], np.float32))
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    bars = np.cumprod(1 - betas)[[0, 999]]
    np.testing.assert_array_equal(point.t, [0, 999])
    np.testing.assert_allclose(np.square(point.alpha), bars, rtol=1e-5)
    np.testing.assert_allclose(np.square(point.sigma), 1 - bars, rtol=1e-4)
    for said, message in (
        ({"path": "discrete"}, "needs one"),
        ({"path": "discrete", "chain": Chain(), "shift": 2.0}, "leave shift"),
        ({"path": "discrete", "chain": Chain(zero_snr=True), "prediction": "noise"}, "'v'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Objective(**said)
    with pytest.raises(ConfigError, match="0 < first"):
        Chain(first=0.1, last=0.01)


@pytest.mark.slow
def test_files_of_adapters_that_are_refused(sd, tmp_path):
    base = load_pipeline(sd)
    module = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"

    def said(**arrays):
        save_file({name.replace("__", "."): a for name, a in arrays.items()}, tmp_path / "a")
        with pytest.raises((CheckpointError, ConfigError)) as error:
            with_adapters(base, merged=(str(tmp_path / "a"),))
        return str(error.value)

    a, b = np.zeros((2, 16), np.float32), np.zeros((16, 2), np.float32)
    assert "save_lora_weights" in said(**{"lora_unet_double_blocks_0_qkv.lora_down.weight": a})
    assert "of that alone" in said(**{"lora_te_q_proj.lora_down.weight": a})
    assert "of that alone" in said(**{"text_encoder.q.lora_A.weight": a})
    assert "near it is" in said(**{f"{module}x.lora_A.weight": a, f"{module}x.lora_B.weight": b})
    assert "A and B are needed" in said(**{f"{module}.lora_A.weight": a})
    twice = {f"{module}.lora_A.weight": a, f"{module}.lora.down.weight": a}
    assert "under another name" in said(**twice)
    for name, bad in (
        (f"{module}.alpha", np.ones(2, np.float32)),
        (f"{module}.lora_A.weight", a + np.inf),
    ):
        assert "save the adapter again" in said(**{name: bad})
    wide = np.zeros((2, 15), np.float32)
    shapes = said(**{f"{module}.lora_A.weight": wide, f"{module}.lora_B.weight": b})
    assert "(16, 16)" in shapes
