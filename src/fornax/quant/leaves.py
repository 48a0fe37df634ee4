"""The tensors of a directory, and which scheme each of them gets: rules over parameter paths.

A path is that of the parameter in the model with the number of its layer:
`layers/3/attention/q/kernel`, `lm_head/kernel`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few, similar
from fornax.models import Decoder, DecoderConfig, StoredModel
from fornax.models.families.convert import family_for
from fornax.models.layout import Block, TensorLayout, by_expert, plan_layout
from fornax.quant.schemes import Scheme, scheme_named

__all__ = [
    "KEEP",
    "ROUTERS",
    "Leaf",
    "Rule",
    "assign",
    "check_group_size",
    "find_leaves",
    "parse_rule",
    "planned_leaves",
]

KEEP = "keep"
"""What a rule says in a scheme's place of leaves that stay floats."""
ROUTERS = ("experts/router/kernel", "experts/shared_gate/kernel")
"""Ends of the paths of weights that choose experts."""

TensorT = TypeVar("TensorT", StoredTensor, TensorLayout)


@dataclass(frozen=True, kw_only=True)
class Leaf(Generic[TensorT]):
    """A tensor of a file, there or to be written, and what becomes of it."""

    tensor: TensorT
    paths: tuple[str, ...] = ()
    """Of the parameters in it; several where a file has them as one. None: of no parameter."""
    layer: int | None = None
    """Number of its layer; None outside the layers."""
    expert: int | None = None
    parameters: tuple[str, ...] = ()
    """Their paths without the layer's number."""
    blocks: tuple[Block, ...] = ()
    """What each parameter takes of the tensor."""
    matrix: bool = False
    """Whether it is a matrix [outputs, inputs], or holds those of all experts."""
    scheme: Scheme | None = None
    """None: it stays as it is."""
    reason: str = ""
    """Why."""

    @property
    def bytes(self: "Leaf[StoredTensor]") -> int:
        """Of the tensor as it is."""
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    @property
    def parameter(self) -> str:
        """Path of its first parameter without the layer's number."""
        return self.parameters[0] if self.parameters else ""

    @property
    def module(self) -> str:
        """The file's name for what has it as its weight."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def layout(self) -> TensorLayout:
        """The tensor as the float model's files have it."""
        return TensorLayout(self.tensor.name, self.tensor.shape, self.blocks)

    @property
    def written(self) -> list[TensorLayout]:
        """The matrices that a quantized file has in its place, by their names as floats."""
        own = self.scheme is not None and self.scheme.layout == "gpt-oss"
        return [self.layout] if own else by_expert(self.layout) or [self.layout]

    @property
    def stacked(self) -> bool:
        """Whether it holds the matrices of all experts."""
        return bool(self.blocks) and self.blocks[0].slot.of_all_experts

    @property
    def modules(self) -> list[str]:
        """The names of the quantized file's modules."""
        return [tensor.name.removesuffix(".weight") for tensor in self.written]

    @property
    def inputs(self) -> int:
        """Of a matrix, or of each expert's."""
        slot = self.blocks[0].slot
        return self.tensor.shape[1 if slot.as_is and not slot.transposed else -1]

    def matrices(self, values: np.ndarray) -> Iterator[tuple[str, str, int | None, np.ndarray]]:
        """Module, path of the (first) parameter, expert and matrix [O, I] of each of `modules`.

        Args:
          values: of the tensor.
        """
        if not self.stacked:
            yield self.module, self.parameter, self.expert, values
            return
        parts = {block.slot.path: block.cut_experts(values) for block in self.blocks}
        for tensor in by_expert(self.layout):
            slot = tensor.blocks[0].slot
            module = tensor.name.removesuffix(".weight")
            yield module, slot.path, slot.expert, parts[slot.path][slot.index[-1]]


@dataclass(frozen=True)
class Rule:
    """A regular expression (`re.search`) over the paths of matrices, and the scheme of what it
    finds."""

    pattern: str
    scheme: Scheme | None
    """None: `KEEP`."""
    _compiled: re.Pattern[str] = field(repr=False, compare=False)

    def finds(self, leaf: Leaf[Any]) -> bool:
        """Whether it finds a leaf.

        Raises:
          ConfigError: when it finds some parameters of a leaf and not the others.
        """
        if not leaf.matrix:
            return False
        found = [path for path in leaf.paths if self._compiled.search(path)]
        if found and len(found) < len(leaf.paths):
            rest = [path for path in leaf.paths if path not in found]
            raise ConfigError(
                f"rule {self.pattern!r} finds {first_few(found)} and not {first_few(rest)}, which "
                f"the file holds in one tensor, {leaf.tensor.name}; let it find all or none"
            )
        return bool(found)


