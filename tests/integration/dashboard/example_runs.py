"""Run directories of every kind as Fornax writes them, small: what the page's tests look at."""

import json
import math
import random
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["HOSTILE", "example_runs", "lines", "metrics", "png"]

HOSTILE = '<img src=x onerror="document.title=1">'
"""A name and a text that would act, were it taken for HTML."""
BEGAN = 1_763_683_200.0


def lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def metrics(
    steps: int, *, seed: int = 0, rate: float = 0.02, floor: float = 1.8, spike: int | None = None
) -> list[dict[str, Any]]:
    """Records of a training run whose loss falls from 6.2 to about `floor`."""
    draw = random.Random(seed)
    found = []
    for step in range(1, steps + 1):
        loss = floor + (6.2 - floor) * math.exp(-step * rate * 0.6) + draw.gauss(0, 0.06)
        record = {
            "step": step,
            "loss": loss + (3.0 if step == spike else 0.0),
            "accuracy": 1 - loss / 6.5,
            "grad_norm": 0.7 + 0.4 * draw.random(),
            "learning_rate": rate * min(step / 20, 1.0) * (1 - step / (steps + 1)),
            "tokens": step * 512,
            "tokens_per_second": 41_000 + 2_500 * draw.random(),
            "step_seconds": 0.0122 + 0.0008 * draw.random(),
            "time": BEGAN + 20.0 + step * 0.5,
        }
        if step % 25 == 0:
            record |= {"eval/loss": loss + 0.11, "eval/perplexity": math.exp(loss + 0.11)}
        found.append(record)
    return found


