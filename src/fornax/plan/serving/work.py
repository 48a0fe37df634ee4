"""What an engine's steps read, compute and exchange on one device, in closed form.

Legend: T tokens of a step, M samples of a step, D model width, V vocabulary, N query heads,
K key/value heads, H head width.
"""

import math
from dataclasses import dataclass
from typing import cast

import jax
from flax import nnx

from fornax import kernels
from fornax.kernels import paged_attention_operation
from fornax.kernels._paged_attention import blockwise, tpu
from fornax.kernels._paged_attention.call import PagedCall
from fornax.models import cache_layers, cache_windows
from fornax.plan.facts import Work
from fornax.plan.serving.engine import Engine
from fornax.plan.serving.linear import LinearAttention, linear_of

Weight = kernels.PackedWeight | jax.ShapeDtypeStruct
"""As shapes."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes that every step has, on one device."""

    body_bytes: int
    """Weights that every step reads: all but embedding table, output projection and experts."""
    body_products: int
    """Multiplications with them that a token takes."""
    expert_bytes: int
    """Of all experts of all layers."""
    expert_products: int
    """Multiplications with one token of each expert."""
    chosen_share: float
    """Of a layer's experts, what one token chooses."""
    head_bytes: int
    """Of the output projection, tied or not."""
    head_products: int
    table_row_bytes: float
    """Of the embedding table, for one token."""
    token_bytes: int
    """Of a row of activations between layers."""
    reductions: int
    """All-reduces of activations in a step."""
    logits: int
    """Of one sample."""
    layers: int

    def weight_bytes(self, tokens: int) -> float:
        """Weights that the layers of a step read, when each token's experts are drawn evenly."""
        touched = 1 - (1 - self.chosen_share) ** tokens
        return self.body_bytes + touched * self.expert_bytes

    @property
    def token_products(self) -> float:
        """Multiplications of a token with the layers' weights."""
        return self.body_products + self.chosen_share * self.expert_products


def step_sizes(engine: Engine) -> StepSizes:
    """Read them off the weights."""
    found = {part: [0, 0] for part in ("embed", "lm_head", "layers", "experts")}
    for path, variable in nnx.to_flat_state(engine.weights.state):
        value = variable.get_value()
        part = found[_part(path)]
        part[0] += _local_bytes(value)
        if path[-1] in ("kernel", "embedding"):
            part[1] += _local_size(value)
    model, size = engine.model.config, engine.devices
    tied, experts = found["lm_head"][0] == 0, model.experts
    head = found["embed"] if tied else found["lm_head"]
    width = engine.weights.placement.compute_dtype.itemsize
    vocab = model.vocab_size // size if model.vocab_size % size == 0 else model.vocab_size
    return StepSizes(
        body_bytes=found["layers"][0],
        body_products=found["layers"][1],
        expert_bytes=found["experts"][0],
        expert_products=found["experts"][1],
        chosen_share=experts.experts_per_token / experts.num_experts if experts else 0.0,
        head_bytes=head[0],
        head_products=head[1],
        table_row_bytes=found["embed"][0] / vocab,
        token_bytes=model.hidden_size * width,
        reductions=0 if size == 1 else 2 * model.num_layers + (vocab < model.vocab_size),
        logits=vocab,
        layers=model.num_layers,
    )


def _part(path: tuple[object, ...]) -> str:
    """Where a weight of the model counts."""
    names = tuple(map(str, path))
    if names[0] in ("embed", "lm_head"):
        return names[0]
    routed = names[1:2] == ("experts",) and names[2] in ("gate", "up", "down")
    return "experts" if routed else "layers"


