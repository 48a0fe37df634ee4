"""A toy of reinforcement learning: a tiny decoder, a sampler without a cache, a countable reward.

Legend: B sequences, T tokens, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax import adapters
from fornax.mesh import Rules, tree_shardings
from fornax.models import Decoder, DecoderConfig
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.rewards import Sample, Score
from fornax.train.goodput import Ledger
from fornax.train.session import Programs, first_state, prepare
from fornax.tune.config import GRPO, GRPOConfig, Importance, PPOConfig, RLConfig, RolloutConfig
from fornax.tune.data import PromptTokens
from fornax.tune.rl.stream import RolloutStream
from fornax.tune.rl.task import Components
from fornax.tune.rollout import Completion, SamplerStats, SampleSettings
from fornax.tune.tasks.grpo import grpo_task
from fornax.tune.tasks.ppo import ppo_task

VOCAB, EOS, GOOD = 12, 1, 5
MODEL = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=32,
    initializer_range=0.3,
)


class ToySampler:
    """Draws from whole forward passes; what it draws depends on weights, prompt and seed alone."""

    def __init__(self, model: Any, length: int = 16) -> None:
        self.graphdef, self.state = nnx.split(model)
        self.length, self.version, self.calls, self.tokens = length, 0, 0, 0
        self.closed = False

    def update(self, params: Any, version: int) -> None:
        copied = jax.tree.map(jnp.copy, nnx.to_pure_dict(params))
        self.state, self.version = copied, version

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        self.calls += 1
        flat = [
            (list(p), s + i) for p, s in zip(prompts, seeds, strict=True) for i in range(settings.n)
        ]
        tokens_BT = np.zeros((-(-len(flat) // 8) * 8, self.length), np.int32)
        start_B = np.ones(len(tokens_BT), np.int32)
        keys = np.zeros((len(tokens_BT), 2), np.uint32)
        for row, (prompt, seed) in enumerate(flat):
            tokens_BT[row, : len(prompt)] = prompt
            start_B[row] = len(prompt)
            keys[row] = [seed >> 32, seed & 0xFFFFFFFF]
        drawn, logps = _generate(
            self.graphdef,
            self.state,
            tokens_BT,
            start_B,
            keys,
            settings.temperature,
            settings.max_tokens,
        )
        drawn, logps = np.asarray(drawn), np.asarray(logps)
        found = [self._completion(drawn[i], logps[i], seed) for i, (_, seed) in enumerate(flat)]
        return [found[i : i + settings.n] for i in range(0, len(found), settings.n)]

    def _completion(self, tokens: np.ndarray, logps: np.ndarray, seed: int) -> Completion:
        ends = np.flatnonzero(tokens == EOS)
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        self.tokens += count
        return Completion(
            tokens=tokens[:count].astype(np.int32),
            logprobs=logps[:count].astype(np.float32),
            versions=np.full(count, self.version, np.int32),
            mask=np.ones(count, np.int8),
            finish_reason="stop" if len(ends) else "length",
            text=" ".join(map(str, tokens[:count])),
            seed=seed,
        )

    def stats(self) -> SamplerStats:
        return SamplerStats(tokens=self.tokens, seconds=1e-3 * self.calls, steps=self.calls)

    def close(self) -> None:
        self.closed = True


@jax.jit(static_argnums=(0, 6))
def _generate(graphdef, state, tokens_BT, start_B, keys, temperature, count):
    model = nnx.merge(graphdef, state)
    rows = jnp.arange(tokens_BT.shape[0])

    def step(tokens_BT, number):
        place_B = start_B + number
        logits_BV = model(tokens_BT)[rows, place_B - 1] / temperature
        draw = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), number))(keys)
        chosen_B = jax.vmap(jax.random.categorical)(draw, logits_BV)
        logps_BV = jax.nn.log_softmax(logits_BV)
        return tokens_BT.at[rows, place_B].set(chosen_B), (chosen_B, logps_BV[rows, chosen_B])

    _, (drawn, logps) = jax.lax.scan(step, tokens_BT, jnp.arange(count))
    return drawn.T, logps.T


class Counter:
    """Rewards the share of a completion's first tokens that are GOOD."""

    def __init__(self, of: int = 8) -> None:
        self.of, self.seen = of, 0

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.seen += len(samples)
        found = [sum(t == GOOD for t in sample.tokens) / self.of for sample in samples]
        return [Score(total=x, parts={"count": x}) for x in found]

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def close(self) -> None:
        """Nothing runs."""


