"""Checks of rollouts: ratios, seeds, groups, ends, truncation, rewards.

They look at a few rollouts of a trial run, made by its own stream, sampler and rewards, without an
update.

Legend: R rows, T tokens of a row.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from flax import nnx

from fornax.models import Decoder
from fornax.train.task import Hosts, Task
from fornax.tune.config import GRPOConfig, PPOConfig, RLConfig, TuneConfig
from fornax.tune.doctor.results import Outcome, failed, passed, skipped
from fornax.tune.doctor.trial_run import Rows, TrialRun, sequences_of
from fornax.tune.policy import Origin
from fornax.tune.rl.collect import Closable
from fornax.tune.rl.components import make_components
from fornax.tune.rl.packing import Round
from fornax.tune.rl.rollouts import Rollout, RolloutBatch
from fornax.tune.rl.stream import RolloutStream
from fornax.tune.rl.task import Components
from fornax.tune.rollout import Sampler
from fornax.tune.tasks.grpo import grpo_task
from fornax.tune.tasks.ppo import ppo_task

__all__ = [
    "Rollouts",
    "drawn_end_is_learned",
    "groups_differ",
    "not_all_truncated",
    "ratio_over_epochs",
    "ratio_to_sampler",
    "repeats_per_seed",
    "rewards_vary",
    "steps_differ",
    "with_old",
]


_SHORT = 16

MakeComponents = Callable[[RLConfig, Origin, Path], Components]


@dataclass(frozen=True, kw_only=True)
class RoundRows:
    """A round: what was collected, and the rows of all its optimizer steps."""

    collected: RolloutBatch
    steps: list[Rows]
    numbers: dict[str, float]
    """The stream's metrics of it."""


def task_of(config: RLConfig, parts: Components) -> Task:
    """The task of either family."""
    if isinstance(config, PPOConfig):
        return ppo_task(config, parts)
    assert isinstance(config, GRPOConfig)
    return grpo_task(config, parts)


