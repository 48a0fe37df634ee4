"""A denoiser trained by the trainer: any mesh, exact resume, conditions, loaded runs."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from fornax import export, optim
from fornax.adapters import LoRA
from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config import load
from fornax.config.errors import ConfigError, DataError
from fornax.data import Hosts
from fornax.diffusion.config import (
    DiffusionConfig,
    DiffusionTuneConfig,
    DiT,
    Inputs,
    SampleConfig,
    Transformer,
)
from fornax.diffusion.data import EncodedConfig, ImagesConfig, LettersConfig, open_examples
from fornax.diffusion.drawing import to_pixels
from fornax.diffusion.exporting import export_denoiser
from fornax.diffusion.letters import Letters
from fornax.diffusion.load import load_run
from fornax.diffusion.objectives import Objective, example_noise
from fornax.diffusion.pipelines import ImageRequest, load_pipeline, plan
from fornax.diffusion.pipelines.clips import encode_video
from fornax.diffusion.prompts import LabelsConfig, Prompts, WordsConfig
from fornax.diffusion.run import train
from fornax.diffusion.setup import Facts, facts_of, network_config
from fornax.diffusion.task import diffusion_task
from fornax.diffusion.tuning import tune
from fornax.mesh import MeshConfig
from fornax.optim import EMA, AdamW, Constant, OptimConfig
from fornax.optim.tree import flatten
from fornax.train import EvalConfig, Ledger
from fornax.train.session import first_state, prepare
from fornax.train.state import split_model

CONFIG = DiffusionConfig(
    data=LettersConfig(count=64, holdout=8),
    model=DiT(num_layers=2, num_heads=2, head_dim=8, patch=4),
    text=WordsConfig(width=16, length=4),
    objective=Objective(prediction="data"),
    batch_size=8,
    steps=4,
    save_every=2,
    optim=OptimConfig(
        optimizer=AdamW(weight_decay=0.0),
        learning_rate=1e-2,
        schedule=Constant(),
        ema=EMA(decay=0.9, warmup=True, widths=(0.1,)),
    ),
    eval=EvalConfig(every=4),
    sample=SampleConfig(every=2, steps=2, count=4),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on all eight devices."""
    out = tmp_path_factory.mktemp("runs") / "letters"
    train(CONFIG, out, progress="none")
    return out


def _records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    names = ("step", "loss", "grad_norm", "images", "eval/loss")
    return [{k: v for k, v in json.loads(line).items() if k in names} for line in lines]


def test_a_run_writes_grids_facts_and_metrics(run: Path) -> None:
    found = _records(run)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert found[-1]["images"] == 32
    assert np.isfinite(found[-1]["eval/loss"])
    grids = sorted(path.name for path in (run / "images").iterdir())
    assert grids == ["step-0000002.png", "step-0000004.png"]
    with Image.open(run / "images" / grids[0]) as image:
        assert image.size[0] >= 2 * 64
    facts = json.loads((run / "diffusion.json").read_text())
    assert facts["sizes"] == [[16, 16]]
    assert "serif" in facts["words"]


def test_a_run_that_goes_on_has_the_numbers_of_one_that_never_stopped(
    run: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "4")
    (again / "images" / "step-0000004.png").unlink()
    result = train(CONFIG, again, progress="none")
    assert result.step == 4
    assert _records(again) == _records(run)
    picture = "images/step-0000004.png"
    assert (again / picture).read_bytes() == (run / picture).read_bytes()
    one, other = load_run(run), load_run(again)
    jax.tree.map(np.testing.assert_array_equal, _params(one), _params(other))


def _params(loaded: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(loaded.network, nnx.Param))


def test_a_loaded_run_draws_each_row_by_itself_with_the_average(run: Path) -> None:
    loaded = load_run(run)
    prompts = ["bold serif R", "sans A", "italic serif Q"]
    drawn = loaded.draw(prompts, seed=3)
    assert drawn.shape == (3, 16, 16, 1)
    assert loaded.decode(drawn).dtype == np.uint8
    np.testing.assert_allclose(loaded.draw(prompts[:1], seed=3)[0], drawn[0], atol=1e-5)
    other = loaded.draw(["sans A", "sans A", "italic serif Q"], seed=3)
    assert np.abs(other[0] - drawn[0]).max() > 1e-3  # the prompt counts
    with pytest.raises(DataError, match="'comic' is in no caption"):
        loaded.encode(["comic A"])
    with pytest.raises(DataError, match="has 5 words"):
        loaded.encode(["bold bold bold bold A"])
    assert load_run(run, step=2).step == 2


