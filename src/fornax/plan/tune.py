"""The plan of a post-training run: its step, the passes before a round, and the sampler.

Steps and passes are traced by shapes (`fornax.tune.shapes`); completions are drawn by the engine
that `fornax plan serve` describes, on the trainer's own chips. No data and no weight is read.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from fornax.config import ConfigError
from fornax.config.hub import find_model
from fornax.models import Decoder, DecoderConfig, RematPolicy
from fornax.optim import SOAP, Muon, Shampoo
from fornax.plan.cost.summary import describe_hardware, describe_speed, report_facts
from fornax.plan.facts import Advice, MemoryPart, Plan, ProgramReport, Round, Run, Speed
from fornax.plan.serving.engine import Engine, describe_engine
from fornax.plan.serving.model import ServedModel
from fornax.plan.serving.rounds import Drawing, draw_round
from fornax.plan.topology import Topology
from fornax.plan.traced import Sampled, TracedStep, forward_facts, held_bytes, train_facts
from fornax.train import Task
from fornax.tune.config import (
    DistillConfig,
    RLConfig,
    SFTConfig,
    TuneConfig,
)
from fornax.tune.policy import ModelOrigin, fit_to_model, read_model_origin
from fornax.tune.rl.components import engines_for
from fornax.tune.shapes import RunShapes, run_shapes

__all__ = ["plan_tune"]

_USE = "plan tune"
_STEPS = 1_000_000
"""Stands for steps that only the data tells: a schedule's length changes no shape."""


def plan_tune(config: TuneConfig, topology: Topology, *, name: str = "config") -> Plan:
    """Plan what `fornax tune` would run, on a topology; nothing is compiled and no data is read.

    Rows are taken to be as long as `max_length`. A round of reinforcement learning is planned as
    the run makes it: the engines draw all completions at their longest, passes score them, steps
    train on them, one after the other, and everything that stays in memory meanwhile is counted.

    Args:
      config: the run; of its model `config.json` is enough.
      topology: the chips.
      name: what the plan is called.

    Raises:
      ConfigError: naming what the plan does not know: a method, a part of the model, an optimizer,
        a mesh axis, where completions come from.
      ShardingError: what does not divide over the mesh.
      EngineError: an engine without room for one sequence.
    """
    origin = read_model_origin(config, find_model(config.model, files=("*.json",)))
    check_planned(config, origin.model_config)
    given, config = config, fit_to_model(config, origin)
    steps = config.steps
    config = dataclasses.replace(config, steps=steps or _STEPS)
    run = run_shapes(config, origin)
    plain = run_shapes(dataclasses.replace(config, remat="none"), origin).task
    traced = train_facts(config, run.task, run.batch, topology, use=_USE, plain=plain)
    step = report_facts("train_step", traced.facts, topology)
    programs: tuple[ProgramReport, ...] = (step,)
    facts = _run(config, steps, run, traced)
    hardware = describe_hardware(topology, config.dtypes.compute)
    speed = describe_speed(step, facts, hardware)
    notes = [*_model_notes(given, config, run), *run.notes]
    loop: Round | None = None
    if isinstance(config, RLConfig):
        drawn = _draws(config, origin, topology)
        programs = _beside(config, run, topology, step, drawn)
        loop = _round(config, programs)
        speed = _over_rounds(speed, loop, facts, hardware.chips)
        notes += _round_notes(config, drawn)
    plan = Plan(
        name=name,
        origin="predicted",
        how="Traced, and predicted from the hardware table; nothing was compiled.",
        hardware=hardware,
        programs=programs,
        run=facts,
        kernels=tuple(dict.fromkeys(map(str, traced.kernels))),
        speed=speed,
        round=loop,
        notes=tuple(notes),
    )
    return (
        plan
        if plan.fits
        else dataclasses.replace(plan, advice=_advice(config, origin, plan, topology))
    )


def check_planned(config: TuneConfig, model: DecoderConfig) -> None:
    """Refuse what a plan of tuning does not know.

    Raises:
      ConfigError: naming it, and what to do instead.
    """
    for what, instead in _unknown(config, model):
        raise ConfigError(f"{what} is not planned for fornax tune; {instead}")


