"""The stack of layers written down plainly: one after the other, each with its own parameters;
then the modules that predict further tokens.

It shares the modules of MLPs and embeddings with `models.Decoder`, and neither the loop over
layers, what layers hand on to later ones, nor their order of norms, branches and sums.

Legend: B rows, T tokens of a row, D model width, L layers, P width of a layer's input.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.kernels import ACTIVATIONS
from fornax.models import Decoder, DecoderConfig, Routing
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.layer_inputs import LayerInput
from fornax.models.layers import DecoderLayer
from fornax.models.rope import rotations
from fornax.preflight.attention import KeysAndValues, PlainAttention
from fornax.preflight.formulas import normed, project

__all__ = ["plain_hidden"]

Parts = Mapping[str, Any]
"""The modules of one layer, by attribute."""


def plain_hidden(
    decoder: Decoder, batch: Mapping[str, jax.Array]
) -> tuple[list[jax.Array], Routing | None]:
    """The final norm's output x [B, T, D] and then that of each module that predicts further
    tokens; and what the routers did, by layer. As in pretraining, experts have the room that
    `capacity_factor` says.

    Args:
      decoder: whose parts are plain.
      batch: tokens, positions and segment ids.
    """
    config, tokens_BT, positions_BT = decoder.config, batch["tokens"], batch["positions"]
    context = LayerContext(
        positions_BT=positions_BT,
        segment_ids_BT=batch["segment_ids"],
        rotations=dict(rotations(config, positions_BT)),
        drops_tokens=True,
    )
    x_BTD = decoder.embed(tokens_BT)
    inputs_BTLP = _inputs(decoder, tokens_BT, x_BTD)
    kinds = config.layer_kinds()
    known: dict[int, KeysAndValues] = {}
    routings: list[Routing] = []
    for index, kind in enumerate(kinds):
        parts = _parts(decoder, config, index)
        shared = known[_source(config, index)] if kind.keys == "shared" else None
        x_BTD, known[index] = _first(x_BTD, kind, config, parts, context, shared)
        x_BTD, routing = _second(x_BTD, kind, config, parts, context)
        routings += [] if routing is None else [routing]
        if inputs_BTLP is not None:
            x_BTD = x_BTD + _taken_in(x_BTD, inputs_BTLP[:, :, index], parts["layer_input"])
        if config.layer_scale:
            x_BTD = x_BTD * parts["layer_scale"].scale[...]
    found = [decoder.final_norm(x_BTD)]
    for index in range(config.num_mtp_modules):
        x_BTD, routing = _module(decoder, index, found[-1], tokens_BT, context)
        found.append(x_BTD)
        routings += [] if routing is None else [routing]
    routing = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *routings) if routings else None
    return found, routing


def _module(
    decoder: Decoder, index: int, x_BTD: jax.Array, tokens_BT: jax.Array, context: LayerContext
) -> tuple[jax.Array, Routing | None]:
    """What a module makes of the hidden states before it and of the token `index` + 1 places on
    (DeepSeek-AI 2024, arXiv:2412.19437, equations 21 and 22). At a row's end that token is one of
    its beginning, which no loss sees."""
    config, kind, on = decoder.config, decoder.config.mtp_kind, index + 1
    one = _slice(decoder.mtp, index)
    later_BTD = decoder.embed(jnp.concatenate([tokens_BT[:, on:], tokens_BT[:, :on]], axis=1))
    of_token, of_state = jnp.split(one.projection.kernel[...].astype(jnp.float32), 2)
    x_BTD = normed(later_BTD, one.embed_norm) @ of_token + normed(x_BTD, one.hidden_norm) @ of_state
    layer: DecoderLayer = one.layer
    x_BTD, _ = _first(x_BTD, kind, config, layer.parts(), context, None)
    x_BTD, routing = _second(x_BTD, kind, config, layer.parts(), context)
    if config.layer_scale:
        x_BTD = x_BTD * layer.layer_scale.scale[...]
    return one.norm(x_BTD), routing


def _parts(decoder: Decoder, config: DecoderConfig, index: int) -> Parts:
    """The modules of one layer: of each part's stack its own slice."""
    return {
        part: _slice(getattr(decoder.layers, part), layers.index(index))
        for part, layers in config.part_layers().items()
        if index in layers
    }


def _slice(stacked: Any, place: int) -> Any:
    """One module of a stack of them."""
    graphdef, stack = nnx.split(stacked)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[place], stack))


def _source(config: DecoderConfig, index: int) -> int:
    """The layer whose keys and values a layer takes: the last of its kind of attention that has
    some of its own."""
    pattern = config.attention_pattern
    attends = [pattern[layer % len(pattern)] for layer in range(config.num_layers)]
    own = range(config.num_layers - config.shared_kv_layers)
    return max(layer for layer in own if attends[layer] == attends[index])


def _first(
    x_BTD: jax.Array,
    kind: LayerKind,
    config: DecoderConfig,
    parts: Parts,
    context: LayerContext,
    shared: KeysAndValues | None,
) -> tuple[jax.Array, Any]:
    """The stream after attention, and the keys and values that there are; `shared` are those of an
    earlier layer."""
    attention, keys_and_values = parts[kind.attention_part], None
    branch_BTD = normed(x_BTD, parts.get("attention_norm"))
    if isinstance(attention, PlainAttention):
        branch_BTD, keys_and_values = attention.attend(branch_BTD, kind, context, shared)
    else:
        branch_BTD, _ = attention(branch_BTD, kind, context)
    branch_BTD = normed(branch_BTD, parts.get("post_attention_norm"))
    return x_BTD + config.residual_multiplier * branch_BTD, keys_and_values


def _second(
    x_BTD: jax.Array,
    kind: LayerKind,
    config: DecoderConfig,
    parts: Parts,
    context: LayerContext,
) -> tuple[jax.Array, Routing | None]:
    """The stream after the MLP or the experts, where there are any."""
    if kind.mlp == "none":
        return x_BTD, None
    into_BTD, routing = normed(x_BTD, parts.get("mlp_norm")), None
    if kind.mlp == "experts":
        branch_BTD, routing = parts["experts"](into_BTD, context, x_BTD)
    else:
        branch_BTD = parts["wide_mlp" if kind.wide_mlp else "mlp"](into_BTD)
    branch_BTD = normed(branch_BTD, parts.get("post_mlp_norm"))
    return x_BTD + config.residual_multiplier * branch_BTD, routing


def _inputs(decoder: Decoder, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array | None:
    """Further inputs of all layers [B, T, L, P], as `models.LayerInputs` says."""
    module = decoder.layer_inputs
    if module is None:
        return None
    split = (*tokens_BT.shape, decoder.config.num_layers, -1)
    own_BTLP = module.embedding[...][tokens_BT].astype(jnp.float32).reshape(split)
    made_BTLP = project("BTD,DX->BTX", x_BTD.astype(jnp.float32), module.projection)
    made_BTLP = normed(made_BTLP.reshape(split) / x_BTD.shape[-1] ** 0.5, module.norm)
    return (own_BTLP * own_BTLP.shape[-1] ** 0.5 + made_BTLP) / 2**0.5


def _taken_in(x_BTD: jax.Array, input_BTP: jax.Array, module: LayerInput) -> jax.Array:
    """What a layer adds to the stream for its input."""
    gate_BTP = ACTIVATIONS[module.activation](project("BTD,DP->BTP", x_BTD, module.gate))
    return normed(project("BTP,PD->BTD", gate_BTP * input_BTP, module.projection), module.norm)
