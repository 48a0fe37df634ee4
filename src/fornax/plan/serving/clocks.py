"""The clocks of an engine, from closed forms and from what was compiled."""

from collections.abc import Callable, Mapping

from fornax.plan.cost import Calibration, network_of
from fornax.plan.serving.compiled import Compiled, body_of, choice_of, exchanges_of
from fornax.plan.serving.data import Bucket
from fornax.plan.serving.latency import Body, Clock, Rates
from fornax.plan.serving.layout import Engine
from fornax.plan.serving.links import exchange_seconds, first_devices
from fornax.plan.serving.work import Attention, amounts, attention_of

__all__ = ["PUBLISHED", "attention_by_size", "bucket_of", "clock_of", "code_bytes"]

PUBLISHED = Calibration(
    matmul=1.0,
    attention=1.0,
    memory=1.0,
    links=1.0,
    outside=1.0,
    host=1.0,
    overhead=0.0,
    hop_seconds=0.0,
    cycles=0.0,
    source="published rates",
)


def attention_by_size(engine: Engine) -> Callable[[int], Attention]:
    known: dict[int, Attention] = {}

    def attention(tokens: int) -> Attention:
        if tokens not in known:
            known[tokens] = attention_of(engine, tokens)
        return known[tokens]

    return attention


def clock_of(
    engine: Engine,
    found: Mapping[str, Compiled],
    calibration: Calibration,
    attention: Callable[[int], Attention],
) -> Clock:
    topology = engine.topology
    chip, dtype = topology.chip, engine.weights.placement.compute_dtype.name
    # Packed weights on CPU are multiplied by native kernels, of which nothing is published.
    peak = max(chip.peak_flops.values()) if chip.platform == "cpu" else chip.peak(dtype)
    places = first_devices(topology, engine.devices)
    bodies: dict[int, Body] = {}
    choices: dict[int, float] = {}
    for name, one in found.items():
        if name.startswith("step"):
            bodies[one.size] = body_of(one.artifact, one.facts, topology, calibration)
        else:
            choices[one.size] = choice_of(one.artifact, one.facts, topology, calibration)
        places = list(one.artifact.devices)
    return Clock(
        rates=Rates(
            flops=peak / chip.devices * calibration.matmul,
            attention=peak / chip.devices * calibration.attention,
            bandwidth=chip.memory_bandwidth / chip.devices * calibration.memory,
            exchange=exchange_seconds(topology, network_of(chip, calibration), places),
            overhead=0.0 if chip.platform == "cpu" else calibration.overhead,
        ),
        amounts=amounts(engine),
        steps=engine.sizes.steps,
        samples=engine.sizes.samples,
        attention=attention,
        bodies=bodies,
        choices=choices,
    )


def code_bytes(engine: Engine, found: Mapping[str, Compiled]) -> int:
    """Bytes of all programs: those that were compiled, and the others as large as the largest."""
    total = 0
    for kind, count in (("step", len(engine.sizes.steps)), ("sample", len(engine.sizes.samples))):
        known = [o.artifact.memory.code for n, o in found.items() if n.startswith(kind)]
        total += sum(known) + (count - len(known)) * max(known, default=0)
    return total


def bucket_of(one: Compiled, clock: Clock, engine: Engine) -> Bucket:
    kind, size = one.artifact.program.split()
    if kind == "step":
        seconds, guess = clock.bodies[one.size].seconds, clock.body(one.size).seconds
    else:
        seconds, guess = clock.choices[one.size], clock.choice(one.size)
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
        exchanges=exchanges_of(one.facts) if kind == "step" else (),
    )
