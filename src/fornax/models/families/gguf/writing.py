"""A Hugging Face model as the metadata and tensors of a GGUF file: the inverse of what reads one.

E: experts; R: rows of a matrix, its outputs; C: columns, its inputs.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import CheckpointError, ConfigError
from fornax.gguf import Value
from fornax.models.families.gguf.architectures import ARCHITECTURES, Architecture
from fornax.models.families.gguf.reading import llama3_divisors
from fornax.models.families.gguf.tensors import OUTSIDE, interleaved

__all__ = ["Source", "gguf_metadata", "gguf_sources", "writable"]

_Values = Mapping[str, Any]
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Source:
    """What a tensor of the file is made of."""

    name: str
    """In the file."""
    shape: tuple[int, ...]
    """[R, C], [E, R, C] or a vector, in NumPy's order."""
    tensors: tuple[StoredTensor, ...]
    """One, or one of each expert."""
    rows: np.ndarray | None
    """Which of a tensor's rows lie one behind the other; None: all as they are."""
    offset: int
    """Added to its numbers."""

    @property
    def layer(self) -> int | None:
        """The number of its layer."""
        return int(self.name.split(".")[1]) if self.name.startswith("blk.") else None

    @property
    def part(self) -> str:
        """Such as `attn_q` or `output`."""
        return self.name.split(".")[-2]

    def read(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Numbers of one of `tensors`, of its first axis from a start to a stop, as they lie."""
        stored = tensor.view()
        part = stored[start:stop] if self.rows is None else stored[self.rows[start:stop]]
        return part.astype(np.float32) + np.float32(self.offset) if self.offset else part


def writable(values: _Values) -> Architecture:
    """The row of the table that a config.json is of.

    Raises:
      ConfigError: when there is none, listing them.
    """
    name = values["architectures"][0]
    for row in ARCHITECTURES:
        if row.target == name:
            return row
    known = ", ".join(row.target for row in ARCHITECTURES)
    raise ConfigError(f"{name} is not written as GGUF, only {known}")


def gguf_metadata(values: _Values) -> tuple[dict[str, Value], dict[str, np.ndarray]]:
    """The keys of the architecture, and tensors of divisors of rotation frequencies by name.

    Args:
      values: config.json as `config_to_hf` writes it.

    Raises:
      ConfigError: an architecture that is not written, or a value that llama.cpp has no key for.
    """
    row = writable(values)
    own = {
        "block_count": values["num_hidden_layers"],
        "context_length": values["max_position_embeddings"],
        "embedding_length": values["hidden_size"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "attention.key_length": values["head_dim"],
        "attention.value_length": values["head_dim"],
        "attention.layer_norm_rms_epsilon": float(values["rms_norm_eps"]),
        "rope.freq_base": float(values["rope_theta"]),
        "rope.dimension_count": int(values["head_dim"] * values.get("partial_rotary_factor", 1.0)),
        "vocab_size": values["vocab_size"],
    }
    scaling, factors = _rope_scaling(values)
    own |= scaling
    own |= _OWN.get(row.target, _none)(values)
    return {f"{row.name}.{key}": value for key, value in own.items()}, factors


def _none(values: _Values) -> dict[str, Value]:
    del values
    return {}


def _rope_scaling(values: _Values) -> tuple[dict[str, Value], dict[str, np.ndarray]]:
    scaling = values.get("rope_scaling")
    if scaling is None:
        return {}, {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}, {}
    if kind == "yarn" and set(scaling) <= _YARN and scaling.get("truncate", True):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling["factor"]),
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(scaling.get("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": float(scaling.get("beta_slow", 1.0)),
        }, {}
    if kind == "llama3":
        options = {key: x for key, x in scaling.items() if key not in ("rope_type", "type")}
        made = llama3_divisors(values["rope_theta"], values["head_dim"], **options)
        return {}, {"rope_freqs.weight": made.astype(np.float32)}
    if kind == "longrope" and "original_max_position_embeddings" in values:
        limit, original = (
            values["max_position_embeddings"],
            values["original_max_position_embeddings"],
        )
        scale = limit / original
        plain = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        keys = {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(scaling.get("attention_factor", plain)),
        }
        return keys, {
            f"rope_factors_{part}.weight": np.array(scaling[f"{part}_factor"], np.float32)
            for part in ("short", "long")
        }
    raise ConfigError(
        f"rope_scaling={dict(scaling)} is not written as GGUF, only linear, llama3, "
        "longrope of Phi, and yarn without factors for attention"
    )


_YARN = {
    *("rope_type", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "truncate"),
}


def _experts(values: _Values) -> dict[str, Value]:
    return {
        "expert_count": values.get("num_experts", values.get("num_local_experts")),
        "expert_used_count": values["num_experts_per_tok"],
    }


def _sparse(values: _Values, *, normalized: bool) -> dict[str, Value]:
    _expect(values, "norm_topk_prob", normalized)
    _expect(values, "decoder_sparse_step", 1)
    _expect(values, "mlp_only_layers", [])
    return {**_experts(values), "expert_feed_forward_length": values["moe_intermediate_size"]}


def _qwen2_moe(values: _Values) -> dict[str, Value]:
    shared = values["shared_expert_intermediate_size"]
    return {
        **_full(values),
        **_sparse(values, normalized=False),
        "expert_shared_feed_forward_length": shared,
    }


def _qwen3_moe(values: _Values) -> dict[str, Value]:
    return {**_full(values), **_sparse(values, normalized=True)}


def _mixtral(values: _Values) -> dict[str, Value]:
    _expect(values, "sliding_window", None)
    return _experts(values)


def _full(values: _Values) -> dict[str, Value]:
    """Layers that all attend to everything."""
    _expect(values, "use_sliding_window", False)
    return {}


def _gemma(values: _Values, largest: int, kinds: Sequence[str]) -> dict[str, Value]:
    """llama.cpp scales queries by the head's width, but in the model of `largest` layers."""
    width, layers = values["head_dim"], values["num_hidden_layers"]
    if layers == largest:
        width = values["hidden_size"] // values["num_attention_heads"]
    _expect(values, "query_pre_attn_scalar", width)
    names = [f"{kinds[layer % len(kinds)]}_attention" for layer in range(layers)]
    _expect(values, "layer_types", names)
    _expect(values, "attention_bias", False)
    return {"attention.sliding_window": values["sliding_window"]}


def _gemma2(values: _Values) -> dict[str, Value]:
    caps = {key: values[f"{key}_logit_softcapping"] for key in ("attn", "final")}
    for key, cap in caps.items():
        if not cap:
            raise ConfigError(f"{key}_logit_softcapping={cap} is not written as GGUF, only a cap")
    return {
        **_gemma(values, 46, ("sliding", "full")),
        **{f"{key}_logit_softcapping": float(cap) for key, cap in caps.items()},
    }


def _gemma3(values: _Values) -> dict[str, Value]:
    _expect(values, "attn_logit_softcapping", None)
    cap = values["final_logit_softcapping"]
    return {
        **_gemma(values, 62, (*["sliding"] * 5, "full")),
        "rope.freq_base_swa": float(values["rope_local_base_freq"]),
        **({} if cap is None else {"final_logit_softcapping": float(cap)}),
    }


def _phi3(values: _Values) -> dict[str, Value]:
    window = values["sliding_window"]
    return {} if window is None else {"attention.sliding_window": window}


_OWN: Mapping[str, Callable[[_Values], dict[str, Value]]] = {
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _full,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _full,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
}


def _expect(values: _Values, key: str, wanted: object) -> None:
    given = values.get(key, wanted)
    if (list(given) if isinstance(given, tuple) else given) != wanted:
        raise ConfigError(
            f"{key}={given!r} is not written as GGUF, where llama.cpp takes it to be {wanted!r}"
        )


def gguf_sources(values: _Values, tensors: Mapping[str, StoredTensor]) -> tuple[Source, ...]:
    """What each tensor of the file is made of, in the file's order.

    Args:
      values: config.json as `config_to_hf` writes it.
      tensors: those of the Hugging Face directory, by name.

    Raises:
      CheckpointError: a tensor that the file has no name for, experts that are missing.
    """
    row = writable(values)
    outside = {theirs: ours for ours, theirs in OUTSIDE.items()}
    parts = {theirs: ours for ours, theirs in row.parts.items()}
    found: dict[str, list[StoredTensor]] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and values["tie_word_embeddings"]:
            continue
        match = _NAME.fullmatch(name)
        layer, stem, ending = match.groups() if match else (None, *name.rsplit(".", 1))
        expert = re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", stem)
        known = (outside if layer is None else parts).get(expert)
        if known is None:
            raise CheckpointError(
                f"{name} has no place in a GGUF file of {row.target}; write the directory again "
                "with the library that made it, an expert's matrices each by themselves"
            )
        place = f"{known}.{ending}" if layer is None else f"blk.{layer}.{known}.{ending}"
        found.setdefault(place, []).append(tensor)
    return tuple(_source(row, values, name, of) for name, of in found.items())


def _source(row: Architecture, values: _Values, name: str, tensors: list[StoredTensor]) -> Source:
    stacked = name.split(".")[-2].endswith("_exps")
    shape = tensors[0].shape
    if stacked:
        tensors = sorted(tensors, key=lambda x: int(x.name.split(".experts.")[1].split(".")[0]))
        count = values.get("num_experts", values.get("num_local_experts"))
        if len(tensors) != count or {x.shape for x in tensors} != {shape}:
            raise CheckpointError(f"{name} is made of {len(tensors)} experts, not {count} alike")
        shape = (len(tensors), *shape)
    elif name.endswith("ffn_gate_inp_shexp.weight"):
        shape = shape[-1:]
    rows = None
    if name.split(".")[-2] in row.interleaved:
        rows = np.argsort(interleaved(np.arange(shape[0]), values["head_dim"]))
    offset = row.norm_offset if name.endswith("norm.weight") else 0
    return Source(name, shape, tuple(tensors), rows, offset)
