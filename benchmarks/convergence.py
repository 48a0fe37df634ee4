"""Loss at equal tokens beside other loops: `python benchmarks/convergence.py --data DIR`.

    fornax data build --output data/stdlib-1k --tokenizer.vocab-size 1024 --holdout 0.05
    python benchmarks/convergence.py --data data/stdlib-1k --runs runs/convergence

The same small decoder learns the same rows in the same order from the same first weights, by the
same schedule and AdamW, in `fornax train`, in transformers' Trainer, and in a loop written by hand
with JAX and Optax, once for each seed. Then `fornax train` with each of its usual optimizers, each
at four learning rates. Every run is a process of its own; one that is done is not made again. It
needs torch, transformers and accelerate (`.venv-parity`).

Legend: B rows, T tokens of a row, D width, N heads, K key-value heads, H head width.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from _curves import picture
from _harness import GUIDES, machine, table, versions, write_guide, write_results

STEPS, ROWS, LENGTH, WARMUP, EVERY, HELD_OUT = 200, 16, 128, 20, 25, 8
RATE, DECAY, LOWEST = 3e-3, 0.1, 0.1
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "tie_embeddings": True,
    "family": "llama",
}
LOOPS = ("fornax", "transformers", "by hand")
SHOWN = {
    "fornax": "fornax train",
    "transformers": "transformers' Trainer",
    "by hand": "JAX and Optax by hand",
    "bfloat16": "fornax train, computed in bfloat16",
}
OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "adamw": {"weight_decay": DECAY},
    "adafactor": {},
    "lion": {},
    "muon": {"weight_decay": DECAY},
}
SCALED = {"lion": 0.1}
"""Learning rates of an optimizer beside AdamW's: Lion's are three to ten times smaller (Chen et al.
2023)."""
Batch = dict[str, np.ndarray]
Points = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Found:
    """What a run reported."""

    train: list[float]
    """Mean loss of each step, nats per token."""
    held_out: Points
    """(step, nats per token of held-out text)."""
    rates: list[float]
    """Learning rate of each step."""


def settings(data: Path, folder: Path, seed: int) -> dict[str, Any]:
    """The run as `fornax train` reads it."""
    return {
        "model": None,
        "init_from": str(folder / "model"),
        "data": {"source": {"type": "dataset", "path": str(data)}},
        "steps": STEPS,
        "batch_size": ROWS,
        "seq_len": LENGTH,
        "seed": seed,
        "dtypes": {"params": "float32", "compute": "float32"},
        "optim": optim("adamw", RATE),
        "eval": {"every": EVERY, "batches": HELD_OUT},
        "log": {"every": 1, "tensorboard": False},
        "save_every": None,
    }


def optim(name: str, rate: float) -> dict[str, Any]:
    return {
        "optimizer": {"type": name, **OPTIMIZERS[name]},
        "learning_rate": rate,
        "schedule": {"type": "cosine", "warmup_steps": WARMUP, "end_factor": LOWEST},
    }


def prepare(data: Path, folder: Path, seed: int) -> None:
    """First weights, and the rows of all steps and of the evaluation, for all loops."""
    if (folder / "rows.npz").is_file():
        return
    from fornax.config import from_mapping
    from fornax.data import Hosts
    from fornax.models import DecoderConfig, create_decoder, save_pretrained
    from fornax.train import TrainConfig, pretrain_task, with_model

    folder.mkdir(parents=True, exist_ok=True)
    decoder = create_decoder(DecoderConfig(**MODEL), seed=seed)
    save_pretrained(decoder, folder / "model", data / "tokenizer", overwrite=True)
    config = from_mapping(TrainConfig, settings(data, folder, seed))
    task = pretrain_task(with_model(config))
    found: dict[str, np.ndarray] = {}
    for split, count in (("train", STEPS), ("eval", HELD_OUT)):
        stream = task.batches(split, Hosts())
        batches = [next(stream) for _ in range(count)]
        stream.close()
        found |= {f"{split}/{name}": np.stack([b[name] for b in batches]) for name in batches[0]}
    with (folder / "rows.part").open("wb") as file:
        np.savez(file, allow_pickle=False, **found)
    (folder / "rows.part").rename(folder / "rows.npz")


def rows(folder: Path, split: str) -> Iterator[Batch]:
    """The batches of a split, in order."""
    with np.load(folder / "rows.npz") as file:
        arrays = {
            name.partition("/")[2]: file[name] for name in file if name.startswith(f"{split}/")
        }
    for number in range(len(arrays["tokens"])):
        yield {name: array[number] for name, array in arrays.items()}


def fornax(data: Path, folder: Path, out: Path, seed: int, changes: Mapping[str, Any]) -> Found:
    """What `fornax train` runs."""
    from fornax.config import from_mapping
    from fornax.train import TrainConfig, read_metrics, train

    config = from_mapping(TrainConfig, {**settings(data, folder, seed), **changes})
    train(config, out, progress="none")
    lines: list[dict[str, Any]] = read_metrics(out / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    return Found(
        train=[line["loss"] for line in steps],
        held_out=[(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line],
        rates=[line["learning_rate"] for line in steps],
    )


def transformers(folder: Path, out: Path, seed: int) -> Found:
    """transformers' Trainer."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )

    def inputs(batch: Batch) -> dict[str, torch.Tensor]:
        """Labels stand where their logits do; each document sees itself alone."""
        segments = torch.from_numpy(batch["segment_ids"])
        same = segments[:, :, None] == segments[:, None, :]
        mask = same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        targets = torch.from_numpy(batch["targets"]).long()
        labels = torch.where(torch.from_numpy(batch["loss_weights"]) > 0, targets, -100)
        return {
            "input_ids": torch.from_numpy(batch["tokens"]).long(),
            "position_ids": torch.from_numpy(batch["positions"]).long(),
            "attention_mask": mask[:, None],
            "labels": labels,
            "shift_labels": labels,
        }

    held_out: Points = []

    class HeldOut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % EVERY:
                return
            total = weight = 0.0
            model.eval()
            with torch.no_grad():
                for batch in rows(folder, "eval"):
                    given = inputs(batch)
                    count = int((given["labels"] >= 0).sum())
                    total += float(model(**given).loss) * count
                    weight += count
            model.train()
            held_out.append((state.global_step, total / weight))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for batch in rows(folder, "train"):
                given = inputs(batch)
                yield from ({name: x[row] for name, x in given.items()} for row in range(ROWS))

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=RATE,
            weight_decay=DECAY,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": LOWEST},
            warmup_steps=WARMUP,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            use_cpu=True,
            seed=seed,
            disable_tqdm=True,
        ),
        train_dataset=Stream(),
        callbacks=[HeldOut()],
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return Found(
        train=[line["loss"] for line in logged],
        held_out=held_out,
        rates=[line["learning_rate"] for line in logged],
    )


