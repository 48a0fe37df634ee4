"""A config small enough for virtual CPU devices: narrow and shallow, but of the same structure."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.data import Prefetch, PythonSource
from fornax.mesh import DtypePolicy, MeshConfig, ProcessConfig
from fornax.models import DecoderConfig
from fornax.optim import SOAP, Adafactor, OptimConfig, Optimizer, Shampoo
from fornax.plan.preflight.shrink_model import Depth, shrink_model, smallest_multiple
from fornax.train import EvalConfig, TrainConfig

__all__ = ["DEVICES", "Shrunk", "float32", "shrink", "with_mesh"]

DEVICES = 8
"""Virtual devices of a preflight."""

_MOST_SHARDS = 8
_SOURCE = "fornax.plan.preflight.documents:Documents"


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A config made small, and the meshes to try it on."""

    config: TrainConfig
    """On the largest mesh; every other choice is the user's own."""
    axes: tuple[str, ...]
    """Mesh axes that the config uses, slowest link first."""
    meshes: tuple[MeshConfig, ...]
    """The whole mesh; several, which hold every three axes together, where four do not fit."""


def shrink(config: TrainConfig, *, seq_len: int = 64, depth: Depth = "whole") -> Shrunk:
    """Shrink a config.

    Sizes of the mesh become 2 each, and the axis that takes what is left takes what is left of
    eight devices. Widths become the least that divide over it in the proportions of the model.

    Args:
      config: the user's; its model resolved.
      seq_len: tokens of a row.
      depth: how many layers; see `shrink_model`. `kinds` is for one device.

    Raises:
      ConfigError: when the config names no model.
    """
    if config.model is None:
        raise ConfigError("model is null; name weights with init_from, or describe the model")
    sizes = config.mesh.axis_sizes()
    axes = tuple(axis for axis, size in sizes.items() if size != 1)
    meshes = tuple(_meshes(config, axes))
    rules = config.mesh.resolved_rules()
    widest = {axis: max(getattr(mesh, axis) for mesh in meshes) for axis in sizes}

    def pieces(*logical: str) -> int:
        return math.lcm(*(math.prod(widest[axis] for axis in rules[name]) for name in logical))

    model = shrink_model(
        config.model, pieces=pieces, seq_len=seq_len, original_seq_len=config.seq_len, depth=depth
    )
    accumulate = min(config.accumulate, 2)
    shards = min(config.data.virtual_shards, _MOST_SHARDS)
    rows = smallest_multiple(8, math.lcm(shards, pieces("batch") * accumulate))
    source = PythonSource(
        target=_SOURCE,
        arguments={"seed": config.seed, "vocab": model.vocab_size, "seq_len": seq_len},
    )
    small = dataclasses.replace(
        config,
        model=model,
        init_from=None,
        seq_len=smallest_multiple(seq_len, pieces("length")),
        batch_size=rows,
        accumulate=accumulate,
        mesh=meshes[0],
        optim=_shrink_optim(config.optim, config.model, model),
        data=dataclasses.replace(
            config.data,
            source=source,
            eval_source=None,
            holdout=0.0,
            transforms=(),
            skip_steps=(),
            skip_records=(),
            epochs=None,
            virtual_shards=shards,
            prefetch=Prefetch(buffer=0),
        ),
        eval=EvalConfig(),
        processes=ProcessConfig(),
        profile_steps=(),
    )
    return Shrunk(config=small, axes=axes, meshes=meshes)


def float32(config: TrainConfig) -> TrainConfig:
    """The config with everything computed in float32."""
    return dataclasses.replace(config, dtypes=DtypePolicy())


def with_mesh(config: TrainConfig, **sizes: int) -> TrainConfig:
    """The config on a mesh of these sizes, all other axes 1, under its own rules."""
    mesh = MeshConfig(**{"fsdp": 1, **sizes}, rules=config.mesh.rules)
    return dataclasses.replace(config, mesh=mesh)


def _meshes(config: TrainConfig, axes: tuple[str, ...]) -> Iterator[MeshConfig]:
    """The whole mesh on eight devices; every choice of three axes where there are more."""
    most = int(math.log2(DEVICES))
    for some in itertools.combinations(axes, min(len(axes), most)):
        sizes = dict.fromkeys(some, 2)
        rest = next((axis for axis in some if getattr(config.mesh, axis) == -1), None)
        if rest is not None:
            sizes[rest] = _rest(config, rest, DEVICES // 2 ** (len(some) - 1))
        yield MeshConfig(**{"fsdp": 1, **sizes}, rules=config.mesh.rules)


def _rest(config: TrainConfig, axis: str, devices: int) -> int:
    """The most devices that the open axis can have: its heads and layers must divide."""
    model = config.model
    assert model is not None
    counts = {
        "kv_heads": model.kv_heads,
        "heads": model.num_heads,
        "layers": model.num_layers,
    }
    rules = config.mesh.resolved_rules()
    bound = [count for name, count in counts.items() if axis in rules[name]]
    while devices > 2 and any(count % devices for count in bound):
        devices //= 2
    return devices


def _shrink_optim(config: OptimConfig, old: DecoderConfig, new: DecoderConfig) -> OptimConfig:
    """The same chain; a first update that moves, and matrices factored as before."""
    share = new.hidden_size / old.hidden_size
    groups = tuple(
        dataclasses.replace(group, optimizer=_shrink_optimizer(group.optimizer, share))
        for group in config.groups
    )
    return dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, warmup_steps=0),
        optimizer=_shrink_optimizer(config.optimizer, share),
        groups=groups,
    )


def _shrink_optimizer(optimizer: Optimizer | None, share: float) -> Optimizer | None:
    """Thresholds on the sides of a matrix shrink with the sides."""
    if isinstance(optimizer, Adafactor):
        least = max(1, round(optimizer.min_dim_size_to_factor * share))
        return dataclasses.replace(optimizer, min_dim_size_to_factor=least)
    if isinstance(optimizer, Shampoo):
        side = max(1, round(optimizer.block_size * share))
        return dataclasses.replace(optimizer, block_size=side)
    if isinstance(optimizer, SOAP):
        most = max(1, round(optimizer.max_precondition_dim * share))
        return dataclasses.replace(optimizer, max_precondition_dim=most)
    return optimizer
