"""From a config and a topology to the facts of its training step: no compiler and no device."""

import math
from collections.abc import Iterator

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.mesh import check_use
from fornax.plan.closed_form.attention import attention_choice
from fornax.plan.closed_form.exchanges import exchanges
from fornax.plan.closed_form.memory import memory_at_peak
from fornax.plan.closed_form.shards import EVEN, LocalStep, Routed, attending, local_step, sections
from fornax.plan.closed_form.state import state_arrays
from fornax.plan.closed_form.work import repeated_flops, step_work, update_work
from fornax.plan.facts import StepFacts
from fornax.plan.topology import Topology
from fornax.train import TrainConfig
from fornax.train.hosts import data_shards, padding_text


def step_facts(config: TrainConfig, topology: Topology, expert_load: float = EVEN) -> StepFacts:
    """What a training step of `config` holds, computes and exchanges on `topology`.

    Args:
      config: of the run.
      topology: the chips.
      expert_load: rows of the busiest device over the mean, where devices divide experts.

    Raises:
      ConfigError: for a model that is not given, slices that the mesh does not
        name, a remat policy that is not known here.
      ShardingError: when model, batch or length do not divide over the mesh.
    """
    check_use(config.mesh, "plan")
    check_slices(config, topology)
    local = local_step(config, topology, expert_load)
    state = state_arrays(local)
    return StepFacts(
        memory=memory_at_peak(local, state),
        work=(*step_work(local), *update_work(local, state)),
        exchanges=exchanges(local, state),
        dtype=config.dtypes.compute,
        mesh=local.mesh,
        repeated_flops=repeated_flops(local) * topology.chip.devices,
        notes=tuple(_notes(local, expert_load)),
    )


def _notes(local: LocalStep, expert_load: float) -> Iterator[str]:
    config, shards = local.config, data_shards(local.mesh, local.rules)
    padding = padding_text(config.batch_size, shards, config.accumulate)
    if padding:
        yield padding
    if config.quant.exclude:
        yield (
            f"quant.exclude is not looked at: all products of the layers count in "
            f"{config.quant.scheme}"
        )
    chosen = {attention_choice(local, kind).implementation for kind in attending(local.model)}
    if chosen & {"blockwise", "xla"}:
        yield (
            "attention runs as plain XLA operations here, which computes masked blocks too and "
            "passes its scores through memory"
        )
    if "ring" in chosen and local.topology.chip.platform != "cpu":
        yield (
            "ring attention multiplies by plain XLA operations here, which pass scores through "
            "memory"
        )
    if local.shares.experts:
        text = expert_text(local.shares.routed, expert_load)
        if local.topology.chip.platform == "tpu":
            filled = _filled_tiles(local)
            yield f"{text}; the tiles of their products are filled to {filled:.0%}"
        else:
            yield f"{text}; grouped products are taken at the rate of dense ones"
    staged = sections(local)[-1]
    if staged.staged:
        stages = local.stages
        yield (
            f"a pipeline of {stages} stages for {config.pipeline.count(stages)} microbatches: its "
            f"layers run {staged.runs} times, {stages - 1} of them for nobody "
            f"({(stages - 1) / staged.runs:.0%} of their time, the bubble)"
        )
    heads = local.size("activation_heads")
    whole = {
        local.model.kv_shape(kind)[0]
        for kind in attending(local.model)
        if local.shares.attended(kind)[0] == local.model.num_heads and heads > 1
    }
    for count in sorted(whole):
        yield (
            f"tensor={heads} does not divide {count} key/value heads, so every tensor shard "
            "computes the attention of all heads"
        )
    if local.model.linear is not None:
        yield (
            "linear layers compute in float32, as products of its chunks and passes over memory, "
            "and are taken to reach its share of the peak"
        )


def _filled_tiles(local: LocalStep) -> float:
    """Of what products of experts compute, the rows and columns that there are."""
    of_experts = [work for work in step_work(local) if work.kind == "experts"]
    useful = sum(work.flops * work.count for work in of_experts)
    return useful / sum(work.flops * work.computed * work.count for work in of_experts)


def expert_text(routed: Routed, expert_load: float) -> str:
    """How even the load of experts is taken to be, by whom it is said, and what has room."""
    text = _load_text(routed, expert_load)
    if routed.capacity is None:
        return text
    return f"{text}; an expert has room for {routed.capacity} tokens of a row and drops the others"


def _load_text(routed: Routed, expert_load: float) -> str:
    if routed.devices == 1:
        return (
            "tokens are taken to choose each expert equally often; an expert that more of them "
            "choose makes no device slower, because each device has a part of all experts"
        )
    said = (
        "an even load, the default, as in published runs, whose routing is balanced artificially"
        if expert_load == EVEN
        else "as given"
    )
    way = "sent to their experts" if routed.sends else "gathered by all that share experts"
    return (
        f"experts are divided over {routed.devices} devices, of which the busiest has "
        f"{expert_load:g} times the mean load (--expert-load: {said}); tokens are {way}"
    )


def kernel_choices(config: TrainConfig, topology: Topology) -> tuple[kernels.Choice, ...]:
    """Which implementation each kernel of a step gets, and why no faster one.

    Raises:
      ConfigError, ShardingError: when the run does not divide over the topology.
    """
    local = local_step(config, topology)
    found = [attention_choice(local, kind) for kind in attending(local.model)]
    if local.shares.experts:
        found.append(experts_choice(local))
    return tuple(dict.fromkeys(found))


def experts_choice(local: LocalStep) -> kernels.Choice:
    """Which implementation multiplies the rows of experts, and why no faster one."""
    call = kernels.GroupedCall(
        platform=local.topology.chip.platform,
        rows=math.ceil(local.tokens * local.shares.routed.room),
        groups=local.shares.experts,
        inputs=local.model.hidden_size,
        outputs=local.shares.expert_mlp,
        dtype=local.config.dtypes.compute_dtype.name,
        devices=1,
    )
    return kernels.grouped_matmul_operation.choice(call)


def check_slices(config: TrainConfig, topology: Topology) -> None:
    """Refuse a mesh whose slice axis is not the topology's number of slices.

    Raises:
      ConfigError: with the value that would do.
    """
    if topology.chip.platform == "tpu" and config.mesh.slice != topology.slices:
        raise ConfigError(
            f"mesh.slice={config.mesh.slice} and {topology.name} has {topology.slices} "
            f"slice{'s' if topology.slices > 1 else ''}; set mesh.slice to {topology.slices}"
        )
