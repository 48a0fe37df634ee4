"""A reward model's score counts as a reward, alone or beside functions."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from fornax.rewards import RewardPool, RewardSpec, Sample
from fornax.tune.rl.judges import ModelJudge


class _Model:
    """Scores a sequence by its length; reads six tokens."""

    max_length = 6
    codec = SimpleNamespace(
        completion=lambda prompt, text: SimpleNamespace(length=len(prompt) + len(text))
    )

    def score_encoded(self, sequences: Sequence[SimpleNamespace]) -> np.ndarray:
        return np.array([each.length for each in sequences], np.float32)


SAMPLES = [Sample(prompt="ab", completion="1"), Sample(prompt="ab", completion="x=(1")]


def test_alone_its_score_is_the_reward():
    scores = ModelJudge(_Model(), 0.5).score(SAMPLES)
    assert [s.total for s in scores] == [1.5, 3.0]
    assert [s.parts for s in scores] == [{"reward_model": 3.0}, {"reward_model": 6.0}]


def test_beside_functions_the_totals_add_up_and_state_is_theirs(tmp_path):
    spec = RewardSpec(function="python_parses", weight=2.0)
    pool = RewardPool([spec], workers=1, log=tmp_path / "log")
    judge = ModelJudge(_Model(), 1.0, pool)
    try:
        scores = judge.score(SAMPLES)
        parses = [score.parts["python_parses"] for score in scores]
        judge.restore(judge.state())
    finally:
        judge.close()
    assert parses[0] != parses[1]
    assert [s.total for s in scores] == [2 * parses[0] + 3, 2 * parses[1] + 6]


def test_what_it_has_no_room_for_counts_nothing_and_is_noted():
    [score] = ModelJudge(_Model(), 1.0).score([Sample(prompt="ab", completion="12345")])
    assert score.total == 0
    assert math.isnan(score.parts["reward_model"])
    assert score.notes == {"reward_model": "7 tokens, and the reward model reads 6"}
