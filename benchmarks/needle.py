"""Whether a model uses its whole context: `python benchmarks/needle.py`.

A document is noise in which facts are repeated: a name, then the number that it has in
this document alone (associative recall, Arora et al. 2023, arXiv:2312.04927). Small decoders are
trained on such documents by `fornax.train`, in stages of growing length, each from the weights of
the last. Then each is asked. A prompt is noise that holds a needle, one fact told once, at some
depth among other facts, and it ends with the needle's name: the model must say its number.

Two controls must fail: the same prompts without the needle, and a model whose layers see no further
than their windows. Fornax's engine answers some of the prompts too.

Runs are kept, so that the same command resumes where it was stopped, or only evaluates again.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from _harness import machine, table, versions, write_guide, write_results
from fornax.config import from_mapping
from fornax.data import DataConfig, NoPacking, PythonSource
from fornax.llm import LLM, SamplingParams
from fornax.models import Decoder, DecoderConfig, abstract_decoder
from fornax.optim import OptimConfig
from fornax.train import (
    Batch,
    LogConfig,
    Loss,
    Task,
    TrainConfig,
    load_run,
    pretrain_task,
    train,
)

NOISE, NAMES, NUMBERS = 64, 128, 64
"""Token ids: words of the noise first, then names, then numbers."""
FIRST_NUMBER = NOISE + NAMES
FACTS = 16
"""Of a prompt, the needle included."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Documents:
    """Training documents, each made when it is read, as a source of `fornax.data`.

    Args:
      count: how many there are.
      length: tokens of each.
      seed: of what they say.
      least: the smallest share of a document's tokens that belong to facts; the largest is 1.
    """

    def __init__(self, count: int, length: int, seed: int, least: float) -> None:
        self._count, self._length, self._seed, self._least = count, length, seed, least

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids, uint16 [length]."""
        draw = np.random.default_rng((self._seed, self._length, index))
        told = int(self._least ** draw.random() * self._length / 2)
        facts = int(2 * (min(NAMES, told // 2) / 2) ** draw.random())
        names, numbers = _facts(draw, facts)
        which = draw.integers(facts, size=told)
        widths = np.ones(self._length - told, int)
        widths[draw.permutation(len(widths))[:told]] = 2
        at = (np.cumsum(widths) - 2)[widths == 2]
        tokens = draw.integers(NOISE, size=self._length)
        tokens[at], tokens[at + 1] = names[which], numbers[which]
        return tokens.astype(np.uint16)


def prompts(
    length: int, depth: float, count: int, *, needle: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts that end with the name of a fact told once, and its numbers.

    Args:
      length: tokens of a prompt.
      depth: the needle's position: 0 is the beginning, 1 right before the question.
      count: how many prompts.
      needle: False puts noise in the needle's place.

    Returns:
      Token ids int32 [count, length], and the answers int32 [count].
    """
    draw = np.random.default_rng((length, round(100 * depth)))
    tokens = draw.integers(NOISE, size=(count, length), dtype=np.int32)
    answers = np.empty(count, np.int32)
    places = (length - 1) // 2
    own = round(depth * (places - 1))
    for n, row in enumerate(tokens):
        names, numbers = _facts(draw, FACTS)
        at = 2 * draw.permutation(np.delete(np.arange(places), own))[: FACTS - 1]
        row[at], row[at + 1] = names[1:], numbers[1:]
        if needle:
            row[2 * own : 2 * own + 2] = names[0], numbers[0]
        row[-1], answers[n] = names[0], numbers[0]
    return tokens, answers


