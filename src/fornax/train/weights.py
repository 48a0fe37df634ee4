"""Weights from elsewhere: a Hugging Face directory, or the checkpoints of a Fornax run.

The checkpoints of a tuned run may hold adapters only: then the decoder that it began at is loaded,
the adapters put on it, and merged.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from fornax import adapters, optim
from fornax.checkpoint import CheckpointConfig, Checkpointer
from fornax.config import diff, from_yaml
from fornax.config.errors import ConfigError
from fornax.config.hub import find_model
from fornax.gguf import is_gguf
from fornax.mesh import DEFAULT_RULES, Rules, tree_shardings
from fornax.models import (
    TRAINING_ONLY,
    Decoder,
    DecoderConfig,
    abstract_decoder,
    config_from_hf,
    load_pretrained,
    stored_modules,
)
from fornax.models.load import read_config
from fornax.train.config import TrainConfig
from fornax.train.record import RunRecord, read_run_record
from fornax.train.resume import HARMLESS, matches
from fornax.train.run_dir import RunDirectory
from fornax.train.state import ModelParts, split_model, trained_of

__all__ = [
    "POSITIONS",
    "Loaded",
    "count_modules",
    "is_run",
    "load_decoder",
    "load_run",
    "model_config",
    "run_config",
    "run_record",
    "with_model",
]

POSITIONS = ("model.rope", "model.local_rope", "model.max_position_embeddings")
"""Keys by which a run may differ from the model of `init_from` where that is accepted: weights can
be trained on with other rotations, which is how a context is extended."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The model of a run's checkpoint."""

    model: Decoder
    config: RunRecord
    """What the run was trained with; its `model` is always said."""
    step: int


def is_run(path: str | Path) -> bool:
    """Whether `path` is a run directory with checkpoints."""
    return Checkpointer(RunDirectory(path).checkpoints).latest_step() is not None


def run_config(path: str | Path, step: int | None = None) -> TrainConfig:
    """What a checkpoint of the pretraining run at `path` was made with; the latest when `step` is
    None.

    Raises:
      ConfigError: when it is a run of another task.
      CheckpointError: when there is no such checkpoint, or its record is damaged.
    """
    return _run_config(Checkpointer(RunDirectory(path).checkpoints), step)


def run_record(path: str | Path, step: int | None = None) -> RunRecord:
    """What a checkpoint of any run at `path` is of; the latest when `step` is None.

    Raises:
      CheckpointError: when there is no such checkpoint, or it does not say.
    """
    return read_run_record(Checkpointer(RunDirectory(path).checkpoints), step)


def model_config(path: str | Path, *, mtp: bool = False) -> DecoderConfig:
    """The decoder that the weights at `path` are of.

    Args:
      path: a run directory or a Hugging Face one.
      mtp: see `load_decoder`.

    Raises:
      ConfigError: when `path` holds neither a run nor a Hugging Face model; modules are asked for
        and it has none.
    """
    path = find_model(path)
    if is_run(path):
        return _with_modules(_model_of(path, run_record(path)), path, mtp=mtp)
    _require_hugging_face(path)
    return config_from_hf(read_config(path), mtp=mtp)


def count_modules(path: str | Path) -> int:
    """How many modules that predict further tokens the weights at `path` have.

    Raises:
      ConfigError: when `path` holds neither a run nor a Hugging Face model.
    """
    path = find_model(path)
    if is_run(path):
        return _model_of(path, run_record(path)).num_mtp_modules
    _require_hugging_face(path)
    return stored_modules(path)


def _with_modules(model: DecoderConfig, path: str | Path, *, mtp: bool) -> DecoderConfig:
    """A run's model, with its modules that predict further tokens or without."""
    if not mtp:
        return dataclasses.replace(model, num_mtp_modules=0)
    if not model.num_mtp_modules:
        raise ConfigError(
            f"the run {path} has no modules that predict further tokens (multi-token prediction); "
            "leave out what asks for them"
        )
    return model


def with_model(
    config: TrainConfig, saved: str | None = None, accept: Sequence[str] = POSITIONS
) -> TrainConfig:
    """The config with the model of its checkpoint or of `init_from` where it names none.

    Args:
      config: a run.
      saved: the config, as YAML, that its checkpoints were made with.
      accept: patterns of keys among `POSITIONS` that may differ from the model of `init_from`; all
        of them by default, for a run that is planned and reads no weights.

    Raises:
      ConfigError: when it names another model than that of `init_from`; settings that change no
        number (`HARMLESS`), how experts are trained (`TRAINING_ONLY`) and what is accepted may
        differ.
    """
    if saved is not None:
        if config.model is not None:
            return config
        return dataclasses.replace(config, model=from_yaml(type(config), saved).model)
    if config.init_from is None:
        return config
    found = model_config(config.init_from, mtp=config.mtp_weight is not None)
    if config.model is None:
        return dataclasses.replace(config, model=found)
    free = (*HARMLESS, *(f"model.experts.{name}" for name in TRAINING_ONLY))
    changes = {f"model.{change.path}": change for change in diff(found, config.model)}
    refused = [
        key
        for key in changes
        if not matches(key, free) and not (matches(key, POSITIONS) and matches(key, accept))
    ]
    if refused:
        listed = ", ".join(f"model.{changes[key]}" for key in refused)
        other = ""
        if all(matches(key, POSITIONS) for key in refused):
            other = f", or train its weights on with --accept-changes {' '.join(refused)}"
        raise ConfigError(
            f"the model is not that of init_from={config.init_from}: {listed}. Set `model: null` "
            f"to take its own{other}"
        )
    return config