def test_an_average_of_any_width_is_made_of_those_in_checkpoints(run: Path) -> None:
    checkpointer = Checkpointer(run / "checkpoints", CheckpointConfig())
    text = checkpointer.read_config(4)
    parts = split_model(load_run(run).network)
    built = optim.build(CONFIG.optim, total_steps=4, params=parts.params)
    shapes = jax.eval_shape(lambda p: p, nnx.to_pure_dict(parts.params))
    wanted = {"optimizer": jax.eval_shape(built.init, shapes)}
    state = checkpointer.restore(wanted, 4, partial=True).state["optimizer"]
    checkpointer.close()
    assert "widths" in text
    kept = built.power_averages(state)
    assert kept is not None
    same = load_run(run, width=0.1)
    wanted, found = flatten(kept.averages[0]), flatten(_params(same))
    assert wanted.keys() == found.keys()
    for path, array in wanted.items():
        np.testing.assert_allclose(found[path], array, atol=1e-5)
    short = load_run(run, width=0.05)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), _params(short), _params(same))
    assert max(jax.tree.leaves(moved)) > 1e-4


def _started(config: DiffusionConfig, folder: Path, devices: int) -> tuple[Any, Any, Any]:
    examples = open_examples(config.data, "train")
    task = diffusion_task(config, facts_of(config, examples, folder), examples, folder)
    programs = prepare(config, task, Ledger(), jax.devices()[:devices])
    return task, programs, first_state(config, programs)


@pytest.mark.slow
def test_many_devices_make_the_steps_of_one(tmp_path: Path) -> None:
    """In micro-batches too: noise and times are of the example and the step alone."""
    found = []
    for mesh, devices, count in (
        (MeshConfig(data=1), 1, 1),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, 2),
        (MeshConfig(slice=2, context=2), 4, 1),
    ):
        config = dataclasses.replace(CONFIG, mesh=mesh, accumulate=count)
        task, programs, state = _started(config, tmp_path, devices)
        stream = task.batches("train", programs.hosts)
        for _ in range(2):
            state, metrics = programs.step(state, next(stream))
        stream.close()
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]), state.params))
    loss, norm, params = found[0]
    for loss8, norm8, params8 in found[1:]:
        assert loss8 == pytest.approx(loss, rel=1e-5)
        assert norm8 == pytest.approx(norm, rel=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=5e-4), params, params8
        )


def _moving(folder: Path, count: int = 12) -> ImagesConfig:
    """Grey letters that move to the right, in videos of five and of nine frames."""
    folder.mkdir()
    letters = Letters(count=count)
    for number in range(count):
        frames = 5 if number % 2 else 9
        still = to_pixels(letters[number].image)
        video = np.stack([np.roll(still, 2 * f, 1) for f in range(frames)])
        (folder / f"{number:02d}.png").write_bytes(encode_video(video, "png", 8))
        (folder / f"{number:02d}.txt").write_text(letters[number].prompt)
    return ImagesConfig(
        path=str(folder), channels=1, resolution=16, multiple=8, frames=(5, 9), threads=1
    )


VIDEOS = dataclasses.replace(
    CONFIG,
    model=DiT(num_layers=1, num_heads=2, head_dim=8, patch=4, text="joint"),
    batch_size=4,
    eval=EvalConfig(),
)


@pytest.mark.slow
def test_videos_train_resume_to_the_bit_and_are_drawn(tmp_path: Path) -> None:
    """In buckets of two lengths; the grids are animated, and the run draws other lengths too."""
    config = dataclasses.replace(VIDEOS, data=_moving(tmp_path / "clips"))
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(config, whole, progress="none")
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "4")
    train(config, again, progress="none")
    assert _records(again) == _records(whole)
    one, other = load_run(whole), load_run(again)
    jax.tree.map(np.testing.assert_array_equal, _params(one), _params(other))
    with Image.open(whole / "images" / "step-0000004.png") as picture:
        assert picture.n_frames in (5, 9)
    assert {shape[0] for shape in one.shapes} == {5, 9}
    pipeline = load_pipeline(whole)
    request = ImageRequest(prompt="bold sans", frames=7, steps=2)
    videos = pipeline.images(pipeline.run(plan(pipeline, request)))
    assert videos.shape == (1, 7, 16, 16, 1)
    assert encode_video(videos[0], "gif", 8).startswith(b"GIF")
    images = dataclasses.replace(config, data=dataclasses.replace(config.data, frames=(1,)))
    assert np.isfinite(train(images, tmp_path / "images", progress="none").metrics["loss"])
    wrong = dataclasses.replace(config, data=LettersConfig(count=8), model=_of_videos())
    with pytest.raises(ConfigError, match="draws videos, and examples are images of 16 x 16"):
        train(wrong, tmp_path / "wrong", progress="none")


