"""What to call: programs from the cache, the rest from a child."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from fornax.config import to_mapping
from fornax.plan.artifact import Artifact
from fornax.plan.compile import cache as store
from fornax.plan.compile.child import compile_in_child
from fornax.plan.compile.errors import OutOfMemoryError
from fornax.plan.compile.progress import Progress, choose
from fornax.plan.compile.request import Request
from fornax.plan.topology import Topology
from fornax.train import TrainConfig, with_model

__all__ = ["compile_program", "compile_programs", "compile_train"]

_TRAIN = "fornax.plan.compile.programs:build"
_IRRELEVANT = (
    *("checkpoint", "eval", "init_from", "log", "processes", "profile_steps"),
    *("save_every", "seed"),
)
"""Parts of a run's config that do not change its programs."""
_LIMIT_SECONDS = 3600.0


def compile_train(
    config: TrainConfig,
    topology: Topology,
    *,
    programs: Sequence[str] = ("train_step", "eval_step"),
    options: dict[str, Any] | None = None,
    cache: bool = True,
    progress: Progress | None = None,
    limit_seconds: float = _LIMIT_SECONDS,
) -> list[Artifact]:
    """Compile what a training run would run: its step, and its evaluation.

    Args:
      config: the run.
      topology: for which chips; TPUs, or a CPU with virtual devices.
      programs: `train_step`, `eval_step` or both.
      options: compiler options of the run.
      cache: whether to look for an earlier compilation, and to keep this one.
      progress: what is shown; None shows phases and seconds on standard error.
      limit_seconds: how long the compiler may take.

    Returns:
      An artifact for each of `programs`, in that order.

    Raises:
      OutOfMemoryError: for the first that does not fit.
      ShardingError, ConfigError: when the run could not be laid out over the chips.
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program, dies or takes too long.
    """
    request = Request(
        builder=_TRAIN,
        arguments={"config": _relevant(with_model(config))},
        programs=tuple(programs),
        options=options or {},
    )
    return compile_programs(
        request, topology, cache=cache, progress=progress, limit_seconds=limit_seconds
    )


def compile_program(request: Request, topology: Topology, **options: Any) -> Artifact:
    """The one program of a request; see `compile_programs`."""
    (found,) = compile_programs(request, topology, **options)
    return found


def compile_programs(
    request: Request,
    topology: Topology,
    *,
    cache: bool = True,
    progress: Progress | None = None,
    limit_seconds: float = _LIMIT_SECONDS,
) -> list[Artifact]:
    """Compile the programs of a builder; raises as `compile_train` does."""
    found: dict[str, Artifact | OutOfMemoryError] = {}
    if cache:
        answers = ((name, store.find(request, topology, name)) for name in request.programs)
        found = {name: answer for name, answer in answers if answer is not None}
    missing = tuple(name for name in request.programs if name not in found)
    if missing and not _fails(found):
        asked = dataclasses.replace(request, programs=missing)
        shown = progress or choose(topology.name)
        answers = compile_in_child(asked, topology, progress=shown, limit_seconds=limit_seconds)
        for name, answer in answers:
            found[name] = answer
            if cache:
                store.keep(request, topology, name, answer)
    return [_artifact(found[name]) for name in request.programs if name in found]


def _fails(found: dict[str, Artifact | OutOfMemoryError]) -> bool:
    return any(isinstance(answer, OutOfMemoryError) for answer in found.values())


def _artifact(answer: Artifact | OutOfMemoryError) -> Artifact:
    if isinstance(answer, OutOfMemoryError):
        raise answer
    return answer


def _relevant(config: TrainConfig) -> dict[str, Any]:
    """The config without what does not change its programs."""
    mapping = to_mapping(config)
    mapping["data"] = {"virtual_shards": config.data.virtual_shards}
    return {name: value for name, value in mapping.items() if name not in _IRRELEVANT}
