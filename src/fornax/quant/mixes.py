"""Groups of matrices that get one scheme together, and the rules that a mix of schemes is.

A group is what a layer mixes tokens with, or its MLP or experts: the matrices under one part of a
layer, such as layers/3/attention.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.quant.leaves import KEEP, Leaf, parse_rule
from fornax.quant.run import Source

__all__ = ["Group", "find_groups", "rules_of"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Matrices of a layer that get one scheme together."""

    name: str
    layer: int
    leaves: Mapping[str, tuple[Leaf, ...]]
    """By scheme: those that can have it, with it. The others stay floats."""


def find_groups(source: Source, schemes: Sequence[str], rules: Sequence[str]) -> dict[str, Group]:
    """The groups of a model, by name.

    Args:
      source: the model.
      schemes: to choose from.
      rules: of the user; matrices that they find belong to no group.

    Raises:
      ConfigError: see `assign`; no schemes, or nothing left to choose for.
    """
    if not schemes:
        raise ConfigError("no schemes to choose from; name one or more")
    parsed = [parse_rule(rule) for rule in rules]
    found: dict[str, dict[str, list[Leaf]]] = {}
    layers: dict[str, int] = {}
    for scheme in schemes:
        for leaf in source.assigned(scheme, rules):
            if leaf.scheme is None or leaf.layer is None or any(r.finds(leaf) for r in parsed):
                continue
            name = f"layers/{leaf.layer}/{_part(leaf)}"
            layers[name] = leaf.layer
            found.setdefault(name, {}).setdefault(scheme, []).append(leaf)
    if not found:
        raise ConfigError(
            f"the rules {', '.join(rules)} leave no matrix whose scheme could be chosen; name "
            "fewer, or give the scheme"
        )
    return {
        name: Group(
            name=name,
            layer=layers[name],
            leaves={scheme: tuple(leaves) for scheme, leaves in own.items()},
        )
        for name, own in found.items()
    }


def rules_of(
    source: Source, groups: Mapping[str, Group], mix: Mapping[str, str], rules: Sequence[str]
) -> tuple[str, tuple[str, ...]]:
    """The scheme and the rules that give each group the scheme of a mix.

    Args:
      source: the model.
      groups: of it.
      mix: schemes by group, one at least; the other groups stay floats.
      rules: of the user, which come first.
    """
    wanted: dict[str, str] = {}
    for name, group in groups.items():
        own = {leaf.tensor.name: KEEP for leaves in group.leaves.values() for leaf in leaves}
        scheme = mix.get(name)
        if scheme is not None:
            own |= {leaf.tensor.name: scheme for leaf in group.leaves[scheme]}
        wanted |= own
    base = max(sorted(set(mix.values())), key=lambda s: sum(x == s for x in wanted.values()))
    otherwise = {
        leaf.tensor.name: KEEP if leaf.scheme is None else leaf.scheme.name
        for leaf in source.assigned(base, rules)
    }
    parts: dict[tuple[str, str], dict[int, list[Leaf]]] = {}
    for leaf in source.leaves:
        scheme = wanted.get(leaf.tensor.name)
        if scheme is not None and scheme != otherwise[leaf.tensor.name]:
            assert leaf.layer is not None
            layers = parts.setdefault((_part(leaf), scheme), {})
            layers.setdefault(leaf.layer, []).append(leaf)
    made = [
        f"{pattern}={scheme}"
        for (part, scheme), layers in parts.items()
        for pattern in _patterns(source, part, layers)
    ]
    return base, (*rules, *made)


def _part(leaf: Leaf) -> str:
    """The part of its layer that a leaf belongs to."""
    return leaf.parameter.split("/")[1]


def _patterns(source: Source, part: str, layers: Mapping[int, Sequence[Leaf]]) -> list[str]:
    """Regular expressions that together find these leaves and no other matrix."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for layer, leaves in layers.items():
        start = f"layers/{layer}/{part}/"
        inner = tuple(path.removeprefix(start) for leaf in leaves for path in leaf.paths)
        alike.setdefault(inner, []).append(layer)
    found = []
    for inner, own in alike.items():
        start = f"^layers/{_any([str(layer) for layer in own])}/{part}/"
        names = {leaf.tensor.name for layer in own for leaf in layers[layer]}
        there = {
            leaf.tensor.name
            for leaf in source.leaves
            if leaf.matrix and any(re.search(start, path) for path in leaf.paths)
        }
        found.append(
            start if there == names else f"{start}{_any([re.escape(path) for path in inner])}$"
        )
    return found


def _any(words: Sequence[str]) -> str:
    """One of the words, as a regular expression."""
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"
