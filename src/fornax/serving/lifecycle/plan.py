"""What should be done about a model: its folder, its requests and its past into a plan."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fornax.serving.lifecycle.states import Failure, Source
from fornax.serving.repository import Bundle, ModelFolder, examine
from fornax.serving.settings import Latest, ModelSettings, Named

__all__ = ["Choice", "Plan", "Situation", "choose", "make_plan"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Versions by their part, each in one part only; some may not be in the repository."""

    selected: tuple[int, ...] = ()
    """What the version policy picks, highest first; the first that is ready is the default."""
    labelled: frozenset[int] = frozenset()
    """Served besides because a label stands for them."""
    shadow: int | None = None
    withheld: frozenset[int] = frozenset()
    """Above the pin: not served whatever the policy says."""

    @property
    def wanted(self) -> frozenset[int]:
        """Every version to load."""
        shadow = () if self.shadow is None else (self.shadow,)
        return frozenset((*self.selected, *self.labelled, *shadow))


def choose(
    settings: ModelSettings,
    versions: Iterable[int],
    pin: int | None,
    usable: Callable[[int], bool],
) -> Choice:
    """Pick versions by the model's policy.

    Args:
      settings: The model's.
      versions: Numbers of the folders that are there.
      pin: The version at which a rollback holds the model: it is picked, and none above it.
      usable: Whether a version is complete and did not fail; asked for the latest only, from the
        highest on, and for no more than are needed.
    """
    there = sorted(versions, reverse=True)
    withheld = frozenset(v for v in there if pin is not None and v > pin)
    shadow = settings.shadow.version if settings.shadow else None
    if shadow == pin:
        shadow = None
    taken = withheld | {shadow}
    selected = _by_policy(settings, [v for v in there if v not in taken], pin, usable)
    return Choice(
        selected=tuple(v for v in selected if v not in taken),
        labelled=frozenset(settings.labels.values()) - taken - set(selected),
        shadow=shadow,
        withheld=withheld - {shadow},
    )


def _by_policy(
    settings: ModelSettings, there: list[int], pin: int | None, usable: Callable[[int], bool]
) -> list[int]:
    policy = settings.versions
    if isinstance(policy, Named):
        below = {v for v in policy.versions if pin is None or v <= pin}
        return sorted(below if pin is None else below | {pin}, reverse=True)
    if not isinstance(policy, Latest):
        return there
    picked: list[int] = []
    for version in there:
        if len(picked) == policy.count:
            break
        if usable(version):
            picked.append(version)
    return picked


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
    """Whether there is nothing to pick from; else what served before stays until one loads."""
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
