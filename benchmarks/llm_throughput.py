"""The LLM engine beside its peers: `make bench-llm`, or `python benchmarks/llm_throughput.py`.

Random Llamas of 40M and 300M parameters and a random Qwen3-MoE of 200M; batches of 1, 8 and 32;
prompts of 128 and 1,024 tokens; 128 greedy tokens each. Contestants of one precision take turns
within one run, on the same prompts. `generated tokens/s` counts from the prompts' arrival to the
last token, so it includes the prompt; the time of a token is that of decoding, of several that an
engine hands over together their mean.

`--precisions Q8_0 Q4_K_M` are GGUF files that llama.cpp's quantizer writes; Fornax and llama.cpp
serve the same file.

At batch 1 decoding is bound by reading the weights once a token: the last table says which share
of that limit each contestant reaches while it decodes all rows, after the last prompt was read and
before the first row ended. A mixture of experts reads the experts that its tokens chose,
which are counted in a run of their own before the contest, and is bound by that at larger batches
too, until the products themselves take longer: their limit is printed beside it.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
from pathlib import Path

import _harness
import _random_llama
from _bandwidth import SIDE, product_rates, read_bandwidth
from _contestants import Cell, Contestant, Standing, agreement, contest, python_of, ratio, started

HERE = Path(__file__).parent
ENGINE = "fornax"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1, "int4": 0.5}
FILE_BYTES = {"Q8_0": 8.5 / 8, "Q4_K_M": 4.85 / 8}
"""Of a weight in the GGUF files that llama.cpp's quantizer writes and both serve as they are; of
Q4_K_M, which mixes Q4_K and Q6_K, about the mean."""
PRECISIONS = ("float32", "bfloat16", "int8", "int4", *FILE_BYTES)
IN_THIS_PYTHON = (ENGINE, "transformers", "jax")
"""Contestants that run where this script does; the others have environments of their own."""
CONTESTANTS = (*IN_THIS_PYTHON, "llamacpp", "ctranslate2", "openvino")
RUN_EXPERTS = {ENGINE, "transformers", "llamacpp"}
"""Contestants that take part with a mixture of experts."""
LARGE = 2**30
"""Bytes of a cache from which on contestants hold one only while it is their turn."""
PROBE = 2**30
"""Bytes read to measure the memory itself, beyond all caches."""


@dataclasses.dataclass
class Contest:
    """All cells of one model and precision."""

    precision: str
    contestants: list[Contestant]
    cells: dict[Cell, dict[str, Standing]] = dataclasses.field(default_factory=dict)
    touched: dict[Cell, float] = dataclasses.field(default_factory=dict)
    """Share of a layer's experts that a step with all rows of the cell reads; 1 without experts."""
    bandwidths: dict[Cell, float] = dataclasses.field(default_factory=dict)
    """Bytes/s read from a buffer of the weights' size, before and after the cell's turns."""


def main() -> None:
    args = arguments()
    products = product_rates(args.threads)
    for name in args.models:
        model = _random_llama.make(name, args.folder)
        contests, path = [], None
        touched = count_touched(model, name, args)
        for precision in args.precisions:
            with started(commands(model, precision, args, name)) as contestants:
                held = Contest(precision, contestants, touched=touched)
                contests.append(held)
                run(held, name, args)
                text = report(name, contests, read_bandwidth(PROBE, args.threads), products, args)
                path = _harness.write_results(f"llm_throughput-{name}", text)
        if path is not None:
            print(path.read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = ["llama-40m", "llama-300m", "qwen3-moe-200m"]
    parser.add_argument("--models", nargs="+", default=models, choices=list(_random_llama.SHAPES))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--new", type=int, default=128, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count, in each cell")
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds of turns in a cell, about; one at least"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    return parser.parse_args()


def takes(model: str, asked: list[str]) -> list[str]:
    """The contestants that take part with a model."""
    experts = isinstance(_random_llama.SHAPES[model], _random_llama.MoeShape)
    return [name for name in asked if not experts or name in RUN_EXPERTS]


def commands(
    model: Path, precision: str, args: argparse.Namespace, shape: str
) -> dict[str, list[str]]:
    """The command of each contestant whose environment is there."""
    found = {}
    if precision in FILE_BYTES:  # llama.cpp begins, because it writes the file
        playing = [name for name in ("llamacpp", ENGINE) if name in args.contestants]
    else:
        playing = takes(shape, args.contestants)
    for name in playing:
        python = sys.executable if name in IN_THIS_PYTHON else python_of(args.peers / name)
        if Path(python).exists():
            script = HERE / "peers" / f"peer_{name}.py"
            settings = {"--model": model, "--precision": precision, "--threads": args.threads}
            words = [str(word) for pair in settings.items() for word in pair]
            found[name] = [str(python), str(script), *words]
        else:
            print(f"{name} takes no part: make bench-peers-{name} installs it", file=sys.stderr)
    return found