def prompts(count: int = 6) -> list[PromptTokens]:
    draw = np.random.default_rng(0)
    return [
        PromptTokens(
            tokens=draw.integers(2, VOCAB, 2 + i % 3).astype(np.int32),
            prompt=f"prompt {i}",
            tools=None,
            record={"number": i},
            where=f"prompts.jsonl:{i + 1}",
        )
        for i in range(count)
    ]


@functools.cache
def _weights() -> dict[str, Any]:
    graphdef, state = nnx.split(Decoder(MODEL, rngs=nnx.Rngs(0)))
    return {"graphdef": graphdef, "state": state}


def pretrained(mesh: Mesh, rules: Rules) -> Decoder:
    """The same small decoder every time, laid on the mesh."""
    made = _weights()
    where = tree_shardings(made["state"], mesh, rules)
    return nnx.merge(made["graphdef"], jax.tree.map(jax.device_put, made["state"], where))


def _adapted(model: Decoder) -> Decoder:
    adapters.attach(model, adapters.LoRA(rank=2), rngs=nnx.Rngs(0))
    return model


ADAPTED: dict[str, Any] = {
    "build": lambda rngs: _adapted(Decoder(MODEL, rngs=rngs)),
    "pretrained": lambda mesh, rules: _adapted(pretrained(mesh, rules)),
    "trained": adapters.LoRAParam,
}
"""The parts of a policy with adapters."""


def parts(out: Path, **changes: Any) -> Components:
    """A whole run's worth of toys."""
    made: dict[str, Any] = {
        "build": lambda rngs: Decoder(MODEL, rngs=rngs),
        "pretrained": pretrained,
        "trained": nnx.Param,
        "prompts": prompts(),
        "rewards": Counter(),
        "sampler": ToySampler,
        "decode": lambda tokens: " ".join(map(str, tokens)),
        "out": out,
    }
    return Components(**{**made, **changes})


BASE = GRPOConfig(
    model="toy",
    data="prompts.jsonl",
    reward=("count",),
    steps=4,
    batch_size=8,
    group_size=4,
    mini_batches=2,
    rollout_epochs=2,
    max_length=64,
    rollout=RolloutConfig(max_tokens=8),
    algorithm=GRPO(kl_coefficient=0.0),
    importance=Importance(),
    optim=OptimConfig(
        optimizer=AdamW(weight_decay=0.0), learning_rate=0.02, schedule=Constant(), clip=()
    ),
    remat="none",
)
"""Eight completions of eight tokens fit two rows of 64, so that every step has one shape."""


def frozen(config: RLConfig, **changes: Any) -> Any:
    """With a learning rate that float32 cannot tell from 0; 0 itself is refused."""
    optim = dataclasses.replace(config.optim, learning_rate=1e-20)
    return dataclasses.replace(config, optim=optim, **changes)


_STATES: dict[int, Any] = {}


def _first_state(config: RLConfig, programs: Programs) -> Any:
    """A state of its own for each run; only the first run of `programs` compiles for it."""
    if id(programs) not in _STATES:
        state = first_state(config, programs)
        where = jax.tree.map(lambda x: x.sharding, state)
        _STATES[id(programs)] = (programs, jax.device_get(state), where)
    _, held, where = _STATES[id(programs)]
    return jax.device_put(jax.tree.map(np.copy, held), where)


class Run:
    """A task driven as the trainer drives it, without its files.

    Runs whose losses are alike share compiled steps: give one's `programs` to the next.
    """

    def __init__(
        self,
        config: RLConfig,
        out: Path,
        *,
        devices: int = 1,
        programs: Programs | None = None,
        **changes: Any,
    ) -> None:
        given = parts(out, **changes)
        if isinstance(config, PPOConfig):
            self.task = ppo_task(config, given)
        else:
            assert isinstance(config, GRPOConfig)
            self.task = grpo_task(config, given)
        self.programs = programs or prepare(config, self.task, Ledger(), jax.devices()[:devices])
        self.state = _first_state(config, self.programs)
        self.step = 0
        stream = self.task.batches("train", self.programs.hosts)
        assert isinstance(stream, RolloutStream)
        self.stream = stream

    def take(self) -> dict[str, np.ndarray]:
        """The rows of the next step."""
        state = self.state
        assert self.task.post.follow is not None
        self.task.post.follow(self.step, lambda: self.programs.model(state))
        return next(self.stream)

    def train(self) -> dict[str, float]:
        """One step; its metrics and what was observed."""
        rows = self.take()
        assert self.task.post.observe is not None
        seen = dict(self.task.post.observe())
        self.state, metrics = self.programs.step(self.state, rows)
        self.step += 1
        found = jax.device_get(metrics).items()
        return {name: float(x) for name, x in found if not np.ndim(x)} | seen

    def params(self) -> Any:
        """All trained parameters on the host."""
        return jax.device_get(self.state.params)