def by_hand(folder: Path) -> Found:
    """A loop as one would write it with JAX and Optax."""
    import jax
    import optax

    config = json.loads((folder / "model" / "config.json").read_text())
    weights = _stacked(folder / "model", config["num_hidden_layers"])
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, STEPS, RATE * LOWEST)
    decays = {name: "norm" not in name for name in weights}
    update = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=DECAY, mask=decays),
    )
    loss = functools.partial(_loss, config)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        changes, state = update.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, value

    evaluate = jax.jit(loss)
    state = update.init(weights)
    train, held_out = [], []
    for number, batch in enumerate(rows(folder, "train"), 1):
        weights, state, value = step(weights, state, batch)
        train.append(float(value))
        if number % EVERY == 0:
            found = [
                (float(evaluate(weights, b)), float(b["loss_weights"].sum()))
                for b in rows(folder, "eval")
            ]
            total = sum(mean * weight for mean, weight in found)
            held_out.append((number, total / sum(weight for _, weight in found)))
    rates = [float(np.asarray(schedule(number))) for number in range(STEPS)]
    return Found(train=train, held_out=held_out, rates=rates)


def _stacked(model: Path, layers: int) -> dict[str, Any]:
    """Weights by name, those of layers stacked, matrices as [in, out]."""
    from safetensors.numpy import load_file

    loaded = load_file(model / "model.safetensors")
    names = [f"self_attn.{part}_proj" for part in "qkvo"]
    names += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    names += ["input_layernorm", "post_attention_layernorm"]
    found = {
        "embed": loaded["model.embed_tokens.weight"],
        "final_norm": loaded["model.norm.weight"],
    }
    for name in names:
        each = [loaded[f"model.layers.{n}.{name}.weight"].T for n in range(layers)]
        found[name.rpartition(".")[2]] = np.stack(each)
    return found


