"""Faults of rollouts, planted: exactly the check that is for them speaks up."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tune.rl.toy import ADAPTED, BASE, EOS, Counter, ToySampler
from tests.unit.tune.rl.toy import parts as toy_parts
from tests.unit.tune.tiny import save_model

from fornax.models import TokenLogprobs
from fornax.rewards import Sample, Score
from fornax.tune import Origin, read_origin
from fornax.tune.config import GRPOConfig, RLConfig
from fornax.tune.doctor import CheckResult, run_checks
from fornax.tune.rl.forward import score_rows
from fornax.tune.rollout import Completion, SampleSettings
from fornax.tune.tasks.grpo import Logps

Kind = Callable[..., Any]
DRAWN = ("truncation", "rewards vary", "groups differ", "steps differ", "seeds repeat")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[GRPOConfig, Origin]:
    folder = tmp_path_factory.mktemp("rl")
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "What follows red?"}\n' * 6)
    config = dataclasses.replace(BASE, model=str(save_model(folder)), data=str(file))
    origin = dataclasses.replace(read_origin(config), eos_ids=(EOS,))
    return config, origin


def look(
    run: tuple[GRPOConfig, Origin],
    *,
    only: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    **parts: Any,
) -> dict[str, CheckResult]:
    """The results with toys of our choice; the toy's words are not the tokenizer's."""
    config, origin = run

    def make(config: RLConfig, origin: Origin, out: Path) -> Any:
        return toy_parts(out, **parts)

    config = dataclasses.replace(config, **(changes or {}))
    return {f.check: f for f in run_checks(config, origin, components=make, only=only)}


def failing(found: Mapping[str, CheckResult]) -> list[str]:
    return [name for name, result in found.items() if result.outcome.verdict == "fail"]


class Seeded(ToySampler):
    """A sampler whose seeds go wrong on their way."""

    def seeds(self, seeds: Sequence[int], count: int) -> list[int]:
        raise AssertionError

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        flat = self.seeds(seeds, settings.n)
        one = dataclasses.replace(settings, n=1)
        each = [list(p) for p in prompts for _ in range(settings.n)]
        found = [group[0] for group in super().sample(each, one, flat)]
        return [found[i : i + settings.n] for i in range(0, len(found), settings.n)]


class FixedKey(Seeded):
    """The same key in every step."""

    def seeds(self, seeds: Sequence[int], count: int) -> list[int]:
        return [7 + i for _ in seeds for i in range(count)]


class OneKeyAGroup(Seeded):
    """Every sample of a prompt with the prompt's own seed."""

    def seeds(self, seeds: Sequence[int], count: int) -> list[int]:
        return [seed for seed in seeds for _ in range(count)]


class Unseeded(Seeded):
    """A random state of its own."""

    made = 0

    def seeds(self, seeds: Sequence[int], count: int) -> list[int]:
        Unseeded.made += 1000
        return [seed + Unseeded.made + i for seed in seeds for i in range(count)]


class WithoutEnd(ToySampler):
    """Cuts the end token off what ended by itself."""

    def _completion(self, tokens: np.ndarray, logps: np.ndarray, seed: int) -> Completion:
        found = super()._completion(tokens, logps, seed)
        kept = len(found) - (found.finish_reason == "stop" and len(found) > 1)
        names = ("tokens", "logprobs", "versions", "mask")
        cut = {name: getattr(found, name)[:kept] for name in names}
        return dataclasses.replace(found, **cut)


class Endless(ToySampler):
    """Never ends by itself."""

    def _completion(self, tokens: np.ndarray, logps: np.ndarray, seed: int) -> Completion:
        found = super()._completion(tokens, logps, seed)
        return dataclasses.replace(found, finish_reason="length")


class Constant(Counter):
    """Likes everything as much."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(total=0.5, parts={"count": 0.5}) for _ in samples]


@pytest.mark.exhaustive
def test_a_sound_run_passes(run: tuple[GRPOConfig, Origin]) -> None:
    found = look(run, **ADAPTED)
    assert failing(found) == []
    passing = [name for name, f in found.items() if f.outcome.verdict == "pass"]
    assert len(passing) == 13, found
    assert sum(f.seconds for f in found.values()) < 120


@pytest.mark.parametrize(
    ("parts", "check", "cause", "cure"),
    [
        ({"sampler": FixedKey}, "steps differ", "same random key in every step", "sample_seed"),
        ({"sampler": OneKeyAGroup}, "groups differ", "share one random key", "seed of its own"),
        ({"sampler": Unseeded}, "seeds repeat", "random state of its own", "request's seed"),
        ({"sampler": Endless}, "truncation", "ran out of tokens", "Raise rollout.max_tokens"),
        ({"rewards": Constant()}, "rewards vary", "same for all completions", "easier prompts"),
    ],
)
def test_a_fault_of_what_is_drawn(
    run: tuple[GRPOConfig, Origin], parts: dict[str, Any], check: str, cause: str, cure: str
) -> None:
    found = look(run, only=DRAWN, **parts)
    assert failing(found) == [check]
    assert cause in found[check].outcome.text
    assert cure in found[check].outcome.text


def test_an_end_cut_off_completions(run: tuple[GRPOConfig, Origin]) -> None:
    found = look(run, only=("truncation", "end is learned"), sampler=WithoutEnd)
    assert failing(found) == ["end is learned"]
    assert "cut from the completion" in found["end is learned"].outcome.text


RATIOS = ("ratio", "ratio, temperature", "ratio, epochs")


def test_a_temperature_left_out_of_the_trained_logprobs(
    run: tuple[GRPOConfig, Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Logps.of

    def without(self: Logps, model: Any, rows: Any, *, entropy: bool = False) -> TokenLogprobs:
        return of(dataclasses.replace(self, temperature=1.0), model, rows, entropy=entropy)

    monkeypatch.setattr(Logps, "of", without)
    found = look(run, only=RATIOS)
    assert failing(found) == ["ratio, temperature"], "1 is the temperature of the run"
    text = found["ratio, temperature"].outcome.text
    assert "at temperature 0.6" in text
    assert "leave out the temperature" in text


def test_stored_logprobs_of_other_rows(
    run: tuple[GRPOConfig, Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(*given: Any) -> dict[str, np.ndarray]:
        return {name: np.roll(x, 1, axis=1) for name, x in score_rows(*given).items()}

    monkeypatch.setattr("fornax.tune.rl.task.score_rows", shifted)
    found = look(run, only=RATIOS)
    assert failing(found) == ["ratio, epochs"]
    assert "nothing is learned" in found["ratio, epochs"].outcome.text


def test_a_reference_that_is_not_the_policy(
    run: tuple[GRPOConfig, Origin], monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = dataclasses.replace(run[0].algorithm, kl_coefficient=0.1)

    def other(*given: Any) -> dict[str, np.ndarray]:
        found = score_rows(*given)
        return {name: x + np.float32(0.2 * (name == "ref_logps")) for name, x in found.items()}

    monkeypatch.setattr("fornax.tune.rl.task.score_rows", other)
    found = look(run, only=("reference", "ratio, epochs"), changes={"algorithm": algorithm})
    assert failing(found) == ["reference"]
    assert "from a model that you do not train" in found["reference"].outcome.text
