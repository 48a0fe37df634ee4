"""Walking a schedule: what overlaps, what waits, what is queued."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.hlo import Collective, Done, Item, Loop, Operation, Run, Start
from fornax.plan.cost import schedule
from fornax.plan.cost.schedule import ItemTime, Timeline

_NOWHERE: dict[str, Any] = {
    "op_name": "", "source": "", "fornax_source": "", "dtype": "float32",
    "count": 1,
}  # fmt: skip


def timing(what: Operation | Collective) -> ItemTime:
    """Times are written where bytes are, links where axes are."""
    if isinstance(what, Operation):
        return ItemTime(what.flops)
    return ItemTime(float(what.bytes), what.axes)


def walk(items: list[Item]) -> Timeline:
    return schedule.walk(items, timing)


def work(seconds: float) -> Run:
    return Run(
        Operation(
            name="work", opcode="", category="matmul", flops=seconds, vector_flops=0,
            transcendentals=0, bytes=0, cycles=None, **_NOWHERE,
        )
    )  # fmt: skip


def transfer(name: str, seconds: float = 0.0, link: str = "ici:0") -> Collective:
    return Collective(
        name=name, kind="all-gather", axes=(link,), groups=(), group_size=2,
        bytes=seconds,  # pyrefly: ignore[bad-argument-type]
        **_NOWHERE,
    )  # fmt: skip


def send(name: str, seconds: float, link: str = "ici:0", waits: bool = False) -> Run | Start:
    what = transfer(name, seconds, link)
    return Run(what) if waits else Start(what)


def done(name: str) -> Done:
    return Done(transfer(name))


def loop(count: int, *body: Item) -> Loop:
    return Loop(name="loop", kind="while", count=count, exact=True, body=body)


def test_work_between_start_and_done_hides_the_transfer():
    found = walk([send("a", 3.0), work(2.0), done("a"), work(1.0)])
    assert found.seconds == 4.0
    assert found.exposed == {"a": 1.0}


def test_a_transfer_that_nobody_started_early_is_exposed_whole():
    found = walk([work(2.0), send("a", 3.0, waits=True)])
    assert (found.seconds, found.exposed_seconds) == (5.0, 3.0)


def test_transfers_on_one_link_stand_in_line_and_on_two_do_not():
    same = walk([send("a", 3.0), send("b", 3.0), done("a"), done("b")])
    assert same.seconds == 6.0
    apart = walk([send("a", 3.0), send("b", 3.0, "ici:1"), done("a"), done("b")])
    assert apart.seconds == 3.0


def test_a_loop_repeats_its_steady_turn():
    body = (send("a", 3.0), work(2.0), done("a"))
    found = walk([loop(10, *body)])
    assert found.seconds == pytest.approx(30.0)
    assert found.exposed["a"] == pytest.approx(10.0)
    assert found.transfer["a"] == pytest.approx(30.0)


def test_a_link_that_a_turn_leaves_busy_delays_the_next():
    """Each turn starts 3 s of transfer and waits only for another link's: the queue grows."""
    body = (send("a", 3.0), work(1.0), send("b", 1.0), done("b"))
    found = walk([loop(4, *body)])
    assert found.seconds == pytest.approx(16.0)


def test_what_nobody_waits_for_ends_with_the_program():
    assert walk([send("a", 3.0), work(1.0)]).seconds == 3.0


items = st.recursive(
    st.one_of(
        st.floats(0, 10).map(work),
        st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.booleans()).map(
            lambda x: send(x[0], x[1], f"link-{x[0]}", waits=x[2])
        ),
        st.sampled_from("abc").map(lambda name: done(name)),
    ),
    lambda inner: st.tuples(st.integers(1, 4), st.lists(inner, max_size=4)).map(
        lambda x: loop(x[0], *x[1])
    ),
    max_leaves=12,
)


@given(st.lists(items, max_size=6))
def test_the_time_lies_between_all_hidden_and_none_hidden(found):
    low, high = schedule.bounds(found, timing)
    assert low - 1e-6 <= walk(found).seconds <= high + 1e-6
