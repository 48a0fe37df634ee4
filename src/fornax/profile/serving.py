"""What servers did: the way of each request, and how full each batch was.

The engine of language models marks when a request is queued, started, preempted, has its first
token and ends, and says of each call's batch what it holds and may hold. A model server says of
each batch which requests it holds and how long each had waited.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fornax.profile.causes import step_of
from fornax.profile.facts import Step
from fornax.profile.raw import Annotation, Raw
from fornax.profile.served import Ending, ServedBatch, ServedRequest, Serving

__all__ = ["read_serving"]

_ENDS: tuple[Ending, ...] = ("finished", "aborted", "failed")
_SAME = 1_000_000
"""Nanoseconds that the arrival of one request may differ by, as two batches tell it."""


def read_serving(
    raws: Sequence[Raw], origins: Sequence[int], steps: Sequence[Sequence[Step]]
) -> Serving:
    """Requests and batches of all ranks.

    Args:
        raws: each rank's rows.
        origins: of each rank's clock, the time that is 0.
        steps: each rank's steps, since that time.
    """
    requests, batches = [], []
    for raw, origin, own_steps in zip(raws, origins, steps, strict=True):
        told = sorted(raw.annotations, key=lambda each: each.begin)
        moved = [
            dataclasses.replace(each, begin=each.begin - origin, end=each.end - origin)
            for each in told
        ]
        requests += _of_engine(raw.rank, moved)
        requests += _of_batches(raw.rank, moved)
        of_rank = [batch for each in moved if (batch := _batch(raw.rank, each)) is not None]
        begins = np.array([each.begin for each in of_rank], np.int64)
        batches += [
            dataclasses.replace(each, step=own_steps[at].number if at >= 0 else None)
            for each, at in zip(of_rank, step_of(own_steps, begins).tolist(), strict=True)
        ]
    requests.sort(key=lambda each: next(t for t in _times(each) if t is not None))
    batches.sort(key=lambda each: each.begin)
    return Serving(requests=tuple(requests), batches=tuple(batches))


def _times(request: ServedRequest) -> tuple[int | None, ...]:
    return request.queued, request.started, request.first_token, request.ended, 0


def _of_engine(rank: int, told: Sequence[Annotation]) -> Iterator[ServedRequest]:
    held: dict[str, dict[str, Any]] = {}
    for each in told:
        event = each.name.removeprefix("request/")
        name = str(each.facts.get("request", ""))
        if event == each.name or not name:
            continue
        if event == "queued" and name in held:  # its end is not told
            yield _request(rank, name, held.pop(name))
        way = held.setdefault(name, {"preempted": 0})
        if event == "preempted":
            way["preempted"] += 1
        else:
            way.setdefault(event, each.begin)
        if event == "queued":
            way["prompt_tokens"] = _whole(each, "tokens")
        if event in _ENDS:
            way |= {"ending": event, "ended": each.begin, "tokens": _whole(each, "tokens")}
            yield _request(rank, name, held.pop(name))
    for name, way in held.items():
        yield _request(rank, name, way)


def _request(rank: int, name: str, way: dict[str, Any]) -> ServedRequest:
    return ServedRequest(
        rank=rank,
        id=name,
        model="",
        queued=way.get("queued"),
        started=way.get("started"),
        first_token=way.get("first token"),
        ended=way.get("ended"),
        ending=way.get("ending", "open"),
        prompt_tokens=way.get("prompt_tokens"),
        tokens=way.get("tokens"),
        preempted=way["preempted"],
    )


def _of_batches(rank: int, told: Sequence[Annotation]) -> Iterator[ServedRequest]:
    """Requests of a model server; one that is computed again, after a batch that failed, ends with
    its last batch."""
    found: dict[tuple[str, str], list[ServedRequest]] = {}
    for each in told:
        model = each.name.removeprefix("batch/")
        numbers = str(each.facts.get("requests", "")).split()
        waited = str(each.facts.get("waited_us", "")).split()
        told_all = len(numbers) == len(waited) and all(part.isdigit() for part in waited)
        if model == each.name or not told_all:
            continue
        for number, micro in zip(numbers, waited, strict=True):
            queued = each.begin - 1000 * int(micro)
            same = found.setdefault((model, number), [])
            if same and abs((same[-1].queued or 0) - queued) < _SAME:
                same[-1] = dataclasses.replace(same[-1], ended=each.end)
                continue
            same.append(
                ServedRequest(
                    rank=rank,
                    id=number,
                    model=model,
                    queued=queued,
                    started=each.begin,
                    first_token=None,
                    ended=each.end,
                    ending="finished",
                    prompt_tokens=None,
                    tokens=None,
                    preempted=0,
                )
            )
    for same in found.values():
        yield from same


def _batch(rank: int, each: Annotation) -> ServedBatch | None:
    """The batch that an annotation tells of; None if it is another's of such a name."""
    engine = each.name.startswith("engine/")
    rows, places = _whole(each, "tokens" if engine else "rows"), _whole(each, "bucket")
    if rows is None or places is None:
        return None
    requests = len(str(each.facts.get("requests", "")).split())
    return ServedBatch(
        rank=rank,
        kind=each.name.partition("/")[2],
        step=None,
        begin=each.begin,
        duration=each.end - each.begin,
        sequences=_whole(each, "sequences") or requests,
        most_sequences=_whole(each, "most_sequences"),
        rows=rows,
        places=places,
        most_rows=_whole(each, "most_tokens" if engine else "most_rows"),
        steps=_whole(each, "steps") or 1,
    )


def _whole(each: Annotation, name: str) -> int | None:
    """A figure of an annotation; None where it has none of the name."""
    value = each.facts.get(name)
    return value if isinstance(value, int) else None