def _loss(config: Mapping[str, Any], weights: Any, batch: Any) -> Any:
    """Mean cross entropy of the next token, nats."""
    import jax
    import jax.numpy as jnp

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, eps = config["head_dim"], config["rms_norm_eps"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    tokens, segments = batch["tokens"], batch["segment_ids"]
    B, T = tokens.shape
    angles = batch["positions"][..., None] * theta ** (-jnp.arange(0, width, 2) / width)
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    visible = (segments[:, :, None] == segments[:, None]) & jnp.tril(jnp.ones((T, T), bool))

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale

    def rotate(x: Any) -> Any:
        low, high = jnp.split(x, 2, -1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    def layer(x: Any, w: Any) -> Any:
        y = norm(x, w["input_layernorm"])
        q = rotate((y @ w["q_proj"]).reshape(B, T, heads, width))
        k = rotate((y @ w["k_proj"]).reshape(B, T, kv_heads, width))
        v = (y @ w["v_proj"]).reshape(B, T, kv_heads, width)
        k, v = (jnp.repeat(a, heads // kv_heads, axis=2) for a in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * width**-0.5
        chosen = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), -1)
        x = x + jnp.einsum("bnts,bsnh->btnh", chosen, v).reshape(B, T, -1) @ w["o_proj"]
        y = norm(x, w["post_attention_layernorm"])
        return x + (jax.nn.silu(y @ w["gate_proj"]) * (y @ w["up_proj"])) @ w["down_proj"], None

    own = {name: w for name, w in weights.items() if name not in ("embed", "final_norm")}
    x, _ = jax.lax.scan(layer, weights["embed"][tokens], own)
    logits = norm(x, weights["final_norm"]) @ weights["embed"].T
    targets = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    counted = batch["loss_weights"]
    return -jnp.sum(targets[..., 0] * counted) / jnp.sum(counted)


def run(args: argparse.Namespace, name: str, seed: int, make: str, *more: str) -> Found:
    """What a run found, which is made in a process of its own unless it is there."""
    path = args.runs / f"{name.replace(' ', '-')}-{seed}.json"
    if not path.is_file():
        print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
        given = ["--data", str(args.data), "--runs", str(args.runs), "--seeds", str(seed)]
        words = [sys.executable, __file__, *given, "--worker", make, "--out", str(path), *more]
        subprocess.run(words, check=True)
    return Found(**json.loads(path.read_text()))


def work(args: argparse.Namespace) -> None:
    """Be one run, and write what it found."""
    seed, out = args.seeds[0], args.out
    folder, own = args.runs / f"seed-{seed}", out.with_suffix("")
    loops: Mapping[str, Callable[[], Found]] = {
        "fornax": lambda: fornax(args.data, folder, own, seed, json.loads(args.changes)),
        "transformers": lambda: transformers(folder, own, seed),
        "by hand": lambda: by_hand(folder),
    }
    found = loops[args.worker]()
    part = out.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(found)))
    part.rename(out)


