"""The plan of a diffusion run: its training step and its sampling, from their traces."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.diffusion.config import DiffusionConfig
from fornax.diffusion.network import Network
from fornax.diffusion.samplers import SAMPLERS
from fornax.diffusion.setup import Facts, network_config
from fornax.plan.cost.summary import describe_hardware, describe_speed, report_facts
from fornax.plan.denoiser import conditions, planned_batch, planned_facts, planned_task
from fornax.plan.facts import Plan, ProgramReport, Run
from fornax.plan.format import format_seconds
from fornax.plan.topology import Topology
from fornax.plan.traced import Sampled, TracedStep, forward_facts, train_facts
from fornax.train import Task

__all__ = ["plan_diffusion"]


def plan_diffusion(
    config: DiffusionConfig,
    topology: Topology,
    *,
    name: str = "config",
    rows: int | None = None,
) -> Plan:
    """Plan training and sampling on a topology; nothing is compiled and no data is read.

    Both programs are traced and their work is counted there; times are those of the cost model of
    all plans. Sampling is of `rows` examples, without text encoders and autoencoder.

    Args:
      config: the run; of its data only the shapes count.
      topology: the chips.
      name: what the plan is called.
      rows: examples sampled at once; None for one on each chip.

    Raises:
      ConfigError: images from files, whose sizes and captions are not known without reading them;
        a mesh axis whose exchanges are not known.
      ShardingError: what does not divide over the mesh.
    """
    facts = planned_facts(config)
    task = planned_task(config)
    trained = train_facts(config, task, planned_batch(config, config.batch_size), topology)
    hardware = describe_hardware(topology, config.dtypes.compute)
    step = report_facts("train_step", trained.facts, topology)
    run = _run(config, facts, trained, topology)
    return Plan(
        name=name,
        origin="predicted",
        how="Traced, and predicted from the hardware table; nothing was compiled.",
        hardware=hardware,
        programs=(step, _sampling(config, facts, task, topology, rows or topology.num_chips)),
        run=run,
        kernels=tuple(dict.fromkeys(map(str, trained.kernels))),
        speed=describe_speed(step, run, hardware),
    )


def _sampling(
    config: DiffusionConfig, facts: Facts, task: Task[Any], topology: Topology, rows: int
) -> ProgramReport:
    """All steps of the config's sampler for some rows, twice as many under guidance."""
    said = config.sample
    guided = 2 if said.guidance != 1 and config.has_text else 1
    shape = (*facts.usual, facts.channels)
    batch = {
        "x": jax.ShapeDtypeStruct((rows * guided, *shape), np.float32),
        **conditions(config, rows * guided),
    }

    def run(network: Network, batch: Any) -> jax.Array:
        sigma = jnp.full(batch["x"].shape[:1], 0.5)
        point = config.objective.point(sigma)
        return network(batch["x"], config.objective, point, network.condition(batch))

    once = forward_facts(config, task, Sampled(run=run, batch=batch), topology)
    table = SAMPLERS[said.sampler](config.objective.schedule(said.steps))
    times = table.evaluations
    found = report_facts("sample", once.facts, topology)
    scaled = {
        field: getattr(found, field) * times
        for field in (
            *("flops", "bytes", "step_seconds", "compute_seconds", "exposed_seconds"),
            *("optimistic_seconds", "pessimistic_seconds"),
        )
    }
    how = f"{times} evaluations of {format_seconds(found.step_seconds)}"
    return dataclasses.replace(
        found,
        **scaled,
        work=tuple(
            dataclasses.replace(
                w, flops=w.flops * times, bytes=w.bytes * times, seconds=w.seconds * times
            )
            for w in found.work
        ),
        collectives=tuple(
            dataclasses.replace(
                c,
                count=c.count * times,
                seconds=c.seconds * times,
                exposed_seconds=c.exposed_seconds * times,
            )
            for c in found.collectives
        ),
        notes=(
            f"sampling is of {rows} examples in {said.steps} steps of {said.sampler}"
            f"{' under guidance' if guided == 2 else ''}: {how}, without text encoders and "
            "autoencoder",
            *found.notes,
        ),
    )


def _run(config: DiffusionConfig, facts: Facts, traced: TracedStep, topology: Topology) -> Run:
    """What would run; a row's tokens are its patches."""
    patch = getattr(network_config(config, facts), "patch", (1,) * len(facts.usual))
    tokens = math.prod(n // p for n, p in zip(facts.usual, patch, strict=True))
    sizes = {axis: size for axis, size in traced.mesh.items() if size > 1}
    return Run(
        parameters=traced.parameters,
        batch_size=config.batch_size,
        seq_len=tokens,
        accumulate=config.accumulate,
        steps=config.steps,
        remat=config.remat,
        params_dtype=config.dtypes.params,
        compute_dtype=config.dtypes.compute,
        mesh=sizes,
        model_flops=traced.model_flops,
    )
