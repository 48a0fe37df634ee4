"""Every implementation of every operation: time, share of the machine's limit, error.

    python benchmarks/kernels.py                  # beside the last run of this machine
    python benchmarks/kernels.py --write          # and a results file

Each call is timed with its gradients in a child process (`fornax.plan.kernels.measure`), in several
rounds; times are divided by that of a plain product of two 1024 x 1024 matrices, taken in the same
round, so that a machine that is slower today is not a kernel that is. "error" is the norm of the
difference to the operation's reference over the norm of that, the largest of results and gradients.

The rounds are kept in the cache folder. A later run fails, with exit status 1, where its best round
is more than a tenth above the worst one kept, or an error more than doubled: `make kernel-bench`
runs it at night. What is faster or as fast replaces what was kept; `--forget` discards it all.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _harness
from fornax import kernels
from fornax.config import environment
from fornax.config.files import write_whole
from fornax.kernels._paged_attention.call import PagedCall, WriteCall
from fornax.kernels._vocabulary.cross_entropy import CrossEntropyCall
from fornax.kernels._vocabulary.logprobs import LogprobsCall
from fornax.kernels.tuning import race
from fornax.plan.kernels import KernelCall, Measurement, measure
from fornax.plan.kernels.report import limit_seconds
from fornax.plan.topology import local_topology

SIDE = 1024
SLOWER, WORSE = 1.1, 2.0
HEADER = ("operation", "call", "implementation", "time", "of the limit", "products", "error", "")


def calls(platform: str) -> dict[str, Any]:
    """What is measured, by a name: shapes of a training step of 36M parameters, and of decoding."""
    attention: dict[str, Any] = {
        "platform": platform, "causal": True, "softcap": None, "sinks": False, "positions": True,
        "consecutive": True, "balanced": False, "segments": True, "length_shards": 1,
        "exchange": "auto", "head_dim": 64, "value_dim": 64,
    }  # fmt: skip
    pages = {
        "platform": platform, "kv_heads": 4, "head_dim": 64, "page_size": 16,
        "dtype": "float32", "cache_dtype": "float32", "shared": False,
    }  # fmt: skip
    rows = {"window": None, "softcap": None, "sinks": False, "heads": 8, "table_width": 64}
    logits = {
        "platform": platform, "tokens": 2048, "width": 512, "vocabulary": 8192, "softcap": None,
        "chunk": 1024, "shards": 1,
    }  # fmt: skip
    linear: dict[str, Any] = {
        "gated DeltaNet": {
            "key_heads": 4, "heads_per_key": 2, "key_dim": 128, "value_dim": 128, "corrects": True,
        },
        "Mamba-2": {
            "key_heads": 1, "heads_per_key": 16, "key_dim": 128, "value_dim": 64, "corrects": False,
        },
    }  # fmt: skip
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        found |= {
            f"8 x 256, 8 heads of 64, {dtype}": kernels.AttentionCall(
                **attention, batch=8, queries=256, keys=256, heads=8, kv_heads=4, dtype=dtype,
                window=None,
            ),
            f"1 x 4096, window 512, {dtype}": kernels.AttentionCall(
                **attention, batch=1, queries=4096, keys=4096, heads=4, kv_heads=2, dtype=dtype,
                window=512,
            ),
            f"4096 rows, 64 groups, 512 x 1024, {dtype}": kernels.GroupedCall(
                platform=platform, rows=4096, groups=64, inputs=512, outputs=1024, dtype=dtype,
                devices=1,
            ),
            f"2048 tokens, 512 x 8192, {dtype}": CrossEntropyCall(
                **logits, dtype=dtype, z_loss=True
            ),
        }  # fmt: skip
    return {
        **found,
        "2048 tokens, 512 x 8192": LogprobsCall(**logits, dtype="float32", entropy=True),
        "32 rows decode 1024 tokens": PagedCall(**pages, **rows, tokens=32, rows=32),
        "32 rows decode 1024 tokens, int8": PagedCall(
            **{**pages, "cache_dtype": "int8"}, **rows, tokens=32, rows=32, scaled=True
        ),
        "a prompt of 256 tokens": PagedCall(**pages, **rows, tokens=256, rows=1),
        "32 tokens written": WriteCall(**pages, tokens=32),
        "64 x 64, 3 x 3, 320 to 320": kernels.ConvolutionCall(
            platform=platform,
            batch=1,
            space=(64, 64),
            window=(3, 3),
            stride=(1, 1),
            padding=((1, 1), (1, 1)),
            channels=320,
            outputs=320,
            dtype="bfloat16",
            bias=True,
            devices=1,
        ),
        "2 x 64 x 64 x 320, 32 groups, silu": kernels.GroupNormCall(
            platform=platform,
            batch=2,
            places=4096,
            channels=320,
            groups=32,
            dtype="bfloat16",
            activation="silu",
            devices=1,
        ),
        **{
            f"{tokens} tokens of {rows} rows, {name}": kernels.RaggedDeltaCall(
                platform=platform, tokens=tokens, rows=rows, kept=1, **heads, devices=1
            )
            for name, heads in linear.items()
            for tokens, rows in ((1, 1), (8, 8), (256, 1))
        },
        **{
            f"{tokens} tokens of {rows} rows, 1024 channels": kernels.RaggedConvolutionCall(
                platform=platform,
                tokens=tokens,
                rows=rows,
                kept=1,
                channels=1024,
                width=4,
                dtype="bfloat16",
                kept_dtype="bfloat16",
                bias=False,
                activation="silu",
                devices=1,
            )
            for tokens, rows in ((1, 1), (8, 8), (256, 1))
        },
        **{
            f"{rows} rows of {vocabulary} logits": kernels.SampleTokensCall(
                platform=platform, rows=rows, width=vocabulary, devices=1
            )
            for rows, vocabulary in ((1, 8192), (32, 8192), (8, 128_256))
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    parser.add_argument("--forget", action="store_true", help="compare with nothing")
    args = parser.parse_args()
    chip = local_topology().chip
    named = calls(chip.platform)
    rounds = [_round(named) for _ in range(args.rounds)]
    file = environment.cache_dir() / "kernel-bench" / f"{chip.platform}.json"
    kept = {} if args.forget or not file.is_file() else json.loads(file.read_text())
    lines, failed = [], []
    for name, (operation, call) in _with_operations(named).items():
        found = [each[name] for each in rounds]
        errors = _errors(operation, call)
        limit = limit_seconds(found[0][0], chip)
        for implementation in found[0][0].seconds:
            seconds = [measured.seconds[implementation] for measured, _ in found]
            yards = [yard for _, yard in found]
            products = [one / yard for one, yard in zip(seconds, yards, strict=True)]
            key = f"{operation} {name} {implementation}"
            error, what = errors[implementation], ""
            if (before := kept.get(key)) is not None:
                what = _compared(before, products, error)
                failed += [f"{key}: {what}"] * bool(what)
            if not what:
                kept[key] = {"products": products, "error": error}
            share = "" if limit is None else f"{limit / min(seconds):.0%}"
            time = f"{statistics.median(seconds) * 1e3:.3g} ms"
            lines.append(
                (operation, name, implementation, time, share, f"{min(products):.3g}",
                 f"{error:.1e}", what)
            )  # fmt: skip
    text = f"{_harness.machine()}; {_harness.versions('jax')}.\n\n{_harness.table(HEADER, lines)}"
    print(text)
    write_whole(file, json.dumps(kept, indent=1))
    if args.write:
        print(_harness.write_results("kernels", f"# Kernels\n\n{text}"))
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


def _with_operations(named: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    by_class = {operation.call: name for name, operation in kernels.operations().items()}
    return {name: (by_class[type(call)], call) for name, call in named.items()}


def _round(named: dict[str, Any]) -> dict[str, tuple[Measurement, float]]:
    """Each call once, with the seconds of the plain product beside it."""
    asked = [
        KernelCall(operation=operation, fields=dataclasses.asdict(call), chosen="")
        for operation, call in _with_operations(named).values()
    ]
    x = jnp.ones((SIDE, SIDE))
    multiply = jax.jit(jnp.matmul)
    found = {}
    for name, measured in zip(named, measure(asked, keep=False), strict=True):
        seconds, _ = race("yardstick", {"product": lambda: lambda: multiply(x, x)})
        found[name] = (measured, seconds["product"])
        if measured.failures:
            raise _harness.FailedError(f"{name}: {measured.failures}")
    return found


def _errors(operation: str, call: Any) -> dict[str, float]:
    """Of each implementation that can run the call."""
    known = kernels.operations()[operation]
    runs = {one.name: one.run for one in known.candidates(call)}
    reference = "reference" if "reference" in runs else "xla"
    wanted = list(_arrays(known.benchmark(call, runs[reference])()))
    errors = {}
    for name, run in runs.items():
        pairs = zip(_arrays(known.benchmark(call, run)()), wanted, strict=True)
        errors[name] = max(
            float(np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-30))
            for one, other in pairs
        )
    return errors


def _arrays(tree: Any) -> Iterator[np.ndarray]:
    for leaf in jax.tree.leaves(tree):
        yield np.asarray(leaf.astype(jnp.float32), np.float64)


def _compared(before: dict[str, Any], products: list[float], error: float) -> str:
    """What is worse than before, beyond what rounds differ by."""
    if min(products) > SLOWER * max(before["products"]):
        return f"slower: {min(products):.3g} products, {max(before['products']):.3g} before"
    if error > WORSE * before["error"] + 1e-12:
        return f"error {error:.1e}, {before['error']:.1e} before"
    return ""


if __name__ == "__main__":
    sys.exit(main())
