"""Continuous against static batching on a recorded arrival trace: `python benchmarks/llm_trace.py`.

The same engine, model and requests both times. Continuous: a request joins the running batch when
it arrives. Static: requests wait until the batch before them is done, then the waiting ones start
together, at most as many as the engine runs at once; a finished one is answered at once and costs
nothing more, which is kinder than a batch that is padded to its longest.

The trace (traces/bursty.jsonl, made with `--record`) holds arrivals, prompt and output lengths; its
clock is stretched so that it offers a chosen share of the tokens/s that the engine makes of
it when all requests are there from the start.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import _harness
import _random_llama

TRACE = Path(__file__).parent / "traces" / "bursty.jsonl"
WAYS = ("continuous", "static")


@dataclass(frozen=True)
class Arrival:
    """One request of the trace."""

    at: float
    prompt: int
    output: int


@dataclass
class Served:
    """When a request came, and when each of its tokens did."""

    arrived: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def whole_s(self) -> float:
        return self.tokens[-1] - self.arrived


@dataclass
class Run:
    """All requests of one replay."""

    served: list[Served]
    seconds: float

    @property
    def rate(self) -> float:
        """Generated tokens per second."""
        return sum(len(one.tokens) for one in self.served) / self.seconds


def record(path: Path, count: int = 160, seed: int = 0) -> None:
    """Write a trace: bursts (gamma intervals, shape 1/4), long-tailed lengths, one request/s."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.gamma(0.25, 4.0, count))
    prompts = np.clip(rng.lognormal(4.8, 0.8, count), 8, 768).astype(int)
    outputs = np.clip(rng.lognormal(3.9, 0.8, count), 4, 256).astype(int)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for time_, prompt, output in zip(times - times[0], prompts, outputs, strict=True):
            row = {"timestamp": round(float(time_), 3), "input_length": int(prompt)}
            file.write(json.dumps({**row, "output_length": int(output)}) + "\n")


def read(path: Path) -> list[Arrival]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Arrival(r["timestamp"], r["input_length"], r["output_length"]) for r in rows]


class Replay:
    """An engine, and the two ways to feed it."""

    def __init__(self, model: Path, args: argparse.Namespace, longest: int) -> None:
        from fornax.llm.build import build_engine
        from fornax.llm.config import EngineConfig

        precision = args.precision
        config = EngineConfig(
            dtype="float32" if precision == "float32" else "bfloat16",
            quantization="int8" if precision == "int8" else None,
            max_num_seqs=args.rows,
            max_model_len=longest,
        )
        self._rows = args.rows
        self._parts = build_engine(model, config)
        self._parts.programs.compile_all()
        self._parts.programs.wait()
        self._vocab = self._parts.engine.runner.weights.config.vocab_size

    def run(self, arrivals: list[Arrival], way: str, stretch: float, seed: int) -> Run:
        """Replay the trace with its clock stretched; prompts are drawn from the seed."""
        rng = np.random.default_rng([seed, 1])
        prompts = [rng.integers(2, self._vocab, a.prompt).tolist() for a in arrivals]
        engine = self._parts.engine
        start = time.perf_counter()
        served = [Served(start + stretch * arrival.at) for arrival in arrivals]
        waiting = list(range(len(arrivals)))[::-1]
        while waiting or engine.has_work:
            if way == "continuous" or not engine.has_work:
                now, room = time.perf_counter(), self._rows if way == "static" else len(waiting)
                while waiting and room and served[waiting[-1]].arrived <= now:
                    room -= 1
                    number = waiting.pop()
                    engine.add(self._request(number, prompts[number], arrivals[number].output))
            if engine.has_work:
                self._turn(served)
            else:
                time.sleep(max(0.0, served[waiting[-1]].arrived - time.perf_counter()))
        return Run(served, time.perf_counter() - start)

    def _request(self, number: int, prompt: list[int], output: int) -> Any:
        from fornax.llm.outputs import RequestOutputKind
        from fornax.llm.sampling_params import SamplingParams

        params = SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        return self._parts.input_processor.request(prompt, params, request_id=str(number))

    def _turn(self, served: list[Served]) -> None:
        from fornax.llm.outputs import RequestOutput

        outputs = self._parts.engine.step()
        now = time.perf_counter()
        for output in outputs:
            assert isinstance(output, RequestOutput)
            new = output.outputs[0].token_ids
            served[int(output.request_id)].tokens.extend([now] * len(new))


