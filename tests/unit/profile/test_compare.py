"""Comparing captures: matching, calibration, tests, verdicts, against changes that are known."""

import dataclasses

import numpy as np
import pytest
from tests.unit.profile.captured import Timed, captured, operation

from fornax.config.errors import ProfileError
from fornax.profile.compare import compare, verdict

STEPS = 40
COUNT = 30


def step_of(seed: int, *, machine: float = 1.0, noise: float = 0.02, busy: float = 0.4):
    """A program of thirty operations, timed on a machine that other processes use too: a run may
    wait, and every operation differs a little between two processes."""
    rng = np.random.default_rng(seed)
    parts = []
    for number in range(COUNT):
        level = 10_000 * (1 + number % 7) * machine * np.exp(noise * rng.standard_normal())
        times = level * (1 + 0.01 * rng.standard_normal((STEPS, 2)))
        times += rng.exponential(5 * level, times.shape) * (rng.random(times.shape) < busy)
        one = operation(
            f"fusion.{number}", f"model.py:{10 + number} (f{number})", flops=1e6 + number
        )
        parts.append(Timed(operation=one, times=times))
    return parts


def replaced(part: Timed, *, times: float = 1.0, **values) -> Timed:
    return Timed(operation=dataclasses.replace(part.operation, **values), times=part.times * times)


def test_a_program_beside_itself_raises_no_alarm():
    alarms = 0
    for seed in range(12):
        before, after = captured(step_of(2 * seed)), captured(step_of(2 * seed + 1))
        found = compare(before, after)
        alarms += bool(found.slower or found.failed)
    assert not alarms


def test_a_machine_half_as_fast_is_no_slower_program():
    before, after = captured(step_of(1)), captured(step_of(2, machine=2.0))
    found = compare(before, after)
    assert found.machine == pytest.approx(2.0, rel=0.03)
    assert not found.slower
    assert found.step.value == pytest.approx(1.0, abs=0.03)
    raw = compare(before, after, calibrate=False)
    assert raw.failed
    assert raw.step.value == pytest.approx(2.0, rel=0.05)


def test_new_work_is_named_with_its_line_though_every_fusion_has_another_name():
    before, after = step_of(3), step_of(4)
    whole = sum(np.median(part.times) * 2 for part in before)
    after = [
        replaced(part, name=f"renamed.{at}", source=f"model.py:{90 + at} (f{at})")
        for at, part in enumerate(after)
    ]
    extra = Timed(
        operation=operation("dot.1", "model.py:7 (planted)", scope=("planted",), flops=5e6),
        times=np.full((STEPS, 1), 0.05 * whole),
    )
    found = compare(captured(before), captured([*after, extra]))
    (one,) = found.slower
    assert (one.kind, one.source) == ("new", "model.py:7 (planted)")
    assert "model.py:7 (planted)" in verdict(found)
    assert found.after.flops - found.before.flops == 5e6


def test_work_that_is_gone_and_a_kernel_that_is_slower_are_told_apart():
    before, after = step_of(5), step_of(6)
    after[6] = replaced(after[6], times=2.0)
    gone = before[13].operation.name
    found = compare(captured(before), captured(after[:13] + after[14:]))
    assert [one.kind for one in found.faster] == ["gone"]
    assert found.faster[0].before_operations == (gone,)
    (slower,) = found.slower
    assert slower.after_operations == ("fusion.6",)
    assert slower.ratio.low < 2.0 < slower.ratio.high
    assert found.before.flops > found.after.flops


def test_modules_that_were_named_anew_change_nothing():
    before, after = step_of(17), step_of(18)
    after = [replaced(part, scope=("decoder", "mlp"), op_name="jit(f)/mlp/dot") for part in after]
    found = compare(captured(before), captured(after))
    assert found.calibrated == COUNT
    assert not found.slower
    assert not found.faster


def test_a_model_that_moved_to_another_file_changes_nothing():
    before, after = step_of(19), step_of(20)
    after = [replaced(part, source=f"wrapper.py:{at} (run)") for at, part in enumerate(after)]
    found = compare(captured(before), captured(after))
    assert found.calibrated == COUNT
    assert not found.slower
    assert not found.faster


