"""The train state's arrays and where they lie: exact, from the trainer's own shapes and rules.

Model and optimizer are traced to shapes (no device is touched), then divided by the rule table.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from fornax import optim
from fornax.mesh import DtypePolicy, Rules, path_name, tree_shardings
from fornax.models import DecoderConfig, abstract_decoder
from fornax.optim import OptimConfig
from fornax.optim.shardings import state_shardings
from fornax.optim.tree import flatten
from fornax.plan.artifact import dividing_axes
from fornax.plan.closed_form.shards import (
    MODULE_LAYERS,
    LocalStep,
    Section,
    abstract_mesh,
    sections,
)

_LANES = 128


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """One array of the train state, as one device holds it."""

    name: str
    owner: str
    """`parameters` or `optimizer`."""
    shape: tuple[int, ...]
    """On one device."""
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes larger than one that divide each dimension."""
    bytes: int
    """On one device, with the padding of its layout."""

    @property
    def stack(self) -> str | None:
        """The path of the stack of layers that it belongs to; None for what is in no layer."""
        stacks = ("layers", MODULE_LAYERS)
        return next((stack for stack in stacks if self.name.startswith(f"{stack}/")), None)

    @property
    def part(self) -> str | None:
        """The part of a layer that it belongs to, such as `attention`."""
        stack = self.stack
        return None if stack is None else self.name.removeprefix(f"{stack}/").split("/")[0]

    @property
    def of_experts(self) -> bool:
        """Whether it has a part for each expert of each layer."""
        *_, owner, projection, _ = ("", "", *self.name.split("/"))
        return owner == "experts" and projection in ("gate", "up", "down")

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """Mesh axes that divide it, and not the work that it is used in: not those of experts, nor
        the stages that divide its layers."""
        stays = self.axes[1] if self.of_experts else ()
        stacked = self.name.startswith(("layers/", "mtp/"))
        dims = self.axes[1:] if stacked else self.axes
        return tuple(axis for dim in dims for axis in dim if axis not in stays)


@dataclass(frozen=True)
class _Shapes:
    params: nnx.State
    built: optim.Built
    optimizer: object


@functools.lru_cache(maxsize=64)
def _shapes(model: DecoderConfig, chain: OptimConfig, dtypes: DtypePolicy, steps: int) -> _Shapes:
    decoder = abstract_decoder(model, dtype=dtypes.param_dtype, compute_dtype=dtypes.compute_dtype)
    params = nnx.state(decoder, nnx.Param)
    built = optim.build(chain, total_steps=steps, params=params)
    optimizer = jax.eval_shape(built.init, nnx.to_pure_dict(params))
    return _Shapes(params, built, optimizer)


def state_arrays(local: LocalStep) -> tuple[StateArray, ...]:
    """Parameters and optimizer state of one device.

    Raises:
      ShardingError: for a parameter that does not divide; the message names it.
      ConfigError: when the optimizer's rules do not fit the model.
    """
    config = local.config
    return _state(
        (local.model, config.optim, config.dtypes, config.steps),
        tuple(local.mesh.values()),
        tuple(sorted(local.rules.items())),
        local.topology.chip.platform == "tpu",
    )


_What = tuple[DecoderConfig, OptimConfig, DtypePolicy, int]


@functools.lru_cache(maxsize=512)
def _state(
    what: _What,
    sizes: tuple[int, ...],
    rules: tuple[tuple[str, tuple[str, ...]], ...],
    tpu: bool,
) -> tuple[StateArray, ...]:
    shapes = _shapes(*what)
    return divided_arrays(shapes.params, shapes.built, shapes.optimizer, sizes, dict(rules), tpu)


def divided_arrays(
    params: nnx.State,
    built: optim.Built,
    optimizer: object,
    sizes: tuple[int, ...],
    rules: Rules,
    tpu: bool,
) -> tuple[StateArray, ...]:
    """Parameters and optimizer state of one device, of any model.

    Args:
      params: the trained `nnx.Param`s, abstract, with the logical axes of their dimensions.
      built: the optimizer.
      optimizer: its state, abstract.
      sizes: of the mesh's axes, in order.
      rules: logical axes to mesh axes.
      tpu: whether arrays are padded as TPUs lay them out.

    Raises:
      ShardingError: for a parameter that does not divide; the message names it.
    """
    mesh = abstract_mesh(sizes)
    where = flatten(
        nnx.to_pure_dict(cast("nnx.State", tree_shardings(params, cast("Mesh", mesh), dict(rules))))
    )
    leaves = flatten(nnx.to_pure_dict(params))
    beside = state_shardings(optimizer, built.views, where)
    found = [_one("parameters", path, leaf, where[path], tpu) for path, leaf in leaves.items()]
    states = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    for (path, leaf), sharding in zip(states, jax.tree.leaves(beside), strict=True):
        found.append(_one("optimizer", path_name(path), leaf, sharding, tpu))
    return tuple(found)


def _one(
    owner: str, name: str, leaf: jax.ShapeDtypeStruct, sharding: NamedSharding, tpu: bool
) -> StateArray:
    shape = sharding.shard_shape(tuple(leaf.shape))
    plain = math.prod(shape) * leaf.dtype.itemsize
    return StateArray(
        name=name,
        owner=owner,
        shape=shape,
        axes=dividing_axes(sharding, len(shape)),
        bytes=padded_bytes(shape, leaf.dtype.itemsize) if tpu else plain,
    )


def dealt_elements(staged: Section, params: list[StateArray]) -> tuple[int, int]:
    """Parameters of a stage's device that one part of the layers has, and of all its parts those
    that lie elsewhere: of layers that do not divide over the stages, or of which some run before.
    """
    local = staged.local
    stages, outside = local.stages, len(sections(local)) > 1
    part = uneven = 0
    for array in params:
        if array.stack is not None:
            across = any("stage" in dim for dim in array.axes[1:])
            layers = sum(array.part in kind.parts() for kind in staged.kinds)
            size = layers * math.prod(array.shape[1:]) * (stages if across else 1)
            part += size
            uneven += size * local.config.pipeline.repeats if across or outside else 0
    return part, uneven


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of an array in the TPU's tiled layout.

    An array lies in tiles of 8 x 128 elements of 32 bits over its two minor dimensions (16 x 128 of
    16 bits, 32 x 128 of 8). The compiler may choose which dimensions are minor, and takes those
    that pad least; a second-minor dimension smaller than the tile gets a smaller power of two.
    """
    count = math.prod(shape)
    if count == 0:
        return 0
    sizes = [size for size in shape if size > 1]
    if len(sizes) <= 1:
        return -(-count // _LANES) * _LANES * itemsize
    pairs = itertools.permutations(range(len(sizes)), 2)
    return min(_tiled(sizes, rows, lanes) for rows, lanes in pairs) * itemsize


def _tiled(sizes: Sequence[int], rows: int, lanes: int) -> int:
    """Elements with padding, when two dimensions are the minor ones."""
    tile = min(8, 1 << (sizes[rows] - 1).bit_length())
    padded = -(-sizes[rows] // tile) * tile * -(-sizes[lanes] // _LANES) * _LANES
    rest = math.prod(size for index, size in enumerate(sizes) if index not in (rows, lanes))
    return padded * rest
