"""What one device holds of a step: its share of heads, widths, rows and length."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from fornax.config.errors import ConfigError
from fornax.mesh import MESH_AXES, Rules, balances
from fornax.models import DecoderConfig
from fornax.plan.topology import Topology
from fornax.train import Hosts, TrainConfig
from fornax.train.hosts import data_shards
from fornax.train.step import batch_shardings


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
    expert_mlp: int
    """Of an expert's width."""
    shared_mlp: int
    """Of the width of what all tokens run through beside their experts."""
    attention_heads: int
    """Query heads whose attention a device computes: all of them where heads do not divide."""
    attention_kv_heads: int


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

    def size(self, logical: str) -> int:
        """Over how many devices a logical axis is divided."""
        return math.prod(self.mesh[axis] for axis in self.rules[logical])

    def axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes, larger than one, that divide a logical axis."""
        return tuple(axis for axis in self.rules[logical] if self.mesh[axis] > 1)


@functools.cache
def abstract_mesh(sizes: tuple[int, ...]) -> AbstractMesh:
    """A mesh of the trainer's axes without devices."""
    return AbstractMesh(sizes, MESH_AXES)


def local_step(config: TrainConfig, topology: Topology) -> LocalStep:
    """Divide a step over the devices of a topology, as the trainer would.

    Raises:
      ConfigError: when the model is not given.
      ShardingError: when model or length do not divide over the mesh.
    """
    model = config.model
    if model is None:
        raise ConfigError("model is null; describe it, or let init_from be read first")
    sizes = config.mesh.resolved_sizes(topology.num_devices)
    rules = config.mesh.resolved_rules()
    # The trainer's own checks read sizes only.
    mesh = cast("Mesh", abstract_mesh(tuple(sizes.values())))
    shards = data_shards(sizes, rules)
    rows = Hosts(multiple=shards * config.accumulate).padded(config.batch_size)
    tokens = jax.ShapeDtypeStruct((rows, config.seq_len), np.int32)
    batch_shardings({"tokens": tokens}, mesh, rules)

    def share(total: int, logical: str) -> int:
        return max(1, total // math.prod(sizes[axis] for axis in rules[logical]))

    N, K, experts = model.num_heads, model.kv_heads, model.experts
    shared = experts.shared_intermediate_size if experts else None
    heads = math.prod(sizes[axis] for axis in rules["activation_heads"])
    divides = N % heads == 0 and K % heads == 0
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
            expert_mlp=share(experts.intermediate_size, "mlp") if experts else 0,
            shared_mlp=share(shared, "mlp") if shared else 0,
            attention_heads=N // heads if divides else N,
            attention_kv_heads=K // heads if divides else K,
        ),
        rows=rows // config.accumulate // shards,
        length=config.seq_len // math.prod(sizes[axis] for axis in rules["length"]),
        compute_bytes=config.dtypes.compute_dtype.itemsize,
        param_bytes=config.dtypes.param_dtype.itemsize,
    )


@functools.cache
def windows(model: DecoderConfig) -> Mapping[int | None, int]:
    """How many layers see how many keys (None: all before them)."""
    return Counter(kind.window for kind in model.layer_kinds())


@functools.cache
def mlps(model: DecoderConfig) -> Mapping[Literal["mlp", "experts"], int]:
    """How many layers have an MLP, how many experts."""
    return Counter(kind.mlp for kind in model.layer_kinds())
