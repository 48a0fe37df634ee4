"""What a family is: how to read and write its config.json, and what its tensors are called."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fornax.models.config import DecoderConfig
from fornax.models.families.reader import ConfigReader

__all__ = [
    "BASE_NAMES",
    "PRE_NORM_NAMES",
    "SANDWICH_NAMES",
    "ExpertsTensor",
    "Family",
    "GroupedRows",
    "MTPFiles",
    "TensorName",
    "expert_names",
    "module_names",
]


@dataclass(frozen=True)
class ExpertsTensor:
    """A stored tensor that holds all experts of a layer as we do: [E, inputs, outputs], or a
    bias [E, outputs]. Several paths with one name share its last axis, in this order."""

    name: str
    """`{layer}` stands for the layer's number."""
    interleaved: bool = False
    """Whether they take turns in that axis, instead of lying one behind the other."""
    transposed: bool = False
    """Whether it is [E, outputs, inputs]; they then share its middle axis."""


@dataclass(frozen=True)
class GroupedRows:
    """A stored matrix whose rows lie head by head: for each index of the parameters' first output
    axis a block of every path with this name, in this order."""

    name: str
    """`{layer}` stands for the layer's number."""


TensorName = str | ExpertsTensor | GroupedRows


@dataclass(frozen=True)
class MTPFiles:
    """How a family's files hold modules that predict further tokens; their names are among the
    family's, `{layer}` standing for the layer's number after all others and `{module}` for the
    module's, from 0."""

    start: str
    """Beginning of the names of a module's tensors."""
    key: str | None = None
    """The key of config.json with their number; None where files do not say: there is one."""
    most: int | None = None
    """How many a file can hold; None for any number."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Paths of our parameters outside the modules of which each module has a copy, and its name."""

    def starts(self, first: int, count: int) -> tuple[str, ...]:
        """Beginnings of the names of the tensors of `count` modules after `first` layers; the one
        that no layer's tensors have is of any number."""
        if "{" not in self.start:
            return (self.start,)
        return tuple(self.start.format(layer=first + n, module=n) for n in range(count))


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture."""

    name: str
    """`model_type` in config.json."""
    architecture: str
    """The class in `architectures`."""
    read: Callable[[ConfigReader], DecoderConfig]
    """Builds the config, taking every key it understands from the reader."""
    write: Callable[[DecoderConfig], dict[str, Any]]
    """The keys of config.json; the caller checks that reading them back loses nothing."""
    names: Mapping[str, TensorName]
    """Our parameter path to the tensor's name, `{layer}` standing for the layer's number and
    `{expert}` for the expert's. Several paths with one name are that tensor's row blocks, in this
    order."""
    mtp: MTPFiles | None = None
    """How files hold modules that predict further tokens; None where they hold none."""
    released_names: Mapping[str, TensorName] | None = None
    """The names in released files, where transformers writes others; read, never written."""


_LAYER = "model.layers.{layer}"

BASE_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
    **{
        f"layers/attention/{ours}/{kind}": f"model.layers.{{layer}}.self_attn.{theirs}"
        for ours in "qkvo"
        for kind, theirs in (("kernel", f"{ours}_proj.weight"), ("bias", f"{ours}_proj.bias"))
    },
    **{
        f"layers/attention/{norm}/scale": f"model.layers.{{layer}}.self_attn.{norm}.weight"
        for norm in ("q_norm", "k_norm")
    },
    **{
        f"layers/mlp/{ours}/{kind}": f"model.layers.{{layer}}.mlp.{theirs}"
        for ours in ("gate", "up", "down")
        for kind, theirs in (("kernel", f"{ours}_proj.weight"), ("bias", f"{ours}_proj.bias"))
    },
}
"""Names that most families share; paths that a model does not have are not looked up."""

PRE_NORM_NAMES = {
    "layers/attention_norm/scale": "model.layers.{layer}.input_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{layer}.post_attention_layernorm.weight",
}

SANDWICH_NAMES = {
    "layers/attention_norm/scale": "model.layers.{layer}.input_layernorm.weight",
    "layers/post_attention_norm/scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "layers/post_mlp_norm/scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
"""Of layers with norms before and after both branches (Gemma)."""


def expert_names(
    block: str, *, gate: str, up: str, down: str, shared: str = "shared_expert"
) -> dict[str, str]:
    """Names of a router and its experts, and of the expert that all tokens run through.

    Args:
      block: what the family calls the part of a layer that holds them.
      gate: what it calls an expert's projections.
      up: see `gate`.
      down: see `gate`.
      shared: what it calls the expert that all tokens run through.
    """
    start = f"model.layers.{{layer}}.{block}"
    names = {
        "layers/experts/router/kernel": f"{start}.gate.weight",
        "layers/experts/shared_gate/kernel": f"{start}.shared_expert_gate.weight",
    }
    for ours, theirs in (("gate", gate), ("up", up), ("down", down)):
        names[f"layers/experts/{ours}/kernel"] = f"{start}.experts.{{expert}}.{theirs}.weight"
        for kind, suffix in (("kernel", "weight"), ("bias", "bias")):
            names[f"layers/experts/shared/{ours}/{kind}"] = f"{start}.{shared}.{theirs}.{suffix}"
    return names


def module_names(
    names: Mapping[str, TensorName], parts: Mapping[str, str], layer: str = _LAYER
) -> dict[str, TensorName]:
    """Names of modules that predict further tokens.

    Args:
      names: of the layers.
      parts: of what a module has beside its layer, by attribute of `models.mtp.MTPModule`.
      layer: what is in the names of a module's layer in place of `model.layers.{layer}`.
    """
    found: dict[str, TensorName] = {f"mtp/{path}": name for path, name in parts.items()}
    for path, given in names.items():
        if not path.startswith("layers/"):
            continue
        if isinstance(given, str):
            name: TensorName = given.replace(_LAYER, layer)
        else:
            name = replace(given, name=given.name.replace(_LAYER, layer))
        found["mtp/layer/" + path.removeprefix("layers/")] = name
    return found
