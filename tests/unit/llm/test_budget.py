"""How prompts share the tokens of a step."""

from hypothesis import given
from hypothesis import strategies as st

from fornax.llm.budget import Job, share_tokens


def share(budget, *jobs, limit=4, base=0, buckets=()):
    return share_tokens(
        budget, [Job(*job) for job in jobs], limit=limit, base=base, buckets=buckets
    )


def test_short_prompt_passes_a_long_one_that_still_moves():
    assert share(512, (100_000, 100_000, True), (100, 100, False)) == [412, 100]
    assert share(512, (100_000, 100_000, True), (9_000, 9_000, False)) == [256, 256]


def test_equal_prompts_are_served_in_order():
    assert share(100, *[(80, 80, False)] * 4) == [80, 20, 0, 0]


def test_partial_prompts_are_limited():
    assert share(100, (90, 90, True), (500, 500, True), (400, 400, False), limit=2) == [90, 0, 10]
    assert share(100, (700, 700, True), (500, 500, False), (20, 20, False), limit=1) == [100, 0, 0]


def test_most_tokens_of_a_prompt_are_kept():
    assert share(100, (500, 30, True), (500, 30, False)) == [30, 30]


def test_excess_over_a_bucket_waits():
    buckets = (128, 256, 512)
    assert share(512, (270, 270, False), buckets=buckets) == [256]
    assert share(512, (400, 400, False), buckets=buckets) == [400]
    assert share(500, (250, 250, False), base=12, buckets=buckets) == [244]


def test_bucket_leaves_no_prompt_more_partly_computed():
    jobs = [(100, 100, True), (300, 60, False)]
    assert share(300, *jobs, limit=1, buckets=(128, 256)) == [100, 28]
    jobs = [(100, 100, True), (300, 30, False)]
    assert share(300, *jobs, limit=1, base=14, buckets=(100, 128, 256)) == [100, 14]
    jobs = [(100, 100, True), (300, 10, False)]
    assert share(300, *jobs, limit=1, base=30, buckets=(128, 256)) == [100, 10]


def test_small_padding_is_cheaper_than_a_step():
    assert share(64, (9, 9, False), buckets=(8, 12, 16, 64)) == [9]


@given(
    budget=st.integers(0, 300),
    jobs=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=6),
    running=st.integers(0, 3),
    spare=st.integers(0, 2),
    base=st.integers(0, 50),
)
def test_shares_fit_and_the_first_moves(budget, jobs, running, spare, base):
    made = [
        Job(remaining, min(most, remaining), index < running)
        for index, (remaining, most) in enumerate(jobs)
    ]
    limit = max(1, min(running, len(jobs)) + spare)
    grants = share_tokens(budget, made, limit=limit, base=base, buckets=(1, 64, 200, 400))
    assert sum(grants) <= budget
    assert all(0 <= grant <= job.most for grant, job in zip(grants, made, strict=True))
    if budget and made:
        assert grants[0] > 0
    partial = sum(
        job.running or 0 < grant < job.remaining
        for grant, job in zip(grants, made, strict=True)
        if grant < job.remaining
    )
    assert partial <= limit
