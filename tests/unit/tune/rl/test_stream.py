"""Rounds as the trainer's batches: ratios, samples, dynamic sampling, references, resume."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.unit.tune.rl.toy import ADAPTED, BASE, GOOD, Counter, Run, ToySampler, frozen

from fornax.adapters import LoRA
from fornax.config import DataError
from fornax.rewards import Score
from fornax.tune.config import DAPO, GRPO, AsyncConfig, ConversationConfig, RolloutConfig
from fornax.tune.data import PromptTokens
from fornax.tune.rl.collect import SampleGroups, sample_completions
from fornax.tune.rollout import Sampler, SampleSettings, Trajectory


@pytest.mark.parametrize(
    "temperature",
    [
        0.5,
        pytest.param(1.0, marks=pytest.mark.slow),
        pytest.param(1.5, marks=pytest.mark.exhaustive),
    ],
)
def test_the_ratio_is_one_at_learning_rate_zero(tmp_path: Path, temperature: float) -> None:
    rollout = RolloutConfig(max_tokens=8, temperature=temperature)
    run = Run(frozen(BASE, rollout=rollout), tmp_path)
    for _ in range(5):
        metrics = run.train()
        assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert metrics["clip_fraction"] == 0
        assert abs(metrics["mismatch_kl"]) < 1e-5
        assert metrics["importance"] == pytest.approx(1, abs=1e-5)


class Warm(ToySampler):
    """Draws at another temperature than it is asked for."""

    def sample(self, prompts: Any, settings: Any, seeds: Any) -> Any:
        return super().sample(prompts, dataclasses.replace(settings, temperature=2.0), seeds)


def test_another_temperature_in_the_sampler_is_seen(base: Run, tmp_path: Path) -> None:
    run = Run(BASE, tmp_path, programs=base.programs, sampler=Warm)
    metrics = run.train()
    assert metrics["mismatch_kl"] > 1e-3
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)


def test_samples_say_what_was_drawn_and_how_it_was_judged(base: Run, tmp_path: Path) -> None:
    run = Run(BASE, tmp_path, programs=base.programs)
    metrics = [run.train() for _ in range(5)]
    run.stream.close()
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] * 16 + [5] * 16
    assert [line["round"] for line in lines] == [0] * 16 + [1] * 16
    first = lines[:16]
    for line in first:
        drawn = [int(token) for token in line["completion"].split()]
        assert line["reward"] == sum(t == GOOD for t in drawn) / 8
        assert line["rewards"] == {"count": line["reward"]}
        assert line["tokens"] == len(drawn)
        assert line["versions"] == [0, 0]
        assert line["where"].startswith("prompts.jsonl:")
    for line in first[:8]:
        assert line["pieces"] == line["completion"].split()
        assert line["advantages"] == pytest.approx([line["advantage"]] * line["tokens"], abs=1e-4)
        assert len(line["logprobs"]) == line["tokens"]
        assert max(line["logprobs"]) < 0
    assert not any("pieces" in line for line in first[8:])
    assert lines[16]["versions"] == [4, 4]
    groups = {line["group"]: [x for x in first if x["group"] == line["group"]] for line in first}
    assert len(groups) == 4
    for group in groups.values():
        assert len({line["prompt"] for line in group}) == 1
        assert len({line["completion"] for line in group}) > 1
        rewards = np.array([line["reward"] for line in group])
        spread = rewards.std(ddof=1) + 1e-4
        expected = (rewards - rewards.mean()) / spread
        np.testing.assert_allclose([x["advantage"] for x in group], expected, atol=1e-5)
    assert {line["completion"] for line in first} != {line["completion"] for line in lines[16:]}
    rewards = np.array([line["reward"] for line in first])
    assert metrics[0]["reward"] == pytest.approx(rewards.mean())
    assert metrics[0]["reward/count"] == pytest.approx(rewards.mean())
    assert metrics[0]["completion_tokens"] == np.mean([line["tokens"] for line in first])
    assert metrics[0]["truncated"] == np.mean([x["finish_reason"] == "length" for x in first])
    assert [m["staleness"] for m in metrics] == [0, 1, 2, 3, 0]
    assert "train_tokens_per_second" not in metrics[3]
    assert metrics[4]["train_tokens_per_second"] > 0


class Drift(Counter):
    """A reward with a memory."""

    def score(self, samples: Any) -> list[Score]:
        before = self.seen
        scores = super().score(samples)
        return [
            Score(total=score.total + (before + number) % 7 / 70, parts=score.parts)
            for number, score in enumerate(scores)
        ]


@pytest.mark.parametrize("asynchronous", [None, AsyncConfig()])
@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    base: Run, tmp_path: Path, stop: int, asynchronous: AsyncConfig | None
) -> None:
    drifting = [Drift(), Drift(), Drift()]
    config = dataclasses.replace(BASE, asynchronous=asynchronous)
    whole = Run(config, tmp_path / "whole", programs=base.programs, rewards=drifting[0])
    for _ in range(9):
        whole.train()
    killed = Run(config, tmp_path / "killed", programs=base.programs, rewards=drifting[1])
    for _ in range(stop):
        killed.train()
    position = json.loads(json.dumps({str(k): v for k, v in killed.stream.state().items()}))
    held = jax.device_get(killed.state)
    for _ in range(3):  # what a killed run did after its last checkpoint
        killed.train()
    killed.stream.close()
    resumed = Run(config, tmp_path / "killed", programs=base.programs, rewards=drifting[2])
    resumed.stream.restore({int(k): v for k, v in position.items()})
    resumed.state = jax.device_put(held, jax.tree.map(lambda x: x.sharding, resumed.state))
    resumed.step = stop
    for _ in range(9 - stop):
        resumed.train()
    for run in (whole, resumed):
        run.stream.close()
    jax.tree.map(np.testing.assert_array_equal, whole.params(), resumed.params())
    files = [tmp_path / name / "samples.jsonl" for name in ("whole", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_one_step_off_draws_with_the_weights_before(base: Run, tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, asynchronous=AsyncConfig())
    run = Run(config, tmp_path, programs=base.programs)
    metrics = [run.train() for _ in range(10)]
    run.stream.close()
    assert [m["staleness"] for m in metrics] == [0, 1, 2, 3, 4, 5, 6, 7, 4, 5]
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [lines[16 * n]["versions"] for n in range(3)] == [[0, 0], [0, 0], [4, 4]]
    first = [m["ratio_max"] for m in metrics[::4]]
    assert first == pytest.approx([1, 1, 1], abs=1e-5)
    assert metrics[0]["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[8]["mismatch_kl"] > 1e-4


class Fussy(Counter):
    """Rewards differ for every third prompt alone."""

    def score(self, samples: Any) -> list[Score]:
        found = []
        for number, (sample, score) in enumerate(zip(samples, super().score(samples), strict=True)):
            useful = sample.record["number"] % 3 == 0
            total = score.total + 0.01 * (number % 4) if useful else 0.5
            found.append(Score(total=total, parts={"fussy": total}))
        return found


def test_dynamic_sampling_fills_the_round_with_groups_that_differ(
    base: Run, tmp_path: Path
) -> None:
    config = dataclasses.replace(
        BASE, algorithm=DAPO(overlong_tokens=0, aggregation="sequence_mean")
    )
    run = Run(config, tmp_path, programs=base.programs, rewards=Fussy())
    rows = [run.take() for _ in range(4)]
    numbers = run.stream.observe()
    assert numbers["groups_missing"] == 0
    assert numbers["groups_sampled"] > 4
    assert numbers["zero_variance_groups"] > 0.3
    for each in rows:
        assert np.abs(each["advantages"]).sum() > 0
        assert each["sequence_weights"].sum() == 8
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {int(line["where"].split(":")[1]) % 3 for line in lines} == {1}


def test_leaving_out_what_has_no_advantage_changes_no_step(tmp_path: Path) -> None:
    once = dataclasses.replace(BASE, batch_size=16, mini_batches=1, rollout_epochs=1)
    runs = []
    for skip in (False, True):
        algorithm = GRPO(kl_coefficient=0.0, skip_zero_advantage=skip)
        config = dataclasses.replace(once, algorithm=algorithm)
        run = Run(config, tmp_path / str(skip), rewards=Fussy())
        metrics = [run.train() for _ in range(3)]
        run.stream.close()
        runs.append((run.params(), metrics))
    (whole, before), (fewer, after) = runs
    assert [m["loss"] for m in after] == pytest.approx([m["loss"] for m in before], abs=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, fewer)
    assert after[0]["zero_variance_groups"] > 0.3
    assert after[0]["entropy"] != before[0]["entropy"]


def test_dynamic_sampling_is_bounded(base: Run, tmp_path: Path) -> None:
    class Flat(Counter):
        def score(self, samples: Any) -> list[Score]:
            return [Score(total=1.0, parts={"flat": 1.0}) for _ in samples]

    config = dataclasses.replace(BASE, algorithm=DAPO(max_resamples=2))
    run = Run(config, tmp_path, programs=base.programs, rewards=Flat())
    before = run.params()
    metrics = run.train()
    assert metrics["groups_sampled"] == 12
    assert metrics["groups_missing"] == 4
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, run.params())


def test_a_reward_that_is_never_a_number_stops_the_run_at_once(base: Run, tmp_path: Path) -> None:
    class Broken(Counter):
        def score(self, samples: Any) -> list[Score]:
            nan = float("nan")
            return [Score(total=0.0, parts={"b": nan}, notes={"b": "gave NaN"}) for _ in samples]

    run = Run(BASE, tmp_path, programs=base.programs, rewards=Broken())
    with pytest.raises(DataError, match=r"reward b gave no number for any of the first 16.*NaN"):
        run.take()


def flaky(failing: Callable[[int], bool]) -> SampleGroups:
    """Completions of which some failed, by number, as a broken environment leaves them."""

    def draw(
        sampler: Sampler,
        prompts: Sequence[PromptTokens],
        settings: SampleSettings,
        seeds: Sequence[int],
    ) -> list[list[Trajectory]]:
        groups = sample_completions(sampler, prompts, settings, seeds)
        numbers = itertools.count()
        return [
            [_broken(each) if failing(next(numbers)) else each for each in group]
            for group in groups
        ]

    return draw


def _broken(drawn: Trajectory) -> Trajectory:
    completion = dataclasses.replace(drawn.completion, finish_reason="error")
    return dataclasses.replace(drawn, completion=completion, error="RuntimeError: no server")


def test_a_failed_rollout_is_neither_learned_from_nor_silent(base: Run, tmp_path: Path) -> None:
    config = dataclasses.replace(
        BASE, conversation=ConversationConfig(environment="e.py:Game", max_failed=0.5)
    )
    rewards = Counter()
    draw = flaky(lambda number: number % 2 == 0)
    run = Run(config, tmp_path, programs=base.programs, rewards=rewards, draw=draw)
    rows = [run.take() for _ in range(4)]
    numbers = run.stream.observe()
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["status"] != "failed"]
    lost = [line for line in lines if line["status"] == "failed"]
    assert (len(kept), len(lost), numbers["rollouts_failed"]) == (8, 8, 8)
    assert rewards.seen == 8
    assert all(line["error"] == "RuntimeError: no server" for line in lost)
    assert all(line["reward"] is None and line["advantage"] == 0 for line in lost)
    rewards = [line["reward"] for line in kept]
    assert numbers["reward"] == pytest.approx(np.mean(rewards))
    pairs = np.reshape(rewards, (4, 2))
    assert numbers["reward_std"] == pytest.approx(pairs.std(axis=1).mean())
    spread = np.where(np.ptp(pairs, axis=1) > 0, pairs.std(axis=1, ddof=1) + 1e-4, 1)
    expected = (pairs - pairs.mean(axis=1, keepdims=True)) / spread[:, None]
    np.testing.assert_allclose([x["advantage"] for x in kept], expected.ravel(), atol=1e-5)
    once = [rows[0], next(x for x in rows if not np.array_equal(x["tokens"], rows[0]["tokens"]))]
    assert sum(x["loss_mask"].sum() for x in once) == sum(line["tokens"] for line in kept)
    assert sum(x["sequence_weights"].sum() for x in once) == 8


def test_too_many_failures_end_the_run_with_the_reason(base: Run, tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, conversation=ConversationConfig(environment="e.py:Game"))
    run = Run(config, tmp_path, programs=base.programs, draw=flaky(lambda number: number < 5))
    with pytest.raises(DataError, match=r"5 of 16 .* round 0 .*max_failed=0\.25 .*no server"):
        run.take()
    enough = Run(config, tmp_path, programs=base.programs, draw=flaky(lambda number: number < 4))
    assert enough.train()["rollouts_failed"] == 4


def test_mini_batches_without_completions_are_no_steps(base: Run, tmp_path: Path) -> None:
    """One completion of sixteen is left: a round is the epochs of one mini-batch, not of two."""
    config = dataclasses.replace(
        BASE, conversation=ConversationConfig(environment="e.py:Game", max_failed=1.0)
    )
    run = Run(config, tmp_path, programs=base.programs, draw=flaky(lambda number: number != 3))
    metrics = [run.train() for _ in range(3)]
    assert [m["skipped"] for m in metrics] == [0, 0, 0]
    assert [m["staleness"] for m in metrics] == [0, 1, 0]
    none = Run(config, tmp_path / "none", programs=base.programs, draw=flaky(lambda number: True))
    before = none.params()
    metrics = [none.train() for _ in range(2)]
    assert [m["skipped"] for m in metrics] == [1, 1]
    assert metrics[1]["rollouts_failed"] == 16
    jax.tree.map(np.testing.assert_array_equal, before, none.params())


def test_truncated_completions_can_be_left_out(base: Run, tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, algorithm=GRPO(kl_coefficient=0, mask_truncated=True))
    run = Run(config, tmp_path, programs=base.programs)
    rows = [run.take() for _ in range(4)]
    lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    kept = [line["tokens"] for line in lines if line["finish_reason"] == "stop"]
    assert 0 < len(kept) < 16
    once = [
        rows[0],
        next(x for x in rows[1:] if not np.array_equal(x["tokens"], rows[0]["tokens"])),
    ]
    assert sum(x["sequence_weights"].sum() for x in once) == len(kept)
    assert sum(x["loss_mask"].sum() for x in once) == sum(kept)
    assert sum((x["token_weights"] > 0).sum() for x in once) == sum(kept)


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), LoRA(rank=2)])
def test_the_reference_is_the_policy_before_its_first_step(tmp_path: Path, lora: Any) -> None:
    config = dataclasses.replace(BASE, algorithm=GRPO(), lora=lora, mini_batches=1)
    run = Run(config, tmp_path, **({} if lora is None else ADAPTED))
    first, second, third = run.train(), run.train(), run.train()
    assert first["kl"] == pytest.approx(0, abs=1e-12)
    assert second["kl"] > 1e-7
    assert third["kl_reference"] != 0
    assert run.programs.compilations == 1


@pytest.mark.slow
def test_micro_batches_and_devices_change_nothing(tmp_path: Path) -> None:
    """Four micro-batches of unequal weight on eight devices make the update of one on one."""
    config = dataclasses.replace(BASE, batch_size=32, mini_batches=1, max_length=24, accumulate=4)
    wide = Run(config, tmp_path / "wide", devices=8)
    narrow = Run(dataclasses.replace(config, accumulate=1), tmp_path / "narrow")
    for _ in range(2):
        many, few = wide.train(), narrow.train()
        for name in ("loss", "grad_norm", "entropy", "ratio_max", "reward", "clip_fraction"):
            assert many[name] == pytest.approx(few[name], rel=1e-4, abs=1e-6), name
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), wide.params(), narrow.params()
    )
