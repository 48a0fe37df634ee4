"""The plan of serving a model: memory, the largest cache, bounds on latency and throughput."""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fornax.config.errors import ConfigError, EngineError
from fornax.hlo import Calibration, ProgramFacts, analyse, calibration_of, parse
from fornax.llm.config import EngineConfig
from fornax.models import CacheHeads, check_model
from fornax.plan.compile import MissingCompilerError, OutOfMemoryError, compile_programs
from fornax.plan.serving.advice import advise, too_large
from fornax.plan.serving.engine import (
    Engine,
    ServingConfig,
    choose_tensor_parallel,
    describe_engine,
)
from fornax.plan.serving.latency import decode_latencies, largest_batches, prompt_latencies
from fornax.plan.serving.memory import memory_of
from fornax.plan.serving.model import ServedModel, read_model
from fornax.plan.serving.programs import request_of
from fornax.plan.serving.times import (
    PUBLISHED,
    CompiledStep,
    StepTimes,
    not_understood,
    step_times,
)
from fornax.plan.serving.work import Attention, attention_of
from fornax.plan.serving_facts import Bucket, EngineReport, ServePlan
from fornax.plan.topology import Topology


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
) -> ServePlan:
    """Plan an engine on a topology.

    For TPUs the steps that would run are compiled: the largest decoding step, the largest
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

    Raises:
      ConfigError: a model, a parallelism or limits that cannot be.
      PlanError: when not even one sequence of full length finds room, with what would make room;
        when the compiler is missing or refuses.
    """
    config = config or ServingConfig()
    served = read_model(Path(model), config.dtype, mtp=config.mtp)
    check_model(served.config, "plan serve")
    if isinstance(config, ServingConfig):
        config = choose_tensor_parallel(served, config.engine, topology)
    engine = _engine(served, config, topology)
    compiles = not predicted and topology.chip.platform == "tpu"
    found = _compile(engine, cache) if compiles else {}
    return _plan(engine, found, itl_seconds, contexts, prompts)


def _engine(served: ServedModel, config: EngineConfig, topology: Topology) -> Engine:
    try:
        return describe_engine(served, config, topology)
    except EngineError as error:
        if "the cache has room" not in str(error):
            raise
        raise too_large(served, config, topology) from error


def _compile(engine: Engine, cache: bool) -> dict[str, CompiledStep]:
    steps, samples = engine.sizes.steps, engine.sizes.samples
    decode = min(size for size in steps if size >= engine.limits.max_num_seqs)
    sizes = {f"step {size}": size for size in dict.fromkeys((decode, steps[-1], steps[0]))}
    sizes[f"sample {samples[-1]}"] = samples[-1]
    request = request_of(engine, tuple(sizes))
    try:
        artifacts = compile_programs(request, engine.topology, cache=cache)
    except MissingCompilerError as error:
        raise MissingCompilerError(f"{error}; or predict with --predicted") from error
    except OutOfMemoryError as error:
        total = error.used * engine.topology.chip.devices
        raise too_large(engine.model, engine.config, engine.topology, total) from error
    found = {}
    for artifact in artifacts:
        facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
        found[artifact.program] = CompiledStep(artifact, facts, sizes[artifact.program])
    return found


def _plan(
    engine: Engine,
    found: dict[str, CompiledStep],
    itl_seconds: float | None,
    contexts: Sequence[int],
    prompts: Sequence[int],
) -> ServePlan:
    attention = functools.cache(functools.partial(attention_of, engine))
    calibration = calibration_of(engine.topology.chip)
    least = step_times(engine, found, PUBLISHED, attention)
    expected = step_times(engine, found, calibration, attention)
    temporaries = max(
        (one.artifact.memory.temporaries for one in found.values()),
        default=engine.account.temporaries,
    )
    memory = memory_of(engine, temporaries, _code_bytes(engine, found))
    contexts, prompts = _lengths(engine, contexts), _lengths(engine, prompts)
    largest = []
    if itl_seconds is not None:
        largest = largest_batches(engine, expected, contexts, itl_seconds)
    advice = [] if memory.fits else advise(engine.model, engine.config, engine.topology)
    return ServePlan(
        name=engine.model.name,
        parameters=engine.model.parameters,
        topology=engine.topology.name,
        chip=engine.topology.chip.name,
        platform=engine.topology.chip.platform,
        num_chips=engine.topology.num_chips,
        origin="compiled" if found else "predicted",
        how=_how(engine, found),
        engine=_engine_report(engine, attention),
        memory=memory,
        decode=tuple(decode_latencies(engine, expected, least, contexts)),
        prompts=tuple(prompt_latencies(engine, expected, least, prompts)),
        itl_seconds=itl_seconds,
        largest=tuple(largest),
        buckets=tuple(_bucket(one, expected, engine) for one in found.values()),
        advice=tuple(advice),
        notes=_notes(engine, found, calibration, attention),
    )


