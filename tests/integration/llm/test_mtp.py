"""Speculation by the model's own module: the same tokens, its own proposals, its memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests.integration.llm.helpers import SIZES, Figures, completions, prompts_of
from tests.integration.llm.test_memory import live_bytes
from tests.unit.models.conftest import CONFIGS

from fornax.config.errors import ConfigError
from fornax.llm import LLM, SamplingParams
from fornax.llm.build import build_engine
from fornax.llm.config import MTP, EngineConfig
from fornax.llm.memory import account_of
from fornax.llm.sequence import Sequence
from fornax.models import Decoder, DecoderConfig, create_decoder, generate
from fornax.models.context import LayerContext
from fornax.models.rope import rotations
from fornax.train import next_token_loss

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
COARSE = {**SIZES, "step_sizes": "coarse"}


@functools.cache
def _model(name: str, modules: int = 1) -> Decoder:
    changes: dict[str, Any] = {"num_mtp_modules": modules}
    if name == "windowed":
        changes["attention_logit_softcap"] = None
    return create_decoder(dataclasses.replace(CONFIGS[name], **changes), seed=3)


def _mtp(count: int) -> dict[str, object]:
    return {"type": "mtp", "num_speculative_tokens": count}


Proposed = list[tuple[list[int], list[int]]]
"""Tokens of a sequence, and what was proposed after them."""


def _watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Proposed:
    """What the engine's proposer proposes from now on."""
    proposer, found = llm._engine._proposer, []
    propose = proposer.propose

    def watch(sequences: list[Sequence]) -> None:
        propose(sequences)
        found.extend((list(each.tokens), list(each.drafts)) for each in sequences)

    monkeypatch.setattr(proposer, "propose", watch)
    return found


