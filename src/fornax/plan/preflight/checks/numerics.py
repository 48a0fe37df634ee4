"""Questions about numbers: every choice of a config alone, in pairs, and all together."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.mesh import MeshConfig
from fornax.plan.preflight.compare import Comparison, compare_number
from fornax.plan.preflight.inputs import alone, one_document, stirred
from fornax.plan.preflight.lab import Failed, Lab, NotUsed, without_remat
from fornax.plan.preflight.programs import Program
from fornax.plan.preflight.question import Question
from fornax.plan.preflight.shrink import float32, shrink, with_mesh
from fornax.plan.preflight.tolerance import allowance
from fornax.train import TrainConfig

__all__ = ["numerics", "shown"]

_LONG = 640
"""Tokens at which every implementation of attention takes the call."""
_LONG_ROWS = 2
_OF_TPU = "splash"
"""The implementation that is interpreted here: it is slow, so a quick preflight leaves it out."""


def numerics(lab: Lab, config: TrainConfig, *, quick: bool) -> Iterator[Question]:
    """All of them, a choice alone before it is combined.

    Args:
      lab: of the shrunk config.
      config: the user's.
      quick: leave out what combines everything with each implementation of attention.
    """
    yield from _attention(config)
    yield from _one_device(lab)
    yield from _meshes(lab)
    if not quick:
        yield from _attention_together(lab, config)
    yield from _precision(lab)


def shown(mesh: MeshConfig) -> str:
    """A mesh as `data=2 x tensor=2`."""
    sizes = {axis: size for axis, size in mesh.axis_sizes().items() if size != 1}
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"


def _verify(lab: Lab, config: TrainConfig, implementation: str | None = None) -> Callable:
    return lambda: lab.verify(lab.program(config, implementation))


def _attention(config: TrainConfig) -> Iterator[Question]:
    """Each implementation on one device, on rows long enough that none declines."""
    long = Lab(shrink(config, seq_len=_LONG, depth="kinds"))

    def ask(name: str) -> Comparison:
        program = long.program(dataclasses.replace(long.single, batch_size=_LONG_ROWS), name)
        platform = (
            kernels.target_platform("tpu", interpret=True)
            if name == _OF_TPU
            else contextlib.nullcontext()
        )
        try:
            with platform:
                return long.verify(program, rows=long_rows())
        except KernelError as error:
            raise NotUsed(_reason(error)) from error

    kept: list[dict[str, np.ndarray]] = []

    def long_rows() -> dict[str, np.ndarray]:
        if not kept:
            kept.append({key: x[:_LONG_ROWS] for key, x in long.rows.items()})
        return kept[0]

    for implementation in kernels.attention_operation.implementations:
        if implementation.name != "reference":
            yield Question(
                group="attention",
                name=f"{implementation.name} on {_LONG} tokens",
                ask=lambda name=implementation.name: ask(name),
                alone=implementation.name == _OF_TPU,
            )


def _one_device(lab: Lab) -> Iterator[Question]:
    """The trainer's step on one device: packing, accumulation, remat, z-loss."""
    small = lab.config
    yield Question(
        group="packing",
        name="documents in a row, on one device",
        ask=lambda: _documents(lab, lab.program(lab.single)),
        alone=True,
    )
    accumulated = dataclasses.replace(lab.single, accumulate=small.accumulate)
    yield Question(
        group="accumulation",
        name=f"{small.accumulate} unequal micro-batches are one batch",
        ask=_verify(lab, accumulated) if small.accumulate > 1 else _off("accumulate is 1"),
        alone=True,
    )
    remade = with_mesh(dataclasses.replace(float32(small), accumulate=1))
    unused = _off("remat is none: nothing is computed again")
    yield Question(
        group="remat",
        name=f"{small.remat}",
        ask=unused if without_remat(remade) == remade else _verify(lab, remade),
        alone=True,
    )
    yield Question(
        group="z_loss",
        name=f"weight {small.z_loss:g}",
        ask=lambda: _z_loss(lab),
        alone=True,
    )


def _meshes(lab: Lab) -> Iterator[Question]:
    """Every axis, every pair of axes, then the whole mesh with accumulation and remat."""
    axes = lab.shrunk.axes
    if not axes:
        yield Question(group="mesh", name="one device", ask=_verify(lab, lab.single))
        return
    groups = [(axis,) for axis in axes]
    groups += list(itertools.combinations(axes, 2)) if len(axes) > 2 else []
    for some in groups:
        config = with_mesh(lab.single, **dict.fromkeys(some, 2))
        yield Question(group="mesh", name=shown(config.mesh), ask=_verify(lab, config), alone=True)
    for mesh in lab.shrunk.meshes:
        config = float32(dataclasses.replace(lab.config, mesh=mesh))
        name = f"{shown(mesh)}{_also(config)}"
        yield Question(group="mesh", name=name, ask=_verify(lab, config))
        yield Question(
            group="packing",
            name=f"documents in a row, on {name}",
            ask=lambda config=config: _documents(lab, lab.program(config)),
        )