def _lengths(engine: Engine, asked: Sequence[int]) -> tuple[int, ...]:
    """Those asked for; without any an eighth of the longest sequence, half of it, all of it."""
    longest = engine.limits.max_model_len
    for length in asked:
        if not 0 < length <= longest:
            raise ConfigError(
                f"a length of {length} tokens is not among 1 to max_model_len={longest}; give "
                "lengths within it"
            )
    return tuple(sorted(set(asked) or {max(1, longest // 8), max(1, longest // 2), longest}))


def _code_bytes(engine: Engine, found: Mapping[str, CompiledStep]) -> int:
    """Bytes of all programs: those that were compiled, and the others as large as the largest; one
    that decodes is a step and a choice."""
    total, sizes = 0, engine.sizes
    for kind, count in (("step", len(sizes.steps)), ("sample", len(sizes.samples))):
        known = [o.artifact.memory.code for n, o in found.items() if n.startswith(kind)]
        most = max(known, default=0)
        total += sum(known) + (count - len(known) + len(sizes.decodes)) * most
    return total


def _bucket(one: CompiledStep, times: StepTimes, engine: Engine) -> Bucket:
    kind, size = one.artifact.program.split()
    if kind == "step":
        seconds, guess = times.compiled_layers[one.size].seconds, times.layers(one.size).seconds
    else:
        seconds, guess = times.compiled_sampling[one.size], times.sampling(one.size)
    each, memory = engine.topology.chip.devices, one.artifact.memory
    return Bucket(
        program=kind,
        size=int(size),
        seconds=seconds,
        predicted_seconds=guess,
        temporaries=memory.temporaries * each,
        code=memory.code * each,
        arguments=memory.arguments * each,
        lower_seconds=one.artifact.lower_seconds,
        compile_seconds=one.artifact.compile_seconds,
        exchanges=_exchanges(one.facts) if kind == "step" else (),
    )


def _exchanges(facts: ProgramFacts) -> tuple[str, ...]:
    """Collectives of a program, equal ones together."""
    found: dict[tuple[str, int], float] = {}
    for one in facts.collectives:
        key = (one.kind, one.bytes)
        found[key] = found.get(key, 0.0) + one.count
    return tuple(f"{count:g} x {kind} of {size:,} bytes" for (kind, size), count in found.items())


def _engine_report(engine: Engine, attention: Callable[[int], Attention]) -> EngineReport:
    limits, topology = engine.limits, engine.topology
    return EngineReport(
        tensor_parallel_size=engine.devices,
        chips=engine.chips,
        engines=engine.engines,
        hosts=topology.num_hosts,
        dtype=str(engine.weights.dtype),
        compute_dtype=str(engine.weights.placement.compute_dtype),
        cache_dtype=str(limits.cache_dtype),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        page_size=limits.page_size,
        attention="; ".join(map(str, attention(limits.max_num_seqs).choices)) or "none",
        command=_command(engine),
    )


def _command(engine: Engine) -> str:
    default, config = EngineConfig(), engine.config
    words = ["fornax", "serve", engine.model.name]
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if value != getattr(default, field.name) and isinstance(value, int | float | str):
            flag = f"--{field.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def _how(engine: Engine, found: Mapping[str, CompiledStep]) -> str:
    if found:
        names = ", ".join(found)
        return (
            f"The engine's own programs, compiled for these chips ({names}); attention and other "
            f"sizes in closed form. {engine.model.source[0].upper()}{engine.model.source[1:]}."
        )
    return (
        f"From closed forms and the hardware table; nothing was compiled. "
        f"{engine.model.source[0].upper()}{engine.model.source[1:]}."
    )


def _notes(
    engine: Engine,
    found: Mapping[str, CompiledStep],
    calibration: Calibration,
    attention: Callable[[int], Attention],
) -> tuple[str, ...]:
    model, topology = engine.model.config, engine.topology
    notes = [
        "times leave out the host's work between steps and the queue of requests; the first token "
        "is that of a prompt that comes to an idle engine with nothing of it in the cache",
        f"rates that programs reach: {calibration.source}",
    ]
    for heads in sorted({own.count for own in CacheHeads.of(model)}):
        if engine.devices > 1 and heads % engine.devices and model.latent is None:
            notes.append(
                f"{heads} key/value heads do not divide over {engine.devices} devices: the "
                f"cache keeps each {engine.devices // heads} times; "
                f"tensor_parallel_size={heads} would keep it once"
            )
    if engine.devices > 1 and model.latent is not None:
        notes.append(
            f"each of the {engine.devices} devices keeps the latents of all tokens: more of them "
            "divide weights and heads, not the cache"
        )
    if engine.config.speculative_config is not None:
        notes.append("speculation counts in memory only: times are those of one token per step")
    choices = attention(engine.limits.max_num_seqs).choices
    if any(choice.implementation == "xla" for choice in choices):
        notes.append(
            "attention runs without a kernel of its own: pages are gathered through memory, "
            "counted as three passes over the keys read"
        )
    if topology.num_hosts > 1 and engine.devices > topology.num_devices // topology.num_hosts:
        notes.append(
            f"the engine spans more than one of the {topology.num_hosts} hosts: Fornax's engine "
            "runs in one process, which must see all its chips"
        )
    left = topology.num_devices - engine.engines * engine.devices
    if left:
        notes.append(f"{left} of {topology.num_devices} devices are left over")
    steps = [one for name, one in found.items() if name.startswith("step")]
    if not found:
        notes.append("temporaries are a guess: one layer's activations, or the logits")
    if found:
        notes.append(
            "tokens are chosen greedily: penalties, filters, random draws and log probabilities "
            "are in branches of the program and are not counted"
        )
    return tuple(dict.fromkeys([*notes, *not_understood(one.facts for one in steps)]))
