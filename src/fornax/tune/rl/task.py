"""Put together: a policy, prompts, rewards and an algorithm become a task of the trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError
from fornax.mesh import Rules, check_processes, make_mesh, tree_shardings, use_mesh
from fornax.models import Decoder
from fornax.train.task import Batch, Batches, Hosts, Loss, PostTraining, Task
from fornax.tune.config import Aggregation, RLConfig
from fornax.tune.data import PromptTokens
from fornax.tune.rl.collect import Collector, RewardManager, SampleGroups, sample_completions
from fornax.tune.rl.credit import Credit, KLController
from fornax.tune.rl.forward import BothPolicies, Forward, mesh_of, score_rows, without_value_head
from fornax.tune.rl.packing import Layout, Round, RoutedShape, Rows, Scored, make_round, row_counts
from fornax.tune.rl.ranks import RoundLink, host_weights
from fornax.tune.rl.rollouts import Rollout, RolloutBatch
from fornax.tune.rl.stream import RolloutStream, SamplesFile
from fornax.tune.rollout import Sampler
from fornax.tune.rollout.sampler import Weights

__all__ = ["Components", "Objective", "rl_task"]


@dataclass(frozen=True, kw_only=True)
class Components:
    """What a run works with, whatever the algorithm."""

    build: Callable[[nnx.Rngs], Decoder]
    pretrained: Callable[[Mesh, Rules], Decoder] | None
    trained: Filter
    """NNX filter of what is trained."""
    prompts: Sequence[PromptTokens]
    rewards: RewardManager | None
    """The rewards; None where environments give them."""
    sampler: Callable[[Decoder], Sampler]
    """A plain decoder, without adapters or value head, to a sampler of it in this process."""
    remote: Callable[[], Sampler] | None = None
    """Makes a sampler over other processes, which takes weights as `HostWeights`; None: there are
    none, and `sampler` draws."""
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, for the file of samples."""
    draw: SampleGroups = sample_completions
    notes: tuple[str, ...] = ()
    """Lines logged before the first step."""
    loopback: bool = True
    """Whether all processes of the run are on this machine."""
    out: Path
    """The run directory."""
    routed: RoutedShape | None = None
    """Of the experts that the sampler returns, for tokens to take them again; None: it does not."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an algorithm brings."""

    loss: Callable[[Decoder, Batch], Loss]
    """(model, rows) to the sums that are trained on."""
    score: Forward | None
    """(model, rows) to arrays [R, T] that a round's first step must find; None: nothing."""
    reference: Forward | None
    """The same of the reference policy; None: there is none."""
    credit: Callable[[Sequence[Rollout], Scored], Credit]
    aggregation: Aggregation
    mask_truncated: bool = False
    skip_zero_advantage: bool = False
    max_resamples: int = 0
    """Above 0: dynamic sampling."""
    controller: KLController | None = None


def rl_task(config: RLConfig, components: Components, objective: Objective) -> Task:
    """The task of a run.

    Raises:
      ClusterError: in a run of several processes without samplers of their own.
    """
    processes, remote = jax.process_count(), components.remote
    if remote is None:
        check_processes("reinforcement learning without samplers", processes)

    def plain(model: nnx.Module) -> Decoder:
        return without_value_head(adapters.merged(model))

    def sampler(model: nnx.Module) -> Sampler:
        return components.sampler(plain(model)) if remote is None else remote()

    def weights(model: nnx.Module) -> Weights:
        state = nnx.state(plain(model), nnx.Param)
        return state if remote is None else host_weights(state, keep=jax.process_index() == 0)

    stream = RolloutStream(
        collector=_collector(config, components, objective),
        sampler=sampler,
        weights=weights,
        steps_per_round=config.steps_per_round,
        ahead=0 if config.asynchronous is None else config.asynchronous.max_staleness,
        meet=None if processes == 1 else lambda: RoundLink(loopback=components.loopback),
        prepare=_preparation(config, components, objective),
        samples=SamplesFile(components.out / "samples.jsonl", components.decode),
        group_size=config.group_size,
        controller=objective.controller,
    )

    def batches(split: str, hosts: Hosts) -> Batches:
        stream.hosts = hosts
        if split != "train":
            raise ConfigError(
                "reinforcement learning reports the reward of every step and evaluates nothing "
                "between; leave eval.every out, and use `fornax eval` on held-out prompts"
            )
        return stream

    return Task(
        build=components.build,
        loss=lambda model, batch, key: objective.loss(model, batch),
        batches=batches,
        pretrained=components.pretrained,
        unit="tokens" if objective.aggregation == "token_mean" else "completions",
        post=PostTraining(
            trained=components.trained,
            follow=stream.follow,
            observe=stream.observe,
            notes=components.notes,
            steps_per_epoch=len(components.prompts) / config.prompts * config.steps_per_round,
        ),
    )


def _collector(config: RLConfig, components: Components, objective: Objective) -> Collector:
    return Collector(
        prompts=components.prompts,
        settings=config.rollout.settings(config.group_size),
        groups=config.prompts,
        seed=config.seed,
        shuffle=config.shuffle,
        rewards=components.rewards,
        draw=components.draw,
        max_resamples=objective.max_resamples,
        max_failed=1.0 if config.conversation is None else config.conversation.max_failed,
    )


def _preparation(
    config: RLConfig, components: Components, objective: Objective
) -> Callable[[RolloutBatch, Callable[[], nnx.Module]], Round]:
    mesh, rules = make_mesh(config.mesh), config.mesh.resolved_rules()
    shards = math.prod(mesh.shape[axis] for axis in rules["batch"])
    layout = Layout(
        length=config.max_length,
        counts=row_counts(config.batch_size, shards * config.accumulate),
        mini_batches=config.mini_batches,
        epochs=config.rollout_epochs,
        aggregation=objective.aggregation,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        mask_truncated=objective.mask_truncated,
        skip_zero_advantage=objective.skip_zero_advantage,
        routed=components.routed,
    )
    score = _scores(config, components, objective, rules)

    def prepare(collected: RolloutBatch, current: Callable[[], nnx.Module]) -> Round:
        if score is None:
            return make_round(collected, layout, None, objective.credit)
        model = current()
        return make_round(collected, layout, lambda rows: score(model, rows), objective.credit)

    return prepare


def _scores(
    config: RLConfig, components: Components, objective: Objective, rules: Rules
) -> Callable[[nnx.Module, Rows], Mapping[str, np.ndarray]] | None:
    """(model, rows) to everything that must be known before the first step; None: nothing."""
    own, other = objective.score, objective.reference
    if own is None and other is None:
        return None
    forward = own
    copies: list[nnx.Module] = []
    if other is not None and config.lora is not None:
        forward, other = BothPolicies(own, other), None

    def score(model: nnx.Module, rows: Rows) -> Mapping[str, np.ndarray]:
        found = {} if forward is None else score_rows(forward, model, rows, rules)
        if other is not None:
            if not copies:
                copies.append(_frozen_copy(config, components, mesh_of(model), rules))
            found |= score_rows(other, copies[0], rows, rules)
        return found

    return score


def _frozen_copy(config: RLConfig, components: Components, mesh: Mesh, rules: Rules) -> nnx.Module:
    """The model as it was before the first step, from where it came from."""
    with use_mesh(mesh, rules):
        if components.pretrained is not None:
            return components.pretrained(mesh, rules)
        model = components.build(nnx.Rngs(config.seed))
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, tree_shardings(state, mesh, rules)))
