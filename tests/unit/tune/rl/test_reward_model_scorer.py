"""A reward model's score counts as a reward, alone or beside functions."""

import math
from pathlib import Path

import numpy as np
import pytest
from tests.unit.tune.tiny import save_model

from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh
from fornax.rewards import RewardPool, RewardSpec, Sample
from fornax.tune.config import RewardModelConfig
from fornax.tune.policy import read_origin
from fornax.tune.reward_model import RewardModel, scored
from fornax.tune.rl.components import RewardModelScorer
from fornax.tune.splits import codec_of

TEXT = [
    Sample(prompt="red follows", completion=" 1"),
    Sample(prompt="red follows", completion=" x=(1"),
]
ASKED = [{"role": "user", "content": "What follows red?"}]
CHAT = [Sample(prompt=ASKED, completion=answer) for answer in ("green follows", "pink", "")]


def reward_model(path: Path) -> RewardModel:
    """A decoder of two layers with a fresh head, its own tokenizer and chat template."""
    config = RewardModelConfig(model=str(path), data="pairs.jsonl", max_length=64)
    origin = read_origin(config)
    mesh = make_mesh(MeshConfig())
    return RewardModel(
        model=scored(config, origin).pretrained(mesh, DEFAULT_RULES),
        codec=codec_of(config, origin),
        max_length=config.max_length,
        mesh=mesh,
        rules=DEFAULT_RULES,
        tokenizer_path=origin.tokenizer_path,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    return reward_model(save_model(tmp_path_factory.mktemp("reward")))


def read_alone(model: RewardModel, text: str) -> float:
    """The head's product with the last hidden state of a text written out by hand."""
    ids = np.asarray(model.codec.encoder.encode_with_offsets(text)[0], np.int32)[None]
    places = np.arange(ids.shape[1], dtype=np.int32)[None]
    hidden = model.model.hidden(ids, places, np.ones_like(ids), consecutive=True)
    head = np.asarray(model.model.reward_head.get_value(), np.float64)
    return float(np.asarray(hidden, np.float64)[0, -1] @ head)


def test_the_answer_to_a_chat_is_scored_in_the_chat_template(model: RewardModel):
    scores = RewardModelScorer(model, 0.5).score(CHAT)
    for sample, score in zip(CHAT, scores, strict=True):
        expected = read_alone(
            model,
            "<|begin|>user\nWhat follows red?<|endoftext|>\n"
            f"<|begin|>assistant\n{sample.completion}<|endoftext|>\n",
        )
        assert score.parts["reward_model"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert score.total == pytest.approx(0.5 * expected, rel=1e-4, abs=1e-5)
        assert not score.notes


def test_the_answer_to_a_text_is_scored_with_its_end(model: RewardModel):
    scores = RewardModelScorer(model, 1.0).score(TEXT)
    expected = [read_alone(model, f"red follows{s.completion}<|endoftext|>") for s in TEXT]
    assert [s.total for s in scores] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)


def test_an_answer_that_spells_the_end_of_a_turn_does_not_end_it(model: RewardModel):
    for prompt in (ASKED, "red follows"):
        [score] = RewardModelScorer(model, 1.0).score(
            [Sample(prompt=prompt, completion="<|endoftext|>")]
        )
        [plain] = RewardModelScorer(model, 1.0).score([Sample(prompt=prompt, completion="")])
        assert math.isfinite(score.total)
        assert score.total != pytest.approx(plain.total, abs=1e-4)


def test_beside_functions_the_totals_add_up_and_state_is_theirs(model: RewardModel, tmp_path: Path):
    alone = [score.total for score in RewardModelScorer(model, 1.0).score(TEXT)]
    spec = RewardSpec(function="python_parses", weight=2.0)
    scorer = RewardModelScorer(model, 1.0, RewardPool([spec], workers=1, log=tmp_path / "log"))
    try:
        scores = scorer.score(TEXT)
        parses = [score.parts["python_parses"] for score in scores]
        scorer.restore(scorer.state())
    finally:
        scorer.close()
    assert parses[0] != parses[1]
    assert [s.total for s in scores] == [2 * p + a for p, a in zip(parses, alone, strict=True)]


def test_what_it_has_no_room_for_counts_nothing_and_is_noted(model: RewardModel):
    long = Sample(prompt=ASKED, completion="? " * 60)
    [score, other] = RewardModelScorer(model, 1.0).score([long, CHAT[0]])
    assert score.total == 0
    assert math.isnan(score.parts["reward_model"])
    assert "the reward model reads 64" in score.notes["reward_model"]
    assert other.total == RewardModelScorer(model, 1.0).score(CHAT[:1])[0].total


def test_a_chat_that_its_template_cannot_write_is_noted(tmp_path: Path):
    plain = reward_model(save_model(tmp_path, template=None))
    [score] = RewardModelScorer(plain, 1.0).score(CHAT[:1])
    assert math.isnan(score.parts["reward_model"])
    assert "no chat template" in score.notes["reward_model"]
