"""Weights from elsewhere: a Hugging Face directory, or the checkpoints of a Fornax run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from fornax import optim
from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config import diff, from_yaml
from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import DEFAULT_RULES, Rules, tree_shardings
from fornax.models import (
    Decoder,
    DecoderConfig,
    abstract_decoder,
    config_from_hf,
    load_pretrained,
)
from fornax.models.load import read_config
from fornax.train.config import TrainConfig
from fornax.train.run_dir import RunDirectory
from fornax.train.state import split_model

__all__ = [
    "Loaded",
    "is_run",
    "load_decoder",
    "load_run",
    "model_config",
    "run_config",
    "with_model",
]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The model of a run's checkpoint."""

    model: Decoder
    config: TrainConfig
    """What the run was trained with."""
    step: int


def is_run(path: str | Path) -> bool:
    """Whether `path` is a run directory with checkpoints."""
    return Checkpointer(RunDirectory(path).checkpoints).latest_step() is not None


def run_config(path: str | Path, step: int | None = None) -> TrainConfig:
    """What a checkpoint of the run at `path` was made with; the latest when `step` is None.

    Raises:
      CheckpointError: when there is no such checkpoint, or its record is damaged.
    """
    return _run_config(Checkpointer(RunDirectory(path).checkpoints), step)


def model_config(path: str | Path) -> DecoderConfig:
    """The decoder that the weights at `path` are of.

    Raises:
      ConfigError: when `path` holds neither a run nor a Hugging Face model.
    """
    if is_run(path):
        return _model_of(run_config(path), path)
    _require_hugging_face(path)
    return config_from_hf(read_config(path))


def with_model(config: TrainConfig, saved: str | None = None) -> TrainConfig:
    """The config with the model of its checkpoint or of `init_from` where it names none.

    Args:
      config: a run.
      saved: the config, as YAML, that its checkpoints were made with.

    Raises:
      ConfigError: when it names another model than that of `init_from`.
    """
    if saved is not None:
        if config.model is not None:
            return config
        return dataclasses.replace(config, model=from_yaml(type(config), saved).model)
    if config.init_from is None:
        return config
    found = model_config(config.init_from)
    if config.model is None:
        return dataclasses.replace(config, model=found)
    changes = diff(found, config.model)
    if changes:
        listed = ", ".join(f"model.{change}" for change in changes)
        raise ConfigError(
            f"the model is not that of init_from={config.init_from}: {listed}. Set `model: null` "
            "to take its own"
        )
    return config


def load_decoder(
    path: str | Path,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Decoder:
    """The decoder at `path`, a run directory or a Hugging Face one, its weights laid out on `mesh`.

    Raises:
      ConfigError: when `path` holds neither.
      CheckpointError: for weights that are missing, damaged or of another shape.
    """
    if is_run(path):
        loaded = load_run(path, dtype=dtype, compute_dtype=compute_dtype, mesh=mesh, rules=rules)
        return loaded.model
    _require_hugging_face(path)
    return load_pretrained(path, dtype=dtype, compute_dtype=compute_dtype, mesh=mesh, rules=rules)


def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    dtype: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Loaded:
    """The model of a run, with averaged parameters where its optimizer keeps an average.

    Args:
      path: the run directory.
      step: which checkpoint; None takes the latest.
      dtype: of the parameters; None keeps the run's.
      compute_dtype: of activations and products; None for the parameters' own.
      mesh: where the weights will lie; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      CheckpointError: when there is no such checkpoint, or it is damaged.
    """
    checkpointer = Checkpointer(RunDirectory(path).checkpoints, CheckpointConfig())
    config = _run_config(checkpointer, step)
    dtype = config.dtypes.param_dtype if dtype is None else dtype
    abstract = abstract_decoder(_model_of(config, path), dtype=dtype, compute_dtype=compute_dtype)
    parts = split_model(abstract)
    wanted: dict[str, Any] = {"params": nnx.to_pure_dict(parts.params)}
    where = None
    if mesh is not None:
        where = nnx.to_pure_dict(tree_shardings(parts.params, mesh, rules))
        wanted["params"] = jax.tree.map(_with_sharding, wanted["params"], where)
    chain = None
    if config.optim.ema is not None or config.optim.lookahead is not None:
        chain = optim.build(config.optim, total_steps=config.steps, params=parts.params)
        wanted["optimizer"] = jax.eval_shape(chain.init, wanted["params"])
        if where is not None:
            shardings = chain.state_shardings(where)
            wanted["optimizer"] = jax.tree.map(_with_sharding, wanted["optimizer"], shardings)
    restored = checkpointer.restore(wanted, step, partial=True)
    params = restored.state["params"]
    if chain is not None:
        params = chain.eval_params(params, restored.state["optimizer"])
    model = parts.merge(params, {}, jax.random.key(0))
    return Loaded(model=model, config=config, step=restored.step)


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _run_config(checkpointer: Checkpointer, step: int | None) -> TrainConfig:
    text = checkpointer.read_config(step)
    return from_yaml(TrainConfig, text, source=f"the config saved in {checkpointer.directory}")


def _model_of(config: TrainConfig, path: str | Path) -> DecoderConfig:
    if config.model is None:
        raise CheckpointError(f"the checkpoints of {path} do not say what their model is")
    return config.model


def _require_hugging_face(path: str | Path) -> None:
    if not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a run directory with checkpoints nor a Hugging Face directory with "
            "a config.json; check the path"
        )