def parse_rule(text: str, group_size: int | None = None) -> Rule:
    """A rule from `PATTERN=SCHEME` or `PATTERN=keep`; `group_size` is that of `scheme_named`.

    Raises:
      ConfigError: for another form, no regular expression, or an unknown scheme.
    """
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(
            f"rule {text!r} must be PATTERN=SCHEME or PATTERN={KEEP}, such as 'lm_head=w8a16'"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"rule {text!r}: its pattern is not a regular expression: {error}"
        ) from None
    return Rule(pattern, None if name == KEEP else scheme_named(name, group_size), compiled)


def check_group_size(group_size: int | None, schemes: Sequence[str], rules: Sequence[str]) -> None:
    """Refuse a size for schemes of which none has groups of a size to choose.

    Raises:
      ConfigError: then, and for an unknown scheme or a rule of another form.
    """
    used = [scheme_named(scheme, group_size) for scheme in schemes]
    used += [found.scheme for found in map(parse_rule, rules) if found.scheme is not None]
    if group_size is not None and all(each.layout != "pack-quantized" for each in used):
        raise ConfigError(
            f"group_size={group_size}: {', '.join(schemes)} has no groups of a size to choose; "
            "leave it out"
        )


def find_leaves(stored: StoredModel, files: Mapping[str, StoredTensor]) -> list[Leaf[StoredTensor]]:
    """Every tensor of a directory: those outside the layers, then layer by layer.

    Args:
      stored: the model in it.
      files: its tensors, by name.

    Raises:
      ConfigError: when the directory is quantized already.
    """
    parts: list[tuple[StoredTensor, Block]] = []
    for layers in stored.blocks.values():
        for tensor, block in (source for sources in layers.values() for source in sources):
            if not isinstance(tensor, StoredTensor):
                raise ConfigError(
                    f"{tensor.name} is quantized already; give the float model's directory"
                )
            parts.append((tensor, block))
    found = _leaves(parts, stored.model.config.part_layers())
    names = {leaf.tensor.name for leaf in found}
    others = [Leaf(tensor=tensor) for name, tensor in files.items() if name not in names]
    return others + found


def planned_leaves(model: Decoder) -> list[Leaf[TensorLayout]]:
    """Every tensor that a model would be saved as, in the order of `find_leaves`.

    Modules that predict further tokens are left out, as `fornax quantize` leaves them.

    Args:
      model: a decoder; abstract is enough.

    Raises:
      ConfigError: when no Hugging Face family can express the model.
    """
    layout = plan_layout(model, family_for(model.config).names)
    parts = [(tensor, block) for tensor in layout for block in tensor.blocks]
    parts = [part for part in parts if not part[1].slot.path.startswith("mtp/")]
    return _leaves(parts, model.config.part_layers())


def _leaves(
    parts: Iterable[tuple[TensorT, Block]], numbers: Mapping[str, Sequence[int]]
) -> list[Leaf[TensorT]]:
    """The leaves of tensors, each with all that parameters take of it.

    Args:
      parts: tensors, each with one parameter's block.
      numbers: of the layers in each part's stack.
    """
    found: dict[str, Leaf[TensorT]] = {}
    for tensor, block in parts:
        slot, layer = block.slot, None
        own = path = slot.path
        if slot.layer is not None:
            _, part, rest = path.split("/", 2)
            layer = numbers[part][slot.layer]
            own = f"layers/{layer}/{part}/{rest}"
        here = found.get(tensor.name)
        if here is not None:
            found[tensor.name] = replace(
                here,
                paths=(*here.paths, own),
                parameters=(*here.parameters, path),
                blocks=(*here.blocks, block),
            )
            continue
        table = path.endswith("/embedding")
        found[tensor.name] = Leaf(
            tensor=tensor,
            paths=(own,),
            layer=layer,
            expert=slot.expert,
            parameters=(path,),
            blocks=(block,),
            matrix=((slot.num_inputs > 0 or table) and tensor.name.endswith(".weight"))
            or slot.of_all_experts,
        )
    return sorted(found.values(), key=lambda leaf: -1 if leaf.layer is None else leaf.layer)