def png(red: int, green: int, blue: int, size: int = 24) -> bytes:
    """A picture: a gradient from black to a colour."""
    rows = b"".join(
        b"\0"
        + b"".join(
            bytes(c * (x + y) // (2 * size) for c in (red, green, blue)) for x in range(size)
        )
        for y in range(size)
    )

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def example_runs(root: Path) -> Path:
    """A folder of runs: training over three seeds and a rate that diverges, a launched one with
    faults, reinforcement learning, pictures, a server, a quantized model, hostile names."""
    for seed in range(3):
        _train(root / f"base/seed-{seed}", metrics(300, seed=seed), seed=seed)
    wild = metrics(160, seed=7, rate=0.08, spike=120)
    wild += [record | {"loss": None, "grad_norm": None} for record in metrics(175, seed=7)[160:]]
    _train(root / "base/rate-0.08", wild, rate=0.08)
    _launched(root / "launched")
    _reinforced(root / "grpo", seed=0)
    _reinforced(root / "grpo-low-rate", seed=1)
    _pictures(root / "unet")
    _server(root / "server")
    _quantized(root / "llama-w4")
    hostile = [record | {HOSTILE: 1.0} for record in metrics(12)]
    _train(root / "hostile" / HOSTILE.replace("/", ""), hostile, note=HOSTILE)
    return root


def _config(run: Path, **values: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


def _train(
    run: Path, records: list[dict[str, Any]], *, seed: int = 0, rate: float = 0.02, **more: Any
) -> None:
    _config(
        run,
        steps=300,
        batch_size=4,
        seed=seed,
        dtypes={"params": "float32", "compute": "bfloat16"},
        optim={"optimizer": {"type": "muon", "beta": 0.95}, "learning_rate": rate},
        data={"path": "data/tiny", "seq_len": 128, "packing": {"type": "greedy"}},
        model={"type": "decoder", "layers": 4, "width": 128},
        **more,
    )
    lines(run / "metrics.jsonl", records)
    lines(run / "goodput.jsonl", _ledger(BEGAN, len(records)))
    (run / "program.json").write_text(json.dumps(_program()))


def _ledger(began: float, steps: int, attempt: int = 1, first: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"attempt": attempt, "start_step": first, "time": began}]

    def add(step: int, at: float, *spans: tuple[str, float]) -> None:
        sums: dict[str, float] = {}
        for cause, seconds in spans:
            sums[cause] = sums.get(cause, 0.0) + seconds
        found.append(
            {
                "attempt": attempt,
                "step": step,
                "time": at,
                "seconds": sums,
                "spans": [list(span) for span in spans],
            }
        )

    now = began + 20.0
    add(first, now, ("initialise", 6.0), ("compile", 14.0))
    for step in range(first + 10, first + steps + 1, 10):
        rest = [("evaluate", 0.6)] if step % 50 == 0 else []
        rest += [("checkpoint", 0.9)] if step % 100 == 0 else []
        length = 5.0 + sum(seconds for _, seconds in rest)
        now += length
        add(step, now, ("wait_for_data", 0.3), ("step", 4.7), *rest)
    return found


def _launched(run: Path) -> None:
    _train(run, metrics(240, seed=3))
    ledger = (
        _ledger(BEGAN, 80) + _ledger(BEGAN + 82.0, 60, 2, 60) + _ledger(BEGAN + 165.0, 130, 3, 110)
    )
    lines(run / "goodput.jsonl", ledger)
    lines(run / "cluster/rank-1.goodput.jsonl", ledger)

    def event(time: float, state: str, epoch: int, **facts: Any) -> dict[str, Any]:
        return {
            "time": BEGAN + time,
            "epoch": epoch,
            "state": state,
            "why": facts.get("kind", ""),
            **facts,
        }

    def fault(time: float, epoch: int, kind: str, rank: int) -> list[dict[str, Any]]:
        facts = {"rank": rank, "kind": kind, "since": BEGAN + time - 4.0}
        return [
            event(time, "suspect", epoch, **facts),
            event(time + 0.5, "teardown", epoch, **facts),
        ]

    lines(
        run / "events.jsonl",
        [
            event(-2.0, "forming", 1, free=0, hosts=2),
            event(0.0, "running", 1, step=0),
            *fault(64.0, 1, "killed", 1),
            event(70.0, "forming", 2, free=0, hosts=2),
            event(84.0, "running", 2, step=60),
            *fault(148.0, 2, "frozen", 0),
            event(156.0, "forming", 3, free=0, hosts=2),
            event(168.0, "running", 3, step=110),
            event(252.0, "ended", 3),
        ],
    )


def _reinforced(run: Path, *, seed: int) -> None:
    draw = random.Random(seed)
    _config(
        run,
        model="models/tiny",
        algorithm={"type": "grpo"},
        steps=24,
        group_size=4,
        seed=0,
        learning_rate=1e-3 / (1 + seed),
        data="data/questions.jsonl",
        max_length=256,
    )
    records, samples = [], []
    for step in range(1, 25):
        rewards = []
        for group in range(2):
            a, b = group + 3, (step * 7) % 11
            for _ in range(4):
                right = draw.random() < 0.15 + step / 30
                answer = a * b if right else a * b + draw.randint(1, 9)
                pieces = [
                    "<think>",
                    f"{a} times {b}",
                    " is",
                    f" {answer}",
                    "</think>",
                    "\n",
                    "The answer",
                    " is ",
                    f"{answer}",
                    ".",
                ]
                rewards.append(float(right))
                samples.append(
                    {
                        "step": step,
                        "round": step - 1,
                        "group": group,
                        "where": f"data/questions.jsonl:{step * 2 + group}",
                        "prompt": f"What is {a} times {b}? Think, then say it.\n",
                        "completion": "".join(pieces),
                        "status": "ok",
                        "reward": float(right),
                        "rewards": {"exact": float(right), "length": -0.1},
                        "trained_reward": float(right),
                        "advantage": 0.8 if right else -0.6,
                        "tokens": len(pieces),
                        "finish_reason": "stop",
                        "versions": [step - 1, step - 1],
                        "pieces": pieces,
                        "logprobs": [round(-2.5 * draw.random() ** 2, 3) for _ in pieces],
                        "advantages": [0.8 if right else -0.6 for _ in pieces],
                    }
                )
        mean = sum(rewards) / len(rewards)
        records.append(
            {
                "step": step,
                "time": BEGAN + 30.0 + 4.3 * step,
                "loss": 0.02 * draw.gauss(0, 1),
                "reward": mean,
                "reward_std": math.sqrt(mean * (1 - mean)),
                "entropy": 3.2 - step * 0.05,
                "approx_kl": 0.001 * step,
                "zero_variance_groups": 0.0,
                "completion_tokens": 10.0,
                "truncated": 0.0,
                "rollout_seconds": 1.2,
                "completions": 8 * step,
                "step_seconds": 4.3,
                "train_tokens_per_second": 1900.0,
                "learning_rate": 1e-3,
            }
        )
    samples.append(
        {
            **samples[-1],
            "prompt": f"{HOSTILE}\n",
            "completion": "</pre><script>document.title=1</script>",
            "pieces": None,
        }
    )
    lines(run / "metrics.jsonl", records)
    lines(run / "samples.jsonl", samples)
    lines(run / "goodput.jsonl", _ledger(BEGAN, 24))


def _pictures(run: Path) -> None:
    _train(run, metrics(60, seed=4, floor=0.2))
    for step in (20, 40, 60):
        for number in range(4):
            path = run / f"images/step-{step:06d}/prompt-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(60 * number + 40, 3 * step, 220 - 2 * step))


def _server(run: Path) -> None:
    draw = random.Random(5)
    first = {"kind": "serve", "model": "tiny", "time": BEGAN}
    rows = []
    for i in range(240):
        busy = 6 + 5 * math.sin(i / 20) + draw.random()
        rows.append(
            {
                "time": BEGAN + 5.0 * i,
                "requests": 40 + 8 * i,
                "running": round(busy),
                "waiting": max(0, round(busy - 9)),
                "cache_used": min(0.98, busy / 12),
                "prefix_hits": 0.4 + 0.2 * draw.random(),
                "batch_fill": min(1.0, busy / 11),
                "prompt_tokens": 300 * i,
                "generated_tokens": 900 * i,
            }
        )
    lines(run / "server.jsonl", [first, *rows])


def _quantized(run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(4) for p in "qkvo"]
    (run / "quantization_report.json").write_text(
        json.dumps(
            {
                "source": "models/llama",
                "scheme": "w4a16-gptq",
                "rules": [],
                "seed": 0,
                "quantized": {
                    n: {
                        "scheme": "w4a16-gptq",
                        "method": "gptq",
                        "scaled": False,
                        "rows": 4096,
                        "error": 0.018 + 0.001 * i,
                    }
                    for i, n in enumerate(names)
                },
                "kept": {"lm_head.weight": "the logits are made with it"},
            }
        )
    )


def _program() -> dict[str, Any]:
    owners = {
        "weights": 6_200_000,
        "optimizer": 12_400_000,
        "activations": 31_000_000,
        "batch": 16_000,
    }
    classes = [
        {"name": "matmul", "flops": 4.1e9, "bytes": 9.0e7, "seconds": 4.6e-3, "bound": "compute"},
        {"name": "attention", "flops": 6.0e8, "bytes": 5.0e7, "seconds": 1.9e-3, "bound": "memory"},
        {
            "name": "elementwise",
            "flops": 9.0e7,
            "bytes": 1.1e8,
            "seconds": 3.1e-3,
            "bound": "memory",
        },
        {
            "name": "normalisation",
            "flops": 2.0e7,
            "bytes": 4.0e7,
            "seconds": 1.0e-3,
            "bound": "memory",
        },
    ]
    buffer = {
        "name": "logits",
        "kind": "temporary",
        "shape": "f32[512,4096]",
        "bytes": 8_388_608,
        "source": "src/fornax/models/loss.py:88",
    }
    return {
        "device": "cpu",
        "devices": 1,
        "peak_flops": 9.0e11,
        "bandwidth": 3.5e10,
        "programs": [
            {
                "name": "train step",
                "flops": 4.81e9,
                "bytes": 2.9e8,
                "peak_bytes": sum(owners.values()),
                "usable_bytes": None,
                "owners": owners,
                "buffers": [buffer],
                "roofline": {"classes": classes, "seconds": 1.06e-2, "bound": "memory"},
                "notes": [],
            }
        ],
    }
