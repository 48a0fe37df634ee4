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
from fornax.kernels import cache_has_codes, paged_attention_operation
from fornax.kernels._paged_attention import blockwise, gpu, tpu_items
from fornax.kernels._paged_attention.call import PagedCall
from fornax.models import CacheHeads, cache_windows
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
    """Of the embedding table and that of the layers' further inputs, for one token."""
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
    """Read them off the weights; a module that drafts is not part of a step without speculation."""
    found = {part: [0, 0] for part in ("embed", "lm_head", "layers", "experts", "inputs")}
    input_row = 0.0
    for path, variable in nnx.to_flat_state(engine.weights.state):
        if path[0] == "mtp":
            continue
        value = variable.get_value()
        part = found[_part(path)]
        if _part(path) == "inputs":
            input_row = _local_bytes(value) / _local_shape(value)[0]
        part[0] += _local_bytes(value)
        if path[-1] in ("kernel", "embedding"):
            part[1] += _local_size(value)
    model, size = engine.model.config, engine.devices
    tied, experts = found["lm_head"][0] == 0, model.experts
    head = found["embed"] if tied else found["lm_head"]
    width = engine.weights.placement.compute_dtype.itemsize
    vocab = model.vocab_size // size if model.vocab_size % size == 0 else model.vocab_size
    branches = sum(2 - (kind.mlp == "none") for kind in model.layer_kinds())
    return StepSizes(
        body_bytes=found["layers"][0],
        body_products=found["layers"][1],
        expert_bytes=found["experts"][0],
        expert_products=found["experts"][1],
        chosen_share=experts.experts_per_token / experts.num_experts if experts else 0.0,
        head_bytes=head[0],
        head_products=head[1],
        table_row_bytes=found["embed"][0] / vocab + input_row,
        token_bytes=model.hidden_size * width,
        reductions=0 if size == 1 else branches + (vocab < model.vocab_size),
        logits=vocab,
        layers=model.num_layers,
    )


def _part(path: tuple[object, ...]) -> str:
    """Where a weight of the model counts."""
    names = tuple(map(str, path))
    if names == ("layer_inputs", "embedding"):
        return "inputs"
    if names[0] in ("embed", "lm_head"):
        return names[0]
    routed = names[1:2] == ("experts",) and names[2] in ("gate", "up", "down")
    return "experts" if routed else "layers"


