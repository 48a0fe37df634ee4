"""A stored model run one layer at a time: no more than a layer's weights are in memory.

Legend: B batch, T tokens, D model width, V vocabulary, L layers, P width of further inputs, E
experts, R rows that meet a weight, K its inputs.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.models.attend import PassKeys
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.decoder import document_positions
from fornax.models.dispatch import SortedRows
from fornax.models.layers import DecoderLayer
from fornax.models.layout import flat_variables, num_inputs
from fornax.models.load import StoredModel
from fornax.models.rope import rotations
from fornax.models.scan import Kept

__all__ = ["Activations", "InputRounding", "LayerByLayer", "ProductInput"]


@dataclass(frozen=True)
class Activations:
    """Rows of tokens between two layers."""

    x_BTD: jax.Array
    inputs_LBTP: jax.Array | None
    """What layers take in beside the residual stream; None where they do not."""
    kept: Kept
    """Keys and values that later layers take."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProductInput:
    """What a layer multiplies by one of its weights."""

    x_RK: jax.Array
    sizes_E: jax.Array | None
    """int32: how many rows each expert has, whose rows are consecutive; rows of none come last.
    None where there are no experts."""


class InputRounding(Protocol):
    """What becomes of the inputs of a weight before they are multiplied: a registered pytree."""

    def __call__(self, x_RK: jax.Array, experts_R: jax.Array | None = None) -> jax.Array:
        """Return inputs of the same shape and dtype; `experts_R` says whose the rows are."""
        ...


class LayerByLayer:
    """A decoder whose layers are read when they run; what is outside them is read once.

    A row is one document of T tokens, without padding.
    """

    def __init__(self, stored: StoredModel, roundings: Mapping[str, InputRounding] | None = None):
        """Read the embeddings, the final norm and the output projection.

        Args:
          stored: the model.
          roundings: of inputs of weights outside the layers, by path, such as lm_head/kernel.
        """
        variables, roundings = flat_variables(stored.model), roundings or {}
        for path in stored.blocks:
            if not path.startswith(("layers/", "mtp/")):
                value = stored.read(path)
                if path in roundings and num_inputs(stored.model, path):
                    value = _Rounded(value, roundings[path])
                variables[path].set_value(value)
        self.stored = stored
        self.config: DecoderConfig = stored.model.config
        self.kinds = self.config.layer_kinds()
        self._parts = self.config.part_layers()

    def embed(self, tokens_BT: jax.Array) -> Activations:
        """What the first layer takes in."""
        model = self.stored.model
        x_BTD = model.embed(tokens_BT)
        inputs = model.layer_inputs
        return Activations(x_BTD, None if inputs is None else inputs(tokens_BT, x_BTD), {})

    def layer(self, index: int, stored: StoredModel | None = None) -> DecoderLayer:
        """Read a layer, by its number in the model, of `stored` where other weights of the same
        model are to be run."""
        stored = stored or self.stored
        parts = {}
        for part in self.kinds[index].parts():
            graphdef, state = nnx.split(getattr(stored.model.layers, part))
            module = nnx.merge(graphdef, state, copy=True)
            place = self._parts[part].index(index)
            for path, variable in flat_variables(module).items():
                variable.set_value(stored.read_layer(f"layers/{part}/{path}", place))
            parts[part] = module
        return DecoderLayer(parts)

    def run(
        self,
        layer: DecoderLayer,
        index: int,
        before: Activations,
        roundings: Mapping[str, InputRounding] | None = None,
    ) -> Activations:
        """Run a layer that `layer` read, of this number, with the inputs of weights rounded, by
        path, such as attention/q/kernel."""
        return self._run(layer, index, before, dict(roundings or {}), records=False)[0]

    def record(
        self, layer: DecoderLayer, index: int, before: Activations
    ) -> dict[str, ProductInput]:
        """What the layer multiplies by each of its weights, by path, such as attention/q/kernel."""
        return self._run(layer, index, before, {}, records=True)[1]

    def _run(
        self,
        layer: DecoderLayer,
        index: int,
        before: Activations,
        roundings: dict[str, InputRounding],
        *,
        records: bool,
    ) -> tuple[Activations, dict[str, ProductInput]]:
        inputs_LBTP = before.inputs_LBTP
        own_BTP = None if inputs_LBTP is None else inputs_LBTP[index]
        graphdef, state = nnx.split(layer)
        kind = self.kinds[index]
        x_BTD, kept, found = _run(
            self.config,
            kind,
            records,
            graphdef,
            state,
            before.x_BTD,
            own_BTP,
            before.kept,
            roundings,
        )
        return replace(before, x_BTD=x_BTD, kept=kept), found

    def logits(self, after: Activations) -> jax.Array:
        """float32 logits [B, T, V] of what the last layer gave."""
        model = self.stored.model
        return model.logits(model.final_norm(after.x_BTD))