def assign(
    leaves: Sequence[Leaf[TensorT]], scheme: Scheme, rules: Sequence[Rule], config: DecoderConfig
) -> list[Leaf[TensorT]]:
    """The leaves with what becomes of each.

    Args:
      leaves: of a directory.
      scheme: of the leaves that no rule finds and that are quantized unless named.
      rules: what is otherwise.
      config: the model's.

    Raises:
      ConfigError: for a rule that finds nothing, a leaf that two rules find, a rule whose scheme a
        leaf cannot have, or when nothing is left to quantize.
    """
    hits = {rule.pattern: [leaf for leaf in leaves if rule.finds(leaf)] for rule in rules}
    for pattern, found in hits.items():
        if not found:
            paths = [path for leaf in leaves if leaf.matrix for path in leaf.paths]
            near = similar(re.sub(r"[^\w/]", "", pattern), paths) or paths
            raise ConfigError(
                f"rule {pattern!r} finds no matrix; near it are {first_few(near)}, all others are "
                "kept anyway"
            )
    assigned: list[Leaf[TensorT]] = []
    for leaf in leaves:
        own = [rule for rule in rules if rule.finds(leaf)]
        if len(own) > 1:
            raise ConfigError(
                f"{first_few(leaf.paths)} is found by the rules "
                f"{' and '.join(repr(rule.pattern) for rule in own)}; let one of them find it"
            )
        assigned.append(_assigned(leaf, scheme, own[0] if own else None, config))
    if all(leaf.scheme is None for leaf in assigned):
        kept = [f"{leaf.tensor.name} ({leaf.reason})" for leaf in assigned if leaf.matrix]
        raise ConfigError(
            f"nothing is left to quantize: {first_few(kept)}; take a scheme whose scales are for "
            "outputs, such as fp8, or rules that name other matrices"
        )
    by_text = [leaf for leaf in assigned if leaf.scheme and leaf.scheme.needs_text]
    if by_text and any(leaf.scheme and leaf.scheme.rotates for leaf in assigned):
        raise ConfigError(
            f"{first_few([leaf.tensor.name for leaf in by_text])} would be in a scheme that is "
            "measured on text through the model as it is, and w4a4 rotates the model; take schemes "
            "that need no text beside it"
        )
    others = [leaf for leaf in assigned if leaf.scheme and leaf.scheme.layout != "gpt-oss"]
    if others and any(leaf.scheme and leaf.scheme.layout == "gpt-oss" for leaf in assigned):
        raise ConfigError(
            f"gpt-oss's files have no other scheme beside the MXFP4 of experts, and "
            f"{first_few([leaf.tensor.name for leaf in others])} would be in another; keep it, or "
            "take another scheme for the experts too"
        )
    return assigned


def _assigned(
    leaf: Leaf[TensorT], scheme: Scheme, rule: Rule | None, config: DecoderConfig
) -> Leaf[TensorT]:
    tied = bool(config.tie_embeddings)
    if rule is not None:
        if rule.scheme is None:
            return replace(leaf, reason=f"kept by the rule {rule.pattern!r}")
        own = _of_family(rule.scheme, config)
        cannot = _cannot(leaf, own, tied=tied)
        if cannot:
            raise ConfigError(
                f"rule {rule.pattern!r} gives {first_few(leaf.paths)} the scheme "
                f"{rule.scheme.name}, and it is {cannot}; keep it, or find less"
            )
        return replace(leaf, scheme=own)
    scheme = _of_family(scheme, config)
    kept = _cannot(leaf, scheme, tied=tied) or _unless_named(leaf)
    return replace(leaf, reason=kept) if kept else replace(leaf, scheme=scheme)


def _of_family(scheme: Scheme, config: DecoderConfig) -> Scheme:
    """gpt-oss has a format of its own for MXFP4, which rounds no inputs."""
    if config.family == "gpt_oss" and scheme.layout == "mxfp4-pack-quantized":
        return replace(scheme, layout="gpt-oss", inputs=None)
    return scheme


def _unless_named(leaf: Leaf[Any]) -> str:
    """Why a leaf stays as it is unless a rule names it; nothing where it does not."""
    if leaf.parameter.endswith(ROUTERS):
        return "a router"
    if leaf.parameter == "lm_head/kernel":
        return "the output projection"
    if leaf.parameter.endswith("/embedding"):
        return "a table of embeddings"
    if leaf.layer is None:
        return "outside the layers"
    return ""


def _cannot(leaf: Leaf[Any], scheme: Scheme, *, tied: bool) -> str:
    """Why a leaf cannot have a scheme; nothing where it can."""
    if not leaf.paths:
        return "no parameter of the decoder"
    if leaf.parameter.endswith("/embedding") and tied:
        return "a table of embeddings that is the output projection too"
    if not leaf.matrix:
        return "no matrix of a linear layer"
    if scheme.layout == "gpt-oss" and not leaf.stacked:
        return "no tensor of experts, which gpt-oss's files alone have in MXFP4"
    if scheme.measures_inputs and leaf.layer is None:
        return "outside the layers, where no inputs are measured"
    if scheme.group is not None and leaf.inputs % scheme.group:
        return f"a matrix of {leaf.inputs} inputs, which groups of {scheme.group} do not divide"
    return ""
