"""Walking a schedule: what overlaps, what waits, what stands in line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.plan.cost.queues import Compute, Done, Exchange, Loop, bounds, walk


def work(seconds, name="work"):
    return Compute(name=name, seconds=seconds)


def send(name, seconds, link="ici:0", waits=False, hidden=0.0):
    return Exchange(name=name, seconds=seconds, links=(link,), waits=waits, hidden=hidden)


def test_work_between_start_and_done_hides_the_transfer():
    found = walk([send("a", 3.0), work(2.0), Done(name="a"), work(1.0)])
    assert found.seconds == 4.0
    assert found.exposed == {"a": 1.0}


def test_a_transfer_that_nobody_started_early_is_exposed_whole():
    found = walk([work(2.0), send("a", 3.0, waits=True)])
    assert (found.seconds, found.exposed_seconds) == (5.0, 3.0)


def test_transfers_on_one_link_stand_in_line_and_on_two_do_not():
    same = walk([send("a", 3.0), send("b", 3.0), Done(name="a"), Done(name="b")])
    assert same.seconds == 6.0
    apart = walk([send("a", 3.0), send("b", 3.0, "ici:1"), Done(name="a"), Done(name="b")])
    assert apart.seconds == 3.0


def test_an_instruction_may_compute_beside_its_own_transfer():
    assert walk([send("a", 3.0, waits=True, hidden=2.0)]).seconds == 3.0
    assert walk([send("a", 3.0, waits=True, hidden=5.0)]).seconds == 5.0


def test_a_loop_repeats_its_steady_turn():
    body = (send("a", 3.0), work(2.0), Done(name="a"))
    found = walk([Loop(name="loop", count=10, body=body)])
    assert found.seconds == pytest.approx(30.0)
    assert found.exposed["a"] == pytest.approx(10.0)
    assert found.busy["ici:0"] == pytest.approx(30.0)


def test_a_link_that_a_turn_leaves_busy_delays_the_next():
    """Each turn starts 3 s of transfer and waits only for another link's: the queue grows."""
    body = (send("a", 3.0), work(1.0), send("b", 1.0), Done(name="b"))
    found = walk([Loop(name="loop", count=4, body=body)])
    assert found.seconds == pytest.approx(16.0)


def test_what_nobody_waits_for_ends_with_the_program():
    assert walk([send("a", 3.0), work(1.0)]).seconds == 3.0


def test_an_empty_loop_does_nothing():
    assert walk([Loop(name="loop", count=0, body=(work(1.0),))]).seconds == 0


items = st.recursive(
    st.one_of(
        st.floats(0, 10).map(work),
        st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.booleans()).map(
            lambda x: send(x[0], x[1], f"link-{x[0]}", waits=x[2])
        ),
        st.sampled_from("abc").map(lambda name: Done(name=name)),
    ),
    lambda inner: st.tuples(st.integers(0, 3), st.lists(inner, max_size=4)).map(
        lambda x: Loop(name="loop", count=x[0], body=tuple(x[1]))
    ),
    max_leaves=12,
)


@given(st.lists(items, max_size=6))
def test_the_time_lies_between_all_hidden_and_none_hidden(schedule):
    low, high = bounds(schedule)
    assert low - 1e-6 <= walk(schedule).seconds <= high + 1e-6