@dataclass(frozen=True)
class _Watched:
    """A weight that sees what it is multiplied with."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> DTypeLike:
        return self.array.dtype


@dataclass(frozen=True)
class _Recorded(_Watched):
    """A weight that notes what it is multiplied with."""

    path: str
    found: dict[str, ProductInput]

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """See `kernels.Weight`."""
        size = math.prod(self.shape[:inputs])
        self.found[self.path] = ProductInput(x.reshape(-1, size), None)
        return kernels.linear(x, self.array.astype(x.dtype), inputs=inputs)

    def grouped(self, x_RK: jax.Array, rows: SortedRows) -> jax.Array:
        """See `dispatch.ExpertWeight`."""
        self.found[self.path] = ProductInput(x_RK, rows.sizes_E)
        return kernels.grouped_matmul(x_RK, self.array.astype(x_RK.dtype), rows.sizes_E)


@dataclass(frozen=True)
class _Rounded(_Watched):
    """A weight that rounds what it is multiplied with."""

    rounding: InputRounding

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """See `kernels.Weight`."""
        size = math.prod(self.shape[:inputs])
        rounded = self.rounding(x.reshape(-1, size)).reshape(x.shape)
        return kernels.linear(rounded, self.array.astype(x.dtype), inputs=inputs)

    def grouped(self, x_RK: jax.Array, rows: SortedRows) -> jax.Array:
        """See `dispatch.ExpertWeight`."""
        rounded = self.rounding(x_RK, rows.experts_R)
        return kernels.grouped_matmul(rounded, self.array.astype(x_RK.dtype), rows.sizes_E)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    config: DecoderConfig,
    kind: LayerKind,
    records: bool,
    graphdef: Any,
    state: Any,
    x_BTD: jax.Array,
    input_BTP: jax.Array | None,
    kept: Kept,
    roundings: dict[str, InputRounding],
) -> tuple[jax.Array, Kept, dict[str, ProductInput]]:
    """One layer; layers of one kind share the compiled program."""
    positions_BT = document_positions(x_BTD.shape[:2], None)
    context = LayerContext(
        positions_BT=positions_BT,
        segment_ids_BT=None,
        rotations=dict(rotations(config, positions_BT)),
        consecutive=True,
        layer_input_BTP=input_BTP,
    )
    layer = nnx.merge(graphdef, state)
    found: dict[str, ProductInput] = {}
    if records:
        for path, variable in flat_variables(layer).items():
            if num_inputs(layer, path):
                variable.set_value(_Recorded(variable.get_value(), path, found))
    variables = flat_variables(layer) if roundings else {}
    for path, rounding in roundings.items():
        variables[path].set_value(_Rounded(variables[path].get_value(), rounding))
    keys = None if kind.keys == "own" else PassKeys(context, kept)
    x_BTD, keys, _ = layer(x_BTD, kind, context, keys)
    window = kind.window or 0
    kept = {**kept, window: keys.kept[window]} if kind.keys == "kept" else kept
    return x_BTD, kept, found
