"""`fornax quantize`: what each scheme costs to make, and what it costs the model.

    fornax data build --output data/stdlib --tokenizer.vocab-size 4096 --holdout 0.05
    fornax train --config recipes/stdlib.yaml --run-dir runs/few-bits --model.hidden-size 256 \\
        --model.intermediate-size 768 --model.num-layers 4 --model.num-heads 4 \\
        --model.num-kv-heads 4 --model.head-dim 64
    fornax convert runs/few-bits --out models/few-bits
    python benchmarks/quantize.py --model models/few-bits --dataset data/stdlib

Groups of 128 must divide the widths, so that the recipe's own model does not do. The model is
calibrated on documents that it was trained on and measured on held-out ones: for each scheme the
KL from the float model and the rise of the loss, with bootstrap intervals over documents. Beside it
the peer: 4-bit NormalFloat by bitsandbytes, weights dequantized again.

Time and memory of quantizing are those of a random Llama of 40M parameters, each scheme in a
process of its own. With --peers (where `make bench-peers` put llama.cpp and OpenVINO) the
quantized directories of that model generate beside them, in turn, as in llm_throughput.py.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import _harness
import _random_llama
from _contestants import Cell, contest, python_of, ratio, started
from fornax.checkpoint.safetensors_file import find_tensors
from fornax.data import Dataset, load_tokenizer
from fornax.data.files import Storage
from fornax.evaluate import ratio as bootstrap
from fornax.evaluate.statistics import Estimate
from fornax.models import load_pretrained
from fornax.quant import SCHEMES, quantize

HERE = Path(__file__).parent
LONGEST = 512
"""Tokens of a held-out document that are measured, at most."""
COST = """
import json, sys, time
sys.path.insert(0, {root!r})
from fornax.quant import quantize
from tests.peak import peak_of

def run(out):
    quantize({model!r}, out, scheme={scheme!r}, data={data!r}, length=256, samples=32)

run({out!r} + "-first")  # compiled, threads started
began = time.perf_counter()
_, peak = peak_of(lambda: run({out!r}))
print(json.dumps([time.perf_counter() - began, peak]))
"""


@dataclass(frozen=True, kw_only=True)
class Document:
    """Sums over the predicted tokens of a document."""

    tokens: int
    nats: float
    kl: float


def main() -> None:
    args = arguments()
    parts = ["# Quantizing a model", "", f"{_harness.machine()}; {_harness.versions('jax')}.", ""]
    with tempfile.TemporaryDirectory(prefix="quantize-") as place:
        folder = Path(place)
        if args.model is not None:
            parts += quality(args, folder)
        if args.cost:
            parts += cost(args, folder)
    path = _harness.write_results("quantize", "\n".join(parts))
    print(path.read_text())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a trained model's directory")
    parser.add_argument("--dataset", type=Path, help="what it was trained on, with an eval split")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--documents", type=int, default=64, help="to calibrate with")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--cost", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.model is not None and args.dataset is None:
        parser.error("--model needs --dataset")
    return args


def quality(args: argparse.Namespace, folder: Path) -> list[str]:
    """What each scheme costs the trained model."""
    tokenizer = load_tokenizer(args.model)
    data = write_texts(args, folder)
    held = Dataset(path=str(args.dataset)).open(Storage(), "eval")
    documents = [np.asarray(held[i]["tokens"], np.int32)[:LONGEST] for i in range(len(held))]
    documents = [each for each in documents if len(each) > 1]
    size = sum(len(tokenizer.decode(each[1:].tolist()).encode()) for each in documents)
    floats = logits_of(args.model, documents)
    own = measure(floats, floats, documents)
    found: dict[str, list[Document]] = {}
    for scheme in args.schemes:
        out = folder / scheme
        quantize(args.model, out, scheme=scheme, data=data, samples=args.samples, length=256)
        found[scheme] = measure(floats, logits_of(out, documents), documents)
        shutil.rmtree(out)
    notes = []
    try:
        normal_float(args.model, folder / "nf4")
        found["bitsandbytes nf4"] = measure(floats, logits_of(folder / "nf4", documents), documents)
    except ImportError as error:
        notes = [f"bitsandbytes takes no part: {error}", ""]
    tokens = sum(each.tokens for each in own)
    bits = sum(each.nats for each in own) / math.log(2) / size
    rows = [
        (name, f"{total(each, 'kl'):.5f}", interval(kl_of(each)), interval(rise_of(own, each)))
        for name, each in found.items()
    ]
    return [
        f"## What a scheme costs ({args.model.name})",
        "",
        f"{bits:.3f} bits per byte, {total(own, 'nats'):.3f} nats per token in floats, on "
        f"{len(documents)} held-out documents of the standard library, {tokens:,} tokens. "
        "KL and the rise of the loss in nats per token with 95 % intervals over documents.",
        "",
        _harness.table(("scheme", "KL", "interval of KL", "rise of the loss"), rows),
        "",
        *notes,
        *goals(own, found),
        "",
    ]


def write_texts(args: argparse.Namespace, folder: Path) -> str:
    """Documents to calibrate with, as JSON lines."""
    tokenizer = load_tokenizer(args.model)
    trained = Dataset(path=str(args.dataset)).open(Storage(), "train")
    lines = (
        json.dumps({"text": tokenizer.decode(np.asarray(trained[i]["tokens"]).tolist())}) + "\n"
        for i in range(min(args.documents, len(trained)))
    )
    file = folder / "texts.jsonl"
    file.write_text("".join(lines))
    return str(file)


def logits_of(folder: Path, documents: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 log-probabilities [T - 1, V] of each document, all padded to one length."""
    model = load_pretrained(folder, dtype="float32")
    run = jax.jit(lambda tokens_BT: jax.nn.log_softmax(model(tokens_BT)[0].astype(jnp.float32)))
    found = []
    for tokens in documents:
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(tokens)] = tokens
        found.append(np.asarray(run(padded))[: len(tokens) - 1])
    return found


