"""What an operator asks of a model: load, unload, roll back, end a rollback."""

import asyncio
import dataclasses
import logging

from fornax.config import ServingCode, ServingError
from fornax.serving.lifecycle.manager import Manager
from fornax.serving.lifecycle.model import Model
from fornax.serving.repository import pin, unpin, version_number
from fornax.serving.types import Rollback

__all__ = ["load", "release", "rollback", "unload"]

_log = logging.getLogger("fornax.serving")


async def load(manager: Manager, name: str, version: str = "") -> None:
    """Look at a model's folder and load what its policy picks, or one version; wait for it.

    What failed before is tried again. Loading a version above the one at which a rollback holds
    the model ends the rollback.

    Raises:
      ServingError: no such model or version, or why it cannot be served.
    """
    async with manager.exclusive():
        model = await manager.look_at(name)
        _mended(model)
        if version:
            number = _number(model, version)
            await _ask_for(manager, model, number)
            await manager.reconcile(model)
            numbers = {number}
        else:
            model.follows_policy = True
            model.stopped = frozenset()
            model.failures.clear()
            await manager.reconcile(model)
            numbers = set(model.plan.wanted | model.plan.waiting.keys())
    if not numbers:
        raise ServingError(
            ServingCode.NOT_FOUND, f"{name} has no version to serve; put a bundle into {name}/1"
        )
    await manager.settled(model)
    _check(model, numbers)
    if not version and model.default is None and (problem := model.shadow_problem()):
        raise ServingError(ServingCode.FAILED_PRECONDITION, f"{name}: {problem}")


async def _ask_for(manager: Manager, model: Model, number: int) -> None:
    model.stopped -= {number}
    model.failures.pop(number, None)
    model.extra |= {number}
    if model.pin is not None and number > model.pin:
        await _unpin(manager, model)


async def unload(manager: Manager, name: str, version: str = "") -> None:
    """Let a model, or one version, answer what it accepted and leave memory; wait for it.

    It stays out until it is loaded by request, or the server starts again.

    Raises:
      ServingError: no such model or version.
    """
    async with manager.exclusive():
        model = _known(manager, name)
        if version:
            number = _number(model, version)
            model.stopped |= {number}
            model.extra -= {number}
            leaving = [each for v, each in model.serving.items() if v == number]
        else:
            model.follows_policy = False
            model.extra = model.stopped = frozenset()
            leaving = list(model.serving.values())
        await manager.reconcile(model)
    await manager.unloaded(model, leaving)


async def rollback(manager: Manager, name: str, version: str = "") -> Rollback:
    """Put an older version in place of the one that answers, and hold the model there.

    The older version is loaded and verified first; when it fails, nothing changes. Without a
    version it is the newest, below the one that answers, that is complete and loads.

    Raises:
      ServingError: no such version, nothing to go back from, or why it cannot be served.
    """
    async with manager.exclusive():
        model = await manager.look_at(name)
        _mended(model)
        current = None if model.default is None else model.default.version
        if current is None:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                f"{name} has no version that answers, so there is none to roll back from; load one",
            )
        candidates = [_number(model, version)] if version else _older(model, current)
    if candidates == [current]:
        raise ServingError(
            ServingCode.FAILED_PRECONDITION,
            f"version {current} of {name} is the one that answers; name an older one",
        )
    reasons = []
    for number in candidates:
        if await _bring_up(manager, model, number):
            return await _hold(manager, model, number)
        reasons.append(f"version {number}: {model.reason(number) or 'it did not load'}")
    detail = "; ".join(reasons) or f"its folder has no version below {current}"
    raise ServingError(
        ServingCode.FAILED_PRECONDITION,
        f"{name} stays at version {current}, for there is none to roll back to: {detail}",
    )


def _older(model: Model, current: int) -> list[int]:
    shadow = model.settings.shadow
    passed_over = None if shadow is None else shadow.version
    numbers = sorted(model.folder.versions, reverse=True)
    return [v for v in numbers if v < current and v != passed_over]


async def _bring_up(manager: Manager, model: Model, number: int) -> bool:
    """Have a version ready beside the one that answers; True when it is."""
    async with manager.exclusive():
        if number in model.serving and number not in model.stopped:
            model.extra |= {number}
            return True
        model.failures.pop(number, None)
        stopped = model.stopped & {number}
        model.stopped -= {number}
        model.extra |= {number}
        await manager.reconcile(model)
    await manager.settled(model)
    if number in model.serving:
        return True
    model.extra -= {number}
    model.stopped |= stopped
    return False


async def _hold(manager: Manager, model: Model, number: int) -> Rollback:
    async with manager.exclusive():
        previous = "" if model.default is None else str(model.default.version)
        if number not in model.serving:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                f"version {number} of {model.name} was unloaded during the rollback; ask again",
            )
        try:
            await asyncio.to_thread(pin, manager.root, model.name, number)
            model.held, persistent = None, True
        except OSError as error:
            _log.warning(
                "the rollback of %s to version %d will not outlast this process: pin.json "
                "cannot be written: %s", model.name, number, error,
            )  # fmt: skip
            model.held, persistent = number, False
        model.folder = dataclasses.replace(model.folder, pin=number)
        model.stopped -= {number}
        model.extra = frozenset(v for v in model.extra if v <= number)
        if model.follows_policy:
            model.extra -= {number}
        await manager.reconcile(model)
    return Rollback(model.name, str(number), previous, persistent)


async def release(manager: Manager, name: str) -> None:
    """End a rollback: the version policy is followed again; wait until that is done.

    Raises:
      ServingError: no such model, or the pin cannot be removed.
    """
    async with manager.exclusive():
        model = await manager.look_at(name)
        await _unpin(manager, model)
        await manager.reconcile(model)
    await manager.settled(model)


async def _unpin(manager: Manager, model: Model) -> None:
    try:
        await asyncio.to_thread(unpin, manager.root, model.name)
    except OSError as error:
        if model.held is None:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                f"{model.name}/pin.json cannot be removed: {error}; remove it by hand",
            ) from error
    model.held = None
    model.folder = dataclasses.replace(model.folder, pin=None)


def _known(manager: Manager, name: str) -> Model:
    model = manager.models.get(name)
    if model is None:
        raise ServingError(
            ServingCode.NOT_FOUND, f"the repository has no model {name!r}; check the name"
        )
    return model


def _mended(model: Model) -> None:
    if model.folder.problem:
        raise ServingError(ServingCode.FAILED_PRECONDITION, model.folder.problem)


def _number(model: Model, version: str) -> int:
    """The number that a version or label stands for, of those that the folder or memory has."""
    number = model.settings.labels.get(version, version_number(version))
    if number is not None and (number in model.folder.versions or number in model.serving):
        return number
    there = ", ".join(map(str, sorted(model.folder.versions))) or "none"
    raise ServingError(
        ServingCode.NOT_FOUND, f"{model.name} has no version {version!r}; its folder has {there}"
    )


def _check(model: Model, numbers: set[int]) -> None:
    """That a load did what was asked; else why not."""
    wrong = {v: model.reason(v) for v in sorted(numbers, reverse=True)}
    wrong = {v: reason for v, reason in wrong.items() if reason or v not in model.serving}
    if not wrong:
        return
    codes = {model.failures[v].code for v in wrong if v in model.failures}
    code = codes.pop() if len(codes) == 1 else ServingCode.FAILED_PRECONDITION
    lines = [
        f"version {v} of {model.name}: {reason or 'not loaded'}" for v, reason in wrong.items()
    ]
    raise ServingError(code, "; ".join(lines))
