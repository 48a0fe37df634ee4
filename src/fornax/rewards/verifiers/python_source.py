"""Is the completion Python, and does it answer the signature it was given? By its syntax tree."""

import ast
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fornax.rewards.verifiers.extract import fenced_block

__all__ = [
    "TABLE",
    "Answered",
    "SignatureOptions",
    "SourceOptions",
    "answered",
    "before_last",
    "parse",
    "signature",
    "source",
]

_LONGEST = 100_000

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How the verifier `python_parses` reads."""

    continues: bool = True
    """Whether prompt and completion together may be the source, and not the completion alone."""


@dataclass(frozen=True, kw_only=True)
class SignatureOptions:
    """What the verifier `answers_signature` asks."""

    column: str = "signature"
    """The column with the signature, where a line has it; the prompt's last one elsewhere."""
    partial: bool = False
    """Whether a function that uses some parameters scores their share, halved where a promised
    value is missing, instead of 0."""
    docstring: bool = False
    """Whether a docstring that begins with Return or Yield promises a value, as annotations do."""


def _parses(options: SourceOptions) -> tuple[Callable[..., float], tuple[str, ...]]:
    def verify(prompt: object, completion: str, **record: object) -> float:
        del record
        head = prompt if options.continues and isinstance(prompt, str) else ""
        return float(parse(head, completion) is not None)

    return verify, ()


def _answers(options: SignatureOptions) -> tuple[Callable[..., float | None], tuple[str, ...]]:
    def verify(prompt: object, completion: str, **record: object) -> float | None:
        text = _last_text(prompt)
        wanted = signature(str(record.get(options.column) or text))
        if wanted is None:
            return None  # nothing was asked that could be answered
        head = prompt if isinstance(prompt, str) else ""
        met = answered(wanted, head, completion, docstring=options.docstring)
        if options.partial:
            # Nothing for less than this: a model soon finds `return None`, which parses too.
            return float(met.parses and met.defines) * met.uses * (1.0 if met.gives else 0.5)
        return float(met.parses and met.defines and met.uses == 1.0 and met.gives)

    return verify, ()


def parse(head: str, completion: str) -> ast.Module | None:
    """The tree of a completion's source; None where it has none."""
    found = source(head, completion)
    return None if found is None else _tree(found)


def source(head: str, completion: str) -> str | None:
    """The Python in a completion: its fenced block, itself after `head`, or itself alone.

    The first of these that parses; an empty completion is nothing.
    """
    block = fenced_block(completion)
    body = completion if block is None else block
    if not body.strip() or len(head) + len(body) > _LONGEST:
        return None
    for text in (head + body, body) if head and block is None else (body,):
        if _tree(text) is not None:
            return textwrap.dedent(text)
    return None


def signature(text: str) -> Definition | None:
    """The last function that a text begins: its name, parameters and annotation; None without one.

    Example:
      signature("def area(width: float, height: float) -> float:\\n").name  # "area"
    """
    lines = text.splitlines()
    for first in reversed(range(len(lines))):
        if not lines[first].lstrip().startswith(("def ", "async def ")):
            continue
        for last in range(first + 1, min(len(lines), first + 40) + 1):
            head = textwrap.dedent("\n".join(lines[first:last])).rstrip()
            for text in (f"{head}\n pass", f"{head}: pass"):  # a comment may follow the colon
                tree = _tree(text)
                if tree is not None and isinstance(tree.body[0], Definition):
                    return tree.body[0]
    return None


def before_last(text: str) -> str:
    """What comes before the last function or class that a text begins; "" where it is not Python.

    These are the imports and helpers that a prompt gives.
    """
    lines = text.splitlines(keepends=True)
    starts = [
        n for n, line in enumerate(lines) if line.startswith(("def ", "async def ", "class "))
    ]
    last = starts[-1] if starts else 0
    while last and lines[last - 1].startswith("@"):
        last -= 1
    before = "".join(lines[:last])
    return before if _tree(before) is not None else ""


@dataclass(frozen=True)
class Answered:
    """Which conditions a completion meets."""

    parses: bool = False
    defines: bool = False
    """The function, with the wanted parameters and a body beyond a docstring, `pass` and `raise
    NotImplementedError`."""
    uses: float = 0.0
    """Share of the parameters that the body reads; 1 where there are none."""
    gives: bool = False
    """It returns or yields a value, or none is promised."""


def answered(
    wanted: Definition, head: str, completion: str, *, docstring: bool = False
) -> Answered:
    """Which conditions a completion meets.

    Args:
      wanted: the signature; annotated with a result other than None, it promises a value.
      head: what the completion continues from, if anything.
      completion: what was written.
      docstring: whether a docstring that begins with Return or Yield promises one too.
    """
    tree = parse(head, completion)
    if tree is None:
        return Answered()
    found = [
        node for node in ast.walk(tree) if isinstance(node, Definition) and node.name == wanted.name
    ]
    body = _body(found[-1]) if found else []
    if not body or _parameters(found[-1]) != _parameters(wanted):
        return Answered(parses=True)
    used = {
        node.id
        for part in body
        for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    needed = {name for name in _parameters(wanted) if name not in ("self", "cls", "_")}
    promised = _promises(wanted) or (docstring and any(map(_says_returns, found)))
    return Answered(
        parses=True,
        defines=True,
        uses=len(needed & used) / len(needed) if needed else 1.0,
        gives=not promised or _gives(body),
    )


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes in what a model wrote
            return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parameters(function: Definition) -> list[str]:
    args = function.args
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    return [arg.arg for arg in every if arg is not None]


def _body(function: Definition) -> list[ast.stmt]:
    """The statements that do something: no docstring, `pass`, `...` or NotImplementedError."""
    return [
        part
        for part in function.body
        if not isinstance(part, ast.Pass)
        and not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        and not _not_implemented(part)
    ]


def _not_implemented(part: ast.stmt) -> bool:
    if not isinstance(part, ast.Raise):
        return False
    raised = part.exc.func if isinstance(part.exc, ast.Call) else part.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def _says_returns(function: Definition) -> bool:
    first = (ast.get_docstring(function) or "").split(maxsplit=1)[:1]
    return any(word.lower().startswith(("return", "yield")) for word in first)


def _promises(function: Definition) -> bool:
    kind = function.returns
    if kind is None:
        return False
    if isinstance(kind, ast.Constant):
        return kind.value not in (None, "None", "NoReturn", "Never")
    named = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "")
    return named not in ("NoReturn", "Never")


def _gives(body: list[ast.stmt]) -> bool:
    """Whether a value is returned or yielded, or all that is tried ends in an exception."""
    if len(body) > 1 and isinstance(body[-1], ast.Raise):
        return True
    return any(
        isinstance(node, ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Return) and node.value is not None)
        for node in _own(body)
    )


def _own(parts: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node that belongs to the function itself, not to one inside it."""
    left: list[ast.AST] = list(parts)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, Definition | ast.Lambda | ast.ClassDef):
            left.extend(ast.iter_child_nodes(node))


def _last_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    users = [m.get("content") for m in prompt if m.get("role") == "user"]
    return users[-1] if users and isinstance(users[-1], str) else ""


TABLE = {
    "python_parses": (SourceOptions, _parses),
    "answers_signature": (SignatureOptions, _answers),
}
