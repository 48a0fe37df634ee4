"""Supervised fine-tuning: which tokens count, exactly how much, and what is trained.

Legend: N examples, B rows, T tokens of a row, D width, V vocabulary.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune.tiny import save_chats, save_model

from fornax.adapters import LoRA, LoRAParam
from fornax.checkpoint import Checkpointer
from fornax.config import CheckpointError, ConfigError, DataError
from fornax.mesh import MeshConfig
from fornax.models import load_pretrained
from fornax.optim import Constant
from fornax.train import DrillConfig, Hosts, Ledger, SpikeConfig, Task, read_metrics
from fornax.train.config import LogConfig
from fornax.train.session import Programs, first_state, prepare
from fornax.tune import SFTConfig, read_origin, tune
from fornax.tune.config import recipe
from fornax.tune.data import load_examples
from fornax.tune.policy import policy
from fornax.tune.splits import codec_of, limit_of
from fornax.tune.tasks.sft import make, neftune

ALL = MeshConfig(fsdp=-1)
OPTIM = dataclasses.replace(recipe(1e-2), schedule=Constant())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("sft")
    return SFTConfig(
        model=str(save_model(folder)),
        data=str(save_chats(folder / "chats.jsonl")),
        max_length=96,
        batch_size=4,
        virtual_shards=1,
        steps=3,
        lora=LoRA(rank=4),
        remat="none",
        mesh=MeshConfig(fsdp=1),
        optim=OPTIM,
        log=LogConfig(tensorboard=False),
        doctor=False,
    )


def begin(config: SFTConfig, devices: int = 1) -> tuple[Task, Programs, Any]:
    task = make(config, read_origin(config), Path())
    programs = prepare(config, task, Ledger(), jax.devices()[:devices])
    return task, programs, first_state(config, programs)


@pytest.fixture(scope="module")
def plain(base: SFTConfig) -> tuple[Task, Programs, Any]:
    """The programs of the plain run; its step gives the state up, so tests copy it."""
    return begin(base)


def copied(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


def redrawn(state: Any, seed: int) -> Any:
    """A first state whose adapters are drawn again; B stays zero."""
    rng = np.random.default_rng(seed)

    def draw(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.uniform(-1, 1, x.shape) * float(jnp.abs(x).max()), x.dtype)

    return dataclasses.replace(copied(state), params=jax.tree.map(draw, state.params))


@functools.cache
def logits_of(model: str, sequences: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """float64 logits [N, T, V] of sequences by themselves."""
    width = max(map(len, sequences))
    tokens_NT = np.array([[*row, *[0] * (width - len(row))] for row in sequences], np.int32)
    return np.asarray(load_pretrained(model)(jnp.asarray(tokens_NT)), np.float64)


def oracle(config: SFTConfig) -> tuple[float, int]:
    """Mean negative log-likelihood of the trained tokens, each example in a row of its own, and
    how many they are; float64 from the logits."""
    origin = read_origin(config)
    loaded = load_examples(
        config.data, codec_of(config, origin), limit_of(config), full=config.loss_on == "all"
    )
    rows = tuple(tuple(item.tokens.tolist()) for item in loaded.items)
    logits_NTV = logits_of(config.model, rows)
    total, count = 0.0, 0
    for logits_TV, item in zip(logits_NTV, loaded.items, strict=True):
        for place in np.flatnonzero(item.mask):
            before = logits_TV[place - 1]
            total += np.log(np.exp(before - before.max()).sum()) + before.max()
            total -= before[item.tokens[place]]
            count += 1
    return total / count, count


def whole_epoch(programs: Programs, state: Any, config: SFTConfig) -> tuple[float, float]:
    """Mean loss and weight over one pass of the data, as evaluation reads it."""
    held_in = dataclasses.replace(config, eval_data=config.data)
    task = make(held_in, read_origin(held_in), Path())
    total = weight = 0.0
    for rows in task.batches("eval", Hosts()):
        sums = programs.evaluate(state, rows)
        total, weight = total + float(sums.total), weight + float(sums.weight)
    return total / weight, weight


def test_packed_rows_hold_the_loss_of_the_assistants_tokens_alone(
    base: SFTConfig, plain: tuple[Task, Programs, Any]
):
    """Against logits of each conversation by itself: masks, end of turn, isolation in a row."""
    expected, count = oracle(base)
    loss, weight = whole_epoch(plain[1], plain[2], base)
    assert weight == count
    assert loss == pytest.approx(expected, rel=2e-6)


def test_padded_rows_and_the_full_loss_agree_with_the_same_oracle(
    base: SFTConfig, plain: tuple[Task, Programs, Any]
):
    config = dataclasses.replace(base, packing="none", loss_on="all")
    expected, count = oracle(config)
    loss, weight = whole_epoch(plain[1], plain[2], config)
    assert weight == count > oracle(base)[1]
    assert loss == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
def test_accumulation_makes_the_update_of_the_whole_batch(
    base: SFTConfig, plain: tuple[Task, Programs, Any]
):
    task, programs, state = plain
    rows = next(iter(task.batches("train", Hosts())))
    per_row = rows["loss_weights"].sum(1)
    assert len(set(per_row)) > 1, "rows of equal weight would hide a mean of means"
    once, _ = programs.step(copied(state), rows)
    config = dataclasses.replace(base, accumulate=4)
    _, divided, start = begin(config)
    often, _ = divided.step(start, rows)
    for x, y in zip(jax.tree.leaves(once.optimizer), jax.tree.leaves(often.optimizer), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_adapters_learn_the_answers_over_five_seeds(
    base: SFTConfig, plain: tuple[Task, Programs, Any]
):
    _, programs, state = plain
    before, _ = whole_epoch(programs, state, base)
    for seed in range(5):
        config = dataclasses.replace(base, seed=seed)
        task = make(config, read_origin(config), Path())
        start = redrawn(state, seed)
        stream = iter(task.batches("train", Hosts()))
        for _ in range(40):
            start, _ = programs.step(start, next(stream))
        assert whole_epoch(programs, start, base)[0] < 0.6 * before


def test_noise_is_bounded_by_the_length_of_each_example_and_spares_padding():
    segments_BT = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0]])
    width, alpha = 4096, 5.0
    x_BTD = jnp.zeros((1, 18, width))
    noise = np.asarray(neftune(alpha, segments_BT, jax.random.key(0))(x_BTD))[0]
    for places, length in ((slice(0, 4), 4), (slice(4, 16), 12)):
        bound = alpha / math.sqrt(length * width)
        assert 0.99 * bound < np.abs(noise[places]).max() <= bound
    assert not noise[16:].any()


def test_noise_disturbs_training_and_not_evaluation(
    base: SFTConfig, plain: tuple[Task, Programs, Any]
):
    task, programs, state = plain
    rows = next(iter(task.batches("train", Hosts())))
    config = dataclasses.replace(base, neftune_alpha=20.0)
    noisy = make(config, read_origin(config), Path())

    @jax.jit
    def losses(params: Any, frozen: Any, rows: Any) -> list[jax.Array]:
        model = programs.parts.model.holding(frozen).merge(params, {}, jax.random.key(0))
        assert noisy.evaluate is not None
        found = [noisy.loss(model, rows, jax.random.key(n)) for n in (1, 2)]
        return [
            sums.total
            for sums in (
                *found,
                noisy.evaluate(model, rows),
                task.loss(model, rows, jax.random.key(1)),
            )
        ]

    first, second, evaluated, calm = losses(state.params, programs.frozen, rows)
    assert evaluated == calm
    assert abs(first - calm) > 1e-4 * abs(calm)
    assert abs(first - second) > 1e-4 * abs(calm)


@pytest.mark.slow
def test_a_run_keeps_adapters_and_tokenizer_and_reports_perplexity(
    base: SFTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)
    config = dataclasses.replace(base, steps=None, batch_size=8, eval_share=0.25, mesh=ALL)
    result = tune(config, tmp_path, progress="none")
    assert result.reason == "finished"
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["eval/perplexity"] == pytest.approx(math.exp(last["eval/loss"]))
    assert last["compilations"] == 1
    for name in ("config.yaml", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).is_file(), name
    model = nnx.eval_shape(lambda: policy(config, read_origin(config)).build(nnx.Rngs(0)))
    adapters = {"params": nnx.to_pure_dict(nnx.state(model, LoRAParam))}
    everything = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
    checkpoints = Checkpointer(tmp_path / "checkpoints")
    state = checkpoints.restore(adapters, partial=True)
    with pytest.raises(CheckpointError, match="embedding"):
        checkpoints.restore(everything, partial=True)
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(state.state["params"])[0]
    ]
    assert paths
    assert all("lora_" in path for path in paths)


@pytest.mark.slow
def test_a_run_goes_back_from_a_loss_spike_as_if_the_batch_had_been_listed(
    base: SFTConfig, tmp_path: Path
):
    """Adapters, optimizer and position go back; the model that is not trained stays."""
    drill = SpikeConfig(snapshot_every=1, drill=DrillConfig(nan=(1,)))
    base = dataclasses.replace(base, mesh=ALL, batch_size=8)
    tune(dataclasses.replace(base, spikes=drill), tmp_path / "drill", progress="none")
    (tmp_path / "listed").mkdir()
    listed = (tmp_path / "drill" / "spikes.jsonl").read_text()
    assert '"skipped": [1], "back_to": 1, "source": "memory"' in listed
    (tmp_path / "listed" / "spikes.jsonl").write_text(listed)
    tune(base, tmp_path / "listed", progress="none")
    found, wanted = (read_metrics(tmp_path / n / "metrics.jsonl") for n in ("drill", "listed"))
    assert [r["batch"] for r in found] == [0, 2, 3]
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert [r[name] for r in found] == [r[name] for r in wanted]


def test_bad_lines_and_patterns_are_reported_before_anything_heavy(base: SFTConfig, tmp_path: Path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": [{"role": "assistant"}]}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        tune(dataclasses.replace(base, data=str(file)), tmp_path / "run", progress="none")
    lost = dataclasses.replace(base, lora=LoRA(targets=("atention/*",)))
    with pytest.raises(ConfigError, match="attention"):
        tune(lost, tmp_path / "run", progress="none")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "devices"), [(MeshConfig(data=2, fsdp=2, tensor=2), 8), (MeshConfig(), 3)]
)
def test_many_devices_make_the_update_of_one(
    base: SFTConfig, plain: tuple[Task, Programs, Any], mesh: MeshConfig, devices: int
):
    """Three do not divide the rows, nor the widths: padding, and parameters whole on each."""
    task, programs, state = plain
    alone, one = programs.step(copied(state), next(iter(task.batches("train", Hosts()))))
    _, spread, start = begin(dataclasses.replace(base, mesh=mesh), devices=devices)
    rows = next(iter(task.batches("train", spread.hosts)))
    assert len(rows["tokens"]) == spread.hosts.size(base.batch_size)
    together, eight = spread.step(start, rows)
    assert float(eight["loss"]) == pytest.approx(float(one["loss"]), rel=1e-5)
    pairs = zip(jax.tree.leaves(alone.optimizer), jax.tree.leaves(together.optimizer), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-7)
