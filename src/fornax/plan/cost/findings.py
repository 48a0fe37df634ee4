"""What a program holds or exchanges that its sharding rules did not ask for, and which rule would
fix it."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from fornax.mesh import Rules, stage_axes
from fornax.plan.artifact import ArrayFact, Artifact
from fornax.plan.facts import CollectiveTime, Finding
from fornax.plan.format import format_axes

LogicalAxes = Mapping[str, tuple[str | None, ...]]
"""A parameter's path, such as `layers/mlp/up/kernel`, to the logical axes of its dimensions."""

_LARGE = 16 << 20
_DIVIDING = ("fsdp", "tensor")
"""Mesh axes that exist to divide parameters; `data` and `slice` replicate on purpose."""
_SMALL_MOVE = 1 << 20
_SMALL_SHARE = 5e-3
"""Of the step's time."""
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
        what=f"{array.name} {array.dtype}{list(array.shape)} is whole over "
        f"{format_axes(tuple(idle))}",
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
    collectives: Sequence[CollectiveTime], rules: Rules, step_seconds: float, residual: int = 0
) -> Iterator[Finding]:
    """Exchanges that the rule table does not lead to, the longest first.

    The rules lead to gathers of parameters over the axes that divide `embed`, whole or a window at
    a time beside a product; to reductions of gradients over the axes that divide the batch, and of
    activations over those that divide a contracted dimension (as a scatter, and a gather of the
    residual stream later); to gathers and permutations of keys and values over `context`; to ragged
    exchanges of tokens over the axes that divide experts, and permutations between stages.

    Args:
      collectives: the program's.
      rules: the rule table it was traced with.
      step_seconds: of its step.
      residual: elements of a micro-batch's residual stream that one shard of the batch holds.
    """
    groups: dict[tuple[str, tuple[str, ...], str, str], list[CollectiveTime]] = {}
    for one in collectives:
        if not _asked(one, rules, residual):
            groups.setdefault((one.kind, one.axes, one.what, one.source), []).append(one)
    found = [_unasked(members, rules) for members in groups.values()]
    for finding in sorted(found, key=lambda finding: -finding.seconds):
        if finding.bytes >= _SMALL_MOVE and finding.seconds >= _SMALL_SHARE * step_seconds:
            yield finding


def _unasked(members: Sequence[CollectiveTime], rules: Rules) -> Finding:
    one = members[0]
    rule = _rule_at(one)
    return Finding(
        kind="collective",
        what=f"{one.kind} over {format_axes(one.axes)} of {one.what}",
        bytes=sum(member.moved for member in members),
        seconds=sum(member.seconds for member in members),
        source=one.source,
        fix=f"look at mesh.rules.{rule}, now {list(rules[rule])}" if rule else "",
    )


def _asked(one: CollectiveTime, rules: Rules, residual: int) -> bool:
    axes = set(one.axes)
    if one.kind in ("all-reduce", "reduce-scatter", "host-transfer", "send-recv"):
        return True
    if one.what.startswith("params/"):
        return axes <= {"data", "slice", *rules["embed"]}
    match one.kind:
        case "all-to-all":
            return axes <= {*rules["expert"]} and "ragged_all_to_all" in one.what
        case "collective-permute":
            return axes <= {"context", *stage_axes(rules)} or "dot_general" in one.what
        case _:
            if one.bytes in (2 * residual, 4 * residual):
                return axes <= {"context", *rules["mlp"], *rules["heads"], *rules["vocab"]}
            return axes <= {"context", *rules["embed"]}


def _rule_at(one: CollectiveTime) -> str | None:
    """The rule of the activations where the exchange happens."""
    place = f"{one.what} {one.source}"
    return next((rule for pattern, rule in _PLACES if pattern.search(place)), None)