def _unknown(config: TuneConfig, model: DecoderConfig) -> Iterator[tuple[str, str]]:
    """What is not known of a run, and what to do instead."""
    optimizers = (config.optim.optimizer, *(group.optimizer for group in config.optim.groups))
    if isinstance(config, DistillConfig):
        yield (
            "distill, whose teacher has a pass and memory of its own,",
            "plan the student's step as fornax plan tune sft, and add the teacher's weights",
        )
    if model.experts is not None:
        yield "a model with experts", "plan its training with fornax plan, whose step is as large"
    if model.linear is not None:
        yield "a model with linear attention", "plan its training with fornax plan"
    for optimizer in optimizers:
        if isinstance(optimizer, Muon | SOAP | Shampoo):
            yield (
                f"optim.optimizer.type={optimizer.type}, which multiplies matrices,",
                "plan with adamw, whose state is no smaller than Muon's",
            )
    for key, value in (("qat", config.quant.qat), ("scheme", config.quant.scheme)):
        if value is not None:
            yield f"quant.{key}={value}", "plan without it: memory is nearly the same"
    if isinstance(config, RLConfig):
        if config.conversation is not None:
            yield "conversation, whose turns and tools take their own time,", "leave it out"
        if config.reward_model is not None:
            yield f"reward_model={config.reward_model}", "leave it out, and add its weights"
        if config.asynchronous is not None:
            yield (
                "asynchronous, which draws while it trains,",
                "leave it out: the plan then says how long each takes alone",
            )


def _run(config: TuneConfig, steps: int | None, run: RunShapes, traced: TracedStep) -> Run:
    rows = 1
    for size in run.batch["tokens"].shape[:-1]:
        rows *= size
    return Run(
        parameters=traced.parameters,
        batch_size=rows,
        seq_len=config.max_length,
        accumulate=config.accumulate,
        steps=steps,
        remat=config.remat,
        params_dtype=config.dtypes.params,
        compute_dtype=config.dtypes.compute,
        mesh={axis: size for axis, size in traced.mesh.items() if size > 1},
        model_flops=traced.model_flops,
    )


def _model_notes(given: TuneConfig, config: TuneConfig, run: RunShapes) -> Iterator[str]:
    yield f"{run.trained_parameters:,} parameters are trained"
    if config.max_length < given.max_length:
        yield (
            f"max_length is {config.max_length} instead of {given.max_length}: the model has no "
            "more positions"
        )
    if isinstance(config, SFTConfig) and config.packing == "none":
        yield "every row is counted at max_length tokens: without packing, rows are shorter"
    if config.eval.every is not None:
        yield "evaluation is not counted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draws:
    """The engines of a run, and one's part of a round."""

    engine: Engine
    engines: int
    drawing: Drawing