def _leaves(value: Weight) -> list[jax.ShapeDtypeStruct]:
    """The arrays of a weight, packed or plain."""
    if isinstance(value, kernels.PackedWeight):
        return cast("list[jax.ShapeDtypeStruct]", jax.tree.leaves(value))
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
class AttentionGroup:
    """Attention of the layers whose keys and values lie in one group of pages, on one device."""

    choice: kernels.Choice
    """Which implementation runs, and why those preferred to it do not."""
    window: int | None
    readers: int
    """Layers that attend to the group's keys."""
    writers: int
    """Those of them that keep keys and values of their own."""
    key_bytes: int
    gathered_bytes: int
    """Of a key and value in the queries' dtype, where XLA gathers them before it multiplies; else
    0."""
    """Of one token's key and value in a layer, as far as a device reads them."""
    pair_flops: int
    """Of one query and one key in a layer."""
    page_size: int
    queries: int
    """That one reading of the keys serves, and that are scored together."""
    rows: float
    """Queries that a kernel computes with for each of a decoding sequence's."""

    @property
    def read_bytes(self) -> int:
        """Bytes that cross the memory's bus for one reading of a key and value."""
        return self.key_bytes + 2 * self.gathered_bytes

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """FLOPs and bytes of a step in which each of `batch` sequences has one token."""
        keys = self._keys(context if self.window is None else min(context, self.window))
        seen = self.readers * batch * keys
        return seen * self.rows * self.pair_flops, seen * self.read_bytes

    def prompt(self, start: int, stop: int) -> tuple[float, float]:
        """The same of a step with tokens `start` to `stop` of one prompt."""
        flops = moved = 0.0
        for first in range(start, stop, self.queries):
            last = min(first + self.queries, stop)
            seen = last if self.window is None else min(last, self.window + self.queries)
            keys = self.readers * self._keys(seen)
            moved += keys * self.read_bytes
            flops += keys * (last - first) * self.pair_flops
        return flops, moved

    def _keys(self, count: int) -> int:
        """Keys that are read: whole pages."""
        return -(-count // self.page_size) * self.page_size


@dataclass(frozen=True)
class Attention:
    """Attention over the paged cache, and linear layers' over states, on one device."""

    groups: tuple[AttentionGroup, ...]
    linear: LinearAttention | None

    @property
    def written_bytes(self) -> int:
        """Of a token's keys and values in all layers."""
        return sum(group.writers * group.key_bytes for group in self.groups)

    @property
    def choices(self) -> tuple[kernels.Choice, ...]:
        """Which implementations run, each once."""
        return tuple(dict.fromkeys(group.choice for group in self.groups))

    def decode(self, batch: int, context: int) -> Work:
        """Of a step in which each of `batch` sequences has one token."""
        linear = None if self.linear is None else self.linear.decode(batch)
        return _sum([group.decode(batch, context) for group in self.groups], linear)

    def prompt(self, start: int, stop: int) -> Work:
        """Of a step with tokens `start` to `stop` of one prompt."""
        linear = None if self.linear is None else self.linear.prompt(stop - start)
        return _sum([group.prompt(start, stop) for group in self.groups], linear)


def _sum(attending: list[tuple[float, float]], linear: Work | None) -> Work:
    """Of layers that attend and linear ones."""
    flops, moved = (sum(parts) for parts in zip((0.0, 0.0), *attending, strict=True))
    if linear is not None:
        flops, moved = flops + linear.flops, moved + linear.bytes
    return Work(kind="attention", flops=flops, bytes=moved)


def attention_of(engine: Engine, tokens: int) -> Attention:
    """How steps of `tokens` tokens attend."""
    model = engine.model.config
    groups = zip(cache_windows(model), engine.limits.cache_heads, strict=True)
    return Attention(
        groups=tuple(_group(engine, tokens, *group) for group in groups),
        linear=linear_of(engine),
    )


def _group(engine: Engine, tokens: int, window: int | None, heads: CacheHeads) -> AttentionGroup:
    model, size, limits = engine.model.config, engine.devices, engine.limits
    local = heads._replace(count=heads.count // size)
    width = heads.width
    call = PagedCall(
        platform=engine.target.platform,
        tokens=tokens,
        rows=min(tokens, limits.max_num_seqs),
        table_width=limits.table_width,
        page_size=limits.page_size,
        heads=model.num_heads // size,
        kv_heads=local.count,
        head_dim=width,
        dtype=engine.weights.placement.compute_dtype.name,
        cache_dtype=str(limits.cache_dtype),
        window=None,
        softcap=model.attention_logit_softcap,
        sinks=model.attention_sinks,
        shared=heads.parts == 1,
        joined=heads.joined,
        capability=engine.topology.chip.compute_capability,
        scaled=cache_has_codes(limits.cache_dtype),
    )
    choice = paged_attention_operation.choice(call)
    lanes = tpu_items.LANES if choice.implementation == "pallas_tpu" else 1
    group = call.heads // call.kv_heads
    readers = [kind for kind in model.layer_kinds() if not kind.linear and kind.window == window]
    return AttentionGroup(
        choice=choice,
        window=window,
        readers=len(readers),
        writers=sum(kind.keys != "shared" for kind in readers),
        key_bytes=local.token_bytes(limits.cache_dtype),
        gathered_bytes=local.token_bytes(call.dtype) if choice.implementation == "xla" else 0,
        pair_flops=4 * -(-width // lanes) * lanes * call.heads,
        page_size=limits.page_size,
        queries=_queries(choice.implementation, call),
        rows=_rows(choice.implementation, group) / group,
    )


def _rows(implementation: str, group: int) -> int:
    """Queries that a kernel computes with for those of a key head of one token."""
    match implementation:
        case "pallas_tpu":
            return tpu_items.few_queries(group)
        case "pallas_gpu":
            return gpu.QUERIES
        case _:
            return group


def _queries(implementation: str, call: PagedCall) -> int:
    """Queries for which a kernel reads the keys once; of a chunk, where it keeps them on chip."""
    match implementation:
        case "pallas_tpu":
            return tpu_items.block_tokens(call.tokens, call.heads, call.kv_heads, call.head_dim)
        case "pallas_gpu":
            return gpu.largest_tile(call.heads // call.kv_heads)
        case "xla":
            return blockwise.LARGEST_TILE
        case _:
            return call.tokens
