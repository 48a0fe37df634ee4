"""Functions of the corpus as pairs to tune on: signature and docstring, then the body."""

import ast
import json
import random
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fornax.data import Dataset, Tokenizer, load_tokenizer
from fornax.data.files import Storage
from fornax.rewards.verifiers.python_source import signature

__all__ = ["pairs_of", "write_pairs"]

_CHARS = 8
"""Characters of a token, generously: what is longer need not be tokenized."""

_BOUND = ("self", "cls", "_")


def write_pairs(
    dataset: Path, out: Path, *, max_tokens: int, seed: int, limits: dict[str, int | None]
) -> dict[str, Any]:
    """Write `train.jsonl` and `eval.jsonl`, each from the files of its own split.

    A function of a held-out file that a training file also has is left out: it was seen.

    Args:
      dataset: a dataset with both splits and a tokenizer.
      out: folder for the two files.
      max_tokens: of a prompt and of a body, each; longer functions are left out.
      seed: of the order.
      limits: pairs of each split, at most; None takes all.

    Returns:
      How many of each split there are.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(dataset / "tokenizer")
    seen: set[tuple[str, str]] = set()
    counts = {}
    for split in ("train", "eval"):
        pairs = []
        for text in _texts(dataset, split, tokenizer):
            for pair in pairs_of(text, longest=_CHARS * max_tokens):
                lengths = map(len, tokenizer.encode_batch(list(pair)))
                if pair not in seen and max(lengths) <= max_tokens:
                    seen.add(pair)
                    pairs.append(pair)
        random.Random(seed).shuffle(pairs)
        pairs = pairs[: limits[split]]
        _write(out / f"{split}.jsonl", pairs)
        counts[split] = len(pairs)
    return counts


def pairs_of(source: str, *, longest: int = 100_000) -> Iterator[tuple[str, str]]:
    """The functions of a file that have a docstring, a body after it, and parameters to use.

    Each is moved to the left margin and cut after its docstring. Decorators stay behind.

    Args:
      source: the file's text.
      longest: characters of a prompt at most, and of a body.

    Example:
      list(pairs_of('def f(x):\\n    "Double."\\n    return 2 * x\\n'))
      # [('def f(x):\\n    "Double."\\n', '    return 2 * x\\n')]
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # files of other Python versions are text like any other
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not _has_parameters(node):
            continue
        if ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        whole = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        head = (node.body[0].end_lineno or node.lineno) - node.lineno + 1
        parts = whole.splitlines(keepends=True)
        pair = "".join(parts[:head]), "".join(parts[head:])
        if max(map(len, pair)) <= longest and _is_function(pair, node.name):
            yield pair


def _has_parameters(node: ast.FunctionDef) -> bool:
    args = node.args
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return any(arg is not None and arg.arg not in _BOUND for arg in every)


def _is_function(pair: tuple[str, str], name: str) -> bool:
    """Whether the pair still is one, and its prompt asks for it: docstrings may quote others."""
    asked = signature(pair[0])
    try:
        tree = ast.parse("".join(pair))
    except SyntaxError:  # a docstring at the margin keeps the rest from moving there
        return False
    return (
        bool(pair[1].strip()) and len(tree.body) == 1 and asked is not None and asked.name == name
    )


def _texts(dataset: Path, split: str, tokenizer: Tokenizer) -> Iterator[str]:
    source = Dataset(path=str(dataset)).open(Storage(), split)
    for index in range(len(source)):
        yield tokenizer.decode(np.asarray(source[index]["tokens"]))


def _write(path: Path, pairs: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"prompt": head, "completion": body}) + "\n" for head, body in pairs]
    path.write_text("".join(lines), encoding="utf-8")