class _Module:
    """The first module over whole sequences, without a cache."""

    def __init__(self, model: Decoder) -> None:
        assert model.mtp is not None
        graphdef, stack = nnx.split(model.mtp)
        self.model = model
        self.module = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], stack))
        self.run = jax.jit(self._run)

    def _run(self, x_TD: jax.Array, tokens_T: jax.Array) -> jax.Array:
        config = self.model.config
        positions_BT = jnp.arange(len(tokens_T))[None]
        context = LayerContext(
            positions_BT=positions_BT,
            segment_ids_BT=None,
            rotations=dict(rotations(config, positions_BT)),
            consecutive=True,
        )
        y_BTD = self.module.layer_input(x_TD[None], self.model.embed(tokens_T[None]))
        y_BTD, _, _ = self.module.layer(y_BTD, config.mtp_kind, context)
        return self.module.norm(y_BTD)[0]

    def check(self, tokens: list[int], drafts: list[int], longest: int = 64) -> None:
        """Each proposal's logit is the largest, up to rounding."""
        known = len(tokens) - 1  # tokens with a next one
        padded = np.zeros(longest, np.int32)
        padded[: len(tokens)] = tokens
        x_TD = self.model.hidden(padded[None])[0]
        later = np.roll(padded, -1)
        for draft in drafts:
            y_TD = self.run(x_TD, jnp.asarray(later))
            logits_V = self.model.logits(y_TD[None, known - 1 : known])[0, 0]
            assert logits_V[draft] > jnp.max(logits_V) - 1e-4
            if known < longest:  # the next one continues from what this one came of
                x_TD = x_TD.at[known].set(y_TD[known - 1])
                later[known] = draft
                known += 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("windowed", 3),
        pytest.param("linear", 2, marks=pytest.mark.exhaustive),
        pytest.param("latent", 1, marks=pytest.mark.exhaustive),
        pytest.param("experts", 3, marks=pytest.mark.exhaustive),
        pytest.param("biased", 2, marks=pytest.mark.exhaustive),
        pytest.param("clipped", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_proposals_are_the_modules_and_change_no_token(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, few pages, so that sequences are preempted and read again; proposals that
    are taken back; all of it again from shared pages."""
    model, figures = _model(name), Figures()
    llm = LLM(
        model,
        **COARSE,
        num_gpu_blocks_override=17,
        speculative_config=_mtp(count),
        observer=figures,
    )
    proposed = _watched(llm, monkeypatch)
    prompts = [prompt * 2 for prompt in prompts_of(4, 14, 6, 11, 3, 15)]
    expected = generate(model, prompts, max_tokens=30, stop_tokens=())
    for count_of in (6, 6, 1, 1):
        found = completions(llm.generate(prompts[:count_of], GREEDY))
        assert found == expected[:count_of]
    assert figures.preemptions > 0
    assert figures.drafted > 0
    assert not figures.compiled
    assert figures.prefix_hits > 0
    module = _Module(model)
    assert max(len(drafts) for _, drafts in proposed) == count
    # Some of each, of sequences of any length, of both passes.
    for tokens, drafts in proposed[:: max(1, len(proposed) // 24)]:
        module.check(tokens, drafts)


@pytest.mark.exhaustive
def test_sampled_tokens_are_those_without_speculation() -> None:
    """Seeds, penalties, several completions of a prompt; a second module is left out."""
    requests = (
        GREEDY,
        SamplingParams(temperature=1.0, seed=2, max_tokens=16),
        SamplingParams(temperature=0.8, top_k=10, top_p=0.9, seed=3, max_tokens=16),
        SamplingParams(temperature=1.0, seed=4, max_tokens=16, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=5, max_tokens=16, n=2),
        SamplingParams(temperature=0, max_tokens=16, logprobs=1, min_tokens=3),
    )
    prompts, model, figures = prompts_of(9, 20, 5, 13, 7, 11), _model("windowed", 2), Figures()
    found = []
    for speculation in (None, _mtp(2)):
        llm = LLM(model, **COARSE, speculative_config=speculation, observer=figures)
        outputs = llm.generate(prompts, requests)
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
        assert llm.num_free_pages == llm.num_pages
    assert found[0] == found[1]
    assert figures.drafted > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str
)
def test_over_devices_and_in_int8(options: dict[str, Any]) -> None:
    model, prompts = _model("windowed"), prompts_of(9, 20, 5, 13)
    found = []
    for speculation in (None, _mtp(2)):
        figures = Figures()
        llm = LLM(model, **COARSE, **options, speculative_config=speculation, observer=figures)
        found.append(completions(llm.generate(prompts, GREEDY)))
    assert found[0] == found[1]
    assert figures.drafted > 0


@pytest.mark.exhaustive
def test_new_weights_and_sleep_leave_no_old_step_behind() -> None:
    model, other, prompts = (
        _model("windowed"),
        create_decoder(_model("windowed").config, seed=8),
        prompts_of(9, 20),
    )
    llm = LLM(model, **COARSE, speculative_config=_mtp(2))
    assert completions(llm.generate(prompts, GREEDY)) == generate(
        model, prompts, max_tokens=30, stop_tokens=()
    )
    llm.sleep()
    llm.wake()
    llm.update_weights(other, version=1)
    assert completions(llm.generate(prompts, GREEDY)) == generate(
        other, prompts, max_tokens=30, stop_tokens=()
    )


@pytest.mark.slow
def test_the_account_holds_the_modules_weights_and_its_layers_pages() -> None:
    model = _model("windowed").config
    plain, held = dataclasses.replace(model, num_mtp_modules=0), {}
    for name, of, speculation in (
        ("without", plain, None),
        ("left out", model, None),
        ("mtp", model, MTP()),
    ):
        config = EngineConfig(**COARSE, num_gpu_blocks_override=20, speculative_config=speculation)
        before = live_bytes()
        parts = build_engine(create_decoder(of, seed=3), config)
        account = account_of(config, parts.engine.runner.weights, parts.limits)
        assert live_bytes() - before == account.held
        held[name] = account
        del parts
    assert held["left out"] == held["without"]
    page = (20 + 1) * 4 * 2 * (2 * 8) * 4  # pages, places, keys and values, their numbers, bytes
    assert held["mtp"].cache - held["without"].cache == page
    assert held["mtp"].weights > held["without"].weights


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        (0, {}, r"type=mtp and the model has no modules that predict further tokens; train some"),
        (1, {"enable_lora": True}, r"further tokens.*\(serve adapters\); leave speculation by"),
    ],
)
def test_what_cannot_be_says_what_to_do(
    modules: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(_model("windowed", modules), **SIZES, speculative_config=_mtp(1), **options)


PATTERN = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_mtp_modules=1,
    num_heads=4,
    max_position_embeddings=64,
)
ORDERS = np.stack([np.random.default_rng(seed).permutation(32) for seed in range(4)])
"""Which token follows which, in the four kinds of documents."""


def _documents(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    kinds, tokens = rng.integers(0, 4, count), np.zeros((count, length), np.int32)
    tokens[:, 0] = rng.integers(0, 32, count)
    for place in range(1, length):
        tokens[:, place] = ORDERS[kinds, tokens[:, place - 1]]
    return tokens


def _trained(steps: int) -> Decoder:
    model = create_decoder(PATTERN, seed=1)
    graphdef, state = nnx.split(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, steps))

    @jax.jit
    def step(state: Any, inner: Any, tokens_BT: jax.Array) -> tuple[Any, Any]:
        def loss(state: Any) -> jax.Array:
            shape = tokens_BT[:, :-1].shape
            batch = {
                "tokens": tokens_BT[:, :-1],
                "targets": tokens_BT[:, 1:],
                "segment_ids": jnp.ones(shape, jnp.int32),
                "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
                "loss_weights": jnp.ones(shape, jnp.float32),
            }
            found = next_token_loss(nnx.merge(graphdef, state), batch, mtp_weight=0.3)
            return found.total / found.weight

        updates, inner = optimizer.update(jax.grad(loss)(state), inner, state)
        return optax.apply_updates(state, updates), inner

    inner, rng = optimizer.init(state), np.random.default_rng(0)
    for _ in range(steps):
        state, inner = step(state, inner, _documents(rng, 16, 33))
    return nnx.merge(graphdef, state)


@pytest.mark.exhaustive
def test_a_module_that_was_trained_is_mostly_right() -> None:
    """Where chance is one in 32, as for a module that was not trained beside the same model."""
    model = _trained(400)
    untrained = nnx.merge(*nnx.split(model))
    fresh = create_decoder(PATTERN, seed=7)
    untrained.mtp = fresh.mtp
    prompts = _documents(np.random.default_rng(9), 12, 8).tolist()
    expected = generate(model, prompts, max_tokens=30, stop_tokens=())
    shares = []
    for each in (model, untrained):
        figures = Figures()
        llm = LLM(each, **COARSE, speculative_config=_mtp(3), observer=figures)
        assert completions(llm.generate(prompts, GREEDY)) == expected
        shares.append(figures.accepted / figures.drafted)
    assert shares[0] > 0.6  # 0.93 of three at a time
    assert shares[1] < 0.2