def measure(
    floats: Sequence[np.ndarray], others: Sequence[np.ndarray], documents: Sequence[np.ndarray]
) -> list[Document]:
    found = []
    for p_TV, q_TV, tokens in zip(floats, others, documents, strict=True):
        nats = -np.take_along_axis(q_TV, tokens[1:, None], axis=1).sum(dtype=np.float64)
        kl = (np.exp(p_TV) * (p_TV - q_TV)).sum(dtype=np.float64)
        found.append(Document(tokens=len(tokens) - 1, nats=float(nats), kl=float(kl)))
    return found


def total(documents: Sequence[Document], name: str) -> float:
    return sum(getattr(x, name) for x in documents) / sum(x.tokens for x in documents)


def kl_of(documents: Sequence[Document]) -> Estimate:
    return bootstrap([x.kl for x in documents], [x.tokens for x in documents])


def rise_of(own: Sequence[Document], documents: Sequence[Document]) -> Estimate:
    """Of the loss, document by document."""
    rises = [b.nats - a.nats for a, b in zip(own, documents, strict=True)]
    return bootstrap(rises, [x.tokens for x in documents])


def interval(found: Estimate) -> str:
    return f"{found.value:+.5f} [{found.low:+.5f}, {found.high:+.5f}]"


def goals(own: Sequence[Document], found: Mapping[str, Sequence[Document]]) -> Iterator[str]:
    """Whether calibration pays: half the loss at 4 bits, apart at 3."""
    if {"w4a16", "w4a16-gptq"} <= found.keys():
        rounded, better = (rise_of(own, found[name]).value for name in ("w4a16", "w4a16-gptq"))
        kl = total(found["w4a16-gptq"], "kl") / total(found["w4a16"], "kl")
        yield (
            f"- At 4 bits GPTQ loses {better / rounded:.2f} of what rounding loses "
            f"(goal: below 0.50); of KL {kl:.2f}."
        )
    for method in ("gptq", "awq"):
        name = f"w3a16-{method}"
        if {"w3a16", name} <= found.keys():
            for what, one, other in (
                ("KL", kl_of(found[name]), kl_of(found["w3a16"])),
                ("loss", rise_of(own, found[name]), rise_of(own, found["w3a16"])),
            ):
                apart = "apart" if one.high < other.low else "overlapping"
                yield (
                    f"- At 3 bits the intervals of {what}, {method.upper()} {interval(one)} and "
                    f"rounding {interval(other)}, are {apart} (goal: apart)."
                )


