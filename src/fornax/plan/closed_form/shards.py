"""What one device holds of a step: its share of heads, widths, rows and length."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from fornax.config.errors import ConfigError
from fornax.kernels._delta_rule import CHUNK
from fornax.mesh import MESH_AXES, Rules, balances, safe_rules, stage_axes
from fornax.models import DecoderConfig, check_model, layers_outside
from fornax.models.config import LayerKind
from fornax.plan.topology import Topology
from fornax.train import Hosts, TrainConfig
from fornax.train.hosts import data_shards
from fornax.train.step import batch_shardings


@dataclass(frozen=True, kw_only=True)
class Routed:
    """Rows that a device's experts run, for each token of the device."""

    devices: int
    """P: over how many the experts are divided."""
    gathered: int
    """Devices whose tokens meet, the device's own included."""
    sends: bool
    """Whether each token is sent to the devices of its experts, or all tokens are gathered."""
    busiest: float
    """Rows of the device that has most: those of an even load times the imbalance."""
    room: float
    """Rows that buffers have room for: those of the worst routing."""
    leaving: float
    """Of the device's own tokens, rows that buffers have room for before they are sent."""
    capacity: int | None
    """Tokens of a row that an expert has room for; None: all."""


MODULE_LAYERS = "mtp/layer"
"""Where the parameters of the layers of modules that predict further tokens lie."""
EVEN = 1.0
"""Rows of the busiest device over the mean, where nothing else is said. Published runs of experts
balance the routing artificially, so that it is 1; `expert_load_max` of a run's metrics is the same
ratio for experts, and more than that of devices."""


