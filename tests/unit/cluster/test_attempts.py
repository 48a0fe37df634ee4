"""When a run that fails again and again is given up, and what the message says then."""

from dataclasses import replace

import pytest

from fornax.cluster.attempts import Attempts
from fornax.cluster.verdict import Verdict


def failed(step: int, **facts: object) -> Verdict:
    usual = Verdict(
        kind="killed",
        rank=1,
        host="a",
        pid=1,
        phase="step",
        step=step,
        since=0.0,
        code=-9,
        what="was ended by SIGKILL",
        agent=7,
        batch=step - 1,
    )
    return replace(usual, **facts)


def test_the_second_fault_at_one_step_asks_for_another_host_and_the_third_ends_the_run():
    """Though each group begins later than the one before."""
    attempts = Attempts()
    attempts.begin(0)
    attempts.reach(394)
    moved, whys = [], []
    for began, host in ((392, "a"), (393, "a"), (394, "b")):
        fault = failed(394, host=host, batch=401)
        moved.append(attempts.needs_another_host(fault))
        whys.append(attempts.fail(fault))
        attempts.begin(began)
    assert moved == [False, True, False]
    assert whys[:2] == [None, None]
    assert whys[2] is not None
    assert whys[2].startswith("step 394 failed 3 times, on a (agent 7) and b (agent 7); the last")
    assert "rank 1 on b (process 1) was ended by SIGKILL in phase step of step 394" in whys[2]
    assert "--data.skip-steps '[{start: 401, stop: 402}]'" in whys[2]


@pytest.mark.parametrize("part", ["main", "code"])
def test_a_record_that_ends_its_process_is_named_whatever_the_step(part: str):
    """Batches are made ahead, so the step is another each time."""
    attempts, why = Attempts(), None
    for step in (4, 6, 5):
        attempts.begin(step)
        why = attempts.fail(failed(step, record=17, part=part))
    assert why is not None
    assert f"each time while a transform had record 17 of the data's part {part}" in why
    assert ("part: code}]'" in why) == (part == "code")
    assert "{start: 17, stop: 18" in why
    assert "skip-steps" not in why


def test_the_record_that_a_transform_had_by_chance_is_not_blamed():
    attempts, why = Attempts(), None
    for record in (17, 18, 19):
        attempts.begin(4)
        why = attempts.fail(failed(4, record=record, part="main"))
    assert why is not None
    assert "record" not in why
    assert "batch 3" in why


def test_what_is_no_fault_of_a_rank_neither_counts_nor_breaks_a_row():
    attempts = Attempts()
    attempts.begin(4)
    found = []
    for kind in ("killed", "service", "preempted", "stopped", "slow", "group"):
        attempts.begin(attempts.best)
        attempts.reach(attempts.best + 1)  # so that it is not a lack of progress
        found.append(attempts.fail(failed(4, kind=kind)))
    assert found == [None] * 6
    assert not attempts.needs_another_host(failed(4, kind="service"))
    assert attempts.fail(failed(4)) is not None


def test_faults_at_other_steps_are_no_row():
    attempts = Attempts()
    for step in (4, 9, 4, 9, 4):
        attempts.begin(attempts.best + 1)
        assert not attempts.needs_another_host(failed(step))
        assert attempts.fail(failed(step)) is None


@pytest.mark.parametrize("began", [340, 0])
def test_a_run_that_never_gets_beyond_a_step_ends_though_it_goes_back(began: int):
    attempts, whys = Attempts(), []
    attempts.begin(began)
    for reached in (394, 380, 390, 394):
        attempts.begin(began)
        attempts.reach(reached)
        whys.append(attempts.fail(failed(reached)))
    assert whys.index(next(filter(None, whys))) == 2
    assert "failed 3 times without getting beyond step 394" in whys[2]


def test_what_is_made_after_a_loss_of_the_newest_steps_is_progress():
    attempts = Attempts()
    attempts.begin(390)
    attempts.reach(394)
    assert attempts.fail(failed(394)) is None
    attempts.begin(340)  # a host was lost, and the one that held its snapshots
    attempts.reach(380)
    assert attempts.fail(failed(380)) is None
    assert attempts.fail(failed(-1)) is None  # while the next group forms
    assert attempts.fail(failed(-1)) is not None