def _leaves(value: Weight) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a weight, packed or plain."""
    if isinstance(value, kernels.PackedWeight):
        arrays = [array for array in (value.values, value.scales) if array is not None]
        return cast("list[jax.ShapeDtypeStruct]", arrays)
    return [value]


def _local_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _local_bytes(value: Weight) -> int:
    return sum(math.prod(_local_shape(leaf)) * leaf.dtype.itemsize for leaf in _leaves(value))


def _local_size(value: Weight) -> int:
    """Numbers of a weight, without what packing pads."""
    if isinstance(value, kernels.PackedWeight):
        return math.prod(value.shape)
    return math.prod(_local_shape(value))


@dataclass(frozen=True)
class Attention:
    """Attention over the paged cache, and linear layers' over states, on one device."""

    choice: kernels.Choice
    """Which implementation runs, and why those preferred to it do not."""
    layers: tuple[tuple[int, int | None], ...]
    """Number of layers with each window; linear ones are not among them."""
    key_bytes: int
    """Of one token's key and value in a layer, as far as a device reads them."""
    pair_flops: int
    """Of one query and one key in a layer."""
    page_size: int
    queries: int
    """That one reading of the keys serves, and that are scored together."""
    passes: int
    """Times a key and value cross the memory's bus for one reading."""
    linear: LinearAttention | None

    @property
    def written_bytes(self) -> int:
        """Of a token's keys and values in all layers."""
        return self.key_bytes * sum(layers for layers, _ in self.layers)

    @property
    def implementation(self) -> str:
        """The name of the one that runs."""
        return self.choice.implementation

    def decode(self, batch: int, context: int) -> Work:
        """Of a step in which each of `batch` sequences has one token."""
        moved = flops = 0.0
        rows = min(self.queries, batch) if self.implementation == "pallas_tpu" else 1
        for layers, window in self.layers:
            keys = self._keys(context if window is None else min(context, window))
            moved += layers * batch * keys * self.passes * self.key_bytes
            flops += layers * batch * keys * rows * self.pair_flops
        linear = None if self.linear is None else self.linear.decode(batch)
        return _sum(flops, moved, linear)

    def prompt(self, start: int, stop: int) -> Work:
        """Of a step with tokens `start` to `stop` of one prompt."""
        moved = flops = 0.0
        for first in range(start, stop, self.queries):
            last = min(first + self.queries, stop)
            for layers, window in self.layers:
                seen = last if window is None else min(last, window + self.queries)
                keys = self._keys(seen)
                moved += layers * keys * self.key_bytes * self.passes
                flops += layers * keys * (last - first) * self.pair_flops
        linear = None if self.linear is None else self.linear.prompt(stop - start)
        return _sum(flops, moved, linear)

    def _keys(self, count: int) -> int:
        """Keys that are read: whole pages."""
        return -(-count // self.page_size) * self.page_size


def _sum(flops: float, moved: float, linear: Work | None) -> Work:
    """Of layers that attend and linear ones."""
    if linear is not None:
        flops, moved = flops + linear.flops, moved + linear.bytes
    return Work(kind="attention", flops=flops, bytes=moved)


def attention_of(engine: Engine, tokens: int) -> Attention:
    """How steps of `tokens` tokens attend."""
    model, size, limits = engine.model.config, engine.devices, engine.limits
    heads = limits.cache_heads[0]  # those of all groups, in the models that are planned
    local_kv, width = heads.count // size, heads.width
    call = PagedCall(
        platform=engine.target.platform,
        tokens=tokens,
        rows=min(tokens, limits.max_num_seqs),
        table_width=limits.table_width,
        page_size=limits.page_size,
        heads=model.num_heads // size,
        kv_heads=local_kv,
        head_dim=width,
        dtype=engine.weights.placement.compute_dtype.name,
        cache_dtype=str(limits.cache_dtype),
        window=None,
        softcap=model.attention_logit_softcap,
        sinks=model.attention_sinks,
        shared=heads.parts == 1,
    )
    choice = paged_attention_operation.choice(call)
    return Attention(
        choice=choice,
        layers=tuple(zip(cache_layers(model), cache_windows(model), strict=True)),
        key_bytes=heads.parts * local_kv * width * limits.cache_dtype.itemsize,
        pair_flops=4 * width * (model.num_heads // size),
        page_size=limits.page_size,
        queries=_queries(choice.implementation, tokens),
        passes=3 if choice.implementation == "xla" else 1,
        linear=linear_of(engine),
    )


def _queries(implementation: str, tokens: int) -> int:
    """Queries for which a kernel reads the keys once; of a chunk, where it keeps them at hand."""
    match implementation:
        case "pallas_tpu":
            return tpu.QUERIES
        case "xla":
            return blockwise.LARGEST_TILE
        case _:
            return tokens
