"""What a run asks of the kernels, read from its own programs, which are traced and not compiled."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.plan.compile import traced_calls, train_request
from fornax.plan.compile.request import Request
from fornax.plan.serving.engine import ServingConfig, choose_tensor_parallel, describe_engine
from fornax.plan.serving.model import read_model
from fornax.plan.serving.programs import request_of
from fornax.plan.topology import Topology
from fornax.plan.train import fitted, programs_of
from fornax.train import TrainConfig, with_model

__all__ = ["KernelCall", "calls_of_serving", "calls_of_training"]


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One kind of call, on one device."""

    operation: str
    fields: Mapping[str, Any]
    """Of the dataclass that describes it: shapes, dtypes, options, platform."""
    chosen: str
    """The implementation that it gets as things stand."""


def calls_of_training(config: TrainConfig, topology: Topology) -> list[KernelCall]:
    """The distinct calls of a training step, and of the evaluation where the config has one.

    Args:
      config: the run.
      topology: TPUs (extra tpu), or devices of this machine.

    Raises:
      ConfigError, ShardingError: when the run does not fit the topology.
      CompileError: when its programs cannot be traced.
    """
    config = fitted(with_model(config), topology)
    return _traced(train_request(config, programs_of(config)), topology)


def calls_of_serving(
    model: str | Path, config: ServingConfig, topology: Topology
) -> list[KernelCall]:
    """The distinct calls of an engine's steps, of all sizes that it compiles.

    Args:
      model: a Hugging Face directory, of which config.json is enough, or a run directory.
      config: the engine's limits.
      topology: TPUs (extra tpu), or devices of this machine.

    Raises:
      ConfigError: for a model or limits that cannot be.
      CompileError: when the programs cannot be traced.
    """
    served = read_model(Path(model), config.dtype, mtp=config.mtp)
    chosen = choose_tensor_parallel(served, config.engine, topology)
    engine = describe_engine(served, chosen, topology)
    steps = tuple(f"step {size}" for size in engine.sizes.steps)
    return _traced(request_of(engine, steps), topology)


def _traced(request: Request, topology: Topology) -> list[KernelCall]:
    return [
        KernelCall(operation=operation, fields=fields, chosen=chosen)
        for operation, fields, chosen in traced_calls(request, topology)
    ]