def weight_bytes(precision: str) -> float:
    """Bytes of a weight."""
    return FILE_BYTES[precision] if precision in FILE_BYTES else BYTES[precision]


def cache_bytes(shape: _random_llama.Shape, cell: Cell) -> int:
    """Bytes of keys and values that a cell needs in float32."""
    slots = cell.batch * (cell.prompt + cell.new)
    return slots * 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES["float32"]


def cells(args: argparse.Namespace) -> list[Cell]:
    """All cells of a contest."""
    lengths = [(prompt, batch) for prompt in args.prompts for batch in args.batches]
    return [Cell(batch=batch, prompt=prompt, new=args.new) for prompt, batch in lengths]


def count_touched(model: Path, name: str, args: argparse.Namespace) -> dict[Cell, float]:
    """The share of experts that a step of each cell reads, counted in a process of its own."""
    shape = _random_llama.SHAPES[name]
    if not isinstance(shape, _random_llama.MoeShape):
        return dict.fromkeys(cells(args), 1.0)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_count_touched, model, shape, cells(args)).result()


def _count_touched(
    model: Path, shape: _random_llama.MoeShape, wanted: list[Cell]
) -> dict[Cell, float]:
    import numpy as np

    from fornax.llm import LLM, SamplingParams

    llm = LLM(
        model,
        enable_return_routed_experts=True,
        max_num_seqs=max(cell.batch for cell in wanted),
        max_model_len=max(cell.prompt + cell.new for cell in wanted),
        step_sizes="coarse",
    )
    found = {}
    for cell in wanted:
        prompts = _random_llama.prompts(cell.batch, cell.prompt, shape.vocab)
        params = SamplingParams(max_tokens=cell.new, temperature=0.0, ignore_eos=True)
        routes = [done.outputs[0].routed_experts for done in llm.generate(prompts, params)]
        routes_BTLk = np.stack([np.asarray(one)[cell.prompt :] for one in routes])
        own_TLE = np.moveaxis(routes_BTLk, 0, 2).reshape(*routes_BTLk.shape[1:3], -1)
        counts = [len(np.unique(own)) for own in own_TLE.reshape(-1, own_TLE.shape[-1])]
        found[cell] = float(np.mean(counts)) / shape.experts
    return found


def run(held: Contest, name: str, args: argparse.Namespace) -> None:
    """Run every cell."""
    size = int(_random_llama.SHAPES[name].weights * weight_bytes(held.precision))
    before = read_bandwidth(size, args.threads)
    for cell in cells(args):

        def draw(number: int, cell: Cell = cell) -> list[list[int]]:
            vocab = _random_llama.SHAPES[name].vocab
            return _random_llama.prompts(cell.batch, cell.prompt, vocab, seed=number)

        held.cells[cell] = contest(
            held.contestants,
            cell,
            draw,
            rounds=args.rounds,
            budget_s=args.budget,
            one_by_one=cache_bytes(_random_llama.SHAPES[name], cell) > LARGE,
        )
        after = read_bandwidth(size, args.threads)
        held.bandwidths[cell] = (before + after) / 2
        before = after


def report(
    name: str,
    contests: list[Contest],
    from_memory: float,
    products: dict[str, float],
    args: argparse.Namespace,
) -> str:
    shape = _random_llama.SHAPES[name]
    parts = [
        f"# LLM throughput: {name}",
        "",
        f"{_harness.machine()}; {args.threads} threads; {shape}. "
        f"{args.new} greedy tokens a prompt; medians of at most {args.rounds} rounds, "
        "contestants in turn. A ratio above 1 says that Fornax made more tokens per second.",
        "",
        "## Fornax beside the fastest peer of each precision",
        "",
        summary(contests),
    ]
    for held in contests:
        parts += ["", f"## {held.precision}", "", cells_table(held), "", *who(held)]
    parts += [
        "",
        "## Share of the memory-bandwidth limit",
        "",
        *limits(shape, contests, from_memory, products),
    ]
    return "\n".join(parts)


