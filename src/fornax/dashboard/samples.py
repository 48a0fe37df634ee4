"""The samples of a run: where each is in its file, so that only those shown are read."""

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fornax.dashboard.folder import Folder
from fornax.dashboard.lines import HUGE, Tail, parse

__all__ = ["ORDERS", "Order", "SampleFiles"]

Order = Literal["drawn", "reward", "-reward", "advantage", "-advantage", "tokens", "-tokens"]
"""As they were drawn, or by a number of theirs, the greatest first with a minus."""
ORDERS: tuple[Order, ...] = (
    "drawn",
    "reward",
    "-reward",
    "advantage",
    "-advantage",
    "tokens",
    "-tokens",
)
_MOST_FILES = 8
_MOST_AT_ONCE = 5000
"""Samples of a step, or of a prompt, that are looked through."""
_LONGEST = 20_000

Sample = dict[str, Any]


class _Index:
    """Byte, step and prompt of each sample of a file."""

    def __init__(self, folder: Folder, path: Path) -> None:
        self._folder, self._path = folder, path
        self._tail = Tail(folder, path)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._places: list[int] = []
        self._lengths: list[int] = []
        self._steps: list[int] = []
        self._prompts: list[int] = []

    def read(self) -> None:
        """Take in what there is."""
        with self._lock:
            more = True
            while more:
                chunk = self._tail.read()
                if chunk.restarted:
                    self._clear()
                for place, line in chunk.lines():
                    for record in parse(line)[0]:
                        if isinstance(step := record.get("step"), int):
                            self._places.append(place)
                            self._lengths.append(len(line))
                            self._steps.append(step)
                            self._prompts.append(_hash(record.get("prompt")))
                more = chunk.more

    def steps(self) -> list[int]:
        """The steps that there are samples of."""
        return sorted(set(self._steps))

    def of_step(self, step: int) -> list[Sample]:
        """The samples of a step."""
        return self._at([n for n, each in enumerate(self._steps) if each == step])

    def of_prompt(self, prompt: str) -> list[Sample]:
        """The samples of a prompt, over all steps."""
        wanted = _hash(prompt)
        found = self._at([n for n, each in enumerate(self._prompts) if each == wanted])
        return [sample for sample in found if sample.get("prompt") == prompt]

    def _at(self, numbers: list[int]) -> list[Sample]:
        samples: list[Sample] = []
        try:
            descriptor = self._folder.open(self._path)
        except OSError:
            return samples
        try:
            for number in numbers[:_MOST_AT_ONCE]:
                length = min(self._lengths[number], HUGE)
                samples += parse(os.pread(descriptor, length, self._places[number]))[0]
        except OSError:
            pass
        finally:
            os.close(descriptor)
        return samples


def _hash(prompt: object) -> int:
    return zlib.crc32(prompt.encode("utf-8", "replace")) if isinstance(prompt, str) else 0


class SampleFiles:
    """The samples of the runs that were looked at last."""

    def __init__(self, folder: Folder) -> None:
        """Nothing is read yet."""
        self._folder = folder
        self._indices: OrderedDict[Path, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def find(
        self,
        path: Path,
        *,
        step: int | None,
        prompt: str | None,
        search: str,
        order: Order,
        offset: int,
        limit: int,
    ) -> dict[str, Any]:
        """Samples of a step or of a prompt, as the answer of the interface."""
        with self._lock:
            index = self._indices.setdefault(path, _Index(self._folder, path))
            self._indices.move_to_end(path)
            while len(self._indices) > _MOST_FILES:
                self._indices.popitem(last=False)
        index.read()
        steps = index.steps()
        if prompt is not None:
            found = index.of_prompt(prompt)
        else:
            step = step if step is not None else (steps[-1] if steps else None)
            found = [] if step is None else index.of_step(step)
        if search:
            found = [sample for sample in found if _holds(sample, search.casefold())]
        found = _ordered(found, order)
        shown = [_cut(sample) for sample in found[offset : offset + limit]]
        return {"steps": steps, "step": step, "total": len(found), "samples": shown}


def _holds(sample: Sample, text: str) -> bool:
    said = (sample.get(name) for name in ("prompt", "completion", "where"))
    return any(isinstance(each, str) and text in each.casefold() for each in said)


def _ordered(samples: list[Sample], order: Order) -> list[Sample]:
    if order == "drawn":
        return samples
    name, sign = order.lstrip("-"), -1.0 if order.startswith("-") else 1.0

    def key(sample: Sample) -> float:
        value = sample.get(name)
        number = isinstance(value, float | int) and np.isfinite(float(value))
        return sign * float(value) if number else float("inf")

    return sorted(samples, key=key)


def _cut(sample: Mapping[str, Any]) -> Sample:
    shown = dict(sample)
    for name in ("prompt", "completion"):
        text = shown.get(name)
        if isinstance(text, str) and len(text) > _LONGEST:
            shown[name], shown["cut"] = text[:_LONGEST], True
    return shown