def main() -> None:
    args = arguments()
    if args.record:
        record(args.trace)
        return
    arrivals = read(args.trace)
    model = _random_llama.make(args.model, args.folder)
    replay = Replay(model, args, max(a.prompt + a.output for a in arrivals))
    replay.run(arrivals[:8], "continuous", 0.0, seed=99)
    full = replay.run(arrivals, "continuous", 0.0, seed=98)
    tokens = sum(arrival.output for arrival in arrivals)
    results: dict[float, dict[str, list[Run]]] = {}
    for load in args.loads:
        stretch = tokens / (load * full.rate) / arrivals[-1].at
        results[load] = {way: [] for way in WAYS}
        for number in range(args.rounds):
            for way in WAYS[:: 1 if number % 2 == 0 else -1]:
                results[load][way].append(replay.run(arrivals, way, stretch, seed=number))
    text = report(args, arrivals, full, results)
    _harness.write_results("llm_trace", text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-40m", choices=list(_random_llama.SHAPES))
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--rows", type=int, default=32, help="requests that run at once")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.4, 0.7])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--record", action="store_true", help="write the trace and stop")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    return parser.parse_args()


def report(
    args: argparse.Namespace,
    arrivals: list[Arrival],
    full: Run,
    results: dict[float, dict[str, list[Run]]],
) -> str:
    rows, ratios = [], []
    for load, ways in results.items():
        for way, runs in ways.items():
            rows.append((f"{load:.0%}", way, *figures(runs)))
        pairs = list(zip(ways["continuous"], ways["static"], strict=True))
        rate = statistics.median(a.rate / b.rate for a, b in pairs)
        first = statistics.median(
            percentile([s.first_s for s in b.served], 99)
            / percentile([s.first_s for s in a.served], 99)
            for a, b in pairs
        )
        whole = statistics.median(
            percentile([s.whole_s for s in b.served], 99)
            / percentile([s.whole_s for s in a.served], 99)
            for a, b in pairs
        )
        ratios.append(
            f"- At {load:.0%} load continuous batching makes {rate:.2f} times the tokens/s; "
            f"static batching's p99 is {first:.1f} times as long to the first token and "
            f"{whole:.1f} times to the last."
        )
    header = ("load", "batching", "tokens/s", "first token p50, s", "p99, s")
    return "\n".join(
        [
            "# Continuous and static batching on an arrival trace",
            "",
            f"{_harness.machine()}; {_harness.versions('jax')}; {args.model}, {args.precision}, at "
            f"most {args.rows} requests at once; {args.trace.name}: {len(arrivals)} requests, "
            f"{sum(a.prompt for a in arrivals):,} prompt and "
            f"{sum(a.output for a in arrivals):,} generated tokens; medians of {args.rounds} "
            f"rounds, the two in turn. With all requests there at once the engine makes "
            f"{full.rate:,.0f} tokens/s, which is load 100%.",
            "",
            _harness.table(
                (*header, "whole answer p50, s", "p99, s", "between tokens p99, ms"), rows
            ),
            "",
            *ratios,
        ]
    )


def figures(runs: list[Run]) -> tuple[str, ...]:
    """Medians over rounds: tokens/s, then times to the first token, to the last, between."""
    firsts = [[s.first_s for s in run.served] for run in runs]
    wholes = [[s.whole_s for s in run.served] for run in runs]
    gaps = [[b - a for s in run.served for a, b in itertools.pairwise(s.tokens)] for run in runs]

    def middle(samples: list[list[float]], percent: float) -> float:
        return statistics.median(percentile(sample, percent) for sample in samples)

    return (
        f"{statistics.median(run.rate for run in runs):,.0f}",
        f"{middle(firsts, 50):.2f}",
        f"{middle(firsts, 99):.2f}",
        f"{middle(wholes, 50):.2f}",
        f"{middle(wholes, 99):.2f}",
        f"{1e3 * middle(gaps, 99):.1f}",
    )


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
