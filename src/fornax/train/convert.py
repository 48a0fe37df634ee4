"""Between Fornax runs, Hugging Face directories and PEFT's adapters, with the logits compared.

Legend: T prompt tokens, V vocabulary.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax import adapters
from fornax.checkpoint import Checkpointer
from fornax.config import dump_yaml, from_yaml
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import write_whole
from fornax.config.hub import find_model
from fornax.config.text import read_yaml
from fornax.data import Dataset, has_tokenizer, load_tokenizer, read_manifest
from fornax.gguf import is_gguf
from fornax.mesh import DtypePolicy, parse_dtype
from fornax.models import Decoder, num_parameters, save_pretrained, stored_dtypes
from fornax.train.config import TrainConfig
from fornax.train.run_dir import RunDirectory
from fornax.train.state import split_model
from fornax.train.weights import count_modules, is_run, load_decoder, load_run, run_record

__all__ = ["PROMPTS", "Parity", "convert", "tokenizer_folder"]

PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in",
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "In 1905 a clerk in Bern wrote four papers; the third said that clocks in motion run slow.",
    "SELECT name, count(*) FROM visits WHERE year >= 2020 GROUP BY name ORDER BY 2 DESC;",
    "Größe, naïve, 東京, привет, 12 + 34 = 46, https://example.org/a?b=c&d=%20 \t\n",
)
"""Texts whose logits are compared: code, prose, and characters beyond ASCII."""

_SEED_TOKENS = 64
_MTP_WEIGHT = 0.1
"""Of a run that holds modules and was not trained here: what DeepSeek V3 ended with."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What a conversion changed, measured: the content of `parity.json`."""

    source: str
    destination: str
    family: str | None
    """Hugging Face family of the model."""
    parameters: int
    """Of the model, or of the adapter."""
    dtype: str
    """Dtype of the weights at the destination."""
    prompts: Literal["text", "token ids"]
    """Whether real texts were compared, or, without a tokenizer, fixed token ids."""
    tokens: int
    """Tokens over all prompts."""
    modules_left_out: int
    """Modules that predict further tokens which the source has and the destination has not."""
    max_abs_difference: float
    """Largest difference of any logit, computed in float32 from both sets of weights."""
    max_abs_logit: float
    """Largest logit, to judge the difference by."""
    same_top_token: float
    """Share of positions at which both put the same token first."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    step: int | None = None,
    tokenizer: str | Path | None = None,
    merge_lora: bool = False,
    mtp: bool = False,
    overwrite: bool = False,
) -> Parity:
    """Turn a run or a GGUF file into a Hugging Face directory, or such a directory into a run.

    A run that trained adapters becomes a folder in PEFT's format, or, merged, a Hugging Face
    directory. A run made this way holds the weights as step 0: `init_from` starts training from
    it. The destination is loaded back and compared; `parity.json` beside its weights keeps the
    result.

    Args:
      source: a run directory with checkpoints, a Hugging Face directory, a name on the Hub, or a
        GGUF file.
      destination: the directory to make.
      dtype: of the weights at the destination; None keeps the source's.
      step: which checkpoint of a run; None takes the latest.
      tokenizer: a tokenizer.json or the folder of one; None finds the source's own.
      merge_lora: whether the adapters that a run trained are merged into its weights.
      mtp: whether the modules that predict further tokens are taken along.
      overwrite: replace a destination that exists.

    Raises:
      ConfigError: when `source` is neither, or an option does not apply to it.
      CheckpointError: for weights that are missing or damaged, or a destination that exists.
    """
    source, destination = find_model(source).expanduser(), Path(destination).expanduser()
    if source.resolve() == destination.resolve():
        raise ConfigError(f"source and destination are both {source}; choose another destination")
    from_run = is_run(source)
    if step is not None and not from_run:
        raise ConfigError(f"step={step}: {source} is not a run and has no steps; leave it out")
    chosen = None if dtype is None else parse_dtype(dtype)
    folder = tokenizer_folder(source, tokenizer)
    record = run_record(source, step) if from_run else None
    base = None if record is None or record.lora is None else record.base
    is_model = from_run or is_gguf(source) or (source / "config.json").is_file()
    if merge_lora and base is None and is_model:
        raise ConfigError(f"{source} has no adapters to merge; leave --merge-lora out")
    keep = base is not None and not merge_lora
    if keep and chosen is not None:
        raise ConfigError("adapters are kept in float32; leave --dtype out, or --merge-lora")
    left_out = 0 if mtp or keep else count_modules(source)
    # float32 has the numbers of every dtype that is stored, and float16 is not computed in;
    # dequantized numbers are rounded once, to what is written.
    as_is = chosen is None or from_run or stored_dtypes(source) in ({"float32"}, {"bfloat16"})
    held = chosen if is_gguf(source) else None if as_is else jnp.dtype(jnp.float32)
    original = _load(source, step, merge=not keep, mtp=mtp, dtype=held)
    prompts, kind = _prompts(folder, original)
    rounded = ("nf4", "int8", "int4")
    few_bits = keep and record is not None and record.lora and record.lora.quantize in rounded
    # A quantized base is what was trained on, and not what the adapter alone will be applied to.
    trained = _load(source, step) if few_bits else original
    expected = _logits(trained, prompts)
    del trained
    model = _cast(original, chosen)
    family = model.config.family
    count = num_parameters(model.config)
    stored = jnp.dtype(model.embed.embedding[...].dtype).name
    del original
    if keep:
        adapters.save_peft(model, destination, base=str(base), overwrite=overwrite)
        count = sum(x.size for x in jax.tree.leaves(nnx.state(model, adapters.LoRAParam)))
    elif from_run or is_gguf(source):
        save_pretrained(model, destination, folder, overwrite=overwrite)
    else:
        _save_run(model, destination, source, overwrite=overwrite)
    del model
    if keep:
        found = _logits(_load_adapter(str(base), stored, destination), prompts)
        stored = "float32"
    else:
        found = _logits(_load(destination, mtp=mtp), prompts)
    parity = Parity(
        source=str(source),
        destination=str(destination),
        family=family,
        parameters=count,
        dtype=stored,
        prompts=kind,
        tokens=sum(map(len, prompts)),
        modules_left_out=left_out,
        **_compare(expected, found),
    )
    _write_json(destination / "parity.json", dataclasses.asdict(parity))
    return parity


def _load(
    path: Path,
    step: int | None = None,
    *,
    merge: bool = True,
    mtp: bool = False,
    dtype: np.dtype | None = None,
) -> Decoder:
    """The decoder at `path`, its weights as they are (of what is not a run in `dtype`), computing
    in float32."""
    if is_run(path):
        return load_run(path, step=step, compute_dtype=jnp.float32, merge=merge, mtp=mtp).model
    return load_decoder(path, dtype=dtype, compute_dtype=jnp.float32, mtp=mtp)


def _load_adapter(base: str, dtype: str, path: Path) -> Decoder:
    """The decoder at `base`, computing in float32, with the adapter at `path`."""
    model = load_decoder(base, dtype=dtype, compute_dtype=jnp.float32)
    adapters.load_peft(path, model)
    return model


def tokenizer_folder(source: Path, given: str | Path | None = None) -> Path | None:
    """The folder, or GGUF file, with a model's tokenizer: the one given, the model's own, or that
    of its run's data.

    None when there is none.

    Raises:
      DataError: when what was given is not a tokenizer.
    """
    source = find_model(source)
    if given is not None:
        path = Path(given).expanduser()
        folder = path.parent if path.is_file() and not is_gguf(path) else path
        load_tokenizer(folder)  # refuses what is not a tokenizer
        return folder
    if has_tokenizer(source):
        return source
    saved = RunDirectory(source).config
    if not saved.is_file():
        return None
    text = saved.read_text(encoding="utf-8")
    base = read_yaml(text, str(saved))[0].get("model")
    if isinstance(base, str):  # tuned: the model that it began at has one
        return tokenizer_folder(find_model(base).expanduser())
    data = from_yaml(TrainConfig, text, source=str(saved)).data
    if not isinstance(data.source, Dataset) or "://" in data.source.path:
        return None
    dataset = Path(data.source.path)
    if not dataset.is_dir():
        return None
    name = read_manifest(dataset).tokenizer
    return None if name is None else dataset / name


def _prompts(
    folder: Path | None, model: Decoder
) -> tuple[list[np.ndarray], Literal["text", "token ids"]]:
    limit = model.config.max_position_embeddings
    if folder is None:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (4, _SEED_TOKENS))
        return [row[:limit].astype(np.int32) for row in ids], "token ids"
    backend = load_tokenizer(folder)
    if backend.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {backend.vocab_size} ids and the model "
            f"{model.config.vocab_size}; give the model's own with --tokenizer"
        )
    encoded = backend.encode_batch(PROMPTS)
    return [tokens[:limit].astype(np.int32) for tokens in encoded], "text"


def _logits(model: Decoder, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 logits [T, V] of each prompt."""
    width = max(map(len, prompts))
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state: object, tokens_BT: jax.Array, segment_ids_BT: jax.Array) -> Any:
        return nnx.merge(graphdef, state)(tokens_BT, segment_ids_BT=segment_ids_BT)

    out = []
    for prompt in prompts:
        tokens_BT = np.zeros((1, width), np.int32)
        tokens_BT[0, : len(prompt)] = prompt
        segments_BT = (np.arange(width)[None] < len(prompt)).astype(np.int32)
        out.append(np.asarray(run(state, tokens_BT, segments_BT))[0, : len(prompt)])
    return out


