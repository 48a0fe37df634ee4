"""Routing replay, and tuning of a mixture beside a plain float64 reference.

Legend: R rows, T tokens of a row, L layers with experts, k experts per token.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune import mixture
from tests.unit.tune.rl.toy import BASE, Run, parts

from fornax.config.errors import ConfigError, EngineError
from fornax.data import Tokenizer, train_bpe
from fornax.llm import EngineConfig
from fornax.llm.config import NGram
from fornax.llm.routed_experts import check_routes
from fornax.mesh import DEFAULT_RULES, MeshConfig, make_mesh, tree_shardings, use_mesh
from fornax.models import Decoder, token_logprobs
from fornax.train import next_token_loss
from fornax.tune.config import DPO, ConversationConfig, RolloutConfig
from fornax.tune.data import Codec, PromptTokens
from fornax.tune.rl.components import Conversations, _routed
from fornax.tune.rl.packing import RoutedShape, pack
from fornax.tune.rl.rollouts import Rollout, RolloutBatch, from_arrays, to_arrays
from fornax.tune.rollout import (
    Completion,
    LLMSampler,
    SamplerStats,
    SampleSettings,
    Turn,
    rollouts_from_arrays,
    rollouts_to_arrays,
)
from fornax.tune.rollout.shards import completions_frame, frame_completions
from fornax.tune.tasks.grpo import grpo_task
from fornax.tune.tasks.preference import preference_loss

ONCE = dataclasses.replace(
    BASE, mini_batches=1, rollout_epochs=1, rollout=RolloutConfig(max_tokens=8)
)
SHAPE = RoutedShape(2, 2, np.dtype(np.int8))
PROMPTS = [[9, 20, 31], [7] * 11, list(range(40, 57)), [3]]
DRAW = SampleSettings(n=3, max_tokens=12, ignore_eos=True)
Sequences = list[tuple[list[int], Completion]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the number is higher lower correct guess"], vocab_size=290)


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Iterator[LLMSampler]:
    """Pages for a few sequences alone: some are pushed out and computed again."""
    engine = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=4,
        max_model_len=48,
        block_size=4,
        num_gpu_blocks_override=13,
        step_sizes="coarse",
        enable_return_routed_experts=True,
    )
    made = LLMSampler(mixture.decoder(), tokenizer=tokenizer, engine=engine)
    yield made
    made.close()


@pytest.fixture(scope="module")
def drawn(sampler: LLMSampler) -> Sequences:
    """Forked, pushed out, of a single token, and with a beginning that was computed for others."""
    groups = sampler.sample(PROMPTS, DRAW, [1, 2, 3, 4])
    assert sampler.stats().preemptions > 0
    found = [(p, one) for p, group in zip(PROMPTS, groups, strict=True) for one in group]
    longer = [*PROMPTS[2], *groups[2][0].tokens.tolist(), 5]
    before = sampler.stats().prompt_tokens
    groups = sampler.sample([longer], dataclasses.replace(DRAW, max_tokens=1), [9])
    assert sampler.stats().prompt_tokens - before < len(longer)
    return [*found, *((longer, one) for one in groups[0])]


def whole(prompt: Sequence[int], one: Completion) -> list[int]:
    return [*prompt, *one.tokens.tolist()]


def rollout(prompt: Sequence[int], one: Completion) -> Rollout:
    return Rollout(
        prompt=np.array(prompt, np.int32),
        tokens=one.tokens,
        logprobs=one.logprobs,
        versions=one.versions,
        mask=one.mask,
        finish_reason=one.finish_reason,
        status=one.status,
        text="",
        where="prompts.jsonl:1",
        group=0,
        reward=0.0,
        parts={},
        routed_experts=one.routed_experts,
    )


def check_experts(tokens: list[int], routed: np.ndarray | None) -> None:
    """They are those that the float64 reference takes, the best first."""
    params = mixture.wide(nnx.state(mixture.decoder()))
    _, expected = mixture.reference(params, np.array(tokens[:-1]))
    assert routed is not None
    assert routed.dtype == np.int8
    np.testing.assert_array_equal(routed, expected)


def test_the_engine_returns_the_experts_that_tokens_took(drawn: Sequences) -> None:
    for prompt, one in drawn:
        check_experts(whole(prompt, one), one.routed_experts)


@pytest.mark.exhaustive
def test_rejected_drafts_leave_no_experts(tokenizer: Tokenizer) -> None:
    engine = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=48,
        block_size=4,
        step_sizes="coarse",
        enable_return_routed_experts=True,
        speculative_config=NGram(prompt_lookup_min=1),
    )
    sampler = LLMSampler(mixture.decoder(), tokenizer=tokenizer, engine=engine)
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    [group] = sampler.sample([prompt], dataclasses.replace(DRAW, temperature=0.5), [3])
    for one in group:
        check_experts(whole(prompt, one), one.routed_experts)
    sampler.close()


class Shout:
    """Asks for one more turn."""

    tools = ()

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, record: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": record["prompt"]}]

    def step(self, message: Any) -> Turn:
        self.turns += 1
        says = [] if self.turns == 2 else [{"role": "user", "content": "higher\n"}]
        return Turn(messages=says, done=self.turns == 2)


def test_a_conversation_has_the_experts_of_all_that_the_model_read(
    sampler: LLMSampler, tokenizer: Tokenizer
) -> None:
    draw = Conversations(
        ConversationConfig(environment=f"{__file__}:Shout"), Codec(tokenizer), max_tokens=40
    )
    asked = PromptTokens(
        tokens=tokenizer.encode("guess"), prompt="guess", tools=None, record={}, where=""
    )
    settings = SampleSettings(n=3, max_tokens=8, stop_token_ids=tuple(range(20, 200)))
    [group] = draw(sampler, [asked], settings, [5])
    assert any(each.turns == 2 for each in group)
    for each in group:
        check_experts(whole(each.prompt, each.completion), each.completion.routed_experts)


def test_experts_come_back_from_a_checkpoint_and_from_other_hosts(drawn: Sequences) -> None:
    groups = [
        [one for _, one in drawn[:3]],
        [dataclasses.replace(drawn[3][1], routed_experts=None)],
    ]
    sent, _ = frame_completions(completions_frame(0, groups, SamplerStats()))
    stored = rollouts_from_arrays(rollouts_to_arrays(groups))
    rollouts = [rollout(*each) for each in drawn]
    batch = RolloutBatch(number=0, version=0, position=0, rollouts=rollouts)
    again = [each.routed_experts for each in from_arrays(to_arrays(batch)).rollouts]
    for found in (sent, stored):
        for one, other in zip(groups[0], found[0], strict=True):
            np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
            assert other.routed_experts is not None
            assert other.routed_experts.dtype == np.int8
        assert found[1][0].routed_experts is None
    for one, other in zip(rollouts, again, strict=True):
        np.testing.assert_array_equal(one.routed_experts, other)


@functools.cache
def graphdef() -> Any:
    return nnx.graphdef(mixture.decoder())


def weighed(state: nnx.State, rows: Any) -> tuple[jax.Array, jax.Array]:
    """The weighed sum of log-probabilities, and these."""
    found = token_logprobs(
        nnx.merge(graphdef(), state),
        rows["tokens"],
        rows["targets"],
        positions_BT=rows["positions"],
        segment_ids_BT=rows["segment_ids"],
        routed_experts_BTLk=rows["routed_experts"],
    )
    return jnp.sum(found.logprobs * rows["weights"]), found.logprobs


gradient = jax.jit(jax.value_and_grad(weighed, has_aux=True))


@pytest.fixture(scope="module")
def rows(drawn: Sequences) -> dict[str, np.ndarray]:
    """Packed: several sequences a row, padding behind them, a row of padding alone."""
    made = pack([rollout(*each) for each in drawn], length=60, counts=(8,), routed=SHAPE).rows
    weights = np.random.default_rng(0).normal(size=made["tokens"].shape).astype(np.float32)
    assert (made["segment_ids"].max(axis=1) > 1).any()
    assert (made["segment_ids"].max(axis=1) == 0).any()
    return {**made, "weights": weights * (made["segment_ids"] > 0)}


def test_replay_of_the_routers_own_choice_changes_no_bit(rows: dict[str, np.ndarray]) -> None:
    state = nnx.state(mixture.decoder())
    own = {**rows, "routed_experts": np.full_like(rows["routed_experts"], -1)}
    for one, other in zip(
        jax.tree.leaves(gradient(state, rows)),
        jax.tree.leaves(gradient(state, own)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def close(found: nnx.State, expected: Any) -> None:
    pairs = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(found))
    for (path, one), other in zip(pairs, jax.tree.leaves(expected), strict=True):
        largest = np.abs(other).max()
        assert largest > 0, path
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5 * largest, err_msg=str(path))


def by_reference(of: Callable[[Any], Any], sequences: Any) -> Any:
    """The value of `of(log-probabilities of the targets [N, T])`, and its gradient.

    Args:
      of: in float64.
      sequences: tokens and targets [N, T], padded at the end, and perhaps routed_experts.
    """

    def value(params: Any) -> Any:
        def targets_of(one: Any) -> Any:
            routed = one.get("routed_experts")
            logps_TV, _ = mixture.reference(params, one["tokens"], routed, jnp)
            return logps_TV[np.arange(len(one["tokens"])), one["targets"]]

        return of(jax.vmap(targets_of)(sequences))

    with jax.enable_x64(True):
        return jax.jit(jax.value_and_grad(value))(mixture.wide(nnx.state(mixture.decoder())))


def test_gradients_through_given_experts_are_those_of_the_reference(
    rows: dict[str, np.ndarray],
) -> None:
    """Experts that no router would choose: weights are its scores for these, and its gradient
    runs through them."""
    draw = np.random.default_rng(1)
    order = np.argsort(draw.random((*rows["tokens"].shape, 2, 8)), axis=-1)[..., :2]
    rows = {**rows, "routed_experts": order.astype(np.int8)}
    (value, _), found = gradient(nnx.state(mixture.decoder()), rows)
    ids = rows["segment_ids"]
    slots = [
        (row, np.flatnonzero(ids[row] == number))
        for row in range(len(ids))
        for number in range(1, ids[row].max() + 1)
    ]
    alone = {
        name: np.zeros((len(slots), *rows[name].shape[1:]), rows[name].dtype)
        for name in ("tokens", "targets", "routed_experts", "weights")
    }
    for place, (row, at) in enumerate(slots):
        for name, array in alone.items():
            array[place, : len(at)] = rows[name][row, at]
    weights = alone.pop("weights")
    expected, grads = by_reference(lambda logps: jnp.sum(logps * weights), alone)
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    close(found, grads)


@pytest.mark.exhaustive
def test_losses_are_those_of_the_reference(drawn: Sequences, tmp_path: Path) -> None:
    """SFT, DPO, and GRPO with replay. The routers' own losses are reported, and no part of what is
    trained on."""
    made = pack([rollout(*each) for each in drawn[:4]], length=22, counts=(4,), routed=SHAPE).rows
    shape, draw = made["tokens"].shape, np.random.default_rng(3)
    names = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: made[name] for name in names}
    batch["loss_weights"] = (made["segment_ids"] > 0).astype(np.float32)
    pairs = {name: x.reshape(2, 2, -1) for name, x in batch.items()}
    pairs["ref_logps"] = np.array([[-40, -41], [-42, -39]], np.float32)
    advantages = draw.normal(size=shape).astype(np.float32)
    rounds = {**made, "advantages": advantages, "token_weights": made["loss_mask"]}
    rounds["sequence_weights"] = np.ones(shape[0], np.float32)
    grpo = grpo_task(ONCE, parts(tmp_path, routed=SHAPE))

    def losses(state: nnx.State, given: Any) -> Any:
        model = nnx.merge(graphdef(), state)
        sft = next_token_loss(model, given[0], balance=False)
        dpo = preference_loss(model, given[1], config=DPO(beta=0.1))
        policy = grpo.loss(model, given[2], jax.random.key(0))
        return sft.total + dpo.total + policy.total, (sft, dpo, policy)

    grad = jax.jit(jax.value_and_grad(losses, has_aux=True))
    (value, found), grads = grad(nnx.state(mixture.decoder()), (batch, pairs, rounds))

    def together(logps: Any) -> Any:
        sums = jnp.sum(logps * batch["loss_weights"], axis=1)
        margins = sums.reshape(2, 2) - pairs["ref_logps"]
        chosen = jax.nn.log_sigmoid(0.1 * (margins[:, 0] - margins[:, 1]))
        ratios = jnp.exp(logps - jax.lax.stop_gradient(logps))
        policy = jnp.sum(ratios * advantages * made["loss_mask"])
        return -jnp.sum(sums) - jnp.sum(chosen) - policy

    alone = {name: batch[name] for name in ("tokens", "targets")}
    expected, wanted = by_reference(together, alone)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    close(grads, wanted)
    for loss in found:
        assert loss.counts["expert_tokens"].sum() == 2 * 2 * batch["loss_weights"].sum()
        assert {"balance_loss", "router_z_loss", "router_entropy"} <= loss.metrics.keys()
        assert loss.maxima["expert_load_max"] >= 1
    assert abs(found[2].metrics["mismatch_kl"][0]) < 1e-6


class Kept:
    """The engine of all these tests, which a run does not close."""

    def __init__(self, sampler: LLMSampler) -> None:
        self.update, self.sample, self.stats = sampler.update, sampler.sample, sampler.stats

    def close(self) -> None:
        """Others use it too."""


@pytest.mark.exhaustive
def test_replay_is_grpo_itself_where_sampler_and_trainer_agree(
    sampler: LLMSampler, tmp_path: Path
) -> None:
    given = {
        "build": lambda rngs: Decoder(mixture.CONFIG, rngs=rngs),
        "pretrained": lambda mesh, rules: nnx.clone(mixture.decoder()),
        "sampler": lambda model: Kept(sampler),
    }
    on = Run(ONCE, tmp_path / "on", routed=SHAPE, **given)
    off = Run(ONCE, tmp_path / "off", **given)
    for run in (on, off):
        metrics = run.train()
        assert abs(metrics["mismatch_kl"]) < 1e-6
        assert {"balance_loss", "router_entropy", "expert_load_max"} <= metrics.keys()
    for one, other in zip(jax.tree.leaves(on.params()), jax.tree.leaves(off.params()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    sampler.update(mixture.decoder(), 0)


def test_replay_narrows_what_rounded_weights_open(
    sampler: LLMSampler, rows: dict[str, np.ndarray]
) -> None:
    """Sampled with weights of eight bits of mantissa, trained on in float32."""
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(mixture.decoder())
    )
    sampler.update(rounded, 1)
    groups = sampler.sample(PROMPTS, dataclasses.replace(DRAW, max_tokens=20), [5, 6, 7, 8])
    sampler.update(mixture.decoder(), 0)
    both = [(p, one) for p, group in zip(PROMPTS, groups, strict=True) for one in group]
    made = pack([rollout(*each) for each in both], length=60, counts=(8,), routed=SHAPE).rows
    made["weights"] = made["loss_mask"]

    def apart(routed: np.ndarray) -> float:
        given = {**{name: made[name] for name in rows}, "routed_experts": routed}
        (_, logps), _ = gradient(nnx.state(mixture.decoder()), given)
        return float(np.abs(logps - made["sampler_logps"])[made["loss_mask"] > 0].mean())

    with_it = apart(made["routed_experts"])
    without = apart(np.full_like(made["routed_experts"], -1))
    assert with_it < 0.7 * without


@pytest.mark.exhaustive
def test_eight_devices_replay_as_one(rows: dict[str, np.ndarray]) -> None:
    """Rows divided by batch and length, experts by the axis of experts."""
    state = nnx.state(mixture.decoder())
    expected = gradient(state, rows)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, context=2))
    spread = jax.device_put(state, tree_shardings(state, mesh, DEFAULT_RULES))
    with use_mesh(mesh, DEFAULT_RULES):
        found = jax.jit(jax.value_and_grad(weighed, has_aux=True))(spread, rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_replayed_is_refused(drawn: Sequences, rows: dict[str, np.ndarray]) -> None:
    dense = dataclasses.replace(mixture.CONFIG, experts=None, mlp_pattern=None)
    sliding = dataclasses.replace(mixture.CONFIG, sliding_window=8, attention_pattern=("sliding",))
    with pytest.raises(ConfigError, match="needs a layer with full attention"):
        check_routes(sliding)
    with pytest.raises(ConfigError, match="routing_replay=True has nothing to replay"):
        _routed(dense)
    with pytest.raises(ConfigError, match="this model has no experts; leave it out"):
        check_routes(dense)
    without = dataclasses.replace(rollout(*drawn[0]), routed_experts=None)
    with pytest.raises(EngineError, match=r"prompts.jsonl:1 came with no experts"):
        pack([without], length=60, counts=(8,), routed=SHAPE)
    few = {**rows, "routed_experts": rows["routed_experts"][:, :, :1]}
    with pytest.raises(ConfigError, match=r"given experts of shape \(8, 60, 1, 2\)"):
        jax.eval_shape(weighed, nnx.state(mixture.decoder()), few)