@dataclass(kw_only=True)
class Rollouts:
    """Rounds drawn with the weights of the first state; one sampler and one pool serve all."""

    trial: TrialRun
    make_components: MakeComponents = make_components
    _samplers: list[Sampler] = field(default_factory=list)
    _plain: dict[float, RoundRows] = field(default_factory=dict)
    _tasks: dict[float, Task] = field(default_factory=dict)

    @property
    def config(self) -> RLConfig:
        """Of the trial run."""
        assert isinstance(self.trial.config, RLConfig)
        return self.trial.config

    @functools.cached_property
    def parts(self) -> Components:
        """What the trial run works with."""
        made = self.make_components(self.config, self.trial.origin, self.trial.folder)

        def sampler(model: Decoder) -> Sampler:
            if not self._samplers:
                self._samplers.append(made.sampler(model))
            return self._samplers[0]

        return replace(
            made, sampler=sampler, remote=None, prompts=made.prompts[: self.config.prompts]
        )

    def task(self, config: TuneConfig, origin: Origin, out: Path) -> Task:
        """The trial run's task, for the trial."""
        del origin, out
        assert isinstance(config, RLConfig)
        return task_of(config, self.parts)

    @functools.cached_property
    def rounds(self) -> list[RoundRows]:
        """The first two rounds, at the run's temperature, filters and lengths."""
        return self._draw(self.trial.task, 2)

    @functools.cached_property
    def again(self) -> RolloutBatch:
        """The beginnings of the first round's completions, drawn once more."""
        return self._draw(task_of(self._short(), self.parts), 1)[0].collected

    def plain(self, temperature: float) -> RoundRows:
        """A round of short completions at a temperature, without filters of tokens."""
        if temperature not in self._plain:
            self._plain[temperature] = self._draw(self._task_at(temperature), 1)[0]
        return self._plain[temperature]

    def at(self, temperature: float) -> RLConfig:
        """The small config at a temperature, with short completions and no filter of tokens."""
        config = self._short()
        rollout = replace(
            config.rollout, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0
        )
        return replace(config, rollout=rollout)

    def evaluate(self, rows: Rows, temperature: float) -> dict[str, float]:
        """The loss's figures over rows, at a temperature."""
        own = temperature == self.config.rollout.temperature
        task = self.trial.task if own else self._task_at(temperature)
        return self.trial.evaluate(padded(rows, self.trial.unit), task)

    def _task_at(self, temperature: float) -> Task:
        if temperature not in self._tasks:
            self._tasks[temperature] = task_of(self.at(temperature), self.parts)
        return self._tasks[temperature]

    def teaching_rows(self) -> Rows:
        """The first step's rows with advantages and returns that are never all alike."""
        rows = with_old(self.rounds[0].steps[0])
        draw = np.random.default_rng(0)
        for name in ("advantages", "returns"):
            if name in rows:
                drawn = draw.normal(size=rows[name].shape).astype(np.float32)
                rows[name] = np.where(rows["loss_mask"] > 0, drawn, 0)
        return padded(rows, self.trial.unit)

    def _short(self) -> RLConfig:
        config = self.config
        tokens = min(config.rollout.max_tokens, _SHORT)
        few = min(config.rollout.min_tokens, tokens)
        rollout = replace(config.rollout, max_tokens=tokens, min_tokens=few)
        return replace(config, rollout=rollout)

    def _draw(self, task: Task, rounds: int) -> list[RoundRows]:
        stream = task.batches("train", Hosts())
        assert isinstance(stream, RolloutStream)
        collected: list[RolloutBatch] = []
        prepare = stream.prepare

        def remember(batch: RolloutBatch, current: Callable[[], nnx.Module]) -> Round:
            collected.append(batch)
            return prepare(batch, current)

        stream.prepare = remember
        per_round = self.config.steps_per_round
        found = []
        for number in range(rounds):
            steps = []
            for step in range(per_round):
                assert task.post.follow is not None
                task.post.follow(number * per_round + step, lambda: self.trial.model)
                steps.append(next(stream))
            found.append(
                RoundRows(collected=collected[number], steps=steps, numbers=stream.observe())
            )
        stream.samples.close()
        return found

    def close(self) -> None:
        """End the sampler and the processes of rewards and tools."""
        for sampler in self._samplers:
            sampler.close()
        made = self.__dict__.get("parts")
        if made is not None and made.rewards is not None:
            made.rewards.close()
        if made is not None and isinstance(made.draw, Closable):
            made.draw.close()


def padded(rows: Rows, unit: int) -> Rows:
    """Rows of zeros added up to a multiple of `unit`: padding, which no loss counts."""
    count = len(rows["tokens"])
    more = -count % unit
    return {
        name: np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)])
        for name, x in rows.items()
    }


def with_old(rows: Rows) -> Rows:
    """Rows whose ratios count from the sampler's own log-probs."""
    return rows | {"old_logps": rows["sampler_logps"]}


def ratio_to_sampler(rollouts: Rollouts, temperature: float) -> Outcome:
    """The trainer finds the sampler's tokens as likely as the sampler did."""
    drawn = rollouts.plain(temperature)
    off = _off(rollouts, [with_old(rows) for rows in _first(drawn)], temperature)
    if off <= _limit(rollouts):
        return passed(f"the ratio is 1 within {off:.1g}")
    return failed(
        f"with the same weights the importance ratio between trainer and sampler is off 1 by "
        f"{off:.2g} at temperature {temperature:g}: each takes the tokens for likelier than the "
        "other does, and every step would correct for a difference that is not there. Usual causes:"
        " the trainer's log-probs leave out the temperature (0.8 to 1.15 is typical of it) or the "
        "sampler's are of filtered logits; the sampler works with older weights; prompt tokens or "
        "positions are shifted between the two. Both must go through `models.token_logprobs` and "
        "`kernels.logits_logprobs` at the same temperature; after a change of sampler, loss or "
        "model code, compare the two on one sequence"
    )


