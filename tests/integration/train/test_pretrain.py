"""Pretraining in process: policies that change no number, early refusals, weights to start from."""

import dataclasses
import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.checkpoint import Checkpointer, checkpointer
from fornax.config import CheckpointError, ConfigError, DataError, FornaxError, from_mapping
from fornax.data import BuildConfig, Dataset, TrainBpe, build, read_manifest
from fornax.data import Jsonl as JsonlSource
from fornax.mesh import MeshConfig
from fornax.models import REMAT_POLICIES, ExpertsConfig, abstract_decoder, save_pretrained
from fornax.train import (
    Hosts,
    Ledger,
    SkipConfig,
    TrainConfig,
    load_run,
    model_config,
    next_token_loss,
    pretrain_task,
    read_metrics,
    train,
    weights,
)
from fornax.train.hosts import to_global
from fornax.train.session import first_state, prepare
from fornax.train.state import as_tree
from fornax.train.step import make_train_step, sum_gradients

ONE = MeshConfig(fsdp=1, data=1)


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> TrainConfig:
    return from_mapping(TrainConfig, {**settings, "z_loss": 1e-3})


@pytest.fixture(scope="module")
def rows(config: TrainConfig) -> list[dict[str, np.ndarray]]:
    """Three batches."""
    batches = pretrain_task(config).batches("train", Hosts())
    found = [next(batches) for _ in range(3)]
    batches.close()
    return found


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing of the report out: it takes longer than these runs."""
    monkeypatch.setattr("fornax.train.report.write", lambda path: path)


def begin(config: TrainConfig, devices: Any = None) -> tuple[Any, Any]:
    programs = prepare(config, pretrain_task(config), Ledger(), devices or jax.devices()[:1])
    return programs, first_state(config, programs)


def gradients(config: TrainConfig, batch: dict[str, np.ndarray]) -> tuple[float, Any]:
    programs, state = begin(config)
    shapes = programs.shapes_of(batch)

    def compute(params: Any, batch: Any) -> Any:
        loss, _, grads = sum_gradients(programs.parts, params, {}, batch, jax.random.key(0))
        return loss.total / loss.weight, grads

    loss, grads = jax.device_get(jax.jit(compute)(state.params, to_global(batch, shapes)))
    return float(loss), grads


@pytest.mark.exhaustive
def test_remat_policies_change_no_number(config: TrainConfig, rows: list[Any]):
    named = {"remat_save": ("query", "mlp_up"), "remat_offload": ("layer_input", "attention")}
    found = {}
    for name in REMAT_POLICIES:
        changes: Any = {"remat": name, **(named if name == "names" else {})}
        found[name] = gradients(dataclasses.replace(config, **changes), rows[0])
    loss, grads = found["none"]
    for other_loss, other in found.values():
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for got, want in zip(jax.tree.leaves(other), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


@pytest.mark.slow
def test_bfloat16_computes_the_same_up_to_its_precision(config: TrainConfig, rows: list[Any]):
    half = from_mapping(type(config.dtypes), {"params": "float32", "compute": "bfloat16"})
    programs, state = begin(dataclasses.replace(config, dtypes=half))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    loss, _ = gradients(config, rows[0])
    _, metrics = programs.step(state, rows[0])
    assert float(metrics["loss"]) != pytest.approx(loss, rel=1e-7)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=5e-3)


def largest_with(vocabulary: int, text: str) -> int:
    """Elements of the largest array of a program that has the vocabulary for a dimension."""
    shapes = {tuple(map(int, x.split("x"))) for x in re.findall(r"tensor<([\dx]+)x[a-z]", text)}
    return max(math.prod(shape) for shape in shapes if vocabulary in shape)


def test_logits_of_a_whole_batch_never_exist(config: TrainConfig):
    """The largest array with a vocabulary's width is a chunk's, not the batch's."""
    config = dataclasses.replace(config, batch_size=64, seq_len=128)
    programs, _ = begin(config)
    batches = pretrain_task(config).batches("train", Hosts())
    shapes = programs.shapes_of(next(batches))
    batches.close()
    step = jax.jit(make_train_step(programs.parts)).lower(programs.abstract, shapes).as_text()
    whole = 64 * 128 * 320

    def dense(params: Any, tokens: Any) -> Any:
        return programs.parts.model.merge(params, {}, jax.random.key(0))(tokens)

    control = jax.jit(dense).lower(programs.abstract.params, shapes["tokens"]).as_text()
    assert largest_with(320, control) >= whole
    assert largest_with(320, step) <= whole // 4


