"""The programs of an engine, traced for a topology's devices in the child that compiles."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from fornax.config import from_mapping, to_mapping
from fornax.llm.config import EngineConfig
from fornax.llm.limits import Limits
from fornax.llm.programs import Program, make_programs
from fornax.models import CacheHeads, DecoderConfig
from fornax.plan.artifact import ArrayFact, Owner
from fornax.plan.compile.request import Job, Lowering, Request, array_facts
from fornax.plan.serving.engine import Engine, described_weights, target_of
from fornax.plan.serving.model import ServedModel


def request_of(engine: Engine, programs: tuple[str, ...]) -> Request:
    """What the child is asked for.

    Args:
      engine: as shapes.
      programs: such as "step 256" and "sample 256".
    """
    limits = dataclasses.asdict(engine.limits)
    return Request(
        builder="fornax.plan.serving.programs:build",
        arguments={
            "model": to_mapping(engine.model.config),
            "dtype": engine.model.dtype,
            "engine": to_mapping(engine.config),
            "limits": {**limits, "cache_dtype": str(limits["cache_dtype"])},
        },
        programs=programs,
    )


def build(job: Job) -> Mapping[str, Callable[[], Lowering]]:
    """Every step and choice of tokens that the engine of `job.arguments` compiles."""
    engine = _engine(job)
    programs = make_programs(
        engine.config, engine.weights, engine.limits, engine.sizes, engine.arrays
    )
    named = {
        f"{key[0]} {key[1]}": program
        for key, program in programs.items()
        if key[0] in ("step", "sample")
    }
    return {name: _lowering(engine, program) for name, program in named.items()}


def _lowering(engine: Engine, program: Program) -> Callable[[], Lowering]:
    def trace() -> Lowering:
        return Lowering(
            lowered=program.lower(),
            mesh=engine.target.mesh(engine.devices),
            arguments=_arguments(engine, program),
        )

    return trace


def _arguments(engine: Engine, program: Program) -> tuple[ArrayFact, ...]:
    """Facts of each argument; the first is the leaves of the state."""
    names = ("kv", "states", "tables", "hidden", "last_token", "vector")
    if program.donated == (2,):  # a choice of tokens
        names = ("hidden", "sampler", "vector", "mask", "proposals")
    found = array_facts({"params": engine.arrays.state}, lambda _: "parameters")
    rest = [{name: one} for name, one in zip(names, program.arguments[1:], strict=True)]
    return (*found, *array_facts(rest, _kind))


def _kind(path: str) -> Owner:
    return "cache" if "kv" in path or "states" in path else "other"


def _engine(job: Job) -> Engine:
    values = job.arguments
    model = ServedModel(
        name="model",
        config=from_mapping(DecoderConfig, values["model"]),
        dtype=values["dtype"],
        source="",
    )
    config = from_mapping(EngineConfig, values["engine"])
    target = target_of(job.topology, tuple(job.devices))
    weights = described_weights(model, config, target)
    return Engine(model, config, job.topology, target, weights, _limits(values["limits"]))


def _limits(values: Mapping[str, Any]) -> Limits:
    changed: dict[str, Any] = {
        "num_pages": tuple(values["num_pages"]),
        "cache_dtype": jnp.dtype(values["cache_dtype"]),
        "cache_heads": tuple(CacheHeads(*heads) for heads in values["cache_heads"]),
        "draft_heads": values["draft_heads"]
        and tuple(CacheHeads(*heads) for heads in values["draft_heads"]),
    }
    return Limits(**{**values, **changed})
