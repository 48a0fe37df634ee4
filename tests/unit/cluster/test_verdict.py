"""Who is at fault, of what is seen from outside."""

from dataclasses import replace

import pytest

from fornax.cluster.messages import Observation, decode, encode
from fornax.cluster.verdict import Limits, departed, judge, lost_agent, without_room

LIMITS = Limits(stall=2.0, slow=100.0)


def rank(number: int, **facts: object) -> Observation:
    usual = Observation(
        epoch=1,
        rank=number,
        host="here",
        pid=100 + number,
        agent_pid=200 + number,
        step=8,
        phase="step",
        entered_step=8,
        entered_ns=1000 * number,
    )
    return replace(usual, **facts)


def faulty(*seen: Observation, steps: tuple[float, ...] = (0.1, 0.1)) -> tuple | None:
    verdict = judge(seen, LIMITS, steps)
    return None if verdict is None else (verdict.kind, verdict.rank)


def test_nothing_is_wrong_with_those_that_work_or_are_done():
    assert faulty(rank(0), rank(1)) is None
    assert faulty(rank(0, code=0), rank(1)) is None
    assert faulty(rank(0, code=143), rank(1, code=143)) is None


def test_the_killed_one_is_at_fault_and_not_those_that_end_because_of_it():
    assert faulty(rank(1, code=1), rank(0, code=-6), rank(2, code=-9)) == ("killed", 2)
    assert faulty(rank(1, code=1), rank(0, code=2)) == ("failed", 1)


def test_an_abort_after_an_error_is_the_errors_doing():
    """jax's client aborts in C++ when a peer is gone."""
    assert faulty(rank(1, code=1), rank(0, code=-6)) == ("failed", 1)
    assert faulty(rank(0, code=-6), rank(1)) == ("killed", 0)


def test_those_that_only_lost_another_are_never_at_fault_before_it():
    assert faulty(rank(0, code=75), rank(1, code=-9)) == ("killed", 1)
    assert faulty(rank(0, code=75), rank(1, code=1)) == ("failed", 1)
    assert faulty(rank(0, left=True), rank(1, code=2)) == ("failed", 1)
    assert faulty(rank(0, left=True), rank(1, stopped=1.5)) == ("stopped", 1)
    assert faulty(rank(0), rank(1, left=True)) == ("group", 1)


def test_a_stopped_one_is_at_fault_after_a_second():
    waiting = rank(0, unchanged=3.0)
    assert faulty(waiting, rank(1, stopped=0.5, silent=0.5, unchanged=3.0)) is None
    assert faulty(waiting, rank(1, stopped=1.2, silent=1.2, unchanged=3.0)) == ("stopped", 1)


def test_one_whose_heart_stands_still_holds_its_interpreter():
    assert faulty(rank(0, unchanged=2.5), rank(1, silent=2.1)) == ("frozen", 1)
    assert faulty(rank(0, unchanged=2.5), rank(1, silent=1.9)) is None


KNOWN = (0.1,) * 5


def test_between_steps_of_known_length_a_second_of_silence_is_enough():
    assert faulty(rank(0), rank(1, silent=1.1), steps=KNOWN) == ("frozen", 1)
    waits = rank(1, silent=1.1, phase="wait_for_data")
    assert faulty(rank(0), waits, steps=KNOWN) == ("frozen", 1)
    assert faulty(rank(0), rank(1, silent=0.9), steps=KNOWN) is None
    assert faulty(rank(0), rank(1, silent=1.1), steps=KNOWN[1:]) is None
    assert faulty(rank(0), rank(1, silent=1.1), steps=(0.3,) * 5) is None


@pytest.mark.parametrize("phase", ["compile", "restore", "snapshot"])
def test_calls_that_hold_the_interpreter_for_a_while_are_usual_outside_of_steps(phase: str):
    assert faulty(rank(0), rank(1, silent=1.9, phase=phase), steps=KNOWN) is None
    assert faulty(rank(0), rank(1, silent=2.1, phase=phase), steps=KNOWN) == ("frozen", 1)


