"""Checks of numbers: every choice of a config alone, in pairs, and all together.

Legend: B rows, T tokens of a row.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fornax import kernels
from fornax.config.errors import KernelError
from fornax.preflight.harness import (
    Case,
    CheckFailed,
    CheckSkipped,
    Harness,
)
from fornax.preflight.report import Group
from fornax.preflight.shrink import describe_mesh, float32, on_mesh, with_mesh
from fornax.preflight.shrink_decoder import shrink
from fornax.preflight.subject import Rows
from fornax.preflight.tolerance import Comparison, allowance, compare_number
from fornax.train import TrainConfig, TrainerConfig

__all__ = ["numerics"]

_LONG = 640
"""Tokens at which every implementation of attention takes the call."""
_LONG_ROWS = 2
_OF_TPU = "splash"
"""The implementation that is interpreted here: it is slow, so a quick preflight leaves it out."""


def numerics(harness: Harness, config: TrainerConfig, *, quick: bool) -> Iterator[Case]:
    """All of them, a choice alone before it is combined.

    Args:
      harness: of the shrunk config.
      config: the user's.
      quick: leave out what combines everything with each implementation of attention.
    """
    if not isinstance(config, TrainConfig):  # no documents, routers or z-loss
        yield from _one_device(harness)
        yield from _meshes(harness)
        yield from _precision(harness)
        return
    yield from _attention(harness, config)
    yield from _one_device(harness)
    yield from _one_device_of_decoders(harness)
    yield from _meshes(harness, documents=True)
    yield from _routers(harness, config)
    if not quick:
        yield from _attention_together(harness, config)
    yield from _precision(harness)


def _verify(
    harness: Harness, config: TrainerConfig, implementation: str | None = None
) -> Callable[[], Comparison]:
    return lambda: harness.verify(harness.program(config, implementation))


def _attention(harness: Harness, config: TrainConfig) -> Iterator[Case]:
    """Each implementation on one device, on rows long enough that none declines. Linear layers,
    which have one, have several chunks there."""
    long = Harness(shrink(with_mesh(config), seq_len=_LONG, depth="kinds"), harness.subject)
    attends = config.model is None or config.model.attends

    def run(name: str | None) -> Comparison:
        program = long.program(dataclasses.replace(long.single, batch_size=_LONG_ROWS), name)
        platform = (
            kernels.target_platform("tpu", interpret=True)
            if name == _OF_TPU
            else contextlib.nullcontext()
        )
        try:
            with platform:
                return long.verify(program, {key: x[:_LONG_ROWS] for key, x in long.rows.items()})
        except KernelError as error:
            raise CheckSkipped(_reason(error)) from error

    if not attends:
        yield Case(
            group="attention",
            name=f"chunks of linear attention on {_LONG} tokens",
            run=lambda: run(None),
        )
    for implementation in kernels.attention_operation.implementations:
        if attends and implementation.name != "reference":
            yield Case(
                group="attention",
                name=f"{implementation.name} on {_LONG} tokens",
                run=lambda name=implementation.name: run(name),
                isolated=implementation.name == _OF_TPU,
            )


def _one_device(harness: Harness) -> Iterator[Case]:
    """The trainer's step on one device: accumulation, remat."""
    small = harness.config
    accumulated = dataclasses.replace(harness.single, accumulate=small.accumulate)
    yield Case(
        group="accumulation",
        name=f"{small.accumulate} unequal micro-batches are one batch",
        run=_verify(harness, accumulated) if small.accumulate > 1 else _off("accumulate is 1"),
        isolated=True,
    )
    remade = with_mesh(dataclasses.replace(float32(small), accumulate=1))
    unused = _off("remat is none: nothing is computed again")
    yield Case(
        group="remat",
        name=f"{small.remat}",
        run=unused if harness.subject.without_remat(remade) == remade else _verify(harness, remade),
        isolated=True,
    )


def _one_device_of_decoders(harness: Harness) -> Iterator[Case]:
    """What rows of documents add: packing, z-loss."""
    yield Case(
        group="packing",
        name="documents in a row, on one device",
        run=lambda: _documents(harness, harness.single),
        isolated=True,
    )
    yield Case(
        group="z_loss",
        name=f"weight {harness.config.z_loss:g}",
        run=lambda: _z_loss(harness),
        isolated=True,
    )


