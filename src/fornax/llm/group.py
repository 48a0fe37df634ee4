"""An engine over several processes: one schedules, the others carry out its operations."""

import contextlib
import dataclasses

import jax
from jax.profiler import StepTraceAnnotation

from fornax.config.errors import ConfigError
from fornax.llm.config import DraftModel, EngineConfig
from fornax.llm.executor import Executor
from fornax.llm.limits import Limits
from fornax.mesh import check_processes
from fornax.mesh.group import Leader, Member, join_group
from fornax.models import DecoderConfig
from fornax.profile import CAPTURE, FollowedCaptures

__all__ = ["IDLE", "check_group", "follow", "join_engine"]

IDLE = "idle"
"""Told, beside the executor's operations, when the engine has no work left."""


def check_group(config: EngineConfig) -> None:
    """Refuse an engine that several processes cannot be.

    Raises:
      ClusterError: adapters or a draft model in several processes.
      ConfigError: a process without part of the mesh.
    """
    count = jax.process_count()
    check_processes("serving a language model", count)
    if config.enable_lora:
        check_processes("serving adapters", count)
    if isinstance(config.speculative_config, DraftModel):
        check_processes("speculation with a draft model", count)
    if count > 1 and config.tensor_parallel_size != jax.device_count():
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} and the {count} processes of the "
            f"engine have {jax.device_count()} devices together; give --tensor-parallel-size "
            f"{jax.device_count()}, so that each process has its part"
        )


def join_engine(limits: Limits, config: EngineConfig, model: DecoderConfig) -> Leader | Member:
    """Connect the processes of an engine; all of them call this once, with the engine made.

    Raises:
      ClusterError: versions, limits or options differ between processes, or one did not come.
    """
    own = {field.name: getattr(limits, field.name) for field in dataclasses.fields(limits)}
    return join_group({"options": config, "model": model, **own})


def follow(executor: Executor, process_0: Member, captures: FollowedCaptures) -> None:
    """Carry out what process 0 says, with all programs compiled, until it ends the engine. Profiles
    number its calls as there: each lasts until the next begins, or none is left.

    Raises:
      LinkError: process 0 is gone.
      EngineError: it says what is not an operation.
    """
    process_0.report()
    number = -1
    with contextlib.closing(captures), contextlib.ExitStack() as call:
        for operation in process_0.operations():
            if operation.name == CAPTURE:
                captures.carry_out(operation.facts)
            elif operation.name == IDLE:
                call.close()
            else:
                if operation.facts["call"] != number:
                    number = operation.facts["call"]
                    call.close()
                    call.enter_context(StepTraceAnnotation("engine", step_num=number))
                executor.carry_out(operation.name, operation.arrays)
