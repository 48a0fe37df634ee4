"""What should be done about a model: its folder, its requests and its past into a plan."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fornax.serving.lifecycle.states import Failure, Source
from fornax.serving.repository import Bundle, Choice, ModelFolder, choose, examine

__all__ = ["Plan", "Situation", "make_plan"]

_NOTHING = Choice()
_MISSING = Bundle("", "there is no such version in the repository")


@dataclasses.dataclass(frozen=True)
class Situation:
    """A model at one moment; a copy that a thread may read."""

    root: Path
    folder: ModelFolder
    pin: int | None
    follows_policy: bool
    """Whether the policy picks versions; else only those asked for by number are loaded."""
    extra: frozenset[int]
    """Asked for by number."""
    stopped: frozenset[int]
    """Unloaded by number: they keep their place in the policy, and are not loaded."""
    lingering: frozenset[int]
    """Served, and gone from the repository only since the last look: perhaps being replaced."""
    serving: Mapping[int, Source]
    loading: Mapping[int, Source]
    failures: Mapping[int, Failure]
    bundles: Mapping[int, Bundle]
    """Those looked at since the folder was; the others are looked at when they are needed."""
    before: Mapping[int, Bundle]
    """What was seen of others at an earlier look."""
    epoch: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from a situation."""

    choice: Choice = _NOTHING
    wanted: frozenset[int] = frozenset()
    """Versions to have in memory."""
    loads: tuple[Source, ...] = ()
    """What to load now: new versions, and those whose files or settings changed."""
    barren: bool = True
    """Whether there is nothing to pick from; else what served before goes on till one loads."""
    waiting: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Wanted versions whose folders are not complete, and what they lack."""
    bundles: Mapping[int, Bundle] = dataclasses.field(default_factory=dict)


def make_plan(now: Situation) -> Plan:
    """Decide which versions a model should have; reads the folders' lists of files."""
    settings = now.folder.settings
    bundles = dict(now.bundles)

    def bundle(version: int) -> Bundle:
        if version not in bundles:
            path = now.folder.versions.get(version)
            bundles[version] = (
                _MISSING if path is None else examine(now.root, path, now.before.get(version))
            )
        return bundles[version]

    def usable(version: int) -> bool:
        if version in now.stopped or version in now.serving or version in now.loading:
            return True
        found = bundle(version)
        return not found.waiting and not _failed(now, version, found)

    there = now.folder.versions.keys() | now.lingering
    if now.follows_policy:
        choice = choose(settings, there, now.pin, usable)
    else:
        choice = Choice(shadow=_shadow(now))
    gone = now.serving.keys() - there
    choice = dataclasses.replace(
        choice,
        selected=tuple(v for v in choice.selected if v not in gone),
        labelled=choice.labelled - gone,
    )
    wanted = (choice.wanted | now.extra) - now.stopped - choice.withheld - gone
    loads = []
    for version in sorted(wanted, reverse=True):
        found = bundle(version)
        path = now.folder.versions.get(version)
        if path is None or version in now.loading or found.waiting or _failed(now, version, found):
            continue
        source = Source(now.folder.name, version, path, settings, found.fingerprint)
        if _differs(now.serving.get(version), source):
            loads.append(source)
    return Plan(
        choice=choice,
        wanted=wanted,
        loads=tuple(loads),
        barren=not (now.follows_policy and there - {choice.shadow} - now.stopped),
        waiting=_waiting(now, wanted, bundles),
        bundles=bundles,
    )


def _shadow(now: Situation) -> int | None:
    """The shadow among versions that were asked for by number."""
    shadow = now.folder.settings.shadow
    if shadow is None or shadow.version == now.pin or shadow.version not in now.extra:
        return None
    return shadow.version


def _failed(now: Situation, version: int, found: Bundle) -> bool:
    failure = now.failures.get(version)
    return failure is not None and failure.holds(found.fingerprint, now.folder.settings, now.epoch)


def _differs(loaded: Source | None, source: Source) -> bool:
    if loaded is None:
        return True
    return loaded.fingerprint != source.fingerprint or loaded.settings.wants_reload(source.settings)


def _waiting(
    now: Situation, wanted: frozenset[int], bundles: Mapping[int, Bundle]
) -> dict[int, str]:
    """Also of versions that the policy would have picked, had they been complete."""
    newest = max(now.serving, default=0)
    return {
        version: found.waiting
        for version, found in bundles.items()
        if found.waiting and (version in wanted or version > newest)
    }