def _of_videos() -> Transformer:
    whole = VIDEOS.model.network(Inputs(channels=1, classes=None, pooled=16, text=16, videos=True))
    return Transformer(config=whole)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_videos_on_any_mesh_have_the_loss_of_one_device(tmp_path: Path) -> None:
    """Their length divided over devices, alone and beside rows, heads and weights."""
    data = _moving(tmp_path / "clips")
    found = []
    for mesh, devices in (
        (MeshConfig(data=1), 1),
        (MeshConfig(data=1, context=4), 4),
        (MeshConfig(data=1, fsdp=2, tensor=2, context=2), 8),
    ):
        config = dataclasses.replace(VIDEOS, data=data, mesh=mesh)
        task, programs, state = _started(config, tmp_path, devices)
        stream = task.batches("train", programs.hosts)
        shapes = set()
        for _ in range(3):
            batch = next(stream)
            shapes.add(batch["images"].shape)
            state, metrics = programs.step(state, batch)
        stream.close()
        assert len(shapes) == 2
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    for loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-4)
        assert norm == pytest.approx(found[0][1], rel=1e-3)


def test_noise_of_a_batch_is_that_of_its_examples_and_step() -> None:
    ids = jnp.array([5, 9, 2**31 - 1], jnp.int32)
    steps = jnp.array([3, 3, 7], jnp.int32)
    whole = example_noise(11, steps, ids, (4, 4, 1))
    for row in range(3):
        alone = example_noise(11, int(steps[row]), ids[row : row + 1], (4, 4, 1))
        np.testing.assert_array_equal(whole[row], alone[0])


def test_dropped_captions_are_the_empty_one(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, caption_dropout=0.5, batch_size=64)
    examples = open_examples(config.data, "train")
    facts = facts_of(config, examples, tmp_path)
    task = diffusion_task(config, facts, examples, tmp_path)
    assert facts.prompts is not None
    empty = facts.prompts.encode([""])["words"][0]
    stream = task.batches("train", Hosts())
    halves = [task.batches("train", Hosts(index=i, count=2)) for i in range(2)]
    batch = next(stream)
    dropped = (batch["words"] == empty).all(1)
    assert 16 < dropped.sum() < 48
    parts = [next(half) for half in halves]
    for name, array in batch.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
    held_out = task.batches("eval", Hosts())
    assert not any((rows["words"] == empty).all(1)[rows["weight"] > 0].any() for rows in held_out)
    for each in (stream, *halves, held_out):
        each.close()


