"""One model in memory: its versions' copies, which of them answers, and what its index says."""

from collections.abc import Iterator
from pathlib import Path

from fornax.config import ServingCode, ServingError, did_you_mean
from fornax.serving.lifecycle.plan import Plan, Situation, choose
from fornax.serving.lifecycle.shadow import Shadowing
from fornax.serving.lifecycle.states import Failure, Instance, Source
from fornax.serving.repository import Bundle, ModelFolder, version_number
from fornax.serving.settings import ModelSettings
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import WAITING, IndexEntry, State

__all__ = ["Model"]

_BESIDE = "put one that loads beside it, or remove shadow"


class Model:
    """What is known of a model, changed in the event loop's thread only.

    `routes` is what a request meets: it changes whole, in one step, so that each request is
    accepted by one copy of one version, which answers it whatever happens meanwhile.
    """

    def __init__(self, folder: ModelFolder, *, follows_policy: bool):
        self.name = folder.name
        self.folder = folder
        self.follows_policy = follows_policy
        self.held: int | None = None
        """A pin that could not be written to the repository."""
        self.extra: frozenset[int] = frozenset()
        self.stopped: frozenset[int] = frozenset()
        self.lingering: frozenset[int] = frozenset()
        self.serving: dict[int, Instance] = {}
        self.loading: dict[int, Source] = {}
        self.draining: list[Instance] = []
        self.failures: dict[int, Failure] = {}
        self.bundles: dict[int, Bundle] = {}
        """What the folders of versions held when they were last looked at."""
        self.before: dict[int, Bundle] = {}
        """What they held at the look before."""
        self.gone = False
        """Whether its folder is no longer there."""
        self.plan = Plan()
        self.default: Instance | None = None
        self.routes: dict[str, Instance] = {}
        self.shadowing: Shadowing | None = None
        self.due = follows_policy
        """Whether it must be reconciled, which may begin a load."""
        self.reconciling = False
        """Whether its plan is being made."""
        self.warned = ""
        """What was last said in the log about its shadow."""

    @property
    def settings(self) -> ModelSettings:
        """The last that could be read."""
        return self.folder.settings

    @property
    def pin(self) -> int | None:
        """The version at which a rollback holds the model."""
        return self.folder.pin if self.held is None else self.held

    @property
    def idle(self) -> bool:
        """Whether nothing of it is in memory or on its way there."""
        return not (self.serving or self.loading or self.draining)

    @property
    def to_serve(self) -> bool:
        """Whether there is something that should be served."""
        return self.follows_policy and bool(self.folder.versions or self.folder.problem)

    @property
    def deciding(self) -> bool:
        """Whether what it will load next is not known yet."""
        return self.due or self.reconciling

    @property
    def lacks_memory(self) -> bool:
        """Whether a version was refused because it does not fit."""
        return any(f.code is ServingCode.RESOURCE_EXHAUSTED for f in self.failures.values())

    def see(self, folder: ModelFolder | None) -> None:
        """Take in what its folder looks like now; None: it is gone."""
        self.gone = folder is None
        if folder is None or not folder.problem:
            there = {} if folder is None else folder.versions
            seen = self.before | self.bundles
            self.before, self.bundles = {v: seen[v] for v in seen if v in there}, {}
        if folder is None:
            folder = ModelFolder(self.name, self.folder.path, settings=self.settings)
            self.lingering = frozenset()
        elif folder.problem:
            was = self.folder
            folder = ModelFolder(
                self.name, folder.path, was.settings, versions=was.versions,
                refused=was.refused, pin=was.pin, problem=folder.problem,
            )  # fmt: skip
        else:
            before = self.folder.versions
            self.lingering = frozenset(
                v for v in self.serving if v in before and v not in folder.versions
            )
            self.failures = {v: why for v, why in self.failures.items() if v in folder.versions}
        self.folder = folder

    def situation(self, root: Path, epoch: int) -> Situation:
        """A copy of what a plan is made of."""
        return Situation(
            root=root,
            folder=self.folder,
            pin=self.pin,
            follows_policy=self.follows_policy,
            extra=self.extra,
            stopped=self.stopped,
            lingering=self.lingering,
            serving={version: each.source for version, each in self.serving.items()},
            loading=dict(self.loading),
            failures=dict(self.failures),
            bundles=dict(self.bundles),
            before=dict(self.before),
            epoch=epoch,
        )

    def to_retire(self) -> list[Instance]:
        """Copies that the plan has no use for, once what replaces them is ready.

        While a wanted version is on its way, or none of those selected could be loaded, the ones
        that served before continue.
        """
        plan = self.plan
        picked = [v for v in plan.choice.selected if v in plan.wanted]
        if plan.choice.selected:  # where none is left, all that the policy picks were unloaded
            replaced = not picked or any(v in self.serving for v in picked)
        else:
            replaced = plan.barren
        settled = not any(v in self.loading for v in plan.wanted)
        unwanted = [each for v, each in self.serving.items() if v not in plan.wanted]
        return [each for each in unwanted if (settled and replaced) or each.version in self.stopped]

    def reroute(self) -> None:
        """Make the routes again from what is ready; call after every change."""
        choice = self.plan.choice
        ready = {v: each for v, each in self.serving.items() if v not in self.stopped}
        default = next((v for v in choice.selected if v in ready), None)
        if default is None and self.default is not None and self.default.version in ready:
            default = self.default.version
        if default is None:
            others = [v for v in ready if v not in choice.labelled and v != choice.shadow]
            default = max(others, default=None)
        self.default = None if default is None else ready[default]
        routes = {str(v): each for v, each in ready.items()}
        for label, version in self.settings.labels.items():
            if version in ready:
                routes[label] = ready[version]
        if self.default is not None:
            routes[""] = self.default
        self.routes = routes
        self._shadow(None if choice.shadow is None else ready.get(choice.shadow))

    def _shadow(self, target: Instance | None) -> None:
        settings, main, current = self.settings.shadow, self.default, self.shadowing
        if settings is None or target is None or main is None or main is target:
            if current is not None:
                current.stop()
        elif current is None or not current.compares(main, target, settings):
            if current is not None:
                current.stop()
            self.shadowing = Shadowing(self.name, main, target, settings)

    def shadow_problem(self) -> str:
        """Why the version under `shadow` is not just that; empty while it is, or may yet be."""
        shadow = self.settings.shadow
        if shadow is None or shadow.version not in self.serving or shadow.version in self.stopped:
            return ""
        if shadow.version == self.pin:
            return "serving.yaml names it under shadow, but a rollback has it answer"
        if self.deciding or any(v in self.loading for v in self.plan.wanted):
            return ""
        if self.plan.choice.shadow != shadow.version:
            return ""
        if self.default is None:
            return (
                "serving.yaml names it under shadow, so it answers no one, and there is no other "
                f"version that could; {_BESIDE}"
            )
        if self.default.version == shadow.version:
            return (
                "serving.yaml names it under shadow, but it still answers, as there is no "
                f"other version that could; {_BESIDE}"
            )
        return ""

    def refusal(self, version: str) -> ServingError:
        """Why a request for a version, label or the default (empty) finds no route."""
        if not version:
            return self._unavailable(f"{self.name} has no version ready", self._first_reason())
        if version in self.settings.labels:
            number = self.settings.labels[version]
            what = f"label {version} of {self.name} is version {number}, which is not ready"
            return self._unavailable(what, self.reason(number))
        number = version_number(version)
        reason = "" if number is None else self.reason(number)
        if number is not None and not reason and self._may_come(number):
            reason = "it is not loaded yet"
        if self.follows_policy and not reason:
            reason = self.folder.problem
        if reason:
            return self._unavailable(f"version {version} of {self.name} is not ready", reason)
        served = sorted(key for key in self.routes if key)
        labels = [key for key in served if not key.isdigit()]
        hint = did_you_mean(version, labels, f"it has {', '.join(served) or 'none'}")
        return ServingError(
            ServingCode.NOT_FOUND, f"{self.name} has no version {version!r} served; {hint}"
        )

    def _may_come(self, version: int) -> bool:
        """Whether a version that is not served is wanted, or the policy may yet pick it.

        The plan may be older than the folder or the requests that it is made of, and versions that
        load may fail: whatever is picked when no other becomes ready may come.
        """
        if version in self.plan.wanted | self.extra:
            return True
        if not self.follows_policy or version not in self.folder.versions:
            return False
        kept = {version, *self.serving, *self.stopped}
        choice = choose(self.settings, self.folder.versions, self.pin, kept.__contains__)
        return version in choice.wanted

    @staticmethod
    def _unavailable(what: str, reason: str) -> ServingError:
        return ServingError(ServingCode.UNAVAILABLE, f"{what}: {reason}" if reason else what)

    def _first_reason(self) -> str:
        entries = self.index()
        reasons = (f"version {e.version}: {e.reason}" if e.version else e.reason for e in entries)
        return next((text for text, e in zip(reasons, entries, strict=True) if e.reason), "")

    def reason(self, version: int) -> str:
        """Why a version is not served, or not as its folder has it now; empty: nothing to say."""
        if version in self.loading:
            return "it is loading"
        if version in self.stopped:
            return "it was unloaded by request; load it to serve it again"
        if version in self.plan.choice.withheld:
            where = "in this server's memory alone" if self.held is not None else "by pin.json"
            return f"withheld: a rollback holds the model at version {self.pin}, {where}"
        if version in self.plan.waiting:
            return f"{WAITING}: {self.plan.waiting[version]}"
        if (failure := self.failures.get(version)) is not None:
            return failure.reason
        if any(each.version == version for each in self.draining):
            return "it is unloading"
        return ""

    def index(self) -> list[IndexEntry]:
        """Its versions that are served, on their way, or cannot be served, highest first."""
        numbers = (
            self.serving.keys() | self.loading.keys() | self.plan.wanted | self.plan.waiting.keys()
            | self.failures.keys() | self.stopped | self.plan.choice.withheld
            | {each.version for each in self.draining}
        )  # fmt: skip
        entries = [self._entry(version) for version in sorted(numbers, reverse=True)]
        entries += [
            IndexEntry(self.name, name, State.UNAVAILABLE.value, reason)
            for name, reason in self.folder.refused.items()
        ]
        if self.folder.problem:
            state = State.UNAVAILABLE.value
            entries.insert(0, IndexEntry(self.name, "", state, self.folder.problem))
        if not entries and self.deciding:
            entries = [IndexEntry(self.name, "", State.LOADING.value)]
        elif not entries:
            there = (
                "none of its versions is loaded" if self.folder.versions else "it has no version"
            )
            entries = [IndexEntry(self.name, "", State.UNAVAILABLE.value, there)]
        return entries

    def _entry(self, version: int) -> IndexEntry:
        reason = self.reason(version)
        if version in self.serving and version not in self.stopped:
            state = State.READY
            if reason:
                reason = f"the copy in memory stays; of the one in the repository: {reason}"
            elif self.settings.shadow is not None and version == self.settings.shadow.version:
                reason = self.shadow_problem()
        elif version in self.loading or (version in self.failures and self.deciding):
            # Of one that has just failed, too: whether it, or another, is tried is being decided.
            state, reason = State.LOADING, ""
        elif any(each.version == version for each in self.draining):
            state = State.UNLOADING
        else:
            state = State.UNAVAILABLE
        return IndexEntry(self.name, str(version), state.value, reason)

    def instances(self) -> Iterator[Instance]:
        """Every copy in memory, those that only finish what they accepted last."""
        yield from self.serving.values()
        yield from self.draining

    def statistics(self, version: str = "") -> list[ModelStatistics]:
        """Counters of the copies in memory, of all versions (empty) or of a number or label."""
        return [
            each.servable.statistics()
            for each in self.instances()
            if not version or each in (self.routes.get(version),) or str(each.version) == version
        ]

    def shadow_report(self) -> dict[str, object]:
        """How the answers of the shadow compare with the main ones, as JSON has it.

        Raises:
          ServingError: it has no shadow, or one that is not ready.
        """
        if self.shadowing is not None:
            return self.shadowing.report()
        settings = self.settings.shadow
        if settings is None:
            text = f"{self.name} has no shadow; put shadow: {{version: N}} into its serving.yaml"
        elif problem := self.shadow_problem():
            text = f"version {settings.version} of {self.name} is not a shadow: {problem}"
        else:
            reason = self.reason(settings.version) or "none answers beside it"
            text = f"version {settings.version}, the shadow of {self.name}, is not ready: {reason}"
        raise ServingError(ServingCode.FAILED_PRECONDITION, text)
