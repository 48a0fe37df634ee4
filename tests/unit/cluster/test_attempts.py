"""When a run that fails again and again is given up."""

import pytest

from fornax.cluster.attempts import Attempts
from fornax.cluster.verdict import Verdict


def failed() -> Verdict:
    return Verdict(
        kind="killed",
        rank=1,
        host="a",
        pid=1,
        phase="step",
        step=1,
        since=0.0,
        code=-9,
        what="was ended by SIGKILL",
    )


def test_three_faults_at_one_step_end_the_run():
    attempts = Attempts()
    attempts.begin(0)
    attempts.reach(394)
    assert attempts.fail(failed()) is None
    for _ in range(3):  # the first of them had more to begin with
        attempts.begin(393)
        attempts.reach(394)
        why = attempts.fail(failed())
    assert why is not None
    assert "step 394" in why


@pytest.mark.parametrize("began", [340, 0])
def test_a_run_that_never_gets_beyond_a_step_ends_though_it_goes_back(began: int):
    attempts, whys = Attempts(), []
    attempts.begin(began)
    for reached in (394, 380, 390, 394):
        attempts.begin(began)
        attempts.reach(reached)
        whys.append(attempts.fail(failed()))
    assert whys.index(next(filter(None, whys))) == 2


def test_what_is_made_after_a_loss_of_the_newest_steps_is_progress():
    attempts = Attempts()
    attempts.begin(390)
    attempts.reach(394)
    assert attempts.fail(failed()) is None
    attempts.begin(340)  # a host was lost, and the one that held its snapshots
    attempts.reach(380)
    assert attempts.fail(failed()) is None
    assert attempts.fail(failed()) is None  # while the next group forms
    assert attempts.fail(failed()) is not None
