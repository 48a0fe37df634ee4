"""Which operations of two captures are the same: names of fusions say nothing, what they do does.

Operations with the same program, opcode, class, dtype and work are the same: those of the same
module and function first, then those of the same function, then those that moved; in the order of
their names where several are. What is left over is put together
by module and function, then by function: work that was fused in another way, or changed its shape,
meets itself there; what meets nothing is new or gone. Folders and numbers of lines are not looked
at, for a checkout elsewhere and an edit above change them.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Sequence

from fornax.profile.compare.samples import Sampled
from fornax.profile.facts import By, Operation

_LINE = re.compile(r":\d+")
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """Operations of both captures that belong together."""

    before: tuple[Sampled, ...]
    after: tuple[Sampled, ...]
    same: bool
    """Whether each does what its counterpart does, to the FLOP and byte."""

    @property
    def all(self) -> tuple[Sampled, ...]:
        """Those after, then those before."""
        return self.after + self.before


def match(before: Sequence[Sampled], after: Sequence[Sampled]) -> list[Matched]:
    """Every operation of both, in one group each."""
    found: list[Matched] = []
    rest: tuple[list[Sampled], list[Sampled]] = (list(before), list(after))
    for key in (_named_work, _work_there, _work):
        rest = _pair(rest, key, found)
    for key in (_place, _function):
        rest = _join(rest, key, found)
    return found + [
        Matched(before=tuple(left), after=tuple(right), same=False)
        for left, right in _meet(*rest, _place)
    ]


def _pair(
    rest: tuple[list[Sampled], list[Sampled]],
    key: Callable[[Sampled], Hashable],
    found: list[Matched],
) -> tuple[list[Sampled], list[Sampled]]:
    """Add pairs that do the same; return what has no partner."""
    left_over: tuple[list[Sampled], list[Sampled]] = ([], [])
    for left, right in _meet(*rest, key):
        left, right = sorted(left, key=_order), sorted(right, key=_order)
        pairs = min(len(left), len(right))
        found += [
            Matched(before=(a,), after=(b,), same=a.runs == b.runs)
            for a, b in zip(left[:pairs], right[:pairs], strict=True)
        ]
        left_over[0].extend(left[pairs:])
        left_over[1].extend(right[pairs:])
    return left_over


def _join(
    rest: tuple[list[Sampled], list[Sampled]],
    key: Callable[[Sampled], Hashable],
    found: list[Matched],
) -> tuple[list[Sampled], list[Sampled]]:
    """Add groups that are on both sides; return the others."""
    left_over: tuple[list[Sampled], list[Sampled]] = ([], [])
    for left, right in _meet(*rest, key):
        if left and right:
            found.append(Matched(before=tuple(left), after=tuple(right), same=False))
        else:
            left_over[0].extend(left)
            left_over[1].extend(right)
    return left_over


def group(matched: Sequence[Matched], by: By) -> dict[str, list[int]]:
    """Positions in `matched` of what has one key: the operation itself, its class, module or
    line."""
    groups: dict[str, list[int]] = {}
    for at, each in enumerate(matched):
        key = _title(each) if by == "op" else _key(each.all[0].operation, by)
        groups.setdefault(f"{key} #{at}" if by == "op" and key in groups else key, []).append(at)
    return groups


def _meet(
    before: Iterable[Sampled], after: Iterable[Sampled], key: Callable[[Sampled], Hashable]
) -> list[tuple[list[Sampled], list[Sampled]]]:
    groups: dict[Hashable, tuple[list[Sampled], list[Sampled]]] = {}
    for side, members in enumerate((before, after)):
        for each in members:
            groups.setdefault(key(each), ([], []))[side].append(each)
    return list(groups.values())


def _named_work(one: Sampled) -> Hashable:
    return _work_there(one), one.operation.scope, one.operation.op_name


def _work_there(one: Sampled) -> Hashable:
    return _work(one), _function(one)


def _work(one: Sampled) -> Hashable:
    what = one.operation
    does = (what.opcode, what.category, what.dtype, what.flops, what.bytes)
    return one.program, what.backward, does


def _place(one: Sampled) -> Hashable:
    return _function(one), one.operation.backward, one.operation.scope


def _function(one: Sampled) -> Hashable:
    return one.program, _LINE.sub("", one.operation.source.rpartition("/")[2])


def _order(one: Sampled) -> tuple[str, int]:
    """By name, fusion.9 before fusion.10."""
    name = one.operation.name
    numbers = _NUMBER.findall(name)
    return _NUMBER.sub("", name), int(numbers[-1]) if numbers else -1


def _title(each: Matched) -> str:
    side = each.after or each.before
    longest = max(side, key=lambda one: one.seconds.sum()).operation
    title = longest.name if len(side) == 1 else f"{longest.name} and {len(side) - 1} more"
    return f"{'/'.join(longest.scope)}: {title}" if longest.scope else title


def _key(operation: Operation, by: By) -> str:
    keys: dict[By, str] = {
        "class": operation.category,
        "module": "/".join(operation.scope),
        "source": operation.source,
    }
    return keys[by] or "(unknown)"