def ratio_over_epochs(rollouts: Rollouts) -> Outcome:
    """Without learning, the ratio stays 1 over all steps of a round."""
    steps = rollouts.rounds[0].steps
    if "old_logps" not in steps[0]:
        return skipped("a round is one step: its own log-probs are what ratios start from")
    off = _off(rollouts, steps, rollouts.config.rollout.temperature)
    if off <= _limit(rollouts):
        return passed(f"over {len(steps)} steps of a round the ratio is 1 within {off:.1g}")
    return failed(
        f"the importance ratio leaves 1 by {off:.2g} within a round although nothing is learned: "
        "the log-probs stored before its first step are not those that the loss computes. They are "
        "of another temperature, of other rows (packed again between epochs, or shifted by one), "
        "or of a model that draws dropout. The clip would then act on noise. The pass that stores "
        "`old_logps` and the loss must call one function on the same rows"
    )


def steps_differ(rollouts: Rollouts) -> Outcome:
    """The same prompts are answered otherwise in the next round."""
    first, second = (_texts(drawn.collected) for drawn in rollouts.rounds)
    same = [where for where in first if where in second and first[where] == second[where]]
    if len(same) < len(first.keys() & second.keys()) or not first.keys() & second.keys():
        return passed("the same prompts are answered otherwise in the next step")
    return failed(
        f"all {len(same)} prompts get exactly the same completions in the next round: the sampler "
        "draws with the same random key in every step, so the model would learn from one set of "
        "samples over and over. Derive the key from run, step, prompt and sample "
        "(`rollout.sample_seed`) and hand it to the engine; if the completions differ in nothing "
        "at all, see also the check of groups"
    )


def repeats_per_seed(rollouts: Rollouts) -> Outcome:
    """The same seeds give the same tokens, so that a run can be resumed exactly."""
    first, again = rollouts.rounds[0].collected, rollouts.again
    differing = sum(
        not np.array_equal(one.tokens[: len(other.tokens)], other.tokens)
        for one, other in zip(first.rollouts, again.rollouts, strict=True)
    )
    if not differing:
        return passed(f"{len(first.rollouts)} completions come out the same from the same seeds")
    return failed(
        f"{differing} of {len(first.rollouts)} completions differ when they are drawn again with "
        "the same seeds: the sampler has a random state of its own, or what it draws depends on "
        "what else is in its batch. A run that is killed and resumed would then not be the run that"
        " went through. Draw each token with a key of the request's seed and the token's place"
    )


def groups_differ(rollouts: Rollouts) -> Outcome:
    """The completions of a prompt are not all one."""
    size = rollouts.config.group_size
    if size == 1:
        return skipped("each prompt is answered once")
    groups = _groups(rollouts)
    alike = sum(_alike(group) for group in groups)
    if alike < len(groups):
        return passed(f"{len(groups) - alike} of {len(groups)} groups hold different completions")
    return failed(
        f"every group holds {size} times the same completion: there is nothing to compare, all "
        "advantages are 0. The samples of a group share one random key (sample i needs a seed of "
        "its own), or the distribution leaves no choice: raise rollout.temperature, open "
        "rollout.top_p and rollout.top_k, or start from a model that is less certain"
    )


def drawn_end_is_learned(rollouts: Rollouts, ends: tuple[int, ...]) -> Outcome:
    """Completions that ended by themselves have their end token in the loss."""
    drawn = rollouts.rounds[0]
    ended = [r for r in drawn.collected.rollouts if r.finish_reason == "stop"]
    stops = bool(rollouts.config.rollout.stop)
    if rollouts.config.conversation is not None or stops:
        return skipped("completions end by what an environment or a stop text says")
    if not ended:
        return skipped("no completion ended by itself")
    learned = {
        sequence.tokens.tobytes()
        for rows in drawn.steps
        for sequence in sequences_of(rows, "loss_mask")
        if len(sequence.tokens) and int(sequence.tokens[-1]) in ends and sequence.mask[-1]
    }
    missing = sum(r.sequence.astype(np.int32).tobytes() not in learned for r in ended)
    if not missing:
        return passed(f"the end token of {len(ended)} completions is in the loss")
    return failed(
        f"{missing} of {len(ended)} completions that ended by themselves have no end token in the "
        "loss: it is cut from the completion or masked. When to stop would never be rewarded, and "
        "lengths drift until all are truncated. The sampler must return the end token with its "
        "log-prob as the completion's last, and the mask must keep it; check that eos_token_id of "
        "generation_config.json names the token that ends a turn"
    )


