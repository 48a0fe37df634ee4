"""Which versions of a model are to be served, from what lies there and what failed."""

import dataclasses
from collections.abc import Callable, Iterable

from fornax.serving.settings import Latest, ModelSettings, Named

__all__ = ["Choice", "choose"]


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
