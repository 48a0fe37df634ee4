"""Bounds on the time of an engine's step: what must be read, computed and exchanged.

A step's parts follow one another: the layers' products, which wait for the weights or for
arithmetic; attention, which waits for the cache or for arithmetic; exchanges between chips; the
output projection and the choice of tokens. The host's work between steps is not counted. The time
of the layers and of the choice comes from the compiled program where there is one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from fornax.hlo import Calibration, Item, Loop, Operation, ProgramFacts
from fornax.llm.programs import bucket_for
from fornax.plan.artifact import Artifact
from fornax.plan.cost.groups import all_devices, group_layouts
from fornax.plan.cost.network import collective_seconds, network_of
from fornax.plan.cost.schedule import predict
from fornax.plan.cost.step import DeviceRates, time_work
from fornax.plan.facts import Work
from fornax.plan.serving.engine import Engine
from fornax.plan.serving.work import Attention, StepSizes, step_sizes
from fornax.plan.serving_facts import Bound
from fornax.plan.topology import Topology

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
"""Nothing lost: times are bounds."""

_OPERATIONS = 50
"""Of a layer, in the programs that XLA makes for TPUs."""
_LOGIT_BYTES = 8
"""Of a logit in float32, written once and read once."""


@dataclass(frozen=True)
class CompiledStep:
    """A program that was compiled, and what was read from it."""

    artifact: Artifact
    facts: ProgramFacts
    size: int
    """Tokens of a step, or samples of a choice."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, by what it waits for."""

    weights: float = 0.0
    """The layers' products that wait for memory."""
    cache: float = 0.0
    compute: float = 0.0
    exchange: float = 0.0
    sampling: float = 0.0
    compiled: bool = False

    @property
    def seconds(self) -> float:
        """All parts."""
        return self.weights + self.cache + self.compute + self.exchange + self.sampling

    @property
    def bound(self) -> Bound:
        """What takes longest."""
        parts: tuple[Bound, ...] = ("weights", "cache", "compute", "exchange", "sampling")
        return max(parts, key=lambda name: getattr(self, name))

    def __mul__(self, count: int) -> "StepTime":
        """So many such steps."""
        parts = {field.name: getattr(self, field.name) * count for field in fields(self)[:-1]}
        return StepTime(**parts, compiled=self.compiled)

    def __add__(self, other: "StepTime") -> "StepTime":
        """One step after another."""
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)[:-1]
        }
        return StepTime(**sums, compiled=self.compiled and other.compiled)