def not_all_truncated(rollouts: Rollouts) -> Outcome:
    """Some completions end by themselves."""
    found = _all(rollouts)
    cut = sum(r.truncated for r in found)
    if cut < len(found):
        return passed(f"{cut} of {len(found)} completions ran out of tokens")
    return failed(
        f"all {len(found)} completions ran out of tokens at rollout.max_tokens="
        f"{rollouts.config.rollout.max_tokens}: rewards judge fragments, and no answer is ever "
        "complete. Raise rollout.max_tokens (and max_length with it); if even long completions "
        "never end, the model does not know how: tune it with `fornax tune sft` first, and check "
        "that eos_token_id of generation_config.json is what its template writes after an answer"
    )


def rewards_vary(rollouts: Rollouts) -> Outcome:
    """Rewards tell completions apart."""
    grouped = rollouts.config.group_size > 1
    groups = _groups(rollouts) if grouped else [_all(rollouts)]
    if all(_alike(group) for group in groups):
        return skipped("the completions of each prompt are all one: there is nothing to judge")
    rewards = [np.array([r.reward for r in group]) for group in groups]
    varied = sum(float(np.ptp(of_group)) > 0 for of_group in rewards)
    if varied:
        spread = float(np.mean([of_group.std() for of_group in rewards]))
        what = "groups have" if grouped else "batches have"
        return passed(f"{varied} of {len(groups)} {what} rewards that differ (spread {spread:.2g})")
    values = sorted({float(x) for of_group in rewards for x in of_group})
    shown = ", ".join(f"{x:g}" for x in values[:4])
    failures = sum(r.failures for group in groups for r in group)
    note = f" {failures} calls of the reward functions failed: see rewards.log." if failures else ""
    return failed(
        f"the reward is the same for all completions of each prompt ({shown}; "
        f"{sum(map(len, groups))} completions looked at): advantages are 0 and nothing is learned."
        f"{note} Print a few completions and their rewards: a reward that is always 0 often parses "
        "an answer in a form that the model never gives (say so in the prompt, or tune on examples "
        "first), or is too hard: add a reward for part of it, take easier prompts or more of them "
        "in a group. If successes are rare but there, start with --no-doctor"
    )


def _all(rollouts: Rollouts) -> list[Rollout]:
    """The completions that did not fail."""
    return [r for group in _groups(rollouts) for r in group]


def _groups(rollouts: Rollouts) -> list[list[Rollout]]:
    """The same by prompt; no group is empty."""
    found = [r for drawn in rollouts.rounds for r in drawn.collected.rollouts]
    size = rollouts.config.group_size
    groups = [[r for r in found[i : i + size] if not r.failed] for i in range(0, len(found), size)]
    return [group for group in groups if group]


def _alike(group: list[Rollout]) -> bool:
    return len({r.tokens.tobytes() for r in group}) == 1


def _texts(collected: RolloutBatch) -> dict[str, list[bytes]]:
    """Completions by the line of their prompt."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for rollout in collected.rollouts:
        found[rollout.where].append(rollout.tokens.tobytes())
    return {where: sorted(tokens) for where, tokens in found.items()}


def _first(drawn: RoundRows) -> list[Rows]:
    """Each mini-batch once."""
    seen: dict[int, Rows] = {id(rows): rows for rows in drawn.steps}
    return list(seen.values())


def _off(rollouts: Rollouts, steps: list[Rows], temperature: float) -> float:
    """How far the loss's own ratio gets from 1."""
    worst = 0.0
    for rows in steps:
        found = rollouts.evaluate(rows, temperature)
        worst = max(worst, abs(found["ratio_max"] - 1), abs(found["ratio_mean"] - 1))
    return worst


def _limit(rollouts: Rollouts) -> float:
    return rollouts.trial.tolerance
