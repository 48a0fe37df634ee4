"""From a config and a topology to an `Estimate`: closed forms only, no compiler and no device."""

import dataclasses
from collections.abc import Iterable, Sequence

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.models import flops_per_token
from fornax.plan.analytic.attention import attention_choice
from fornax.plan.analytic.flops import repeated_flops, step_pieces
from fornax.plan.analytic.local import Local, localise, windows
from fornax.plan.analytic.memory import estimate_memory
from fornax.plan.analytic.optimizer import update_pieces
from fornax.plan.analytic.result import (
    Bound,
    CollectiveEstimate,
    Estimate,
    OperationEstimate,
)
from fornax.plan.analytic.state import state_arrays
from fornax.plan.analytic.time import HIDDEN_WAITS, class_seconds, exchange_seconds
from fornax.plan.analytic.traffic import exchanges
from fornax.plan.cost import calibration_of
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["estimate", "kernel_choices"]


def estimate(config: TrainConfig, topology: Topology) -> Estimate:
    """What a training step of `config` would need and take on `topology`.

    Raises:
      ConfigError: for a model that is not given, pipeline stages, slices that the mesh does not
        name, a remat policy that is not known here.
      ShardingError: when model, batch or length do not divide over the mesh.
    """
    check_slices(config, topology)
    local = localise(config, topology)
    state = state_arrays(local)
    pieces = (*step_pieces(local), *update_pieces(local, state))
    operations = class_seconds(local, pieces)
    update = sum(row.seconds for row in operations if row.name == "optimizer")
    compute = sum(row.seconds for row in operations)
    collectives = exchange_seconds(local, exchanges(local, state), compute - update)
    exposed = sum(row.exposed_seconds for row in collectives)
    communication = sum(row.seconds for row in collectives)
    by_link = _by_link(collectives)
    model = local.model
    per_chip = topology.chip.devices
    tokens = config.batch_size * config.seq_len
    return Estimate(
        config=config,
        topology=topology,
        mesh=local.mesh,
        memory=estimate_memory(local, state),
        operations=tuple(_of_chip(row, per_chip) for row in operations),
        collectives=collectives,
        model_flops=tokens * flops_per_token(model, config.seq_len) / topology.num_chips,
        repeated_flops=repeated_flops(local) * per_chip,
        compute_seconds=compute,
        communication_seconds=communication,
        exposed_seconds=exposed,
        step_seconds=compute + exposed,
        optimistic_seconds=max(compute, max(by_link.values(), default=0.0)),
        pessimistic_seconds=compute + communication,
        bound=_bound(operations, collectives),
        notes=tuple(_notes(local)),
    )


def _of_chip(row: OperationEstimate, devices: int) -> OperationEstimate:
    """A device's row as a chip's: its devices work side by side."""
    return dataclasses.replace(row, flops=row.flops * devices, bytes=row.bytes * devices)


def _by_link(collectives: Sequence[CollectiveEstimate]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in collectives:
        totals[row.link] = totals.get(row.link, 0.0) + row.seconds
    return totals


def _bound(
    operations: Sequence[OperationEstimate], collectives: Sequence[CollectiveEstimate]
) -> Bound:
    """What takes the most of the step's time."""
    waits: dict[Bound, float] = {"compute": 0.0, "memory": 0.0}
    for row in operations:
        waits[row.bound] += row.seconds
    for row in collectives:
        waits[row.link] = waits.get(row.link, 0.0) + row.exposed_seconds
    return max(waits, key=lambda name: waits[name])


def _notes(local: Local) -> Iterable[str]:
    rates = calibration_of(local.topology.chip)
    share = rates.matmul_estimated
    yield (
        f"predicted without compiling: matrix products at {share:.0%} of the peak, "
        f"attention at {rates.attention:.0%}, memory at {rates.memory:.0%} of its bandwidth; "
        f"exchanges run beside computation, {HIDDEN_WAITS:.0%} of those whose result the "
        "next operation waits for"
    )
    chosen = {attention_choice(local, window).implementation for window in windows(local.model)}
    if chosen & {"blockwise", "xla"}:
        yield (
            "attention runs as plain XLA operations here, which computes masked blocks too and "
            "passes its scores through memory"
        )
    heads = local.size("activation_heads")
    if local.shares.attention_heads == local.model.num_heads and heads > 1:
        yield (
            f"tensor={heads} does not divide {local.model.kv_heads} key/value heads, so every "
            "tensor shard computes the attention of all heads"
        )


def kernel_choices(config: TrainConfig, topology: Topology) -> tuple[kernels.Choice, ...]:
    """Which implementation each kernel of a step gets, and why no faster one.

    Raises:
      ConfigError, ShardingError: when the run does not divide over the topology.
    """
    local = localise(config, topology)
    found = [attention_choice(local, window) for window in windows(local.model)]
    return tuple(dict.fromkeys(found))


def check_slices(config: TrainConfig, topology: Topology) -> None:
    """Refuse a mesh whose slice axis is not the topology's number of slices.

    Raises:
      ConfigError: with the value that would do.
    """
    if topology.chip.platform == "tpu" and config.mesh.slice != topology.slices:
        raise ConfigError(
            f"mesh.slice={config.mesh.slice} and {topology.name} has {topology.slices} "
            f"slice{'s' if topology.slices > 1 else ''}; set mesh.slice to {topology.slices}"
        )
