"""What a program holds or exchanges that its sharding rules did not ask for, and which rule would
mend it."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from fornax.mesh import Rules
from fornax.plan.artifact import ArrayFact, Artifact
from fornax.plan.report.program import Collective, Finding
from fornax.plan.report.words import sides

__all__ = ["LogicalAxes", "unasked", "whole_arrays"]

LogicalAxes = Mapping[str, tuple[str | None, ...]]
"""A parameter's path, such as `layers/mlp/up/kernel`, to the logical axes of its dimensions."""

_LARGE = 64 << 20
_DIVIDING = ("fsdp", "tensor", "expert", "stage")
"""Mesh axes that exist to divide parameters; `data` and `slice` replicate on purpose."""
_SMALL_MOVE = 1 << 20
_PLACES = (
    (re.compile(r"cross_entropy|loss|logits", re.IGNORECASE), "activation_vocab"),
    (re.compile(r"mlp", re.IGNORECASE), "activation_mlp"),
    (re.compile(r"attention|attend|rope|rotat", re.IGNORECASE), "activation_heads"),
    (re.compile(r"embed|norm", re.IGNORECASE), "activation_embed"),
)


def whole_arrays(artifact: Artifact, logical: LogicalAxes, rules: Rules) -> list[Finding]:
    """Large arguments that a mesh axis made for dividing does not divide, largest first.

    Args:
      artifact: the program.
      logical: the logical axes of its parameters.
      rules: the rule table it was traced with.
    """
    mesh = artifact.mesh
    found = []
    for array in artifact.arguments:
        if array.bytes_device < _LARGE:
            continue
        used = {axis for entry in array.axes for axis in entry}
        idle = [axis for axis in _DIVIDING if mesh.get(axis, 1) > 1 and axis not in used]
        if idle:
            found.append(_whole(array, idle, mesh, logical, rules))
    return sorted(found, key=lambda finding: -finding.bytes)


def _whole(
    array: ArrayFact,
    idle: Sequence[str],
    mesh: Mapping[str, int],
    logical: LogicalAxes,
    rules: Rules,
) -> Finding:
    names = next((axes for path, axes in logical.items() if array.name.endswith(path)), ())
    fix = ""
    for axis in idle:
        rule = _dividing_rule(array, axis, mesh, names, rules)
        if rule:
            fix = f"add {axis} to mesh.rules.{rule}, now {list(rules[rule])}"
            break
    return Finding(
        kind="replicated",
        what=f"{array.name} {array.dtype}{list(array.shape)} is whole over {sides(tuple(idle))}",
        bytes=array.bytes_device,
        fix=fix,
    )


def _dividing_rule(
    array: ArrayFact,
    axis: str,
    mesh: Mapping[str, int],
    names: Sequence[str | None],
    rules: Rules,
) -> str | None:
    """The logical axis, largest dimension first, that `axis` could divide further."""
    if len(names) != len(array.shape):
        return None
    options = []
    for size, divided, name in zip(array.shape, array.axes, names, strict=True):
        parts = math.prod(mesh[a] for a in divided) * mesh[axis]
        if name and name != "layers" and name in rules and size % parts == 0:
            options.append((size // parts, name))
    return max(options)[1] if options else None


def unasked(
    collectives: Sequence[Collective], rules: Rules, step_seconds: float
) -> Iterator[Finding]:
    """Exchanges that the rule table does not lead to, the longest first.

    The rules lead to gathers and reductions of parameters and gradients over the axes that divide
    parameters and the batch, to reductions of activations over the axes that divide a contracted
    dimension, and to gathers and permutations of keys and values over `context`.
    """
    for one in sorted(collectives, key=lambda one: -one.seconds):
        large = one.moved >= _SMALL_MOVE and one.seconds >= 1e-3 * step_seconds
        if large and not _asked(one, rules):
            rule = _rule_at(one)
            yield Finding(
                kind="collective",
                what=f"{one.kind} over {sides(one.axes)} of {one.what}",
                bytes=one.moved,
                seconds=one.seconds,
                source=one.source,
                fix=f"look at mesh.rules.{rule}, now {list(rules[rule])}" if rule else "",
            )


def _asked(one: Collective, rules: Rules) -> bool:
    axes = set(one.axes)
    match one.kind:
        case "all-reduce" | "reduce-scatter" | "host-transfer" | "send-recv":
            return True
        case "all-to-all":
            return axes <= {"expert"}
        case "collective-permute":
            return axes <= {"context", "stage"} or "dot_general" in one.what
        case _:
            gathered = {"context", *rules.get("embed", ()), *rules.get("activation_embed", ())}
            return axes <= gathered


def _rule_at(one: Collective) -> str | None:
    """The rule of the activations where the exchange happens."""
    place = f"{one.what} {one.source}"
    return next((rule for pattern, rule in _PLACES if pattern.search(place)), None)
