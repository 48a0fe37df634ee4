"""What a serving plan says in words: the engine, its command, how figures were found, notes."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping

from fornax.llm.config import EngineConfig
from fornax.plan.cost import Calibration
from fornax.plan.serving.compiled import Compiled, unknown_of
from fornax.plan.serving.data import EngineReport
from fornax.plan.serving.layout import Engine
from fornax.plan.serving.work import Attention

__all__ = ["engine_report", "how_words", "notes_of"]


def engine_report(engine: Engine, attention: Callable[[int], Attention]) -> EngineReport:
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
        attention=str(attention(limits.max_num_seqs).choice),
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


def how_words(engine: Engine, found: Mapping[str, Compiled]) -> str:
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


def notes_of(
    engine: Engine,
    found: Mapping[str, Compiled],
    calibration: Calibration,
    attention: Callable[[int], Attention],
) -> tuple[str, ...]:
    model, topology = engine.model.config, engine.topology
    notes = [
        "times leave out the host's work between steps and the queue of requests; the first token "
        "is that of a prompt that comes to an idle engine with nothing of it in the cache",
        f"rates that programs reach: {calibration.source}",
    ]
    if engine.devices > 1 and model.kv_heads % engine.devices:
        notes.append(
            f"{model.kv_heads} key/value heads do not divide over {engine.devices} devices: the "
            f"cache keeps each {engine.devices // model.kv_heads} times; "
            f"tensor_parallel_size={model.kv_heads} would keep it once"
        )
    if engine.config.speculative_config is not None:
        notes.append("speculation counts in memory only: times are those of one token a step")
    if attention(engine.limits.max_num_seqs).implementation == "xla":
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
            "stand in branches of the program and are not counted"
        )
    return tuple(dict.fromkeys([*notes, *unknown_of(one.facts for one in steps)]))
