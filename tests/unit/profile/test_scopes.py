"""Modules in the names that jax gives operations, and sets of moments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.profile.intervals import Intervals
from fornax.profile.memory import argument_owner
from fornax.profile.operations import scope_of
from fornax.profile.xspace import own_time


@pytest.mark.parametrize(
    ("op_name", "scope", "backward"),
    [
        ("jit(step)/jvp(layers)/while/body/mlp/dot_general", ("layers", "mlp"), False),
        ("jit(step)/transpose(jvp(layers))/while/body/mlp/dot_general", ("layers", "mlp"), True),
        (
            "jit(f)/jvp(layers/attention)/q_proj/dot_general",
            ("layers", "attention", "q_proj"),
            False,
        ),
        ("jit(f)/layers/checkpoint/rematted_computation/norm/mul", ("layers", "norm"), False),
        ("jit(f)/vmap(transpose(jvp(head)))/dot_general", ("head",), True),
        ("jit(f)/cond/branch_1_fun/jit(silu)/mlp/logistic", ("mlp",), False),
        ("jit(f)/loss/CV,DV->CD/dot_general", ("loss",), False),
        ("mul;jit(f)/layers/mul", ("layers",), False),
        ("dot_general", (), False),
        ("state.params['w']", (), False),
        ("", (), False),
    ],
)
def test_scopes_are_what_is_left_of_a_path(op_name, scope, backward):
    assert scope_of(op_name) == (scope, backward)


def test_scopes_of_what_jax_writes_today():
    """Names as this version of jax makes them, through gradient, remat, scan, vmap and jit."""

    def loss(w, x):
        def layer(x, w):
            with jax.named_scope("attention"), jax.named_scope("q_proj"):
                return jax.nn.silu(x @ w), None

        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
        return x.sum()

    lowered = jax.jit(jax.vmap(jax.grad(loss), (None, 0))).lower(
        jnp.ones((2, 4, 4)), jnp.ones((3, 5, 4))
    )
    lines = lowered.compile().as_text().splitlines()
    products = [line for line in lines if "dot_general" in line and 'op_name="' in line]
    names = {line.partition('op_name="')[2].partition('"')[0] for line in products}
    found = {scope_of(name) for name in names}
    assert found == {(("layers", "attention", "q_proj"), side) for side in (True, False)}


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def points(pairs) -> set[int]:
    return {t for begin, length in pairs for t in range(begin, begin + length)}


def intervals(pairs) -> Intervals:
    begin = np.array([begin for begin, _ in pairs], np.int64)
    return Intervals.union(begin, begin + np.array([length for _, length in pairs], np.int64))


@given(spans, spans, st.integers(0, 80), st.integers(0, 80))
def test_sets_of_moments_are_those_of_their_points(first, second, begin, end):
    a, b = intervals(first), intervals(second)
    window = set(range(begin, end))
    assert a.covered(begin, end) == len(points(first) & window)
    rest = a.without(b)
    assert rest.covered(begin, end) == len((points(first) - points(second)) & window)
    both = Intervals.all_of([a, b])
    assert both.covered(begin, end) == len((points(first) | points(second)) & window)
    assert (a.begin[1:] > a.end[:-1]).all()
    times = np.arange(81)
    assert set(times[rest.holds(times)].tolist()) == points(first) - points(second)


def nested(draw, begin, end, depth):
    """Events of one thread: each inside of another or beside it."""
    events, at = [], begin
    while at < end and len(events) < 4:
        start = draw(st.integers(at, end))
        stop = draw(st.integers(start, end))
        events.append((start, stop - start))
        if depth:
            events += nested(draw, start, stop, depth - 1)
        at = stop
    return events


@given(st.data())
def test_self_times_of_nested_events_add_up_to_what_they_cover(data):
    events = nested(data.draw, 0, 50, 2)
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    begin = np.array([begin for begin, _ in ordered], np.int64)
    duration = np.array([length for _, length in ordered], np.int64)
    own = own_time(begin, duration)
    assert own.sum() == len(points(events))
    assert ((own >= 0) & (own <= duration)).all()


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("state.params['layers']['mlp']['up']['kernel']", "weights"),
        ("params['w']", "weights"),
        ("opt_state[0].mu['w']", "optimizer"),
        ("state.optimizer['params']", "optimizer"),
        ("cache[0]", "cache"),
        ("kv_cache['k']", "cache"),
        ("batch['tokens']", "other"),
        ("x", "other"),
    ],
)
def test_arguments_are_owned_by_what_they_are_called(name, owner):
    assert argument_owner(name) == owner
