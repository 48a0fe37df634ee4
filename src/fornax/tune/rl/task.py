"""Put together: a policy, prompts, rewards and an algorithm become a task of the trainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ClusterError, ConfigError
from fornax.mesh import Rules, make_mesh, tree_shardings, use_mesh
from fornax.train.task import Batch, Batches, Hosts, Loss, Task
from fornax.tune.data import PromptTokens
from fornax.tune.rl.algorithms import Aggregation
from fornax.tune.rl.collect import Collector, Draw, Judge, draw_completions
from fornax.tune.rl.config import RLConfig
from fornax.tune.rl.credit import Credit
from fornax.tune.rl.rollouts import Collected, Rollout
from fornax.tune.rl.rounds import Layout, Round, Rows, Scored, make_round
from fornax.tune.rl.rows import row_counts
from fornax.tune.rl.samples import SamplesFile
from fornax.tune.rl.scorer import BothPolicies, Forward, mesh_of, score_rows
from fornax.tune.rl.sources import Ahead, OnPolicy
from fornax.tune.rl.stream import Controller, RolloutStream, Source
from fornax.tune.rl.value_head import without_value_head
from fornax.tune.rollout import Sampler

__all__ = ["Method", "Parts", "rl_task"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run works with, whatever the algorithm."""

    build: Callable[[nnx.Rngs], nnx.Module]
    pretrained: Callable[[Mesh, Any], nnx.Module] | None
    trained: Any
    """NNX filter of what is trained."""
    prompts: Sequence[PromptTokens]
    judge: Judge | None
    """The rewards; None where environments give them."""
    sampler: Callable[[nnx.Module], Sampler]
    """A plain decoder, without adapters or value head, to a sampler of it."""
    decode: Callable[[Sequence[int]], str]
    """Tokens to text, for the file of samples."""
    draw: Draw = draw_completions
    notes: tuple[str, ...] = ()
    """Lines said before the first step."""
    out: Path
    """The run directory."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What an algorithm brings."""

    loss: Callable[[Any, Batch], Loss]
    """(model, rows) to the sums that are trained on."""
    score: Forward | None
    """(model, rows) to arrays [R, T] that a round's first step must find; None: nothing."""
    reference: Forward | None
    """The same of the reference policy; None: there is none."""
    credit: Callable[[Sequence[Rollout], Scored], Credit]
    aggregation: Aggregation
    mask_truncated: bool = False
    max_resamples: int = 0
    """Above 0: dynamic sampling."""
    controller: Controller | None = None


def rl_task(config: RLConfig, parts: Parts, method: Method) -> Task:
    """The task of a run.

    Raises:
      ClusterError: in a run of several processes.
    """
    if jax.process_count() > 1:
        raise ClusterError(
            f"reinforcement learning runs in one process, and this run has {jax.process_count()}; "
            "start one process on a host, over all its devices"
        )
    stream = RolloutStream(
        source=_source(config, parts, method),
        prepare=_preparation(config, parts, method),
        samples=SamplesFile(parts.out / "samples.jsonl", parts.decode),
        group_size=config.group_size,
        controller=method.controller,
    )

    def batches(split: str, hosts: Hosts) -> Batches:
        del hosts
        if split != "train":
            raise ConfigError(
                "reinforcement learning reports the reward of every step and evaluates nothing "
                "between; leave eval.every out, and use `fornax eval` on held-out prompts"
            )
        return stream

    return Task(
        build=parts.build,
        loss=lambda model, batch, key: method.loss(model, batch),
        batches=batches,
        pretrained=parts.pretrained,
        trained=parts.trained,
        follow=stream.follow,
        observe=stream.observe,
        notes=parts.notes,
        steps_per_epoch=len(parts.prompts) / config.prompts * config.steps_per_round,
        unit="tokens" if method.aggregation == "token_mean" else "completions",
    )


def _source(config: RLConfig, parts: Parts, method: Method) -> Source:
    collector = Collector(
        prompts=parts.prompts,
        settings=config.rollout.settings(config.group_size),
        groups=config.prompts,
        seed=config.seed,
        shuffle=config.shuffle,
        judge=parts.judge,
        draw=parts.draw,
        max_resamples=method.max_resamples,
        max_failed=1.0 if config.conversation is None else config.conversation.max_failed,
    )

    def sampler(model: nnx.Module) -> Sampler:
        return parts.sampler(without_value_head(adapters.merged(model)))

    def weights(model: nnx.Module) -> Any:
        return nnx.state(without_value_head(adapters.merged(model)), nnx.Param)

    if config.asynchronous is None:
        return OnPolicy(collector=collector, sampler=sampler, weights=weights)
    return Ahead(
        collector=collector,
        sampler=sampler,
        weights=weights,
        steps_per_round=config.steps_per_round,
    )


def _preparation(
    config: RLConfig, parts: Parts, method: Method
) -> Callable[[Collected, Callable[[], nnx.Module]], Round]:
    mesh, rules = make_mesh(config.mesh), config.mesh.resolved_rules()
    shards = math.prod(mesh.shape[axis] for axis in rules["batch"])
    layout = Layout(
        length=config.max_length,
        counts=row_counts(config.batch_size, shards * config.accumulate),
        mini_batches=config.mini_batches,
        epochs=config.rollout_epochs,
        aggregation=method.aggregation,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        mask_truncated=method.mask_truncated,
    )
    score = _scores(config, parts, method, rules)

    def prepare(collected: Collected, current: Callable[[], nnx.Module]) -> Round:
        if score is None:
            return make_round(collected, layout, None, method.credit)
        model = current()
        return make_round(collected, layout, lambda rows: score(model, rows), method.credit)

    return prepare


def _scores(
    config: RLConfig, parts: Parts, method: Method, rules: Rules
) -> Callable[[nnx.Module, Rows], Mapping[str, np.ndarray]] | None:
    """(model, rows) to everything that must be known before the first step; None: nothing."""
    own, other = method.score, method.reference
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
                copies.append(_frozen_copy(config, parts, mesh_of(model), rules))
            found |= score_rows(other, copies[0], rows, rules)
        return found

    return score


def _frozen_copy(config: RLConfig, parts: Parts, mesh: Mesh, rules: Rules) -> nnx.Module:
    """The model as it was before the first step, from where it came from."""
    with use_mesh(mesh, rules):
        if parts.pretrained is not None:
            return parts.pretrained(mesh, rules)
        model = parts.build(nnx.Rngs(config.seed))
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, tree_shardings(state, mesh, rules)))