def _facts(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Different names, and the number of each."""
    names = NOISE + draw.permutation(NAMES)[:count]
    return names, FIRST_NUMBER + draw.integers(NUMBERS, size=count)


@dataclass(frozen=True)
class Stage:
    """One run of a curriculum."""

    length: int
    rows: int
    steps: int
    least: float
    """See `Documents`."""


@dataclass(frozen=True)
class Contestant:
    """A model, how it is trained and what it is asked."""

    stages: tuple[Stage, ...] = ()
    asked: tuple[int, ...] = ()
    """Lengths of its prompts."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `MODEL`, or from the model of the contestant whose weights it takes."""
    begins: str | None = None
    """The contestant whose weights it takes; without stages they are asked with its own rope."""


MODEL = {
    "vocab_size": FIRST_NUMBER + NUMBERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "qk_norm": "head",
    "tie_embeddings": True,
    "attention_pattern": ("sliding", "full"),
    "sliding_window": 2,
    "max_position_embeddings": 2**13 + 1,
}
STAGES = (Stage(64, 64, 80, 0.9), Stage(256, 16, 30, 0.5), Stage(1024, 8, 80, 0.05))
CONTESTANTS = {
    "window and full": Contestant(STAGES, (256, 1024, 4096)),
    "the same, YaRN": Contestant(
        asked=(4096,),
        model={
            "rope": {
                "scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            }
        },
        begins="window and full",
    ),
    "the same, theta 500,000": Contestant(
        (Stage(4096, 8, 16, 0.05),), (4096,), {"rope": {"theta": 5e5}}, "window and full"
    ),
    "window and full without rotation": Contestant(
        STAGES, (1024, 4096, 8192), {"rope_pattern": (True, False)}
    ),
    "windows alone": Contestant(STAGES[:1], (64, 1024), {"attention_pattern": ("sliding",)}),
}
ENGINE_LENGTH = 1024
OPTIM = {
    "optimizer": {"type": "muon", "weight_decay": 0.0},
    "learning_rate": 1e-2,
    "schedule": {"type": "cosine", "warmup_steps": 5},
}


@dataclass
class Trained:
    """A contestant's weights and what they took."""

    decoder: Decoder
    run: Path
    """Of its last stage."""
    tokens: int = 0
    minutes: float = 0.0


def trained(contestant: Contestant, runs: Path, base: Trained | None, seed: int) -> Trained:
    """Train the stages that are not done yet, each in a folder of `runs`."""
    own = from_mapping(DecoderConfig, {**MODEL, **contestant.model})
    if base is not None:
        own = dataclasses.replace(base.decoder.config, rope=own.rope)
    run, tokens, minutes = None if base is None else base.run, 0, 0.0
    for number, stage in enumerate(contestant.stages):
        documents: dict[str, bool | int | float | str] = {
            "count": stage.rows * stage.steps,
            "length": stage.length,
            "seed": seed,
            "least": stage.least,
        }
        target = f"{Path(__file__).resolve()}:Documents"
        config = TrainConfig(
            model=own,
            data=DataConfig(
                source=PythonSource(target=target, arguments=documents), packing=NoPacking()
            ),
            seq_len=stage.length,
            batch_size=stage.rows,
            steps=stage.steps,
            seed=seed,
            optim=from_mapping(OptimConfig, OPTIM),
            init_from=None if run is None else str(run),
            save_every=None,
            log=LogConfig(every=10, tensorboard=False),
        )
        run = runs / f"{number}-{stage.length}"
        task = on_numbers(pretrain_task(config))
        done = train(config, run, task=task, accept_changes=["model.rope"])
        tokens += stage.length * stage.rows * stage.steps
        minutes += 0.0 if done.goodput is None else done.goodput.wall_seconds / 60
    assert run is not None, "a contestant without stages takes another's weights"
    return Trained(with_config(load_run(run).model, own), run, tokens, minutes)


def on_numbers(task: Task) -> Task:
    """The task with a loss of numbers alone: nothing tells the noise, or which name comes next."""

    def loss(decoder: Decoder, batch: Batch, key: jax.Array) -> Loss:
        weights = batch["loss_weights"] * (batch["targets"] >= FIRST_NUMBER)
        return task.loss(decoder, {**batch, "loss_weights": weights}, key)

    return dataclasses.replace(task, loss=loss)


def with_config(decoder: Decoder, config: DecoderConfig) -> Decoder:
    """The decoder's weights in one of another config with the same weights."""
    return nnx.merge(nnx.split(abstract_decoder(config))[0], nnx.state(decoder))


def answers(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """The likeliest next token of each prompt, [count]."""
    graph, state = nnx.split(decoder)

    @jax.jit
    def next_token(state: nnx.State, tokens_BT: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, state)
        x_BTD = decoder.hidden(tokens_BT)
        return jnp.argmax(decoder.logits(x_BTD[:, -1:])[:, 0], axis=-1)

    rows = min(len(tokens), max(1, 2**16 // tokens.shape[1]))
    parts = [next_token(state, tokens[n : n + rows]) for n in range(0, len(tokens), rows)]
    return np.concatenate(parts)


def shares(decoder: Decoder, length: int, count: int) -> list[float]:
    """The share of `count` prompts that are answered at each depth, then without the needle."""
    asked = [prompts(length, depth, count) for depth in DEPTHS]
    asked.append(prompts(length, 0.5, count, needle=False))
    said = answers(decoder, np.concatenate([tokens for tokens, _ in asked])).reshape(-1, count)
    return [float(np.mean(row == right)) for row, (_, right) in zip(said, asked, strict=True)]


def served(decoder: Decoder, length: int) -> tuple[int, int]:
    """To how many prompts, one of each depth, the engine answers greedily as `answers` does, and
    the number of prompts."""
    tokens = np.concatenate([prompts(length, depth, 1)[0] for depth in DEPTHS])
    llm = LLM(decoder, max_model_len=length + 1, max_num_seqs=4, step_sizes="coarse")
    greedy = SamplingParams(temperature=0, max_tokens=1)
    outputs = llm.generate([row.tolist() for row in tokens], greedy)
    said = [output.outputs[0].token_ids[0] for output in outputs]
    return int(np.sum(np.array(said) == answers(decoder, tokens))), len(tokens)


def main() -> None:
    """Train, ask, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/needle"))
    parser.add_argument("--seeds", type=int, default=1, help="models of each kind")
    parser.add_argument("--prompts", type=int, default=20, help="of each length and depth, a seed")
    parser.add_argument("--guide", action="store_true", help="write the guide's table too")
    args = parser.parse_args()
    done: dict[str, list[Trained]] = {}
    rows, costs, engine = [], [], []
    for name, contestant in CONTESTANTS.items():
        folder = name.replace(" ", "-").replace(",", "")
        models = done[name] = [
            trained(
                contestant,
                args.runs / f"seed-{seed}" / folder,
                None if contestant.begins is None else done[contestant.begins][seed],
                seed,
            )
            for seed in range(args.seeds)
        ]
        if contestant.stages:
            stages = [f"{s.steps} x {s.rows} x {s.length:,}" for s in contestant.stages]
            minutes = np.mean([model.minutes for model in models])
            tokens = f"{models[0].tokens / 1e6:.2f} M"
            costs.append((name, ", ".join(stages), tokens, f"{minutes:.1f}"))
        for length in contestant.asked:
            each = np.array([shares(m.decoder, length, args.prompts) for m in models])
            rows.append((name, f"{length:,}", *(f"{share:.0%}" for share in each.mean(axis=0))))
            print(*rows[-1], *(f"\n  {seed}" for seed in each), sep=" | ", flush=True)
        if contestant.begins is None:
            same, asked = np.sum([served(m.decoder, ENGINE_LENGTH) for m in models], axis=0)
            engine.append(f"{same} of {asked} ({name})")
    head = ("layers", "tokens", *(f"depth {depth:.0%}" for depth in DEPTHS), "needle left out")
    text = "\n\n".join(
        [
            f"The share of prompts, {args.prompts} to the model of each seed (0 to "
            f"{args.seeds - 1}), after which the likeliest token is the needle's number, by the "
            "prompt's length and the needle's depth in it. Guessing is right in "
            f"{100 / NUMBERS:.1f} % among all numbers, in {100 / FACTS:.1f} % among those of the "
            "prompt.",
            table(head, rows),
            table(("layers", "steps x rows x tokens", "tokens", "minutes"), costs),
            f"Asked prompts of {ENGINE_LENGTH:,} tokens, one of each depth, the engine gives the "
            f"same token as the model without a cache: {', '.join(engine)}.",
        ]
    )
    title = "# A needle in a long context: `python benchmarks/needle.py`"
    about = f"{machine()}. {versions('jax')}."
    write_results("needle", f"{title}\n\n{about}\n\n{text}\n")
    if args.guide:
        write_guide("long-context.md", "needle", text)


if __name__ == "__main__":
    main()