def compare_loops(args: argparse.Namespace) -> tuple[str, dict[str, Points]]:
    """A table of the loops, and their curves."""
    found: dict[tuple[str, int], Found] = {}
    for seed in args.seeds:
        prepare(args.data, args.runs / f"seed-{seed}", seed)
        for name in LOOPS:
            found[name, seed] = run(args, name, seed, name)
        dtypes = json.dumps({"dtypes": {"params": "float32", "compute": "bfloat16"}})
        found["bfloat16", seed] = run(args, "bfloat16", seed, "fornax", "--changes", dtypes)
    lines = []
    for (name, seed), one in found.items():
        base = found["by hand", seed]
        apart = np.abs(np.array(one.rates) - np.array(base.rates)).max() / RATE
        if len(one.train) != STEPS or apart > 1e-5:
            raise SystemExit(f"{name}, seed {seed}: another schedule, or not all steps")
        early = np.abs(np.array(one.train[:EVERY]) - np.array(base.train[:EVERY])).max()
        last = one.held_out[-1][1]
        lines.append(
            [
                SHOWN[name],
                seed,
                f"{statistics.mean(one.train[-EVERY:]):.4f}",
                f"{last:.4f}",
                f"{last - base.held_out[-1][1]:+.4f}",
                f"{early:.1e}",
            ]
        )
    finals = {name: [found[name, seed].held_out[-1][1] for seed in args.seeds] for name in SHOWN}
    spread = [f"{SHOWN[name]} {statistics.mean(x):.4f}" for name, x in finals.items()]
    seeds = max(finals["by hand"]) - min(finals["by hand"])
    head = ("loop", "seed", f"last {EVERY} steps", "held out", "beside by hand")
    text = [
        table((*head, f"largest difference, steps 1 to {EVERY}"), lines),
        "",
        f"Nats per token. Means of held-out loss over {len(args.seeds)} seeds: "
        f"{', '.join(spread)}; seeds differ by up to {seeds:.4f}.",
    ]
    curves = {f"{SHOWN[name]}, seed {seed}": one.held_out for (name, seed), one in found.items()}
    first = args.seeds[0]
    return "\n".join(text), {SHOWN[name]: curves[f"{SHOWN[name]}, seed {first}"] for name in SHOWN}


def compare_optimizers(args: argparse.Namespace) -> tuple[str, dict[str, Points]]:
    """A table of optimizers by learning rate, and the curves of each at its best."""
    seed, lines, curves = args.seeds[0], [], {}
    prepare(args.data, args.runs / f"seed-{seed}", seed)
    for name in OPTIMIZERS:
        rates = [rate * SCALED.get(name, 1.0) for rate in RATES]
        found = []
        for rate in rates:
            changes = json.dumps({"optim": optim(name, rate)})
            same = (name, rate) == ("adamw", RATE)
            own = "fornax" if same else f"{name} {rate:g}"
            found.append(run(args, own, seed, "fornax", "--changes", changes))
        finals = [one.held_out[-1][1] for one in found]
        best = finals.index(min(finals))
        cells = [f"{x:.4f} at {rate:g}" for x, rate in zip(finals, rates, strict=True)]
        cells[best] = f"**{cells[best]}**"
        lines.append([name, *cells])
        curves[f"{name}, {rates[best]:g}"] = found[best].held_out
    head = ("optimizer", "lowest rate", "3 times", "10 times", "30 times")
    return table(head, lines), curves


def main() -> None:
    """Make what is missing, compare, and write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a dataset of 1024 tokens")
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--guide", action="store_true", help="write the guide's tables, pictures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--changes", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    loops, loop_curves = compare_loops(args)
    optimizers, optimizer_curves = compare_optimizers(args)
    parts = [
        "# Loss at equal tokens beside other loops",
        f"{machine()}; {versions('jax', 'optax', 'torch', 'transformers')}. {STEPS} steps of "
        f"{ROWS} rows of {LENGTH} tokens of the standard library, a decoder of 0.26M parameters, "
        f"float32 unless it says otherwise, AdamW at {RATE:g} with decay {DECAY:g}, {WARMUP} "
        "steps of warm-up, a cosine to a tenth.",
        loops,
        f"Optimizers in `fornax train`, seed {args.seeds[0]}, nats per token of held-out text at "
        "the end, by learning rate:",
        optimizers,
    ]
    text = "\n\n".join(parts)
    print(text)
    print(write_results("convergence", text))
    if args.guide:
        write_guide("convergence.md", "loops", loops)
        write_guide("convergence.md", "optimizers", optimizers)
        title = "Nats per token of held-out text by step, "
        for name, curves in (("loops", loop_curves), ("optimizers", optimizer_curves)):
            (GUIDES / f"convergence-{name}.svg").write_text(picture(title + name, curves))


if __name__ == "__main__":
    main()