def test_work_fused_in_another_way_meets_itself():
    before, after = step_of(7), step_of(8)
    pieces = [
        replaced(after[6], times=0.5, name="multiply.3", flops=4e5, category="elementwise"),
        replaced(after[6], times=0.5, name="add.4", flops=6e5, category="elementwise"),
    ]
    found = compare(captured(before), captured([*after[:6], *pieces, *after[7:]]))
    assert not found.slower
    assert not found.faster
    assert any(set(one.after_operations) == {"multiply.3", "add.4"} for one in found.changes)


@pytest.mark.parametrize("by", ["class", "module", "source"])
def test_groups_add_their_operations_up(by):
    before, after = captured(step_of(9)), captured(step_of(10))
    ops, groups = compare(before, after), compare(before, after, by=by)
    for side in ("before_seconds", "after_seconds"):
        of_ops = sum(getattr(one, side) for one in ops.changes)
        assert sum(getattr(one, side) for one in groups.changes) == pytest.approx(of_ops)
    assert groups.step == ops.step


def test_a_step_is_refused_only_with_its_whole_interval():
    before, after = step_of(11, busy=0.0), step_of(12, busy=0.0)
    after = [replaced(part, flops=2e6, times=1.2) for part in after]
    found = compare(captured(before), captured(after))
    assert found.calibrated == 0
    assert "too few operations are the same" in found.notes[0]
    assert found.failed
    assert not compare(captured(before), captured(after), fail_over=0.3).failed


def test_waiting_for_input_counts_for_the_step():
    parts = step_of(13, busy=0.0)
    whole = sum(np.median(part.times) * 2 for part in parts)
    late = captured(parts, waits=[int(0.5 * whole)] * STEPS)
    found = compare(captured(parts), late)
    assert found.failed
    assert found.step.value == pytest.approx(1.5, abs=0.03)


def test_an_exchange_beside_operations_counts_where_nothing_hides_it():
    parts = step_of(21, busy=0.0)
    whole = sum(np.median(part.times) * 2 for part in parts)
    exchange = Timed(
        operation=operation("all-reduce.1", category="exchange", flops=0.0),
        times=np.full((STEPS, 1), whole),
    )

    def with_exchange(exposed):
        found = captured([*parts, exchange])
        (row,) = found.rows
        at = row.events.operation == COUNT
        own, beside = (
            dataclasses.replace(row, kind=kind, events=some(row.events, chosen))
            for kind, chosen in (("operations", ~at), ("exchange", at))
        )
        steps = tuple(
            dataclasses.replace(
                step,
                causes=dataclasses.replace(
                    step.causes, nanoseconds={**step.causes.nanoseconds, "exchange": exposed}
                ),
            )
            for step in found.steps
        )
        return dataclasses.replace(found, rows=(own, beside), steps=steps)

    hidden, half = with_exchange(0), with_exchange(int(whole / 2))
    assert compare(hidden, hidden).before.seconds == pytest.approx(whole / 1e9, rel=0.05)
    assert compare(hidden, half).step.value == pytest.approx(1.5, abs=0.02)


def some(events, chosen):
    columns = {name: column[chosen] for name, column in vars(events).items() if column is not None}
    return dataclasses.replace(events, **columns)


def test_steps_that_warm_up_are_left_out():
    parts = step_of(14)
    found = compare(captured(parts), captured(parts, compiled=4))
    assert (found.before.warm_up, found.after.warm_up) == (1, 4)
    assert found.before.steps == found.after.steps == STEPS - 4
    with pytest.raises(ProfileError, match="capture at least 41 steps"):
        compare(captured(parts), captured(parts, compiled=36))


def test_what_other_threads_work_on_a_run_is_part_of_it():
    parts = step_of(15, busy=0.0)
    alone = captured(parts)
    (row,) = alone.rows
    half = row.events.own // 2
    shared = dataclasses.replace(row.events, duration=half, own=half, helped=row.events.own - half)
    divided = dataclasses.replace(alone, rows=(dataclasses.replace(row, events=shared),))
    found = compare(alone, divided)
    assert found.raw == pytest.approx(1.0, rel=1e-6)
    assert found.after.flops == found.before.flops


def test_captures_whose_operations_ran_outside_of_steps_are_refused():
    whole = captured(step_of(16))
    (row,) = whole.rows
    events = dataclasses.replace(row.events, step=np.full(len(row.events), -1, np.int32))
    outside = dataclasses.replace(whole, rows=(dataclasses.replace(row, events=events),))
    with pytest.raises(ProfileError, match="no operation of the capture"):
        compare(whole, outside)
