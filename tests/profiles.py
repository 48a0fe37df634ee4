"""Profiles made by hand, of any size, with what a capture of a laptop does not hold: several ranks,
devices with rates and allocators, names that try to be HTML."""

from typing import Any

import numpy as np

from fornax.hlo import Buffer, Peak
from fornax.profile import (
    CAUSES,
    CaptureInfo,
    Causes,
    Collection,
    Counter,
    Counters,
    Events,
    Host,
    Memory,
    Moment,
    Operation,
    Profile,
    Program,
    Row,
    Sample,
    Serving,
    Stage,
    Step,
    Thread,
    Wait,
)

__all__ = ["HOSTILE", "made_comparison", "made_profile"]

HOSTILE = '</script><img src=x onerror="alert(1)">'

_HLO = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (p0: f32[64,64], p1: f32[64,64]) -> f32[64,64] {
  %p0 = f32[64,64]{1,0} parameter(0)
  %p1 = f32[64,64]{1,0} parameter(1)
  %dot.0 = f32[64,64]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %fusion.1 = f32[64,64]{1,0} add(%dot.0, %p0)
  %dot.2 = f32[64,64]{1,0} dot(%fusion.1, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %copy.3 = f32[64,64]{1,0} copy(%dot.2)
  %all-reduce.4 = f32[64,64]{1,0} all-reduce(%copy.3), replica_groups={}, to_apply=%sum
  ROOT %fusion.5 = f32[64,64]{1,0} multiply(%all-reduce.4, %fusion.1)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""

_PEAK_FLOPS, _BANDWIDTH = 1.97e14, 8.1e11


def made_profile(*, ranks: int = 2, steps: int = 8, events: int = 2000) -> Profile:
    """A profile of a training step on TPUs of that many ranks, `events` of them in all."""
    random = np.random.default_rng(0)
    operations = (*(_operation(number, random) for number in range(6)), _hostile())
    names = [operation.name for operation in operations] + ["PjitFunction(step)", "wait", HOSTILE]
    rows, made_steps = [], []
    each = max(1, events // (ranks * 2))
    for rank in range(ranks):
        begin, duration, owners = _busy(each, len(operations), random)
        length = int(begin[-1] + duration[-1]) // steps + 1
        step_of = np.minimum(begin // length, steps - 1).astype(np.int32) + rank * steps
        made_steps += [_step(rank, number, length, random) for number in range(steps)]
        device = Events(
            begin=begin,
            duration=duration,
            own=duration,
            name=owners.astype(np.int32),
            operation=owners.astype(np.int32),
            step=step_of,
        )
        host_name = random.integers(len(operations), len(names), each).astype(np.int32)
        none = np.full(each, -1, np.int32)
        host = Events(
            begin=begin, duration=duration, own=duration, name=host_name, operation=none, step=none
        )
        rows.append(
            Row(rank=rank, device=f"tpu:{rank}", name="XLA Ops", kind="operations", events=device)
        )
        rows.append(Row(rank=rank, device="", name="main", kind="host", events=host))
    return Profile(
        info=CaptureInfo(
            folder="2026_11_28_14_59_52",
            begin=1.795e9,
            seconds=max(step.end for step in made_steps) / 1e9,
            platform="tpu",
            device_kind="TPU v5 lite",
            devices=ranks,
            hosts=tuple(f"host-{rank}" for rank in range(ranks)),
            ranks=tuple(range(ranks)),
            versions={"jax": "0.10.2", "fornax": "0.1.0"},
            truncated=True,
            bytes=1 << 20,
            notes=(f"a note about {HOSTILE}",),
        ),
        names=names,
        rows=tuple(rows),
        steps=tuple(made_steps),
        operations=operations,
        programs=(
            Program(name="jit_train_step", module_id=1, rank=0, proto=b"", text=_HLO, facts=None),
        ),
        memory=(_memory(),),
        samples=tuple(
            Sample(
                time=time * 1_000_000,
                rank=rank,
                device=f"tpu:{rank}",
                bytes_in_use=2**30 + time * 2**20,
                peak_bytes=2**31,
                limit_bytes=16 * 2**30,
            )
            for time in range(20)
            for rank in range(ranks)
        ),
        host=Host(
            threads=tuple(
                Thread(rank=rank, name="main", busy_seconds=0.01, waiting_seconds=0.004)
                for rank in range(ranks)
            ),
            collections=(Collection(rank=0, begin=1000, duration=200_000, generation=2),),
            waits=(
                Wait(rank=0, kind="lock", name=HOSTILE, threads=2, count=3, seconds=0.004),
                Wait(rank=0, kind="device", name="engine/wait", threads=1, count=9, seconds=0.1),
            ),
            unknown=("the lock of the interpreter",),
        ),
        input=(
            Stage(name="tokenize", count=steps, seconds=0.02, waited_seconds=0.004),
            Stage(name="pack", count=steps, seconds=0.001, waited_seconds=0.0),
        ),
        counters=Counters(
            series=tuple(
                Counter(
                    rank=rank,
                    device=f"tpu:{rank}",
                    name=name,
                    time=np.arange(5) * 1_000_000,
                    value=np.array([0.0, 2.0, 5.0, 5.0, 9.0]),
                    total=name == "cycles",
                )
                for rank in range(ranks)
                for name in ("HBM read", "cycles", HOSTILE)
            ),
            absent={"instructions": f"a reason with {HOSTILE}"},
        ),
        serving=Serving(),
    )


def _operation(number: int, random: np.random.Generator) -> Operation:
    opcode = ("dot", "fusion", "dot", "copy", "all-reduce", "fusion")[number]
    category = ("matmul", "elementwise", "matmul", "copy", "exchange", "elementwise")[number]
    flops = float({"dot": 4e9, "fusion": 2e6}.get(opcode, 0))
    moved = int(random.integers(1, 40) * 1_000_000)
    compute, memory = flops / _PEAK_FLOPS, moved / _BANDWIDTH
    return Operation(
        program=0,
        name=f"{opcode}.{number}",
        opcode=opcode,
        category=category,
        scope=("layers", "attention" if number < 3 else "mlp"),
        backward=number in (2, 5),
        op_name=f"jit(train_step)/layers/{opcode}",
        source=f"model.py:{40 + number} (forward)",
        fornax_source="",
        dtype="bfloat16",
        flops=flops,
        bytes=moved,
        bound_seconds=max(compute, memory),
        bound="compute" if compute > memory else "memory",
        planned_seconds=max(compute, memory) * 1.2,
    )


def _hostile() -> Operation:
    return Operation(
        program=-1,
        name=HOSTILE,
        opcode="",
        category="other",
        scope=(HOSTILE.replace("/", ""),),
        backward=False,
        op_name=HOSTILE,
        source=HOSTILE,
        fornax_source="",
        dtype="",
        flops=0.0,
        bytes=0,
        bound_seconds=None,
        bound=None,
        planned_seconds=None,
    )


def _busy(
    count: int, operations: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    duration = random.lognormal(9.5, 1.2, count).astype(np.int64) + 20
    gaps = (random.random(count) < 0.05) * random.integers(1000, 60_000, count)
    begin = np.cumsum(duration + gaps) - duration
    return begin, duration, random.integers(0, operations, count)


def _step(rank: int, number: int, length: int, random: np.random.Generator) -> Step:
    shares = random.dirichlet(np.array([60, 12 if rank else 30, 4, 5, 0.1, 10]))
    parts = (shares * length).astype(np.int64)
    parts[-1] = length - parts[:-1].sum()
    return Step(
        rank=rank,
        number=100 + number,
        name="train",
        begin=number * length,
        end=(number + 1) * length,
        causes=Causes(nanoseconds=dict(zip(CAUSES, map(int, parts), strict=True))),
    )


def _memory() -> Memory:
    owned = {"weights": 400, "optimizer": 800, "activations": 700, "cache": 0, "other": 20}
    mib = 2**20
    course = [
        {**owned, "activations": int(700 * np.sin(np.pi * at / 60)), "other": 20 if at % 7 else 60}
        for at in range(61)
    ]
    buffers = tuple(
        Buffer(
            name=f"buffer.{at}",
            bytes=(60 - at) * mib,
            unpadded_bytes=(59 - at) * mib,
            shape="bf16[1024,1024]",
            op_name=HOSTILE if at == 1 else f"state.params['layers']['{at}']",
            source="model.py:12 (init)",
            fornax_source="",
            kind="argument",
        )
        for at in range(40)
    )
    total = sum(course[30].values()) * mib
    return Memory(
        program=0,
        peak=Peak(bytes=total, temporaries=720 * mib, instruction="fusion.1", buffers=buffers),
        owners={owner: size * mib for owner, size in course[30].items()},
        buffer_owners=("weights",) * 20 + ("activations",) * 20,
        course=tuple(
            Moment(
                position=at,
                instruction=f"fusion.{at}",
                bytes={owner: size * mib for owner, size in sizes.items()},
            )
            for at, sizes in enumerate(course)
        ),
    )


def made_comparison() -> dict[str, Any]:
    """A comparison as a page takes it: one operation slower, one gone."""
    side = {
        "folder": "before",
        "steps": 8,
        "warm_up": 1,
        "seconds": 0.012,
        "input_seconds": 0.0,
        "flops": 1e12,
        "bytes": 1e9,
    }
    change = {
        "key": "layers/mlp: fusion.5",
        "kind": "slower",
        "program": "jit_train_step",
        "category": "elementwise",
        "source": "model.py:45 (forward)",
        "before_operations": ["fusion.9"],
        "after_operations": ["fusion.5"],
        "before_seconds": 0.002,
        "after_seconds": 0.003,
        "ratio": {"value": 1.5, "low": 1.35, "high": 1.66},
        "share": 0.083,
        "p_value": 0.0001,
        "before_flops": 1e9,
        "after_flops": 1e9,
        "before_bytes": 1e8,
        "after_bytes": 2e8,
    }
    nothing = {"value": None, "low": None, "high": None}
    return {
        "before": side,
        "after": {**side, "folder": "after", "seconds": 0.0132, "bytes": 1.1e9},
        "by": "op",
        "step": {"value": 1.1, "low": 1.08, "high": 1.13},
        "raw": 1.12,
        "machine": 1.02,
        "calibrated": 40,
        "noise": 0.01,
        "changes": [
            change,
            {**change, "key": HOSTILE, "kind": "gone", "ratio": nothing, "share": -0.02},
            {**change, "key": "dot.0", "kind": "same", "share": 0.0},
        ],
        "fail_over": 0.05,
        "failed": True,
        "verdict": "Slower, by more than the 5 % allowed: the operations of a step take +10.0%.",
        "notes": [],
    }
