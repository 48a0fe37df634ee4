"""The rule table: logical axes of arrays to the mesh axes that divide them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.config.errors import ShardingError
from fornax.config.suggest import did_you_mean
from fornax.mesh.capabilities import MESH_AXES

__all__ = [
    "DEFAULT_RULES",
    "Rules",
    "axes_in_use",
    "constrain",
    "current_mesh",
    "current_rules",
    "dividing",
    "merge_rules",
    "mesh_in_use",
    "named_sharding",
    "partition_spec",
    "safe_rules",
    "shards",
    "stage_axes",
    "use_mesh",
]

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis to the mesh axes that divide it; an empty tuple replicates."""

DEFAULT_RULES: Rules = {
    "batch": ("slice", "data", "stage", "fsdp", "expert"),
    "length": ("context",),
    "activation_embed": ("tensor",),
    "activation_heads": ("tensor",),
    "activation_kv_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",),
    "embed": ("stage", "fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "groups": (),
    "conv": (),
    "layer_input": ("stage", "fsdp", "expert"),
    "latent": ("stage", "fsdp", "expert"),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "router": (),
    "layers": ("stage",),
    "norm": (),
}


def _unknown(kind: str, name: str, allowed: Sequence[str]) -> ShardingError:
    return ShardingError(f"{kind} {name!r} is not known; {did_you_mean(name, allowed)}")


def merge_rules(rules: Rules, overrides: Rules) -> Rules:
    """`rules` with `overrides` laid over them.

    Raises:
      ShardingError: for a logical or mesh axis that does not exist, or one named twice.
    """
    for logical, axes in overrides.items():
        if logical not in rules:
            raise _unknown("logical axis", logical, list(rules))
        for axis in axes:
            if axis not in MESH_AXES:
                raise _unknown(f"mesh axis (for logical axis {logical!r})", axis, MESH_AXES)
        if len(set(axes)) != len(axes):
            raise ShardingError(f"rule for {logical!r} names a mesh axis twice: {axes}")
    return {**rules, **{k: tuple(v) for k, v in overrides.items()}}


def partition_spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The partition of an array whose dimensions carry logical `axes` (None: replicated).

    A mesh axis divides an array once: where two dimensions ask for it, the first has it.

    Raises:
      ShardingError: for a logical axis without a rule.
    """
    return PartitionSpec(*(entry or None for entry in _divide(axes, rules)))


def _divide(axes: Sequence[str | None], rules: Rules) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, each mesh axis given to the first that asks."""
    used: set[str] = set()
    entries: list[tuple[str, ...]] = []
    for logical in axes:
        if logical is not None and logical not in rules:
            raise _unknown("logical axis", logical, list(rules))
        free = tuple(a for a in (rules[logical] if logical else ()) if a not in used)
        used.update(free)
        entries.append(free)
    return entries


def named_sharding(
    mesh: Mesh,
    axes: Sequence[str | None],
    rules: Rules,
    *,
    shape: Sequence[int] | None = None,
    name: str = "array",
) -> NamedSharding:
    """Where an array with logical `axes` lies on `mesh`.

    Layers of a stack that do not divide are not divided: the axes that would divide them go to the
    next dimension that asks.

    Args:
      mesh: a mesh from `make_mesh`.
      axes: one logical axis (or None) a dimension.
      rules: the rule table.
      shape: when given, each dimension is checked to divide.
      name: what the array is called in an error.

    Raises:
      ShardingError: for an unknown axis, a wrong number of them, or a dimension that does not
        divide over its mesh axes.
    """
    if shape is not None and len(shape) != len(axes):
        raise ShardingError(
            f"{name} has {len(shape)} dimensions {tuple(shape)} and {len(axes)} logical axes "
            f"{tuple(axes)}; name one axis, or None, for each dimension"
        )
    if shape is not None:
        axes = [
            None
            if logical == "layers" and not _divides(size, rules.get(logical, ()), mesh)
            else logical
            for size, logical in zip(shape, axes, strict=True)
        ]
    entries = _divide(axes, rules)
    if shape is not None:
        for dim, (size, logical, entry) in enumerate(zip(shape, axes, entries, strict=True)):
            _check_divides(name, dim, size, logical, entry, mesh)
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))