def _attention_together(lab: Lab, config: TrainConfig) -> Iterator[Question]:
    """On the whole mesh, the implementations that the trainer does not choose here of itself."""
    if not lab.shrunk.axes:
        return
    long = Lab(shrink(config, seq_len=_LONG, depth="quick"))

    def ask(name: str) -> Comparison:
        here = long if name == "blockwise" else lab
        try:
            return here.verify(here.program(float32(here.config), name))
        except KernelError as error:
            raise NotUsed(_reason(error)) from error

    small = float32(lab.config)
    for name in ("blockwise", "xla"):
        yield Question(
            group="attention",
            name=f"{name} on {shown(small.mesh)}{_also(small)}",
            ask=lambda name=name: ask(name),
        )


def _precision(lab: Lab) -> Iterator[Question]:
    """The dtypes of the config on one device, then the config as it is."""
    dtypes = lab.config.dtypes
    name = f"parameters {dtypes.params}, products {dtypes.compute}"
    if dtypes == float32(lab.config).dtypes:
        yield Question(group="precision", name=name, ask=_off("all of it is float32"))
        return
    single = dataclasses.replace(lab.single, dtypes=dtypes)
    yield Question(group="precision", name=name, ask=_verify(lab, single), alone=True)
    for mesh in lab.shrunk.meshes:
        config = dataclasses.replace(lab.config, mesh=mesh)
        yield Question(
            group="precision",
            name=f"all as configured: {name}, {shown(mesh)}{_also(config)}",
            ask=_verify(lab, config),
        )


def _reason(error: KernelError) -> str:
    """Why an implementation declines, without what to do about it."""
    return str(error).partition("declines this call: ")[2].partition("; use one of")[0]


def _also(config: TrainConfig) -> str:
    """What goes with the mesh."""
    parts = [f"accumulate {config.accumulate}"] if config.accumulate > 1 else []
    parts += [f"remat {config.remat}"] if without_remat(config) != config else []
    return "".join(f" with {part}" for part in parts[:1]) + "".join(
        f" and {part}" for part in parts[1:]
    )


def _off(reason: str) -> Callable[[], Comparison]:
    def ask() -> Comparison:
        raise NotUsed(reason)

    return ask


def _documents(lab: Lab, program: Program) -> Comparison:
    """A document's loss and gradients are those it has alone, whatever shares its row.

    Raises:
      Failed: when weights cross the end of a document, or padding has any.
    """
    check_row_ends(lab.rows)
    model = lab.config.model
    assert model is not None
    packed, chosen_BT = one_document(lab.rows)
    lonely = alone(packed, chosen_BT)
    expected = lab.expected("float32", lonely)
    found = lab.judge(program, program.run(lab.state, lonely), expected, lonely)
    for rows in (packed, stirred(packed, chosen_BT, model.vocab_size)):
        outcome = program.run(lab.state, rows)
        found = found.then(lab.judge(program, outcome, expected, rows))
    return found


def check_row_ends(rows: dict[str, np.ndarray]) -> None:
    """Each token's target is the next one of its document, and padding counts for nothing.

    Raises:
      Failed: naming the first row and token that say otherwise.
    """
    segments, weights = rows["segment_ids"], rows["loss_weights"]
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    wrong = np.zeros(segments.shape, bool)
    wrong[:, :-1] = same & (rows["targets"][:, :-1] != rows["tokens"][:, 1:])
    step = rows["positions"][:, 1:] - rows["positions"][:, :-1]
    jumps = np.zeros(segments.shape, bool)
    jumps[:, 1:] = same & (step != 1)
    for where, what in (
        (wrong, "has a target that is not the next token"),
        (jumps, "has a position that does not follow the one before"),
        ((segments == 0) & (weights != 0), "is padding and has a weight"),
    ):
        if where.any():
            row, token = np.argwhere(where)[0]
            raise Failed(f"token {token} of row {row} {what}")


def _z_loss(lab: Lab) -> Comparison:
    """The z-loss that the trainer reports is the formula's, on top of the whole loss being so."""
    if not lab.config.z_loss:
        raise NotUsed("z_loss is 0")
    program = lab.program(lab.single)
    outcome = program.run(lab.state, lab.rows)
    expected = lab.expected("float32")
    found = lab.judge(program, outcome, expected, lab.rows)
    factor = allowance("float32", lab.terms)
    allowed = expected.noise.of_loss(expected.loss, factor, lab.rows["tokens"].size, "float32")
    return found.then(
        compare_number("the z-loss", outcome.metrics["z_loss"], expected.z_loss, allowed)
    )