def summary(contests: list[Contest]) -> str:
    rows = []
    for held in contests:
        for cell, standings in held.cells.items():
            peers = {name: s for name, s in standings.items() if name != ENGINE}
            if ENGINE not in standings or not peers:
                continue
            best = max(peers, key=lambda name: peers[name].rate())
            mine = standings[ENGINE]
            rows.append(
                (
                    held.precision,
                    cell.batch,
                    cell.prompt,
                    f"{mine.rate():,.0f}",
                    best,
                    f"{peers[best].rate():,.0f}",
                    f"{ratio(mine, peers[best]):.2f}",
                )
            )
    header = ("precision", "batch", "prompt", "Fornax tokens/s", "fastest peer", "its tokens/s")
    return _harness.table((*header, "ratio"), rows)


def cells_table(held: Contest) -> str:
    rows = []
    for cell, standings in held.cells.items():
        mine = standings.get(ENGINE)
        for name, standing in standings.items():
            rows.append(
                (
                    cell.batch,
                    cell.prompt,
                    name,
                    f"{standing.rate():,.0f}",
                    f"{ratio(mine, standing):.2f}" if mine and name != ENGINE else "",
                    f"{1e3 * standing.first_token_s():.1f}",
                    f"{1e3 * standing.pace_s():.2f}",
                    f"{1e3 * standing.gap_s(99):.2f}",
                    f"{agreement(mine, standing):.0%}" if mine and name != ENGINE else "",
                    len(standing.turns),
                )
            )
    header = (
        "batch",
        "prompt",
        "contestant",
        "generated tokens/s",
        "Fornax is faster by",
        "first token, ms",
        "a token p50, ms",
        "between tokens p99, ms",
        "rows with Fornax's tokens",
        "rounds",
    )
    return _harness.table(header, rows)


def who(held: Contest) -> list[str]:
    lines = []
    for contestant in held.contestants:
        if contestant.absent is not None:
            lines.append(f"- {contestant.name} takes no part: {contestant.absent}")
        else:
            said = ", ".join(f"{key} {value}" for key, value in contestant.details.items())
            lines.append(f"- {contestant.name}: {said}")
    return lines


def limits(
    shape: _random_llama.Shape,
    contests: list[Contest],
    from_memory: float,
    products: dict[str, float],
) -> list[str]:
    """For each contestant where reading is the limit: tokens per second beside what it allows."""
    experts = isinstance(shape, _random_llama.MoeShape)
    rows = []
    for held in contests:
        cache = {c.name: c.details.get("cache", "float32") for c in held.contestants}
        for cell, standings in held.cells.items():
            if cell.batch != 1 and not experts:
                continue
            weights = shape.read(held.touched[cell]) * weight_bytes(held.precision)
            length = cell.prompt + cell.new / 2
            computed = products.get(held.precision, 0) / shape.flops(length)
            for name, standing in standings.items():
                slot = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[cache[name]]
                read = weights + cell.batch * length * slot
                limit = cell.batch * held.bandwidths[cell] / read
                pace = standing.pace_s(all_rows=True)
                rate = cell.batch / pace if pace else None
                rows.append(
                    (
                        held.precision,
                        cell.batch,
                        cell.prompt,
                        name,
                        f"{read / 1e6:.1f}",
                        f"{held.bandwidths[cell] / 1e9:.1f}",
                        f"{limit:,.0f}",
                        f"{rate:,.0f}" if rate else "",
                        f"{rate / limit:.0%}" if rate else "",
                        f"{computed:,.0f}" if computed else "",
                    )
                )
    header = ("precision", "batch", "prompt", "contestant", "MB read a step", "GB/s")
    shares = ", ".join(
        f"{held.touched[cell]:.0%} at batch {cell.batch} after {cell.prompt}"
        for held in contests[:1]
        for cell in held.cells
    )
    note = f"Of a layer's experts, a step reads, as counted: {shares}." if experts else ""
    return [
        "GB/s is what plain reading of as many bytes as all weights reached (int8 scales not "
        "counted; a cache holds part of what is small), the mean of medians before and after a "
        f"cell's turns; {from_memory / 1e9:.1f} GB/s from memory after the last. Decoding is the "
        "median token while all rows are decoded, empty where they never are. Bytes read are "
        "the weights and the cache at half of the generated tokens. What the products allow, were "
        f"all as fast as square ones of {SIDE:,} ("
        f"{', '.join(f'{name} {rate / 1e9:,.0f} GFLOP/s' for name, rate in products.items())}), "
        "is beside it.",
        *(["", note] if note else []),
        "",
        _harness.table(
            (*header, "limit, tokens/s", "decoding, tokens/s", "share", "by products, tokens/s"),
            rows,
        ),
    ]


if __name__ == "__main__":
    main()
