"""Checks of the rule table: does the model divide, does every rule and axis divide a thing.

What a program asks of the rules is seen, not guessed: the step is traced with a table that notes
which logical axes are looked up, and the layouts it fixes are read from what was traced.
"""

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fornax.mesh import MESH_AXES, partition_spec, tree_shardings
from fornax.preflight.harness import Case, CheckFailed, Harness
from fornax.preflight.shrink import describe_mesh, on_mesh
from fornax.preflight.subject import Subject
from fornax.train import Ledger, TrainerConfig
from fornax.train.hosts import data_shards, padding_text
from fornax.train.session import Programs, prepare
from fornax.train.state import split_model
from fornax.train.step import make_train_step

__all__ = ["Asked", "rules"]

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes of each dimension."""


def rules(harness: Harness, config: TrainerConfig) -> Iterator[Case]:
    """Whether the user's own model divides, whether every override and every mesh axis acts."""
    yield Case(
        group="rules", name="the full model divides", run=lambda: _full(config, harness.subject)
    )
    for mesh in harness.shrunk.meshes:
        small = on_mesh(harness.config, mesh)
        yield Case(
            group="rules",
            name=f"every rule and axis of {describe_mesh(mesh)} acts",
            run=lambda small=small: _used(small, harness),
        )


class Asked(UserDict[str, tuple[str, ...]]):
    """A rule table that notes which logical axes are looked up."""

    def __init__(self, table: Mapping[str, tuple[str, ...]]):
        """Note nothing yet."""
        super().__init__(table)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> tuple[str, ...]:
        axes = super().__getitem__(key)
        self.seen.add(key)
        return axes


def _full(config: TrainerConfig, subject: Subject) -> str:
    """The user's own arrays over the user's own mesh; what -1 takes is not known and counts as 1.

    Raises:
      ShardingError: for a parameter that does not divide.
    """
    sizes = {axis: max(size, 1) for axis, size in config.mesh.axis_sizes().items()}
    mesh = AbstractMesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )
    table = config.mesh.resolved_rules()
    parts = split_model(subject.model(config))
    found = tree_shardings(parts.params, _as_mesh(mesh), table)
    arrays = len(jax.tree.leaves(found))
    size = describe_mesh(config.mesh)
    padding = padding_text(config.batch_size, data_shards(sizes, table), config.accumulate)
    text = f"{arrays} parameters and {config.batch_size} rows over {size}"
    return f"{text}; {padding}" if padding else text


def _as_mesh(mesh: AbstractMesh) -> Mesh:
    """A mesh of which only the shape is asked."""
    return mesh  # pyrefly: ignore[bad-return]


def _used(config: TrainerConfig, harness: Harness) -> str:
    """Every override is looked up and divides something; so does every mesh axis.

    Raises:
      CheckFailed: naming the first that does not.
    """
    count = 1
    for size in config.mesh.axis_sizes().values():
        count *= size
    programs = prepare(config, harness.subject.task(config), Ledger(), jax.devices()[:count])
    asked, activations = _trace(programs, harness)
    if config.mesh.num_stages() > 1:  # a pipeline copies the table, and looks up all of it
        wider = config.mesh.fsdp * config.mesh.stage
        mesh = dataclasses.replace(config.mesh, stage=1, fsdp=wider, across="data")
        flat = on_mesh(config, mesh)
        task = harness.subject.task(flat)
        flat_programs = prepare(flat, task, Ledger(), jax.devices()[:count])
        asked, _ = _trace(flat_programs, harness)
    params = list(_params(programs))
    asked |= {name for axes, _ in params for name in axes if name}
    sizes = config.mesh.axis_sizes()
    for logical, axes in config.mesh.rules.items():
        if logical not in asked:
            raise CheckFailed(
                f"`mesh.rules.{logical}` matches no array of the model: it carries the axes "
                f"{', '.join(sorted(asked))}"
            )
        _check_override(logical, tuple(axes), params, activations, sizes)
    specs = [spec for _, spec in params] + activations
    met = {axis for spec in specs for entry in spec for axis in entry}
    for axis, size in sizes.items():
        if size > 1 and axis not in met:
            named = [name for name, to in programs.parts.rules.items() if axis in to]
            why = f"its rules are {', '.join(named)}" if named else "no rule names it"
            raise CheckFailed(
                f"`mesh.{axis}` divides nothing, so its devices repeat each other's work: {why}"
            )
    return f"{len(asked)} logical axes on {len(params)} parameters, {len(activations)} activations"


def _check_override(
    logical: str,
    axes: tuple[str, ...],
    params: list[tuple[tuple[str | None, ...], Spec]],
    activations: list[Spec],
    sizes: Mapping[str, int],
) -> None:
    """An override's mesh axes divide a dimension that carries it, in some array at least."""
    carriers = [(names, spec) for names, spec in params if logical in names]
    for axis in axes:
        if sizes[axis] == 1:
            continue
        of_params = any(axis in spec[names.index(logical)] for names, spec in carriers)
        of_activations = any(axis in entry for spec in activations for entry in spec)
        if not (of_params if carriers else of_activations):
            raise CheckFailed(
                f"`mesh.rules.{logical}` names {axis}, which divides it in no array: another "
                "dimension of each takes it first"
            )


def _params(programs: Programs) -> Iterator[tuple[tuple[str | None, ...], Spec]]:
    """Each parameter's logical axes and the mesh axes (of more than one device) they got."""
    variables = jax.tree.leaves(
        programs.parts.model.params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for variable in variables:
        axes = tuple(variable.get_metadata().get("axes") or ())
        spec = partition_spec(axes, programs.parts.rules)
        yield axes, _spec(spec, len(axes), programs.parts.mesh)


def _spec(spec: PartitionSpec, ndim: int, mesh: Mesh) -> Spec:
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    entries += [()] * (ndim - len(entries))
    return tuple(tuple(axis for axis in e if mesh.shape[axis] > 1) for e in entries)


def _trace(programs: Programs, harness: Harness) -> tuple[set[str], list[Spec]]:
    """The logical axes that a step looks up, and the layouts of batch and activations it fixes."""
    table = Asked(programs.parts.rules)
    parts = dataclasses.replace(programs.parts, rules=table)
    shapes = dataclasses.replace(programs, parts=parts).shapes_of(harness.rows)
    traced = jax.make_jaxpr(make_train_step(parts))(programs.abstract, shapes)
    mesh = programs.parts.mesh
    found = [_spec(x.sharding.spec, x.ndim, mesh) for x in shapes.values()]
    for equation in _equations(traced.jaxpr):
        if equation.primitive.name == "sharding_constraint":
            where = equation.params["sharding"]
            if isinstance(where, NamedSharding):
                found.append(_spec(where.spec, equation.outvars[0].aval.ndim, mesh))
    return table.seen, found


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
