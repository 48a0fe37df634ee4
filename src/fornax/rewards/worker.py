"""The process that runs reward functions: imports no jax, and dies with the process that began it.

It answers on a pipe of its own, so what functions print goes where the parent sent its output.
"""

import asyncio
import json
import random
import sys
import zlib
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from fornax.config.errors import ConfigError
from fornax.rewards.functions import (
    Function,
    as_score,
    describe_failure,
    load_function,
    missing_columns,
)
from fornax.rewards.spec import RewardSpec, Sample

__all__ = ["main"]

Numbered = Sequence[tuple[int, Sample]]


def main(parent: Connection) -> None:
    """Serve until the parent says stop or is gone."""
    specs = parent.recv()
    functions = []
    for place, spec in enumerate(specs):
        try:
            functions.append(load_function(spec))
        except ConfigError as error:
            parent.send(("unusable", place, str(error)))
            return
    parent.send(("ready", [(f.batched, f.is_async, f.has_state, f.columns) for f in functions]))
    while (request := parent.recv()) is not None:
        _serve(parent, request, functions, specs)


def _serve(
    parent: Connection, request: tuple, functions: list[Function], specs: list[RewardSpec]
) -> None:
    kind, place, body = request
    function = functions[place]
    if kind == "run":
        run = _run_batch if function.batched else _run_async if function.is_async else _run_each
        run(parent, function, body, specs[place].timeout_seconds)
        parent.send(("end",))
        return
    try:
        if kind == "set_state":
            function.module.set_state(body)  # pyrefly: ignore[missing-attribute]
            parent.send(("state", None, ""))
        else:
            state = function.module.get_state()  # pyrefly: ignore[missing-attribute]
            parent.send(("state", json.dumps(state), ""))
    except Exception as error:
        parent.send(("state", None, describe_failure(error)))


def _run_each(parent: Connection, function: Function, samples: Numbered, limit: float) -> None:
    del limit  # the parent watches the clock: nothing in this process could stop the call
    for number, sample in samples:
        lacking = missing_columns(function, sample.record)
        if lacking:
            parent.send(("done", number, (None, _lacks(lacking), {})))
            continue
        _seed([sample])
        try:
            answer = as_score(function.call(**function.arguments(sample)))
        except Exception as error:
            answer = None, describe_failure(error), {}
        parent.send(("done", number, answer))


def _run_async(parent: Connection, function: Function, samples: Numbered, limit: float) -> None:
    async def one(number: int, sample: Sample) -> None:
        lacking = missing_columns(function, sample.record)
        if lacking:
            parent.send(("done", number, (None, _lacks(lacking), {})))
            return
        try:
            call = function.call(**function.arguments(sample))
            answer = as_score(await asyncio.wait_for(call, limit))
        except TimeoutError:
            answer = None, f"took over {limit:g} s", {}
        except Exception as error:
            answer = None, describe_failure(error), {}
        parent.send(("done", number, answer))

    async def everything() -> None:
        await asyncio.gather(*(one(number, sample) for number, sample in samples))

    _seed([sample for _, sample in samples])
    asyncio.run(everything())


def _run_batch(parent: Connection, function: Function, samples: Numbered, limit: float) -> None:
    given = [sample for _, sample in samples]
    lacking = [c for c in function.columns if not any(c in sample.record for sample in given)]
    if lacking:
        parent.send(("fault", _lacks(lacking)))
        return
    _seed(given)
    try:
        found: Any = function.call(**function.batch_arguments(given))
        if function.is_async:
            found = asyncio.run(asyncio.wait_for(found, limit))
        values = list(found)
    except TimeoutError:
        parent.send(("fault", f"took over {limit:g} s"))
        return
    except Exception as error:
        parent.send(("fault", describe_failure(error)))
        return
    if len(values) != len(given):
        parent.send(("fault", f"gave {len(values)} scores for {len(given)} completions"))
        return
    for (number, _), value in zip(samples, values, strict=True):
        parent.send(("done", number, as_score(value)))


def _lacks(columns: Sequence[str]) -> str:
    return f"needs the column {', '.join(columns)}, which this line of the data lacks"


def _seed(samples: Sequence[Sample]) -> None:
    """Make functions that draw numbers give a sample the same score in every run."""
    texts = "\0".join(f"{sample.prompt}\0{sample.completion}" for sample in samples)
    seed = zlib.crc32(texts.encode(errors="surrogatepass"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