def _meshes(harness: Harness, *, documents: bool = False) -> Iterator[Case]:
    """Every axis, every pair of axes, then the whole mesh with accumulation and remat."""
    axes = harness.shrunk.axes
    if not axes:
        yield Case(group="mesh", name="one device", run=_verify(harness, harness.single))
        return
    groups = [(axis,) for axis in axes]
    groups += list(itertools.combinations(axes, 2)) if len(axes) > 2 else []
    for some in groups:
        config = with_mesh(harness.single, **dict.fromkeys(some, 2))
        if config.mesh.num_stages() > 1:
            config = dataclasses.replace(config, pipeline=harness.config.pipeline)
        yield Case(
            group="mesh",
            name=describe_mesh(config.mesh),
            run=_verify(harness, config),
            isolated=True,
        )
    for mesh in harness.shrunk.meshes:
        config = float32(on_mesh(harness.config, mesh))
        name = f"{describe_mesh(mesh)}{_also(harness, config)}"
        yield Case(group="mesh", name=name, run=_verify(harness, config))
        if documents:
            yield Case(
                group="packing",
                name=f"documents in a row, on {name}",
                run=lambda config=config: _documents(harness, config),
            )


def _routers(harness: Harness, config: TrainConfig) -> Iterator[Case]:
    """The losses of routers, of the whole batch at once on the whole mesh."""
    group: Group = "experts"
    model, wanted = harness.config.model, config.model.experts if config.model else None
    if model is None or model.experts is None or wanted is None:
        yield Case(group=group, name="losses of routers", run=_off("the model has no experts"))
        return
    weights = {"balance_loss": wanted.balance_loss, "router_z_loss": wanted.router_z_loss}
    name = " and ".join(f"{key} {value:g}" for key, value in weights.items() if value)
    if not name:
        yield Case(group=group, name="losses of routers", run=_off("none has a weight"))
        return
    experts = dataclasses.replace(model.experts, **weights)
    small = float32(dataclasses.replace(harness.config, accumulate=1))
    small = dataclasses.replace(small, model=dataclasses.replace(model, experts=experts))
    own = Harness(dataclasses.replace(harness.shrunk, config=small), harness.subject)
    for mesh in harness.shrunk.meshes:
        one = on_mesh(small, mesh)
        yield Case(group=group, name=f"{name} on {describe_mesh(mesh)}", run=_verify(own, one))


def _attention_together(harness: Harness, config: TrainConfig) -> Iterator[Case]:
    """On the whole mesh, the implementations that the trainer does not choose here of itself."""
    if not harness.shrunk.axes or (config.model is not None and not config.model.attends):
        return
    long = Harness(shrink(config, seq_len=_LONG, depth="quick"), harness.subject)

    def run(name: str) -> Comparison:
        here = long if name == "blockwise" else harness
        try:
            return here.verify(here.program(float32(here.config), name))
        except KernelError as error:
            raise CheckSkipped(_reason(error)) from error

    small = float32(harness.config)
    for name in ("blockwise", "xla"):
        yield Case(
            group="attention",
            name=f"{name} on {describe_mesh(small.mesh)}{_also(harness, small)}",
            run=lambda name=name: run(name),
        )


def _precision(harness: Harness) -> Iterator[Case]:
    """The dtypes of the config on one device, then the config as it is."""
    dtypes = harness.config.dtypes
    name = f"parameters {dtypes.params}, products {dtypes.compute}"
    if dtypes == float32(harness.config).dtypes:
        yield Case(group="precision", name=name, run=_off("all of it is float32"))
        return
    single = dataclasses.replace(harness.single, dtypes=dtypes)
    yield Case(group="precision", name=name, run=_verify(harness, single), isolated=True)
    for mesh in harness.shrunk.meshes:
        config = on_mesh(harness.config, mesh)
        yield Case(
            group="precision",
            name=f"all as configured: {name}, {describe_mesh(mesh)}{_also(harness, config)}",
            run=_verify(harness, config),
        )


def _reason(error: KernelError) -> str:
    """Why an implementation declines, without what to do about it."""
    return str(error).partition("declines this call: ")[2].partition("; use one of")[0]