def routed(
    model: DecoderConfig, sizes: Mapping[str, int], rules: Rules, load: float, length: int
) -> Routed:
    """How the tokens of a device meet the experts, as `fornax.models.dispatch` has them.

    Args:
      model: of which some layers may have experts.
      sizes: mesh axis to size.
      rules: logical axis to mesh axes.
      load: rows of the busiest device over the mean.
      length: tokens of a row.
    """
    experts = model.experts
    if experts is None:
        return Routed(
            devices=1, gathered=1, sends=False, busiest=0, room=0, leaving=0, capacity=None
        )
    k, over = experts.experts_per_token, rules["expert"]
    holding = {*rules["batch"], *rules["length"]}
    P = math.prod(sizes[axis] for axis in over)
    gathered = math.prod(sizes[axis] for axis in over if axis in holding)
    capacity = experts.capacity(length)
    own = length // math.prod(sizes[axis] for axis in rules["length"])

    def most(count: int) -> float:
        """Rows of this many experts, for each token of one device."""
        return min(k, count) if capacity is None else min(k, count, count * capacity / own)

    room = gathered * most(experts.num_experts // P)
    wanted = experts.exchange == "all_to_all" or (experts.exchange == "auto" and k < P)
    return Routed(
        devices=P,
        gathered=gathered,
        sends=wanted and gathered == P > 1,
        busiest=min(load * gathered * k / P, room) if P > 1 else room,
        room=room,
        leaving=most(experts.num_experts),
        capacity=capacity,
    )


@dataclass(frozen=True, kw_only=True)
class LinearShares:
    """One device's share of a layer with linear attention, whatever its rule."""

    heads: int
    """Heads of values."""
    key_heads: int
    """Heads of queries and keys; groups of Mamba-2, all of which are on each device."""
    chunk: int
    """C: tokens of a chunk."""
    padding: float
    """Tokens of the chunks for each token: 1, or more where they do not fill the last one."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """One device's share of a layer's widths."""

    stream: int
    """Of the residual stream's width."""
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    experts: int
    """Experts of a layer; 0 without."""
    chosen: int
    """Experts of a token."""
    routed: Routed
    """Rows of its experts, for each token that it holds."""
    expert_mlp: int
    """Of an expert's width."""
    shared_mlp: int
    """Of the width of what all tokens run through beside their experts."""
    attention_heads: int
    """Query heads whose attention a device computes: all of them where heads do not divide."""
    attention_kv_heads: int
    global_kv_heads: int
    """Key/value heads of the layers with `global_heads`; 0 without."""
    global_attention_heads: int
    """As `attention_heads` of those layers."""
    global_attention_kv_heads: int
    linear: LinearShares | None
    module: int
    """Of the width of what a module that predicts further tokens projects for its layer."""

    def kv_heads_of(self, kind: LayerKind) -> int:
        """Key/value heads that a layer's projections make."""
        return self.global_kv_heads if kind.global_heads else self.kv_heads

    def attended(self, kind: LayerKind) -> tuple[int, int]:
        """Query and key/value heads whose attention a device computes in a layer."""
        if kind.global_heads:
            return self.global_attention_heads, self.global_attention_kv_heads
        return self.attention_heads, self.attention_kv_heads


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """A step from one device's point of view."""

    config: TrainConfig
    model: DecoderConfig
    topology: Topology
    mesh: Mapping[str, int]
    """Mesh axis to size."""
    rules: Rules
    shares: Shares
    rows: int
    """Rows of a micro-batch."""
    length: int
    """Tokens of a row."""
    compute_bytes: int
    """Bytes of an element in the compute dtype."""
    param_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this device."""
        return self.rows * self.length

    @property
    def context(self) -> int:
        """Devices that share a row's length."""
        return self.size("length")

    @property
    def balanced(self) -> bool:
        """Whether each of them has early and late tokens."""
        return balances(self.config.seq_len, self.context)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The mesh axes, larger than one, that the stages of a pipeline lie along."""
        return tuple(axis for axis in stage_axes(self.rules) if self.mesh[axis] > 1)

    @property
    def stages(self) -> int:
        """Stages of the pipeline; 1 without."""
        return math.prod(self.mesh[axis] for axis in self.stage_axes)

    def size(self, logical: str) -> int:
        """Over how many devices a logical axis is divided."""
        return math.prod(self.mesh[axis] for axis in self.rules[logical])

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes, larger than one, that divide a logical axis."""
        return tuple(axis for axis in self.rules[logical] if self.mesh[axis] > 1)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Layers of which a device runs some number in a micro-batch."""

    local: LocalStep
    """With the rows of one run."""
    kinds: tuple[LayerKind, ...]
    runs: int
    """Of each of them: the ticks of a pipeline, its bubble included."""
    staged: bool = False
    """Whether they are a stage of a pipeline."""
    stack: str = "layers"
    """The path of the stack that their parameters lie in."""

    @property
    def layers(self) -> int:
        """Runs of all of them."""
        return self.runs * len(self.kinds)

    @property
    def runs_of(self) -> Mapping[LayerKind, int]:
        """How many of those runs are of a layer of each kind."""
        return {kind: count * self.runs for kind, count in Counter(self.kinds).items()}

    @property
    def expert_layers(self) -> int:
        """How many of them are of layers with experts."""
        return self.runs * sum(kind.mlp == "experts" for kind in self.kinds)


def sections(local: LocalStep) -> tuple[Section, ...]:
    """The layers of a micro-batch: those before a pipeline, and those of its stages; or all, and
    those of modules that predict further tokens, which are in no pipeline.

    A stage runs its part of the layers at each of M R + P - 1 ticks (`fornax.models.pipeline`), on
    P / M times the rows that a device has of all else.
    """
    kinds, stages = local.model.layer_kinds(), local.stages
    if stages == 1:
        modules = (local.model.mtp_kind,) * local.model.num_mtp_modules
        own = Section(local=local, kinds=kinds, runs=1)
        ahead = Section(local=local, kinds=modules, runs=1, stack=MODULE_LAYERS)
        return (own, ahead) if modules else (own,)
    pipeline = local.config.pipeline
    count, parts = pipeline.count(stages), stages * pipeline.repeats
    slices = math.prod(local.mesh[axis] for axis in stage_axes(local.rules)[:-1])
    outside = layers_outside(kinds, stages, pipeline, slices=slices)
    own = kinds[outside : outside + (len(kinds) - outside) // parts]
    ticks = count * pipeline.repeats + stages - 1
    inside = dataclasses.replace(local, rows=local.rows * stages // count)
    staged = Section(local=inside, kinds=own, runs=ticks, staged=True)
    before = Section(local=local, kinds=kinds[:outside], runs=1)
    return (before, staged) if outside else (staged,)


@functools.cache
def abstract_mesh(sizes: tuple[int, ...]) -> AbstractMesh:
    """A mesh of the trainer's axes without devices."""
    return AbstractMesh(sizes, MESH_AXES)


def local_step(config: TrainConfig, topology: Topology, expert_load: float = EVEN) -> LocalStep:
    """Divide a step over the devices of a topology, as the trainer would.

    Args:
      config: of the run.
      topology: the chips.
      expert_load: rows of the busiest device over the mean, where devices divide experts.

    Raises:
      ConfigError: when the model is not given; for a load below the mean.
      ShardingError: when model or length do not divide over the mesh.
    """
    model = config.model
    if model is None:
        raise ConfigError("model is null; describe it, or let init_from be read first")
    if not expert_load >= 1:
        raise ConfigError(
            f"expert_load={expert_load} is less than the mean load; give 1 for an even load, or "
            "how many times the mean the busiest device has"
        )
    sizes = config.mesh.resolved_sizes(topology.num_devices)
    rules = safe_rules(sizes, config.mesh.resolved_rules())
    if math.prod(sizes[axis] for axis in rules["length"]) > 1:
        check_model(model, "context axis")
    if math.prod(sizes[axis] for axis in stage_axes(rules)) > 1:
        check_model(model, "stage axis")
    # The trainer's own checks read sizes only.
    mesh = cast("Mesh", abstract_mesh(tuple(sizes.values())))
    shards = data_shards(sizes, rules)
    rows = Hosts(multiple=shards * config.accumulate).padded(config.batch_size)
    _check_microbatches(config, sizes, rows // config.accumulate // shards)
    tokens = jax.ShapeDtypeStruct((rows, config.seq_len), np.int32)
    batch_shardings({"tokens": tokens}, mesh, rules)

    def share(total: int, logical: str) -> int:
        return max(1, total // math.prod(sizes[axis] for axis in rules[logical]))

    N, K, experts = model.num_heads, model.kv_heads, model.experts
    wide = model.global_heads
    own, other = attended(model, sizes, rules, K), (0, 0)
    if wide is not None:
        other = attended(model, sizes, rules, wide.num_kv_heads)
    shared = experts.shared_intermediate_size if experts else None
    length = config.seq_len // math.prod(sizes[axis] for axis in rules["length"])
    return LocalStep(
        config=config,
        model=model,
        topology=topology,
        mesh=MappingProxyType(sizes),
        rules=rules,
        shares=Shares(
            stream=share(model.hidden_size, "activation_embed"),
            heads=share(N, "heads"),
            kv_heads=share(K, "kv_heads"),
            mlp=share(model.intermediate_size, "mlp"),
            vocab=share(model.vocab_size, "vocab"),
            experts=share(experts.num_experts, "expert") if experts else 0,
            chosen=experts.experts_per_token if experts else 0,
            routed=routed(model, sizes, rules, expert_load, config.seq_len),
            expert_mlp=share(experts.intermediate_size, "mlp") if experts else 0,
            shared_mlp=share(shared, "mlp") if shared else 0,
            attention_heads=own[0],
            attention_kv_heads=own[1],
            global_kv_heads=share(wide.num_kv_heads, "kv_heads") if wide else 0,
            global_attention_heads=other[0],
            global_attention_kv_heads=other[1],
            module=share(2 * model.hidden_size, "mlp"),
            linear=linear_shares(model, math.prod(sizes[a] for a in rules["heads"]), length),
        ),
        rows=rows // config.accumulate // shards,
        length=length,
        compute_bytes=config.dtypes.compute_dtype.itemsize,
        param_bytes=config.dtypes.param_dtype.itemsize,
    )


def attended(
    model: DecoderConfig, sizes: Mapping[str, int], rules: Rules, kv_heads: int
) -> tuple[int, int]:
    """Query and key/value heads whose attention a device computes: all where they do not divide."""
    parts = math.prod(sizes[axis] for axis in rules["activation_heads"])
    if model.num_heads % parts or kv_heads % parts:
        return model.num_heads, kv_heads
    return model.num_heads // parts, kv_heads // parts


def linear_shares(model: DecoderConfig, parts: int, length: int) -> LinearShares | None:
    """A device's share of linear layers; None where there are none.

    Args:
      model: of which some layers may be linear.
      parts: devices that divide their heads.
      length: tokens of a row.
    """
    rule = model.linear
    if rule is None:
        return None
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    whole = rule.sharded_heads != rule.num_key_heads  # then each device has all key heads
    return LinearShares(
        heads=max(1, rule.num_key_heads * rule.heads_per_key // parts),
        key_heads=rule.num_key_heads if whole else max(1, rule.num_key_heads // parts),
        chunk=chunk,
        padding=-(-length // chunk) * chunk / length,
    )


def _check_microbatches(config: TrainConfig, sizes: Mapping[str, int], rows: int) -> None:
    """Refuse rows of a device that are not microbatches of a pipeline, as the trainer does.

    Raises:
      ConfigError: with the multiple that would do.
    """
    rules = safe_rules(sizes, config.mesh.resolved_rules())
    along = stage_axes(rules)
    stages, slices = (math.prod(sizes[axis] for axis in axes) for axes in (along, along[:-1]))
    if stages == 1:
        return
    each = config.pipeline.count(stages) // stages
    assert config.model is not None
    layers_outside(config.model.layer_kinds(), stages, config.pipeline, slices=slices)
    shards = math.prod(sizes[axis] for axis in rules["batch"])
    multiple = shards * each * config.accumulate
    if rows % each or config.batch_size % multiple:
        raise ConfigError(
            f"batch_size={config.batch_size} does not divide into accumulate={config.accumulate} x "
            f"{each * stages} microbatches over {shards // stages} data shards; use a multiple of "
            f"{multiple}, or change pipeline.microbatches"
        )


@functools.cache
def kinds_of(model: DecoderConfig) -> tuple[LayerKind, ...]:
    """The kinds of layers that the model and its modules have, each once."""
    return tuple(dict.fromkeys(model.kinds_with_modules()))


@functools.cache
def attending(model: DecoderConfig) -> tuple[LayerKind, ...]:
    """Those of them that have keys and values."""
    return tuple(kind for kind in kinds_of(model) if not kind.linear)
