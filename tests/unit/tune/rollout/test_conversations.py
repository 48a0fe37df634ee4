"""Groups of conversations about prompts of the data, as reinforcement learning draws them."""

import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.tune.config import ConversationConfig
from fornax.tune.data import Codec, PromptTokens
from fornax.tune.rl.components import Conversations
from fornax.tune.rollout import SampleSettings, Turn, sample_seed


class Shout:
    """Asks for one more turn; its reward tells the task's seed."""

    tools = ()

    def __init__(self):
        self.turns = 0

    def reset(self, record, seed):
        self.record, self.seed = record, seed
        return [{"role": "user", "content": record["prompt"]}]

    def step(self, message):
        self.turns += 1
        over = self.turns == 2
        says = [] if over else [{"role": "user", "content": "higher\n"}]
        return Turn(messages=says, done=over, rewards={"seed": float(self.seed % 1000)})


class Silent:
    """Is not an environment."""


def prompts_of(tokenizer, count):
    return [
        PromptTokens(
            tokens=tokenizer.encode(f"guess {i}"), prompt=f"guess {i}", tools=None, record={"a": i}
        )
        for i in range(count)
    ]


def test_a_group_has_one_task_and_completions_of_its_own(sampler, tokenizer):
    config = ConversationConfig(environment=f"{__file__}:Shout")
    draw = Conversations(config, Codec(tokenizer), max_tokens=60)
    seeds = [sample_seed(0, 3, i) for i in range(2)]
    stops = tuple(range(20, 200))
    settings = SampleSettings(n=3, max_tokens=8, temperature=1.5, stop_token_ids=stops)
    groups = draw(sampler, prompts_of(tokenizer, 2), settings, seeds)
    assert [len(group) for group in groups] == [3, 3]
    for number, (group, seed) in enumerate(zip(groups, seeds, strict=True)):
        assert [each.completion.seed for each in group] == [seed, seed + 1, seed + 2]
        assert len({tuple(each.completion.tokens.tolist()) for each in group}) > 1
        for each in group:
            assert each.prompt.tolist() == tokenizer.encode(f"guess {number}").tolist()
            if each.completion.finish_reason == "done":
                assert each.rewards == {"seed": 2.0 * (seed % 1000)}
                assert np.unique(each.completion.mask).tolist() == [0, 1]
    ended = {each.completion.finish_reason for group in groups for each in group}
    assert "done" in ended
    draw.close()


def test_what_cannot_be_talked_with_is_refused_before_anything_is_drawn(tokenizer):
    with pytest.raises(ConfigError, match="an environment or tools"):
        ConversationConfig()
    with pytest.raises(ConfigError, match="need tool_parser"):
        ConversationConfig(tools=("a.py:b",))
    with pytest.raises(ConfigError, match="max_turns=0"):
        ConversationConfig(environment="a.py:b", max_turns=0)
    codec = Codec(tokenizer)
    missing = ConversationConfig(environment="/nowhere.py:Game")
    with pytest.raises(ConfigError, match=r"no file /nowhere\.py"):
        Conversations(missing, codec, max_tokens=9)
    silent = ConversationConfig(environment=f"{__file__}:Silent")
    with pytest.raises(ConfigError, match="has no tools, reset, step"):
        Conversations(silent, codec, max_tokens=9)
    tools = ConversationConfig(
        tools=("fornax.tune.rollout.toy_environments:calculate",), tool_parser="hermes"
    )
    with pytest.raises(ConfigError, match="no chat template"):
        Conversations(tools, codec, max_tokens=9)
    game = ConversationConfig(environment="fornax.tune.rollout:GuessNumber")
    with pytest.raises(ConfigError, match="takes no single requests"):
        Conversations(game, codec, max_tokens=9)(object(), [], SampleSettings(), [])