def _draws(config: RLConfig, origin: ModelOrigin, topology: Topology) -> _Draws:
    rollout, platform = config.rollout, topology.chip.platform
    made, engines = engines_for(config, platform, topology.num_devices)
    model = ServedModel(
        name=config.model, config=origin.model_config, dtype=config.dtypes.params, source=""
    )
    engine = describe_engine(model, made, topology)
    drawing = draw_round(
        engine,
        prompts=-(-config.prompts // engines),
        group=config.group_size,
        prompt_tokens=config.max_length - rollout.max_tokens,
        new_tokens=rollout.max_tokens,
    )
    return _Draws(engine=engine, engines=engines, drawing=drawing)


def _beside(
    config: RLConfig, run: RunShapes, topology: Topology, step: ProgramReport, drawn: _Draws
) -> tuple[ProgramReport, ...]:
    """The programs of a round, each with what lies in memory beside it."""
    each, account = topology.chip.devices, drawn.engine.account
    weights = step.memory.owned("parameters")
    kept = {
        "sampler": account.held * each,
        "reference": weights if run.copies_reference else 0,
    }
    passes = []
    for name, forward in run.passes.items():
        batch = {key: run.batch[key] for key in ("tokens", "targets", "segment_ids", "positions")}
        sampled = Sampled(run=_without_dropout(forward), batch=batch)
        traced = forward_facts(config, run.task, sampled, topology, use=_USE, training=True)
        passes.append(_with_parts(report_facts(name, traced.facts, topology), kept))
    merged = 0
    if config.lora is not None:  # adapters are merged into a copy, which the engine copies
        merged = held_bytes(
            config, _dense(config, drawn.engine.model.config, run.task), topology, use=_USE
        )
    sample = _sample(drawn, step, topology, max(account.temporaries * each, merged))
    return (_with_parts(step, kept), *passes, _with_parts(sample, kept))


def _without_dropout(forward: Any) -> Any:
    def run(model: Decoder, batch: Mapping[str, jax.Array]) -> Any:
        model.eval()
        return forward(model, batch)

    return run


def _dense(config: RLConfig, model: DecoderConfig, task: Task) -> Task:
    """The same task, of the model without adapters."""
    dtypes = {"dtype": config.dtypes.param_dtype, "compute_dtype": config.dtypes.compute_dtype}
    return dataclasses.replace(
        task,
        build=lambda rngs: Decoder(model, rngs=rngs, **dtypes),
        post=type(task.post)(),
    )


def _with_parts(program: ProgramReport, more: Mapping[str, int]) -> ProgramReport:
    parts = tuple(MemoryPart(owner=owner, bytes=size) for owner, size in more.items() if size)
    memory = dataclasses.replace(program.memory, parts=(*program.memory.parts, *parts))
    return dataclasses.replace(program, memory=memory)


def _sample(
    drawn: _Draws, step: ProgramReport, topology: Topology, temporaries: int
) -> ProgramReport:
    """All completions of a round, drawn beside the trainer's state."""
    time, each = drawn.drawing.time, topology.chip.devices
    state = [part for part in step.memory.parts if part.owner in ("parameters", "optimizer")]
    memory = dataclasses.replace(
        step.memory, parts=(*state, MemoryPart(owner="temporaries", bytes=temporaries))
    )
    waits = {
        "memory": time.weights + time.cache + time.sampling,
        "compute": time.compute,
        "ici": time.exchange,
    }
    return ProgramReport(
        name="sample",
        memory=memory,
        flops=drawn.drawing.flops * each,
        bytes=drawn.drawing.bytes * each,
        step_seconds=time.seconds,
        compute_seconds=time.seconds - time.exchange,
        exposed_seconds=time.exchange,
        optimistic_seconds=time.seconds - time.exchange,
        pessimistic_seconds=time.seconds,
        bound=max(waits, key=waits.__getitem__),
    )


def _round(config: RLConfig, programs: tuple[ProgramReport, ...]) -> Round:
    step, *passes, sample = programs
    return Round(
        completions=config.completions,
        steps=config.steps_per_round,
        sample_seconds=sample.step_seconds,
        score_seconds=config.mini_batches * sum(one.step_seconds for one in passes),
        train_seconds=config.steps_per_round * step.step_seconds,
    )


def _over_rounds(speed: Speed, loop: Round, run: Run, chips: int) -> Speed:
    """The speed of a run whose steps wait for their round."""
    seconds = loop.seconds / loop.steps
    return dataclasses.replace(
        speed,
        step_seconds=seconds,
        tokens_per_second_per_chip=run.tokens / seconds / chips,
        tokens_per_day=run.tokens / seconds * 86_400,
    )


def _round_notes(config: RLConfig, drawn: _Draws) -> Iterator[str]:
    engines = f"{drawn.engines} engines" if drawn.engines > 1 else "one engine"
    yield (
        f"{engines} of {drawn.engine.devices} device{'s' * (drawn.engine.devices > 1)} draw "
        f"{drawn.drawing.at_once} completions at once, each after a prompt of "
        f"{config.max_length - config.rollout.max_tokens} tokens and {config.rollout.max_tokens} "
        "tokens long"
    )
    yield "the engine's times leave out the host's work between its steps"
    yield "rewards, and the transfer of weights to the engine, are not counted"


def _advice(
    config: TuneConfig, origin: ModelOrigin, plan: Plan, topology: Topology
) -> tuple[Advice, ...]:
    """The fewest micro-batches that would fit, as it recomputes now and with all recomputed."""
    others = max((one.memory.total for one in plan.programs[1:]), default=0)
    beside = sum(map(plan.main.memory.owned, ("sampler", "reference")))
    found: list[Advice] = []
    if others > plan.main.memory.usable:  # which no change of the step makes smaller
        return ()
    remats: tuple[RematPolicy, ...] = (
        ("full",) if config.remat == "full" else (config.remat, "full")
    )
    for remat in remats:
        for accumulate in (config.accumulate * times for times in (1, 2, 4, 8, 16)):
            said = {"remat": remat, "accumulate": accumulate}
            said = {key: value for key, value in said.items() if value != getattr(config, key)}
            if not said or config.batch_size % accumulate:
                continue
            changed = dataclasses.replace(config, remat=remat, accumulate=accumulate)
            run = run_shapes(changed, origin)
            traced = train_facts(changed, run.task, run.batch, topology, use=_USE)
            step = report_facts("train_step", traced.facts, topology)
            if step.memory.total + beside <= step.memory.usable:
                found.append(
                    Advice(
                        change=" and ".join(f"{key} {value}" for key, value in said.items()),
                        flags=" ".join(f"--{key} {value}" for key, value in said.items()),
                        total_bytes=step.memory.total + beside,
                        step_seconds=step.step_seconds,
                    )
                )
                break
    return tuple(sorted(found, key=lambda one: one.step_seconds))
