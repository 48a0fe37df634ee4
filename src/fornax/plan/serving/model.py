"""The model to be served: its config and the dtype its weights are stored in, no weights read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.config.hub import find_model
from fornax.gguf import is_gguf
from fornax.models import (
    CodeFormat,
    DecoderConfig,
    config_from_hf,
    num_parameters,
    read_config,
    stored_code_formats,
    stored_dtypes,
)

_SUPPORTED = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model by what its files say about it."""

    name: str
    config: DecoderConfig
    dtype: str
    """float32 or bfloat16: what an engine holds the weights in unless told otherwise."""
    source: str
    """One sentence on where shapes and dtype come from."""
    code_formats: Mapping[str, CodeFormat | str] = field(default_factory=dict)
    """How packed products read what its files quantize; see `StoredModel.code_formats`."""

    @property
    def parameters(self) -> int:
        """How many numbers the model holds."""
        return num_parameters(self.config)


def read_model(path: Path, dtype: str = "auto", *, mtp: bool = False) -> ServedModel:
    """Read what a directory says about its model; weights need not be there.

    Args:
      path: a Hugging Face directory or a name on the Hub, of which config.json is enough, a GGUF
        file, or a Fornax run directory.
      dtype: what the user chose, or "auto".
      mtp: whether the first of its modules that predict further tokens is part of it: an engine
        loads no other.

    Raises:
      ConfigError: when it is neither, the family is not known, or the dtype must be chosen.
      CheckpointError: a damaged file.
    """
    found = find_model(path, files=("*.json",))
    name = found.expanduser().resolve().name if found == path else str(path)
    path = found.expanduser()
    if (path / "config.json").is_file() or is_gguf(path):
        return _hugging_face(path, dtype, name, mtp=mtp)
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; name the directory that holds the model's config.json, a GGUF "
            "file, or a run"
        )
    from fornax.train import is_run, run_config

    if not path.is_dir() or not is_run(path):
        raise ConfigError(
            f"{path} is neither a Hugging Face directory with a config.json nor a run directory "
            "with checkpoints; check --model (config.json alone is enough, no weights are read)"
        )
    run = run_config(path)
    if run.model is None:
        raise ConfigError(f"the checkpoints of {path} do not say what their model is")
    stored = dtype if dtype != "auto" else str(run.dtypes.param_dtype)
    source = "shapes and dtype from the config saved with the run's latest checkpoint"
    model = replace(run.model, num_mtp_modules=min(run.model.num_mtp_modules, int(mtp)))
    return ServedModel(name=path.name, config=model, dtype=stored, source=source)


def _hugging_face(path: Path, dtype: str, name: str, *, mtp: bool) -> ServedModel:
    values = read_config(path)
    config = config_from_hf(values, mtp=mtp)
    config = replace(config, num_mtp_modules=int(mtp))
    if dtype != "auto":
        stored, said = dtype, "dtype as asked"
    else:
        stored, said = _stored_dtype(path, values)
    formats = stored_code_formats(path, mtp=mtp) if _has_weights(path) else {}
    return ServedModel(
        name=name,
        config=config,
        dtype=stored,
        source=f"bytes from {_said_in(path)}, no weights were read; {said}",
        code_formats=formats,
    )


def _said_in(path: Path) -> str:
    return "the header of the GGUF file" if is_gguf(path) else "config.json"


def _stored_dtype(path: Path, values: dict) -> tuple[str, str]:
    """The dtype an engine would find, and where it is said."""
    found = _header_dtypes(path)
    where = _said_in(path) if is_gguf(path) else "the headers of its safetensors files"
    if not found:
        inner = values.get("text_config") or {}
        named = (v.get(key) for v in (values, inner) for key in ("dtype", "torch_dtype"))
        found = {name for name in named if isinstance(name, str)}
        where = "config.json"
    if not found:
        return "bfloat16", "config.json names no dtype, bfloat16 is assumed"
    if len(found) == 1 and next(iter(found)) in _SUPPORTED:
        return next(iter(found)), f"dtype from {where}"
    raise ConfigError(
        f"{path}: by {where} the weights are {' and '.join(sorted(found))}, which Fornax does not "
        "serve as they are; choose --dtype bfloat16 or --dtype float32"
    )


def _header_dtypes(path: Path) -> set[str]:
    """Dtypes of the weights by the files' headers; none where there are no whole weights."""
    return stored_dtypes(path) if _has_weights(path) else set()


def _has_weights(path: Path) -> bool:
    """Whether all files with weights are there."""
    if is_gguf(path):
        return True
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return (path / "model.safetensors").is_file()
    shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
    return all((path / shard).is_file() for shard in shards)