def _also(harness: Harness, config: Any) -> str:
    """What goes with the mesh."""
    parts = [f"accumulate {config.accumulate}"] if config.accumulate > 1 else []
    parts += [f"remat {config.remat}"] if harness.subject.without_remat(config) != config else []
    return "".join(f" with {part}" for part in parts[:1]) + "".join(
        f" and {part}" for part in parts[1:]
    )


def _off(reason: str) -> Callable[[], Comparison]:
    def run() -> Comparison:
        raise CheckSkipped(reason)

    return run


def _documents(harness: Harness, config: TrainConfig) -> Comparison:
    """A document's loss and gradients are those it has alone, whatever shares its row.

    Where experts have room for some of a row's tokens, its documents share that: here it is without
    bound.

    Raises:
      CheckFailed: when weights cross the end of a document, or padding has any.
    """
    check_row_ends(harness.rows)
    model = harness.config.model
    assert model is not None
    if model.experts is not None and model.experts.capacity_factor is not None:
        experts = dataclasses.replace(model.experts, capacity_factor=None)
        model = dataclasses.replace(model, experts=experts)
        config = dataclasses.replace(config, model=model)
        small = dataclasses.replace(harness.config, model=model)
        shrunk = dataclasses.replace(harness.shrunk, config=small)
        harness = Harness(shrunk, harness.subject)
    program = harness.program(config)
    packed, chosen_BT = one_document(harness.rows)
    lonely = alone(packed, chosen_BT)
    expected = harness.expected("float32", lonely)
    found = harness.check_step(
        program, program.run(harness.state_of(program), lonely), expected, lonely
    )
    for rows in (packed, stirred(packed, chosen_BT, model.vocab_size)):
        outcome = program.run(harness.state_of(program), rows)
        found = found.then(harness.check_step(program, outcome, expected, rows))
    return found


def check_row_ends(rows: Rows) -> None:
    """Each token's target is the next one of its document, and padding is not counted.

    Raises:
      CheckFailed: naming the first row and token that say otherwise.
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
            raise CheckFailed(f"token {token} of row {row} {what}")


def _z_loss(harness: Harness) -> Comparison:
    """The z-loss that the trainer reports is the formula's, on top of the whole loss being so."""
    if not harness.config.z_loss:
        raise CheckSkipped("z_loss is 0")
    program = harness.program(harness.single)
    outcome = program.run(harness.state_of(program), harness.rows)
    expected = harness.expected("float32")
    found = harness.check_step(program, outcome, expected, harness.rows)
    factor = allowance("float32", harness.terms)
    allowed = expected.noise.of_loss(expected.loss, factor, harness.rows["tokens"].size, "float32")
    return found.then(
        compare_number("the z-loss", outcome.metrics["z_loss"], expected.z_loss, allowed)
    )


def one_document(rows: Rows) -> tuple[Rows, np.ndarray]:
    """The rows with weight on one document of each only, the last of two or more tokens; and which
    tokens those are, bool [B, T]."""
    segments_BT = rows["segment_ids"]
    chosen_BT = np.zeros(segments_BT.shape, bool)
    for row, ids in enumerate(segments_BT):
        numbers, counts = np.unique(ids[ids > 0], return_counts=True)
        long = numbers[counts > 1]
        if long.size:
            chosen_BT[row] = ids == long[-1]
    weights = np.where(chosen_BT, rows["loss_weights"], 0).astype(np.float32)
    return {**rows, "loss_weights": weights}, chosen_BT


def alone(rows: Rows, chosen_BT: np.ndarray) -> Rows:
    """Rows that hold the chosen document of each and nothing else, at their start."""
    found = {name: np.zeros_like(x) for name, x in rows.items()}
    for row, chosen in enumerate(chosen_BT):
        for name, x in rows.items():
            found[name][row, : chosen.sum()] = x[row, chosen]
    found["segment_ids"] = np.minimum(found["segment_ids"], 1)
    return found


def stirred(rows: Rows, chosen_BT: np.ndarray, vocab: int) -> Rows:
    """The rows with every token but the chosen ones replaced by another."""
    tokens = rows["tokens"]
    other = np.where(tokens == vocab - 1, 1, tokens + 1)
    real = rows["segment_ids"] > 0
    return {**rows, "tokens": np.where(chosen_BT | ~real, tokens, other).astype(tokens.dtype)}
