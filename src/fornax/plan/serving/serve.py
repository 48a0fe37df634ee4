"""The plan of serving a model: memory, the largest cache, bounds on latency and throughput."""

from collections.abc import Sequence
from pathlib import Path

from fornax.config.errors import ConfigError, EngineError
from fornax.llm.config import EngineConfig
from fornax.plan.compile import MissingCompilerError, OutOfMemoryError, compile_programs
from fornax.plan.compile.progress import Progress
from fornax.plan.cost import calibration_of
from fornax.plan.hlo import analyse, parse
from fornax.plan.serving.advice import advise, too_large
from fornax.plan.serving.clocks import (
    PUBLISHED,
    attention_by_size,
    bucket_of,
    clock_of,
    code_bytes,
)
from fornax.plan.serving.compiled import Compiled
from fornax.plan.serving.config import ServingConfig
from fornax.plan.serving.data import Advice, ServePlan
from fornax.plan.serving.describe import engine_report, how_words, notes_of
from fornax.plan.serving.layout import Engine, choose_tensor_parallel, describe_engine
from fornax.plan.serving.memory import memory_of
from fornax.plan.serving.model import ServedModel, read_model
from fornax.plan.serving.points import (
    Clocks,
    contexts_of,
    decode_points,
    largest_batches,
    prompt_points,
)
from fornax.plan.serving.programs import request_of
from fornax.plan.topology import Topology

__all__ = ["plan_serve"]


def plan_serve(
    model: str | Path,
    topology: Topology,
    config: ServingConfig | EngineConfig | None = None,
    *,
    itl_seconds: float | None = None,
    contexts: Sequence[int] = (),
    prompts: Sequence[int] = (),
    predicted: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
) -> ServePlan:
    """Plan an engine on a topology.

    For TPUs the very steps that would run are compiled: the largest decoding step, the largest
    prefill step, a step of one token, and the largest choice of tokens. GPUs and CPUs, and
    anything with `predicted`, come from closed forms.

    Args:
      model: a Hugging Face directory, of which config.json is enough, or a run directory.
      topology: the chips.
      config: the engine's limits; with a `ServingConfig` the tensor parallelism may be left open.
      itl_seconds: look for the largest batch whose tokens come within this time of each other.
      contexts: tokens of each sequence at the points of decoding; none for a usual choice.
      prompts: tokens of the prompts; none for a usual choice.
      predicted: compile nothing.
      cache: whether to look for earlier compilations, and to keep these.
      progress: what is shown while compiling.

    Raises:
      ConfigError: a model, a parallelism or limits that cannot be.
      PlanError: when not even one sequence of full length finds room, with what would make room;
        when the compiler is missing or refuses.
    """
    config = config or ServingConfig()
    served = read_model(Path(model), config.dtype)
    if isinstance(config, ServingConfig):
        config = choose_tensor_parallel(served, config.engine, topology)
    engine = _engine(served, config, topology)
    compiles = not predicted and topology.chip.platform == "tpu"
    found = _compile(engine, cache, progress) if compiles else {}
    return _plan(engine, found, itl_seconds, contexts, prompts)


def _engine(served: ServedModel, config: EngineConfig, topology: Topology) -> Engine:
    try:
        return describe_engine(served, config, topology)
    except EngineError as error:
        if "the cache has room" not in str(error):
            raise
        raise too_large(served, config, topology) from error


def _compile(engine: Engine, cache: bool, progress: Progress | None) -> dict[str, Compiled]:
    steps, samples = engine.sizes.steps, engine.sizes.samples
    decode = min(size for size in steps if size >= engine.limits.max_num_seqs)
    sizes = {f"step {size}": size for size in dict.fromkeys((decode, steps[-1], steps[0]))}
    sizes[f"sample {samples[-1]}"] = samples[-1]
    request = request_of(engine, tuple(sizes))
    try:
        artifacts = compile_programs(request, engine.topology, cache=cache, progress=progress)
    except MissingCompilerError as error:
        raise MissingCompilerError(f"{error}; or predict with --predicted") from error
    except OutOfMemoryError as error:
        total = error.used * engine.topology.chip.devices
        raise too_large(engine.model, engine.config, engine.topology, total) from error
    found = {}
    for artifact in artifacts:
        facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
        found[artifact.program] = Compiled(artifact, facts, sizes[artifact.program])
    return found


def _plan(
    engine: Engine,
    found: dict[str, Compiled],
    itl_seconds: float | None,
    contexts: Sequence[int],
    prompts: Sequence[int],
) -> ServePlan:
    attention = attention_by_size(engine)
    calibration = calibration_of(engine.topology.chip)
    clocks = Clocks(
        clock_of(engine, found, PUBLISHED, attention),
        clock_of(engine, found, calibration, attention),
    )
    temporaries = max(
        (one.artifact.memory.temporaries for one in found.values()),
        default=engine.account.temporaries,
    )
    memory = memory_of(engine, temporaries, code_bytes(engine, found))
    contexts = _lengths(engine, contexts)
    advice: list[Advice] = []
    if not memory.fits:
        advice = advise(engine.model, engine.config, engine.topology)
    return ServePlan(
        name=engine.model.name,
        parameters=engine.model.parameters,
        topology=engine.topology.name,
        chip=engine.topology.chip.name,
        platform=engine.topology.chip.platform,
        num_chips=engine.topology.num_chips,
        origin="compiled" if found else "predicted",
        how=how_words(engine, found),
        engine=engine_report(engine, attention),
        memory=memory,
        decode=tuple(decode_points(engine, clocks, contexts)),
        prompts=tuple(prompt_points(engine, clocks, _lengths(engine, prompts))),
        itl_seconds=itl_seconds,
        largest=tuple(largest_batches(engine, clocks, contexts, itl_seconds))
        if itl_seconds is not None
        else (),
        buckets=tuple(bucket_of(one, clocks.expected, engine) for one in found.values()),
        advice=tuple(advice),
        notes=notes_of(engine, found, calibration, attention),
    )


def _lengths(engine: Engine, asked: Sequence[int]) -> tuple[int, ...]:
    longest = engine.limits.max_model_len
    for length in asked:
        if not 0 < length <= longest:
            raise ConfigError(
                f"a length of {length} tokens is not among 1 to max_model_len={longest}; give "
                "lengths within it"
            )
    return tuple(sorted(set(asked))) or contexts_of(engine)