def load_decoder(
    path: str | Path,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    mtp: bool = False,
) -> Decoder:
    """The decoder at `path`, a run directory, a Hugging Face one or a GGUF file; its weights laid
    out on `mesh`.

    A `path` that is not there may be the name of a model on the Hub, `org/name[@revision]`. The
    modules that predict further tokens are part of it with `mtp` alone.

    Raises:
      ConfigError: when `path` holds neither.
      CheckpointError: for weights that are missing, damaged or of another shape.
    """
    path = find_model(path)
    options: dict[str, Any] = {
        "dtype": dtype,
        "compute_dtype": compute_dtype,
        "mesh": mesh,
        "rules": rules,
        "mtp": mtp,
    }
    if is_run(path):
        return load_run(path, **options).model
    _require_hugging_face(path)
    return load_pretrained(path, **options)


def load_run(
    path: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    merge: bool = True,
    mtp: bool = False,
) -> Loaded:
    """The model of a run, with averaged parameters where its optimizer keeps an average.

    Args:
      path: the run directory.
      step: which checkpoint; None takes the latest.
      dtype: of the parameters; None keeps the run's.
      compute_dtype: of activations and products; None for the parameters' own.
      mesh: where the weights will lie; None for the default device.
      rules: logical axes to mesh axes.
      merge: whether adapters are merged into the weights that they were trained on, or stay on
        the base's own, which are then not quantized.
      mtp: see `load_decoder`.

    Raises:
      CheckpointError: when there is no such checkpoint, or it is damaged.
      ConfigError: when the model that tuning began at is not where it was.
    """
    checkpointer = Checkpointer(RunDirectory(path).checkpoints, CheckpointConfig())
    record = read_run_record(checkpointer, step)
    own = _with_modules(_model_of(path, record), path, mtp=mtp)
    record = dataclasses.replace(record, model=own)
    dtype = record.dtypes.param_dtype if dtype is None else dtype
    if record.lora is None and not record.freeze_router:
        model = abstract_decoder(own, dtype=dtype, compute_dtype=compute_dtype)
    else:
        model = load_decoder(
            _base(path, record),
            mesh=mesh,
            rules=rules,
            dtype=dtype,
            compute_dtype=compute_dtype,
            mtp=own.num_mtp_modules > 0,
        )
    if record.lora is not None:
        # Stored codes are read as the numbers that they stand for.
        quantize = record.lora.quantize if merge and record.lora.quantize != "stored" else None
        lora = dataclasses.replace(record.lora, quantize=quantize)
        adapters.attach(model, lora, rngs=nnx.Rngs(0))
    parts = split_model(model, trained_of(record.lora, freeze_router=record.freeze_router))
    where = None
    if mesh is not None:
        where = nnx.to_pure_dict(tree_shardings(parts.params, mesh, rules))
    params, other, at = _restore(checkpointer, record, parts, where, step)
    model = parts.merge(params, other, jax.random.key(0))
    if record.lora is not None and merge:
        model = adapters.merged(model)
    return Loaded(model=model, config=record, step=at)


def _restore(
    checkpointer: Checkpointer,
    record: RunRecord,
    parts: ModelParts,
    where: object,
    step: int | None,
) -> tuple[Any, Any, int]:
    """The trained arrays of a checkpoint, the model's other arrays, and its step.

    Whatever else it has, such as a head that gives values, is left there.
    """
    wanted: dict[str, Any] = {"params": jax.tree.map(_shape, nnx.to_pure_dict(parts.params))}
    if where is not None:
        wanted["params"] = jax.tree.map(_with_sharding, wanted["params"], where)
    if others := jax.tree.map(_shape, nnx.to_pure_dict(parts.other)):
        wanted["other"] = others
    chain = None
    if record.optim.ema is not None or record.optim.lookahead is not None:
        chain = optim.build(record.optim, total_steps=record.steps, params=parts.params)
        wanted["optimizer"] = jax.eval_shape(chain.init, wanted["params"])
        if where is not None:
            shardings = chain.state_shardings(where)
            wanted["optimizer"] = jax.tree.map(_with_sharding, wanted["optimizer"], shardings)
    restored = checkpointer.restore(wanted, step, partial=True)
    found = restored.state["params"]
    if chain is not None:
        found = chain.eval_params(found, restored.state["optimizer"])
    return found, restored.state.get("other", {}), restored.step


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _run_config(checkpointer: Checkpointer, step: int | None) -> TrainConfig:
    text = checkpointer.read_config(step)
    return from_yaml(TrainConfig, text, source=f"the config saved in {checkpointer.directory}")


def _model_of(path: str | Path, record: RunRecord) -> DecoderConfig:
    return record.model or model_config(_base(path, record), mtp=record.mtp)


def _base(path: str | Path, record: RunRecord) -> str:
    base = str(find_model(str(record.base)))
    if not Path(base).is_dir():
        raise ConfigError(
            f"the run {path} began at the model {base}, which is not there (from {Path.cwd()}); "
            "move it back, or call from the folder that the run was started in"
        )
    return base


def _require_hugging_face(path: str | Path) -> None:
    path = Path(path).expanduser()
    if not (path / "config.json").is_file() and not is_gguf(path):
        raise ConfigError(
            f"{path} is neither a run directory with checkpoints nor a Hugging Face directory with "
            "a config.json nor a GGUF file; check the path, or name a model of the Hub as org/name"
        )
