"""A function's StableHLO: its operations counted, compared, and its custom calls checked.

A graph can name any function that is registered in the process, Python callbacks and pointers among
them, so a loader looks before it compiles: only calls that jax promises to keep may be in one.
"""

import collections
import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterator

from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.ir import Operation, WalkResult

from fornax.config.errors import BundleError
from fornax.export._exported import stable_calls

__all__ = ["Graph", "changes", "check_calls", "custom_calls", "read_graph", "readable_versions"]

_FRAME = ("builtin.module", "func.func", "func.return", "stablehlo.return")
"""Operations that hold others and compute nothing."""
_LONGEST = 20_000
"""Lines beyond which the difference of two graphs is left to their counts."""
_SYMBOL = re.compile(r"@([A-Za-z_][\w$.]*)")
_VALUE = re.compile(r"%[\w]+(?:[#:]\d+)?")
_DEFINED = re.compile(r"func\.func (?:public |private )?@([A-Za-z_][\w$.]*)")
_MESSAGE = re.compile(r'error_message = "(?:[^"\\]|\\.)*"')
_ELEMENTS = 64


@dataclasses.dataclass(frozen=True)
class Graph:
    """A program's operations."""

    operations: dict[str, int]
    """How many of each there are, the most frequent first; a loop's body counts once."""
    lines: tuple[str, ...]
    """The program as text: no locations, functions numbered in order, long constants cut."""
    digest: str
    """SHA-256 of the same with its constants whole: equal for equal programs."""

    @property
    def size(self) -> int:
        """All operations."""
        return sum(self.operations.values())


def read_graph(module: bytes) -> Graph:
    """Read a StableHLO portable artifact.

    Raises:
      BundleError: when the bytes are none, or of a StableHLO that this jaxlib does not read.
    """
    counted: collections.Counter[str] = collections.Counter()

    def count(operation: Operation) -> WalkResult:
        if operation.name not in _FRAME:
            counted[_name(operation)] += 1
        return WalkResult.ADVANCE

    context = mlir.make_ir_context()
    with context:
        try:
            whole = stablehlo.deserialize_portable_artifact(context, module).operation
        except Exception as error:
            raise BundleError(
                f"this jaxlib does not read the graph: {str(error).splitlines()[0]}; use a newer "
                "jax, or export again"
            ) from None
        whole.walk(count)
        cut = _plain(str(whole.get_asm(enable_debug_info=False, large_elements_limit=_ELEMENTS)))
        full = _plain(str(whole.get_asm(enable_debug_info=False)))
    return Graph(
        operations=dict(sorted(counted.items(), key=lambda item: (-item[1], item[0]))),
        lines=tuple(cut.splitlines()),
        digest=hashlib.sha256(full.encode()).hexdigest(),
    )


def readable_versions() -> tuple[str, str]:
    """The oldest and newest StableHLO whose artifacts the installed jaxlib is sure to read."""
    return stablehlo.get_minimum_version(), stablehlo.get_current_version()


def _name(operation: Operation) -> str:
    name = str(operation.name).removeprefix("stablehlo.")
    if name != "custom_call":
        return name
    target = str(operation.attributes["call_target_name"]).strip('"')
    return f"{name} {target}"


def _plain(text: str) -> str:
    """Text that says nothing of the jax that wrote it."""
    text = _MESSAGE.sub("error_message", text)
    names = {name: f"f{index}" for index, name in enumerate(_DEFINED.findall(text))}
    text = _SYMBOL.sub(lambda found: "@" + names.get(found[1], found[1]), text)
    return "\n".join(line.rstrip() for line in text.splitlines()[1:])  # the module's own line


def changes(a: Graph, b: Graph) -> list[str]:
    """What of `a` must be taken out and put in to get `b`: lines of a unified difference.

    Values are not named in it, so that one operation more does not change all lines after it.
    """
    if a.digest == b.digest:
        return []
    if max(len(a.lines), len(b.lines)) > _LONGEST:
        return [f"{len(a.lines)} and {len(b.lines)} lines: too long to compare line by line"]
    found = list(_unified(a.lines, b.lines))
    if found:
        return found
    if a.lines == b.lines:
        return [f"the same operations; constants of more than {_ELEMENTS} elements differ"]
    return ["the same operations in the same order, connected otherwise"]


def _unified(a: tuple[str, ...], b: tuple[str, ...]) -> Iterator[str]:
    left, right = ([_VALUE.sub("%", line) for line in lines] for lines in (a, b))
    for line in difflib.unified_diff(left, right, "a", "b", n=1, lineterm=""):
        if not line.startswith(("---", "+++")):
            yield line


def custom_calls(module: bytes) -> set[str]:
    """The targets that a portable artifact calls.

    Raises:
      BundleError: when it is none, or of a StableHLO that this jaxlib does not read.
    """
    found: set[str] = set()

    def look(operation: Operation) -> WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.add(str(operation.attributes["call_target_name"]).strip('"'))
        return WalkResult.ADVANCE

    context = mlir.make_ir_context()
    with context:
        try:
            stablehlo.deserialize_portable_artifact(context, module).operation.walk(look)
        except Exception as error:
            raise BundleError(
                f"this jaxlib does not read it ({str(error).splitlines()[0]}); use a newer jax, "
                "or export again"
            ) from None
    return found


def check_calls(module: bytes) -> None:
    """That a graph calls nothing but what every jax is promised to have.

    Raises:
      BundleError: naming the calls.
    """
    unknown = sorted(custom_calls(module) - stable_calls())
    if unknown:
        raise BundleError(
            f"it calls {', '.join(unknown)}, which no bundle may: such code is not part of it and "
            "not promised to be here; export the function with XLA's implementations"
        )