@dataclass(frozen=True)
class StepTimes:
    """Times of one engine's steps."""

    rates: DeviceRates
    exchange: Callable[[str, float], float]
    """(kind of collective, bytes of the whole array) to seconds, among an engine's devices."""
    sizes: StepSizes
    steps: tuple[int, ...]
    """Sizes of steps in tokens."""
    samples: tuple[int, ...]
    decodes: tuple[int, ...]
    """Of those that are sampled in the same program; none where each is sampled apart."""
    attention: Callable[[int], Attention]
    """By tokens of a step."""
    compiled_layers: Mapping[int, StepTime]
    """Of steps that were compiled, by tokens: without attention and the choice of tokens."""
    compiled_sampling: Mapping[int, float]
    """Seconds of the compiled choices, by samples."""

    def layers(self, tokens: int) -> StepTime:
        """In closed form, a step of that many tokens without attention and choice."""
        sizes = self.sizes
        written = tokens * self.attention(tokens).written_bytes
        products = Work(
            kind="products",
            flops=2 * tokens * sizes.token_products,
            bytes=sizes.weight_bytes(tokens) + tokens * sizes.table_row_bytes + written,
        )
        time = time_work(products, self.rates)
        exchange = 0.0
        if sizes.reductions:
            each = self.exchange("all-reduce", tokens * sizes.token_bytes)
            exchange = sizes.reductions * each
        small = sizes.layers * _OPERATIONS * self.rates.overhead
        if time.bound == "memory":
            return StepTime(weights=time.memory + small, exchange=exchange)
        return StepTime(weights=small, compute=time.compute, exchange=exchange)

    def sampling(self, samples: int) -> float:
        """In closed form, the output projection and the greedy choice of that many tokens."""
        sizes = self.sizes
        head = Work(
            kind="products", flops=2 * samples * sizes.head_products, bytes=sizes.head_bytes
        )
        logits = Work(kind="logits", bytes=samples * sizes.logits * _LOGIT_BYTES)
        return time_work(head, self.rates).seconds + time_work(logits, self.rates).seconds

    def decode(self, batch: int, context: int) -> StepTime:
        """A step in which each of `batch` sequences of `context` tokens gets one more."""
        size = bucket_for(batch, self.decodes or self.steps)
        work = self.attention(size).decode(batch, context)
        return self._step(size, work, size if self.decodes else bucket_for(batch, self.samples))

    def prompt(self, tokens: int) -> tuple[StepTime, int]:
        """The steps of one prompt that has the engine to itself, and how many they are."""
        chunk = self.steps[-1]
        found = []
        for start in range(0, tokens, chunk):
            stop = min(start + chunk, tokens)
            size = bucket_for(stop - start, self.steps)
            work = self.attention(size).prompt(start, stop)
            found.append(self._step(size, work, 1 if stop == tokens else 0))
        total = found[0]
        for step in found[1:]:
            total = total + step
        return total, len(found)

    def prompts(self, count: int, tokens: int) -> tuple[StepTime, int]:
        """The steps of `count` prompts of equal length, short ones together, and how many."""
        together = min(count, max(1, self.steps[-1] // tokens))
        if together == 1:
            time, steps = self.prompt(tokens)
            return time * count, count * steps
        size = bucket_for(together * tokens, self.steps)
        one = self.attention(size).prompt(0, tokens)
        work = replace(one, flops=one.flops * together, bytes=one.bytes * together)
        steps = -(-count // together)
        return self._step(size, work, bucket_for(together, self.samples)) * steps, steps

    def _step(self, size: int, attention: Work, samples: int) -> StepTime:
        layers = self.compiled_layers.get(size) or self.layers(size)
        time = time_work(attention, self.rates)
        sampling = 0.0
        if samples:
            known = self.compiled_sampling.get(samples)
            sampling = self.sampling(samples) if known is None else known
        return StepTime(
            weights=layers.weights,
            cache=time.memory if time.bound == "memory" else 0.0,
            compute=layers.compute + (0.0 if time.bound == "memory" else time.compute),
            exchange=layers.exchange,
            sampling=sampling,
            compiled=layers.compiled,
        )


def step_times(
    engine: Engine,
    found: Mapping[str, CompiledStep],
    calibration: Calibration,
    attention: Callable[[int], Attention],
) -> StepTimes:
    """Times of an engine's steps at the rates of a calibration.

    Args:
      engine: as shapes.
      found: its programs that were compiled, such as `step 256` and `sample 256`.
      calibration: shares of published rates.
      attention: by tokens of a step.
    """
    topology = engine.topology
    chip, dtype = topology.chip, engine.weights.placement.compute_dtype.name
    # Packed weights on CPU are multiplied by native kernels, of which nothing is published.
    peak = max(chip.peak_flops.values()) if chip.platform == "cpu" else chip.peak(dtype)
    devices = all_devices(topology)[: engine.devices]
    layers: dict[int, StepTime] = {}
    sampling: dict[int, float] = {}
    for name, one in found.items():
        if name.startswith("step"):
            layers[one.size] = compiled_layers(one, topology, calibration)
        else:
            schedule = _without_branches(one.facts.schedule)
            time = predict(schedule, one.artifact.devices, topology, calibration)
            sampling[one.size] = time.step_seconds
        devices = list(one.artifact.devices)
    network = network_of(chip, calibration)
    layouts = group_layouts([range(len(devices))], devices, topology)

    def exchange(kind: str, size: float) -> float:
        times = [collective_seconds(kind, size, layout, network).seconds for layout in layouts]
        return max(times, default=0.0)

    return StepTimes(
        rates=DeviceRates(
            matmul=peak / chip.devices * calibration.matmul,
            attention=peak / chip.devices * calibration.attention,
            memory=chip.memory_bandwidth / chip.devices * calibration.memory,
            overhead=0.0 if chip.platform == "cpu" else calibration.overhead,
        ),
        exchange=exchange,
        sizes=step_sizes(engine),
        steps=engine.sizes.steps,
        samples=engine.sizes.samples,
        decodes=engine.sizes.decodes,
        attention=attention,
        compiled_layers=layers,
        compiled_sampling=sampling,
    )


def compiled_layers(one: CompiledStep, topology: Topology, calibration: Calibration) -> StepTime:
    """A compiled step without attention, whose time depends on what the sequences hold."""
    schedule = without_attention(one.facts.schedule)
    time = predict(schedule, one.artifact.devices, topology, calibration)
    return StepTime(
        weights=time.memory_seconds,
        compute=max(0.0, time.step_seconds - time.memory_seconds - time.exposed_seconds),
        exchange=time.exposed_seconds,
        compiled=True,
    )


def without_attention(schedule: Sequence[Item]) -> tuple[Item, ...]:
    """The schedule without attention's kernels and loops of unknown length. What is written and
    prepared for attention stays."""

    def keeps(item: Item) -> bool:
        if isinstance(item, Loop):
            return item.exact
        kernel = isinstance(item.what, Operation) and item.what.category in ("attention", "kernel")
        return not kernel

    return _filtered(schedule, keeps)


def _without_branches(schedule: Sequence[Item]) -> tuple[Item, ...]:
    """The schedule of a greedy choice: what requests may ask for beyond it is in branches."""

    def keeps(item: Item) -> bool:
        return not isinstance(item, Loop) or (item.exact and item.kind != "conditional")

    return _filtered(schedule, keeps)


def _filtered(schedule: Sequence[Item], keeps: Callable[[Item], bool]) -> tuple[Item, ...]:
    return tuple(
        Loop(item.name, item.kind, item.count, item.exact, _filtered(item.body, keeps))
        if isinstance(item, Loop)
        else item
        for item in schedule
        if keeps(item)
    )


def not_understood(programs: Iterable[ProgramFacts]) -> list[str]:
    """What was not understood of steps, less what their attention is counted for by itself."""
    counted = ("attention", "how often this loop runs")
    notes = dict.fromkeys(note for facts in programs for note in facts.notes)
    return [note for note in notes if not any(text in note for text in counted)]