def test_a_slow_read_is_given_longer_than_a_silence():
    reads = rank(1, phase="wait_for_data", unchanged=1.9)
    assert faulty(rank(0, unchanged=1.9), reads, steps=KNOWN) is None


def test_one_that_waits_for_data_while_others_wait_in_the_step():
    late = rank(1, phase="wait_for_data", unchanged=2.5)
    assert faulty(rank(0, unchanged=2.4), late) == ("stuck", 1)
    assert faulty(rank(0, phase="wait_for_data", unchanged=2.4), late) is None


def test_slow_steps_make_the_limit_longer():
    late = rank(1, phase="wait_for_data", unchanged=4.0)
    assert faulty(rank(0, unchanged=4.0), late, steps=(1.0, 1.0)) is None
    assert faulty(rank(0, unchanged=4.0), late, steps=(0.5, 0.5)) == ("stuck", 1)


@pytest.mark.parametrize("phase", ["compile", "checkpoint", "restore", "evaluate", "start"])
def test_slow_phases_have_their_own_limit(phase: str):
    assert faulty(rank(0, unchanged=50.0), rank(1, phase=phase, unchanged=50.0)) is None
    assert faulty(rank(0, unchanged=50.0), rank(1, phase=phase, unchanged=101.0)) == ("stuck", 1)


def test_when_all_wait_in_one_step_the_last_to_enter_is_named():
    assert faulty(rank(0, unchanged=59.0), rank(1, unchanged=59.0)) is None
    assert faulty(rank(0, unchanged=61.0), rank(1, unchanged=61.0)) == ("waiting", 1)


def test_a_verdict_says_who_where_and_what():
    verdict = judge([rank(0), rank(1, code=-9)], LIMITS)
    assert verdict is not None
    assert verdict.text == (
        "rank 1 on here (process 101) was ended by SIGKILL in phase step of step 8"
    )


def test_a_message_comes_back_as_it_was_sent():
    seen = rank(1, silent=0.5)
    assert decode(Observation, encode("observation", seen)) == seen


def test_who_is_to_go_is_no_fault_until_all_have_saved():
    assert faulty(rank(0), rank(1, preempted=True)) is None
    assert faulty(rank(0, code=143, left=True), rank(1, code=143, preempted=True)) is None
    verdict = departed(
        rank(1, code=143, preempted=True), "all left at one step", slow=False, since=4.0
    )
    assert (verdict.kind, verdict.rank, verdict.since) == ("preempted", 1, 4.0)


@pytest.mark.parametrize("cut", [False, True])
def test_of_a_lost_agent_what_was_heard_last_is_known(cut: bool):
    seen = rank(1, phase="compile", changed_at=3.0, batch=9, code=-9)
    verdict = lost_agent(1, seen, "it is silent", cut=cut, since=5.0)
    assert verdict.facts == {
        "rank": 1,
        "host": "here",
        "kind": "partition" if cut else "agent",
        "phase": "compile",
        "step": 8,
        "batch": 9,
        "since": 5.0,
    }
    assert verdict.takes_agent
    text = "rank 1 on here (process 201) lost its agent: it is silent in phase compile of step 8"
    assert verdict.text == text
    unheard = lost_agent(2, None, "it ended", cut=cut, since=5.0)
    assert unheard.text.startswith("rank 2 on a host that has said nothing yet lost its agent")


def test_a_full_disk_is_told_of_a_rank_and_its_host():
    verdict = without_room(rank(1, unsaved=7, phase="checkpoint", changed_at=3.0))
    assert (verdict.kind, verdict.rank, verdict.host, verdict.since) == ("disk", 1, "here", 3.0)
    assert "no room on the disk for a checkpoint after step 7" in verdict.text
    assert verdict.meanwhile["at_step"] == 8
    assert "step" not in verdict.meanwhile  # which says that a group has begun