def _cast(model: Decoder, dtype: object) -> Decoder:
    if dtype is None:
        return model
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), state))


def _save_run(model: Decoder, destination: Path, source: Path, *, overwrite: bool) -> None:
    """A run directory whose step 0 holds the weights, and its tokenizer beside them."""
    if destination.exists() and any(destination.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{destination} exists; give another path, or --overwrite")
        shutil.rmtree(destination)
    name = jnp.dtype(model.embed.embedding[...].dtype).name
    if name not in ("float32", "bfloat16"):
        raise ConfigError(
            f"a run keeps its parameters in float32 or bfloat16, not {name}; set dtype"
        )
    weight = _MTP_WEIGHT if model.config.num_mtp_modules else None
    dtypes = DtypePolicy(params=name, compute=name)
    config = TrainConfig(model=model.config, dtypes=dtypes, mtp_weight=weight)
    directory = RunDirectory(destination)
    directory.create()
    directory.save_config(dump_yaml(config))
    parts = split_model(model)
    state: dict[str, Any] = {"params": nnx.to_pure_dict(parts.params)}
    if other := nnx.to_pure_dict(parts.other):
        state["other"] = other
    with Checkpointer(directory.checkpoints, config.checkpoint) as checkpointer:
        checkpointer.save(0, state=state, config_yaml=dump_yaml(config), force=True)
    for file in sorted(source.glob("tokenizer*.json")) + sorted(
        source.glob("special_tokens*.json")
    ):
        shutil.copy2(file, destination / file.name)


def _compare(expected: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    one, other = np.concatenate(expected), np.concatenate(found)
    same = np.argmax(one, axis=-1) == np.argmax(other, axis=-1)
    return {
        "max_abs_difference": float(np.max(np.abs(one - other))),
        "max_abs_logit": float(np.max(np.abs(one))),
        "same_top_token": float(np.mean(same)),
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    try:
        write_whole(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room or make it writable"
        ) from error
