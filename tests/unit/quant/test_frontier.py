"""The frontier beside all mixes that there are, and rules that say what a mix is."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fornax.quant.frontier import Mix, Option, frontier

OPTIONS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(-2, 9), st.integers(0, 1000)),
    max_size=12,
    unique_by=lambda each: each[:2],
)


def options_of(drawn: list[tuple[int, int, int, int]]) -> list[Option]:
    """Whole numbers, so that sums are exact."""
    return [
        Option(group=f"g{group}", scheme=f"s{scheme}", saved=saved, kl=float(kl))
        for group, scheme, saved, kl in drawn
    ]


@given(OPTIONS)
def test_no_mix_that_saves_as_much_costs_less(drawn: list[tuple[int, int, int, int]]) -> None:
    options = options_of(drawn)
    groups = {each.group for each in options}
    choices = [[None, *(each for each in options if each.group == group)] for group in groups]
    mixes = [[each for each in mix if each] for mix in itertools.product(*choices)]
    sums = [(sum(x.saved for x in mix), sum(x.kl for x in mix)) for mix in mixes]
    for mix in frontier(options):
        assert mix.kl == min(kl for saved, kl in sums if saved >= mix.saved)
        chosen = [each for each in options if mix.schemes.get(each.group) == each.scheme]
        assert mix.saved == sum(each.saved for each in chosen)
        assert mix.kl == sum(each.kl for each in chosen)


@given(OPTIONS)
def test_each_step_saves_more_at_no_less_a_byte(drawn: list[tuple[int, int, int, int]]) -> None:
    path = frontier(options_of(drawn))
    assert path[0] == Mix(schemes={}, saved=0, kl=0.0)
    steps = [(b.saved - a.saved, b.kl - a.kl) for a, b in itertools.pairwise(path)]
    assert all(saved > 0 <= kl for saved, kl in steps)
    slopes = [kl / saved for saved, kl in steps]
    assert slopes == sorted(slopes)


def test_it_ends_where_most_is_saved() -> None:
    options = options_of([(0, 0, 4, 1), (0, 1, 8, 9), (1, 0, 4, 2), (1, 1, 6, 100), (1, 2, 5, 120)])
    last = frontier(options)[-1]
    assert last.schemes == {"g0": "s1", "g1": "s1"}
    assert (last.saved, last.kl) == (14, 109.0)
