"""Sizes of steps: each number of tokens has one, and not much of it is padding."""

import pytest

from fornax.llm.programs import bucket_for, buckets, powers_of_four, powers_of_two


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8, 13, 16, 17, 64, 100, 512])
@pytest.mark.parametrize(("make", "times"), [(buckets, 2), (powers_of_two, 2), (powers_of_four, 4)])
def test_sizes_ascend_to_the_limit_and_fit_what_is_asked(make, times, limit):
    sizes = make(limit)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == limit
    for count in range(1, limit + 1):
        assert count <= bucket_for(count, sizes) <= max(times * count, 4)


def test_coarse_sizes_are_few():
    assert powers_of_four(128) == (4, 16, 64, 128)
    assert powers_of_four(3) == (3,)
