"""How far sampler and trainer lie apart on a mixture of experts, with routing replay and without.

A decoder of random weights with 32 experts in each of 6 layers, 4 a token, draws completions with
the engine; the trainer's forward, in float32, then says how likely it finds them: first with
experts of its own choice, then with those that the tokens took. The sampler has the trainer's
weights in float32 or bfloat16, or in float32 with noise on them, as after optimizer steps.

    python benchmarks/routing_replay.py [--prompts 32] [--samples 2]
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from flax import nnx

from _harness import machine, table, versions, write_guide, write_results
from fornax.llm import EngineConfig
from fornax.models import Decoder, DecoderConfig, ExpertsConfig, token_logprobs
from fornax.tune.rollout import Completion, LLMSampler, SampleSettings

CONFIG = DecoderConfig(
    vocab_size=512,
    hidden_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qk_norm="head",
    tie_embeddings=False,
    max_position_embeddings=128,
    initializer_range=0.1,
    experts=ExpertsConfig(num_experts=32, experts_per_token=4, intermediate_size=64),
)
PROMPT, TOKENS = 16, 96
ROWS = 32
Drawn = list[tuple[list[int], Completion]]


def engine(dtype: Any) -> EngineConfig:
    return EngineConfig(
        dtype=dtype,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=PROMPT + TOKENS + 1,
        step_sizes="coarse",
        enable_return_routed_experts=True,
    )


def experts_of(completions: Sequence[Completion]) -> np.ndarray:
    """[completions, tokens, layers, experts per token], of completions of one length."""
    return np.stack([np.asarray(one.routed_experts) for one in completions])


def with_noise(state: nnx.State, share: float) -> nnx.State:
    """Normal noise on each array, of this share of its own deviation."""
    draw = np.random.default_rng(7)

    def moved(x: jax.Array) -> jax.Array:
        return x + (share * float(x.std()) * draw.normal(size=x.shape)).astype(x.dtype)

    return jax.tree.map(moved, state)


def measure(state: nnx.State, graphdef: Any, own: LLMSampler, drawn: Drawn) -> list[str]:
    """A row: the share of choices that differ, then mean |difference| and KL without and with."""
    whole = [[*prompt, *one.tokens.tolist()] for prompt, one in drawn]
    again = own.sample(whole, SampleSettings(max_tokens=1), range(len(whole)))
    routed = experts_of([one for _, one in drawn])
    chosen = experts_of([group[0] for group in again])[:, :-1]
    same = (routed[..., :, None] == chosen[..., None, :]).any(-1).all(-1)
    tokens = np.array(whole, np.int32)

    @jax.jit
    def logps(tokens: Any, given: Any) -> Any:
        decoder = nnx.merge(graphdef, state)
        found = token_logprobs(decoder, tokens[:, :-1], tokens[:, 1:], routed_experts_BTLk=given)
        return found.logprobs[:, PROMPT - 1 :]

    sampled = np.stack([one.logprobs for _, one in drawn]).astype(np.float64)
    row = [f"{1 - same.mean():.2%}", f"{1 - same.all(-1).mean():.1%}"]
    figures = []
    for given in (np.full_like(routed, -1), routed):
        parts = [
            np.asarray(logps(tokens[at : at + ROWS], given[at : at + ROWS]))
            for at in range(0, len(tokens), ROWS)
        ]
        apart = np.concatenate(parts).astype(np.float64) - sampled
        figures.append((np.abs(apart).mean(), (np.expm1(apart) - apart).mean()))
    (without, kl_without), (replayed, kl_replayed) = figures
    row += [f"{without:.1e}", f"{replayed:.1e}", f"{kl_without:.1e}", f"{kl_replayed:.1e}"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=2)
    options = parser.parse_args()
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(decoder)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, CONFIG.vocab_size, (options.prompts, PROMPT)).tolist()
    settings = SampleSettings(n=options.samples, max_tokens=TOKENS, ignore_eos=True)
    float32 = LLMSampler(decoder, engine=engine("float32"))
    bfloat16 = LLMSampler(decoder, engine=engine("bfloat16"))
    rows = []
    for name, sampler, weights in (
        ("float32", float32, state),
        ("bfloat16", bfloat16, state),
        ("float32, noise of 0.1 %", float32, with_noise(state, 1e-3)),
        ("float32, noise of 1 %", float32, with_noise(state, 1e-2)),
    ):
        sampler.update(weights, 1)
        groups = sampler.sample(prompts, settings, range(len(prompts)))
        float32.update(state, 2)
        drawn = [(p, one) for p, group in zip(prompts, groups, strict=True) for one in group]
        rows.append([name, *measure(state, graphdef, float32, drawn)])
    head = ["sampler", "choices that differ", "tokens with one", "mean abs", "replayed"]
    shown = table([*head, "KL", "replayed"], rows)
    text = (
        f"# Sampler and trainer on a mixture, with routing replay\n\n{machine()}. "
        f"{versions('jax')}.\n\n{len(prompts) * options.samples * TOKENS} tokens of a decoder of "
        "random weights, 6 layers with 32 experts, 4 a token; the trainer computes in float32. "
        "`mean abs` is the mean |difference| of a token's log-probability in nats, `KL` the mean "
        "of r - 1 - log r over drawn tokens, r the trainer's probability over the sampler's.\n\n"
        f"{shown}"
    )
    print(text)
    print(write_results("routing_replay", text))
    write_guide("reinforcement.md", "routing_replay", shown)


if __name__ == "__main__":
    main()
