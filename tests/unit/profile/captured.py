"""Profiles as they would be read, made of given times of operations.

Legend: S steps, U runs of one operation in a step.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fornax.profile import (
    CAUSES,
    CaptureInfo,
    Causes,
    Counters,
    Events,
    Host,
    Operation,
    Profile,
    Program,
    Row,
    Serving,
    Step,
)

_GAP = 1_000
"""Nanoseconds between two events."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Timed:
    """One operation and its times in nanoseconds [S, U]."""

    operation: Operation
    times: np.ndarray


def operation(name: str, source: str = "model.py:10 (layer)", **values) -> Operation:
    """An operation of program 0; `values` change its fields."""
    fields = {
        "program": 0,
        "opcode": "dot",
        "category": "matmul",
        "scope": ("layers",),
        "backward": False,
        "op_name": f"jit(step)/{source.partition('(')[2]}",
        "fornax_source": "",
        "dtype": "float32",
        "flops": 1e6,
        "bytes": 1000,
        "bound_seconds": None,
        "bound": None,
        "planned_seconds": None,
        **values,
    }
    return Operation(name=name, source=source, **fields)


def captured(
    parts: Sequence[Timed],
    *,
    folder: str = "capture",
    compiled: int = 0,
    waits: Sequence[int] = (),
    text: str = "",
) -> Profile:
    """A capture on one thread whose steps run `parts` one after the other.

    Args:
      parts: all with the same number of steps.
      folder: its name.
      compiled: how many of the first steps compile.
      waits: nanoseconds that each step waits for its input; none for 0.
      text: of the program.
    """
    columns: dict[str, list[int]] = {name: [] for name in ("begin", "duration", "at", "step")}
    steps, now = [], 0
    for number in range(len(parts[0].times)):
        began = now
        for at, part in enumerate(parts):
            for duration in part.times[number]:
                for name, value in zip(columns, (now, int(duration), at, number), strict=True):
                    columns[name].append(value)
                now += int(duration) + _GAP
        waited = int(waits[number]) if len(waits) else 0
        now += waited
        causes = dict.fromkeys(CAUSES, 0) | {
            "input": waited,
            "compile": int(number < compiled),
        }
        steps.append(
            Step(
                rank=0,
                number=number,
                name="train",
                begin=began,
                end=now,
                causes=Causes(nanoseconds=causes),
            )
        )
    duration = np.array(columns["duration"], np.int64)
    events = Events(
        begin=np.array(columns["begin"], np.int64),
        duration=duration,
        own=duration,
        name=np.array(columns["at"], np.int32),
        operation=np.array(columns["at"], np.int32),
        step=np.array(columns["step"], np.int32),
    )
    return Profile(
        info=CaptureInfo(
            folder=folder,
            begin=0.0,
            seconds=now / 1e9,
            platform="cpu",
            device_kind="cpu",
            devices=1,
            hosts=("host",),
            ranks=(0,),
            versions={},
            truncated=False,
            bytes=0,
        ),
        names=[part.operation.name for part in parts],
        rows=(Row(rank=0, device="cpu:0", name="worker", kind="operations", events=events),),
        steps=tuple(steps),
        operations=tuple(part.operation for part in parts),
        programs=(Program(name="jit_step", module_id=1, rank=0, proto=b"", text=text, facts=None),),
        memory=(),
        samples=(),
        host=Host(threads=(), collections=()),
        input=(),
        counters=Counters(),
        serving=Serving(),
    )