def normal_float(model: Path, out: Path) -> None:
    """The layers' matrices rounded to nf4 in blocks of 64 by bitsandbytes, as floats again."""
    import torch
    from bitsandbytes import functional
    from safetensors.numpy import save_file

    out.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    made = {}
    for name, tensor in find_tensors(model).items():
        values = tensor.view().astype(np.float32)
        if values.ndim == 2 and ".layers." in name:
            codes, state = functional.quantize_4bit(
                torch.from_numpy(values.copy()), blocksize=64, quant_type="nf4"
            )
            values = functional.dequantize_4bit(codes, state).numpy()
        made[name] = np.ascontiguousarray(values)
    save_file(made, out / "model.safetensors")


def cost(args: argparse.Namespace, folder: Path) -> list[str]:
    """Time and memory of quantizing, and the speed of what comes of it."""
    model = _random_llama.make("llama-40m", args.folder).resolve()
    data, rows = folder / "random.jsonl", []
    text = (HERE / "quantize.py").read_text()
    data.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(24)))
    largest = max(math.prod(x.shape) * x.dtype.itemsize for x in find_tensors(model).values())
    for scheme in args.schemes:
        print(f"quantizing by {scheme}", file=sys.stderr, flush=True)
        words = {"root": str(HERE.parent), "model": str(model), "scheme": scheme}
        script = COST.format(**words, data=str(data), out=str(folder / f"40m-{scheme}"))
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        seconds, peak = json.loads(done.stdout.splitlines()[-1])
        report = json.loads((folder / f"40m-{scheme}/quantization_report.json").read_text())
        share = report["bytes_after"] / report["bytes_before"]
        cells = (f"{seconds:.1f}", f"{peak / 1e6:,.0f}", f"{peak / largest:.1f}", f"{share:.1%}")
        rows.append((scheme, *cells))
    return [
        f"## Time and memory ({_random_llama.SHAPES['llama-40m']})",
        "",
        f"32 rows of 256 tokens; the peak beside the process's memory before, mapped files not "
        f"counted; the largest tensor has {largest / 1e6:.1f} MB. The rows held out are compared "
        "in that time and memory too, and have their logits there.",
        "",
        _harness.table(("scheme", "s", "peak, MB", "largest tensors", "of the bytes"), rows),
        "",
        *speed(args, model, folder),
    ]


def speed(args: argparse.Namespace, model: Path, folder: Path) -> list[str]:
    """Generated tokens per second beside the peers that are installed."""
    script = HERE / "peers" / "peer_{}.py"
    commands: dict[str, list[str]] = {}

    def add(name: str, python: str, peer: str, path: Path, precision: str) -> None:
        settings = {"--model": path, "--precision": precision, "--threads": args.threads}
        words = [str(word) for pair in settings.items() for word in pair]
        commands[name] = [python, str(script).format(peer), *words]

    add("fornax bfloat16", sys.executable, "fornax", model, "bfloat16")
    for scheme in args.schemes:
        own = folder / f"40m-{scheme}"
        add(f"fornax {scheme}", sys.executable, "fornax", own, "bfloat16")
    for peer, precisions in (("llamacpp", ("int8", "int4")), ("openvino", ("int8",))):
        python = python_of(args.peers / peer)
        for precision in precisions if python.exists() else ():
            add(f"{peer} {precision}", str(python), peer, model, precision)
    rows = []
    with started(commands) as contestants:
        for batch in (1, 8):
            cell = Cell(batch=batch, prompt=128, new=64)

            def draw(number: int, batch: int = batch) -> list[list[int]]:
                vocab = _random_llama.SHAPES["llama-40m"].vocab
                return _random_llama.prompts(batch, 128, vocab, seed=number)

            found = contest(contestants, cell, draw, rounds=args.rounds, budget_s=120)
            mine = found["fornax bfloat16"]
            rows += [
                (batch, name, f"{each.rate():,.0f}", f"{ratio(each, mine):.2f}")
                for name, each in found.items()
            ]
        absent = [f"- {c.name} takes no part: {c.absent}" for c in contestants if c.absent]
    head = ("batch", "contestant", "generated tokens/s", "x Fornax bfloat16")
    return [
        f"## Speed of what comes of it ({args.threads} threads, prompts of 128, 64 greedy tokens)",
        "",
        _harness.table(head, rows),
        "",
        *absent,
    ]


if __name__ == "__main__":
    main()