def test_labels_and_no_text(tmp_path: Path) -> None:
    labels = Prompts.of(LabelsConfig(), ["cat", "dog", "cat", ""])
    np.testing.assert_array_equal(labels.encode(["dog", "", "cat"])["classes"], [1, 2, 0])
    with pytest.raises(DataError, match="did you mean dog"):
        labels.encode(["dogs"])
    for text in (LabelsConfig(), None):
        config = dataclasses.replace(
            CONFIG,
            text=text,
            sample=SampleConfig(every=None, guidance=1.0),
            model=DiT(num_layers=1, num_heads=1, head_dim=8, patch=8),
            batch_size=4,
        )
        task, programs, state = _started(
            dataclasses.replace(config, mesh=MeshConfig(data=1)), tmp_path / str(text), 1
        )
        stream = task.batches("train", programs.hosts)
        _, metrics = programs.step(state, next(stream))
        stream.close()
        assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--caption-dropout", "1.5"], "is a share"),
        (["--text", "null"], "text is null.*sample.guidance to 1"),
        (["--caption-dropout", "0"], "caption_dropout is 0"),
        (["--sample.sampler", "dpm2"], "did you mean"),
        (["--data.type", "letters", "--data.size", "4"], "legible"),
        (["--optim.ema.debias", "--optim.ema.warmup"], "keep one of them"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(DiffusionConfig, file=None, overrides=flags)


def test_patches_that_do_not_divide_are_refused_before_the_run_is_written(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, model=DiT(num_layers=1, num_heads=1, head_dim=8, patch=5))
    with pytest.raises(ConfigError, match="16 x 16 do not divide into patches of 5 x 5"):
        train(config, tmp_path / "run", progress="none")
    assert not list((tmp_path / "run").glob("*.yaml"))
    assert not list((tmp_path / "run").glob("*.json"))


def test_another_data_set_is_refused_on_resume(run: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run, again)
    colour = dataclasses.replace(CONFIG, data=LettersConfig(colour=True, count=64, holdout=8))
    with pytest.raises(DataError, match="1 channels, and these have 3"):
        train(colour, again, progress="none")


@pytest.mark.slow
def test_adapters_train_on_a_run_and_are_merged_at_load(run: Path, tmp_path: Path) -> None:
    config = DiffusionTuneConfig(
        model=str(run),
        data=LettersConfig(count=16, holdout=8, seed=9),
        lora=LoRA(rank=4),
        batch_size=8,
        steps=2,
        optim=OptimConfig(learning_rate=1e-2, schedule=Constant()),
        sample=SampleConfig(every=2, steps=2, count=4),
    )
    result = tune(config, tmp_path / "tuned", progress="none")
    assert result.step == 2
    base, tuned = load_run(run), load_run(tmp_path / "tuned")
    before, after = (nnx.to_flat_state(nnx.state(x.network, nnx.Param)) for x in (base, tuned))
    changed = {
        "/".join(map(str, path))
        for (path, a), (_, b) in zip(before, after, strict=True)
        if not np.array_equal(a[...], b[...])
    }
    assert changed == {
        f"denoiser/blocks/0/{part}/kernel"
        for part in (
            *(f"attention/{name}" for name in ("q", "k", "v", "out")),
            "mlp/up",
            "mlp/down",
        )
    }
    assert tuned.objective == CONFIG.objective
    sizes = [
        sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
        for folder in (tmp_path / "tuned", run)
    ]
    assert sizes[0] < sizes[1]
    with pytest.raises(ConfigError, match="not a run directory of fornax diffusion train"):
        tune(dataclasses.replace(config, model=str(tmp_path)), tmp_path / "x", progress="none")
    colour = dataclasses.replace(config, data=LettersConfig(colour=True, count=16, holdout=8))
    with pytest.raises(DataError, match="draws images of 1 channels, and these have 3"):
        tune(colour, tmp_path / "y", progress="none")


def test_a_bundle_of_the_denoiser_says_what_it_says(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run, compute_dtype=np.float32)
    manifest = export_denoiser(run, tmp_path / "bundle", batch=(3,), platforms=("cpu",))
    assert set(manifest.functions) == {"denoise"}
    x = np.random.default_rng(0).normal(size=(3, 16, 16, 1)).astype(np.float32)
    time = np.array([10.0, 500.0, 990.0], np.float32)
    prompts = ["sans A", "", "bold serif R"]
    assert loaded.facts.prompts is not None
    words = loaded.facts.prompts.encode(prompts)["words"]
    found = export.load(tmp_path / "bundle")["denoise"](x=x, time=time, words=words)
    direct = loaded.denoiser(x, time, loaded.encode(prompts))
    np.testing.assert_allclose(found["output"], direct, atol=1e-4)


def _encoded(model: DiT, **arrays: Any) -> Any:
    """The network's config for precomputed latents with some arrays."""
    config = dataclasses.replace(
        CONFIG,
        model=model,
        data=EncodedConfig(path="latents", shape=(4, 4, 4), **arrays),
        text=None,
        eval=EvalConfig(),
        sample=SampleConfig(every=None, guidance=1.0),
    )
    return network_config(config, Facts(channels=4, sizes=((4, 4),), prompts=None))


def test_precomputed_texts_are_read_or_refused() -> None:
    """A denoiser would else train without the captions of its data."""
    dit = DiT(num_layers=2, num_heads=2, head_dim=8)
    text = {"text_length": 5, "text_width": 8}
    found = _encoded(dataclasses.replace(dit, text="cross"), **text)
    assert found.text.width == 8
    assert found.embedder.pooled is None
    assert _encoded(dit, pooled_width=6).embedder.pooled == 6
    for arrays, said in (
        (text, r"data has text, .* data\.text_width to null, or model\.text of a dit to cross"),
        ({**text, "pooled_width": 6}, "data has text"),
        ({"sizes": True}, r"data has sizes, .* set data\.sizes to false$"),
        ({"guidance": 3.5}, r"data has guidance, .* set data\.guidance to null$"),
    ):
        with pytest.raises(ConfigError, match=said):
            _encoded(dit, **arrays)
    with pytest.raises(ConfigError, match=r"model\.text=joint attends to the words"):
        _encoded(dataclasses.replace(dit, text="joint"))
    with pytest.raises(ConfigError, match=r"model\.frame_patch=2 is of videos"):
        _encoded(dataclasses.replace(dit, frame_patch=2))