@pytest.mark.exhaustive
def test_steps_on_a_mesh_are_those_of_one_device(config: TrainConfig, rows: list[Any]):
    """Three whole steps, accumulation, clipping, the skip rule and AdamW included."""
    config = dataclasses.replace(config, accumulate=2, skip=SkipConfig(outlier_factor=50.0))
    found = []
    for mesh, devices in ((ONE, None), (MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())):
        programs, state = begin(dataclasses.replace(config, mesh=mesh), devices)
        losses = []
        for batch in rows:
            state, metrics = programs.step(state, batch)
            losses.append(float(jax.block_until_ready(metrics)["loss"]))
        kernel = state.params["layers"]["mlp"]["gate"]["kernel"]
        assert kernel.sharding.num_devices == len(devices or [0])
        found.append((losses, jax.device_get(state.params)))
    (one, params), (many, others) = found
    assert many == pytest.approx(one, rel=1e-5)
    for got, want in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.fixture(scope="module")
def finished(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fornax.train.report.write", lambda path: path)
        run_dir = tmp_path_factory.mktemp("finished")
        train(shorter(config), run_dir, progress="none")
    return run_dir


def shorter(config: TrainConfig, **changes: Any) -> TrainConfig:
    evaluation = dataclasses.replace(config.eval, every=3, batches=None)
    changes = {"steps": 6, "save_every": 3, "eval": evaluation, **changes}
    return dataclasses.replace(config, mesh=MeshConfig(data=-1, fsdp=1), **changes)


@pytest.mark.slow
def test_bits_per_byte_are_nats_per_token_times_tokens_per_byte(finished: Path, dataset: Path):
    held_out = read_manifest(dataset).splits["eval"]
    records = [r for r in read_metrics(finished / "metrics.jsonl") if "eval/loss" in r]
    assert [r["step"] for r in records] == [3, 6]
    for record in records:
        bits = record["eval/loss"] / math.log(2) * held_out.tokens / held_out.text_bytes
        assert record["eval/bits_per_byte"] == pytest.approx(bits)
        assert record["eval/perplexity"] == pytest.approx(math.exp(record["eval/loss"]))
        # every token of the split but each document's first is scored once
        assert record["eval/weight"] <= held_out.tokens - held_out.records
        assert record["eval/weight"] > 0.9 * held_out.tokens


@pytest.mark.slow
def test_weights_of_a_run_and_of_a_hugging_face_directory_start_a_run(
    config: TrainConfig, finished: Path, tmp_path: Path
):
    model = load_run(finished).model
    save_pretrained(model, tmp_path / "hf")
    wanted = Checkpointer(finished / "checkpoints").restore(
        {"params": begin(config)[0].abstract.params}, partial=True
    )
    for source in (finished, tmp_path / "hf"):
        named = dataclasses.replace(config, init_from=str(source))
        state = begin(named)[1]
        jax.tree.map(np.testing.assert_array_equal, state.params, wanted.state["params"])
        assert int(state.step) == 0
    result = train(
        shorter(config, init_from=str(tmp_path / "hf"), model=None, steps=1, eval=config.eval),
        tmp_path / "run",
        progress="none",
    )
    last = read_metrics(finished / "metrics.jsonl")[-1]["loss"]
    assert result.metrics is not None
    assert result.metrics["loss"] == pytest.approx(last, rel=0.1)
    assert load_run(tmp_path / "run").config.model == load_run(tmp_path / "run").model.config


def test_a_model_that_is_not_that_of_the_weights_is_refused(
    config: TrainConfig, finished: Path, tmp_path: Path
):
    """Rope frequencies change no shape: nothing but this check would notice."""
    assert config.model is not None
    rope = dataclasses.replace(config.model.rope, theta=5e5)
    other = dataclasses.replace(config.model, rope=rope)
    changed = dataclasses.replace(config, model=other, init_from=str(finished))
    refused = r"not that of init_from.*model\.rope\.theta.*null.*--accept-changes model.rope.theta$"
    with pytest.raises(ConfigError, match=refused):
        train(changed, tmp_path / "run", progress="none")


@pytest.mark.exhaustive
def test_a_run_trains_weights_on_with_other_rotations_where_that_is_accepted(
    config: TrainConfig, finished: Path, tmp_path: Path
):
    assert config.model is not None
    rope = dataclasses.replace(config.model.rope, theta=5e5)
    other = dataclasses.replace(config.model, rope=rope)
    changed = dataclasses.replace(config, model=other, init_from=str(finished), steps=1)
    train(changed, tmp_path / "run", accept_changes=["model.rope.*"], progress="none")
    assert model_config(tmp_path / "run") == other

    graph, _ = nnx.split(abstract_decoder(other))
    decoder = nnx.merge(graph, nnx.state(load_run(finished).model))
    batches = pretrain_task(changed).batches("train", Hosts())
    loss = next_token_loss(decoder, next(batches), z_loss=config.z_loss)
    batches.close()
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(float(loss.total / loss.weight), rel=1e-5)

    wide = dataclasses.replace(changed, model=dataclasses.replace(other, norm_eps=1e-5))
    with pytest.raises(ConfigError, match=r"model\.norm_eps.*null` to take its own$"):
        train(wide, tmp_path / "wide", accept_changes=["model.*"], progress="none")


def test_how_experts_are_trained_may_differ_from_the_weights_own(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A Hugging Face directory says nothing of it; their number is another matter."""
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=16)
    assert config.model is not None
    model = dataclasses.replace(config.model, experts=experts)
    monkeypatch.setattr(weights, "model_config", lambda path, **_: model)

    def resolved(**changes: object) -> TrainConfig:
        own = dataclasses.replace(model, experts=dataclasses.replace(experts, **changes))
        return weights.with_model(dataclasses.replace(config, model=own, init_from=str(tmp_path)))

    own = resolved(capacity_factor=1.25, exchange="all_gather", balance_loss=0.01).model
    assert own is not None
    assert own.experts is not None
    assert own.experts.capacity_factor == 1.25
    with pytest.raises(ConfigError, match=r"model\.experts\.experts_per_token"):
        resolved(capacity_factor=1.25, experts_per_token=1)


def test_token_ids_beyond_the_vocabulary_are_refused(config: TrainConfig, tmp_path: Path):
    assert config.model is not None
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=319))
    with pytest.raises(ConfigError, match=r"has 320 token ids and model.vocab_size is 319; set"):
        train(small, tmp_path / "run", progress="none")


def test_a_missing_evaluation_split_is_refused_before_the_first_step(
    config: TrainConfig, tmp_path: Path
):
    (tmp_path / "a.jsonl").write_text('{"text": "abcabc"}\n' * 50)
    source = JsonlSource(path=str(tmp_path / "a.jsonl"))
    corpus = BuildConfig(
        source=source, tokenizer=TrainBpe(vocab_size=300), holdout=0.0, output=tmp_path / "data"
    )
    data = dataclasses.replace(config.data, source=Dataset(path=str(build(corpus).path)))
    with pytest.raises(DataError, match="no split 'eval'"):
        train(shorter(config, data=data), tmp_path / "run", progress="none")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.exhaustive
def test_other_data_is_taken_up_when_accepted(config: TrainConfig, finished: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    train(shorter(config, steps=3), run_dir, progress="none")
    changed = shorter(config, seq_len=48)
    with pytest.raises(ConfigError, match=r"steps: 3 -> 6, seq_len: 32 -> 48"):
        train(changed, run_dir, progress="none")
    result = train(changed, run_dir, accept_changes=["steps", "seq_len"], progress="none")
    assert result.step == 6
    tokens = [r["tokens"] for r in read_metrics(run_dir / "metrics.jsonl")]
    assert np.diff(tokens)[2:].mean() == pytest.approx(1.5 * np.diff(tokens)[:2].mean(), rel=0.1)


@pytest.mark.slow
def test_a_save_that_fails_in_the_background_stops_the_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The loop looks at every step, so it is seen long before the next save."""
    changes: dict[str, Any] = {"steps": 2000, "save_every": 1000, "eval": config.eval}
    run_dir = tmp_path / "run"
    train(shorter(config, **changes | {"steps": 2}), run_dir, progress="none")
    before = (run_dir / "checkpoints" / "2" / "fornax.0.json").read_bytes()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(checkpointer, "write_record", refuse)
        failing = shorter(config, **changes | {"save_every": 3})
        with pytest.raises(CheckpointError, match=r"saving step 3 .*Input/output error.*Step 2 is"):
            train(failing, run_dir, accept_changes=["steps"], progress="none")
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["step"] < 1000
    assert (run_dir / "checkpoints" / "2" / "fornax.0.json").read_bytes() == before
    again = shorter(config, steps=4, save_every=3)
    assert train(again, run_dir, accept_changes=["steps"], progress="none").step == 4
    records = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]


def test_a_batch_that_does_not_divide_into_virtual_shards_is_refused(
    config: TrainConfig, tmp_path: Path
):
    data = dataclasses.replace(config.data, virtual_shards=24)
    changed = shorter(config, batch_size=16, data=data)
    with pytest.raises(FornaxError, match=r"batch_size=16.*24 virtual shards: use a multiple of"):
        train(changed, tmp_path / "run", progress="none")


@pytest.mark.exhaustive
def test_a_skipped_update_on_a_mesh_leaves_everything(config: TrainConfig, rows: list[Any]):
    mesh = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=4))
    programs, state = begin(mesh, jax.devices())
    state, _ = programs.step(state, rows[0])
    before = jax.device_get(as_tree(state))
    empty = {**rows[1], "loss_weights": np.zeros_like(rows[1]["loss_weights"])}
    state, metrics = programs.step(state, empty)
    after = jax.device_get(as_tree(state))
    assert float(metrics["skipped"]) == 1
    for name in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