def _divides(size: int, entry: Iterable[str], mesh: Mesh) -> bool:
    return size % math.prod(mesh.shape[axis] for axis in entry) == 0


def _check_divides(
    name: str, dim: int, size: int, logical: str | None, entry: tuple[str, ...], mesh: Mesh
) -> None:
    if not _divides(size, entry, mesh):
        over = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in entry if mesh.shape[axis] > 1)
        raise ShardingError(
            f"{name}: dimension {dim} ({logical}) of size {size} does not divide over {over}; "
            f"choose sizes in `mesh` that divide {size}, or set `mesh.rules.{logical}` to []"
        )


def safe_rules(sizes: Mapping[str, int], rules: Rules) -> Rules:
    """`rules`, with a residual stream that is whole where dividing it makes XLA's products wrong.

    Where as many devices divide the width of weights as divide that of the stream, along other mesh
    axes, and further axes divide rows, XLA's partitioner multiplies rows of one device by weights
    meant for another's (jax 0.10.2 and 0.12.0.1; data, fsdp and tensor of 2 each).

    Args:
      sizes: of the mesh axes.
      rules: the rule table.
    """
    weights, stream = (
        {axis for axis in rules.get(name, ()) if sizes.get(axis, 1) > 1}
        for name in ("embed", "activation_embed")
    )
    count = math.prod(sizes[axis] for axis in stream)
    alike = math.prod(sizes[axis] for axis in weights) == count
    further = math.prod(sizes.values()) > math.prod(sizes[axis] for axis in weights | stream)
    if stream and stream != weights and alike and further:
        return {**rules, "activation_embed": ()}
    return rules


_current: ContextVar[tuple[Mesh, Rules] | None] = ContextVar("fornax_mesh", default=None)


@contextmanager
def use_mesh(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Iterator[None]:
    """Within the block (tracing included), `constrain` lays activations on `mesh` by `safe_rules`
    of `rules`."""
    token = _current.set((mesh, safe_rules(mesh.shape, rules)))
    try:
        yield
    finally:
        _current.reset(token)


def current_mesh() -> Mesh | None:
    """The mesh of the enclosing `use_mesh`, or None."""
    found = _current.get()
    return found[0] if found else None


def current_rules() -> Rules:
    """The rules of the enclosing `use_mesh`, or the default ones."""
    found = _current.get()
    return found[1] if found else DEFAULT_RULES


def mesh_in_use() -> Mesh | None:
    """The mesh of the enclosing `use_mesh` if it has several devices, else None."""
    mesh = current_mesh()
    return None if mesh is None or mesh.size == 1 else mesh


def axes_in_use(*logical: str) -> tuple[str, ...]:
    """The axes of the enclosing mesh, larger than 1, that divide these logical axes."""
    mesh, rules = current_mesh(), current_rules()
    if mesh is None:
        return ()
    return tuple(axis for name in logical for axis in rules[name] if mesh.shape[axis] > 1)


def stage_axes(rules: Rules) -> tuple[str, ...]:
    """The mesh axes that the stages of a pipeline lie along, the slowest first: `stage`, and before
    it `slice` where slices divide layers."""
    return tuple(axis for axis in ("slice", "stage") if axis == "stage" or axis in rules["layers"])


def shards(axes: Iterable[str] | None) -> int:
    """Over how many devices these axes of the enclosing mesh divide; 1 for none."""
    mesh = current_mesh()
    return math.prod(mesh.shape[axis] for axis in axes or ()) if mesh is not None else 1


def dividing(logical: str, *sizes: int) -> tuple[str, ...] | None:
    """`axes_in_use(logical)` where there are some and each size divides over them, else None."""
    axes = axes_in_use(logical)
    count = shards(axes)
    return axes if axes and all(size % count == 0 for size in sizes) else None


def constrain(x: Any, axes: Sequence[str | None]) -> Any:
    """`x` with its layout on the enclosing mesh fixed by logical `axes`; as it is outside one.

    Axes of a size that does not divide are an error, named, rather than silently padded.
    """
    found = _current.get()
    if found is None or found[0].size == 1:
        return x
    mesh, rules = found
    sharding = named_sharding(mesh, axes, rules, shape=x.shape, name="an activation")
    return jax.lax.with_sharding_constraint(x, sharding)
