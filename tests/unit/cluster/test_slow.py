"""Which worker is slow, of what each spends by itself while all steps take equally long."""

import pytest

from fornax.cluster.messages import Observation
from fornax.cluster.slow import Paces

HEALTHY = (0.01, 0.03, 0.06)


class Group:
    """Workers whose collectives hold all of them up to the slowest."""

    def __init__(self, count: int = 4) -> None:
        self.paces = Paces()
        self.totals = [[0.0, 0.0, 0.0] for _ in range(count)]
        self.step, self.at = 0, 100.0

    def steps(self, count: int, **slow: tuple[float, float, float]) -> list[bool]:
        """Make steps; `r2=(data, code, programs)` are the seconds of rank 2. What changed when."""
        changed = []
        for _ in range(count):
            self.step += 1
            spent = [slow.get(f"r{rank}", HEALTHY) for rank in range(len(self.totals))]
            self.at += max(map(sum, spent))
            for rank, (total, own) in enumerate(zip(self.totals, spent, strict=True)):
                self.totals[rank] = [a + b for a, b in zip(total, own, strict=True)]
                self.paces.add(self.seen(rank))
            changed.append(self.paces.judge())
        return changed

    def seen(self, rank: int) -> Observation:
        data, code, programs = self.totals[rank]
        return Observation(
            epoch=1,
            rank=rank,
            host="here",
            pid=1,
            agent_pid=2,
            entered_step=self.step,
            entered_ns=int(self.at * 1e9),
            data_seconds=data,
            code_seconds=code,
            program_seconds=programs,
        )


@pytest.mark.parametrize(
    ("spent", "where"),
    [
        ((0.31, 0.03, 0.06), "waiting for data"),
        ((0.01, 0.33, 0.06), "in its own code"),
        ((0.01, 0.03, 0.36), "in the devices' programs"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_a_slow_one_is_named_within_20_steps_with_the_cause(
    count: int, spent: tuple[float, float, float], where: str
):
    group = Group(count)
    assert not any(group.steps(60))
    changed = group.steps(20, r1=spent)
    assert changed.count(True) == 1
    assert group.paces.named is not None
    assert (group.paces.named.rank, group.paces.named.at_step) == (1, 80)
    assert where in group.paces.named.text
    group.steps(20, r1=spent)
    text = group.paces.named.text
    assert "holds each step up by 0.3 s of 0.4 s" in text
    assert "needs 0.4 s by itself, the others 0.1 s" in text
    assert not any(group.steps(20, r1=spent))
    assert group.steps(40).count(True) == 1
    assert group.paces.named is None


def test_one_long_step_and_what_is_a_little_slower_are_not_named():
    group = Group()
    group.steps(30)
    group.steps(1, r2=(0.01, 3.0, 0.06))
    group.steps(30)
    group.steps(1, r2=(3.0, 0.03, 0.06))
    assert not any(group.steps(30))
    assert not any(group.steps(100, r3=(0.01, 0.05, 0.06)))
    assert group.paces.named is None


def test_when_all_are_slow_nobody_is():
    group = Group()
    slow = (0.01, 0.03, 0.5)
    assert not any(group.steps(60, r0=slow, r1=slow, r2=slow, r3=slow))


def test_short_steps_are_judged_by_the_second():
    """A third of a step of two milliseconds is not evidence."""
    group = Group()
    fast = (0.0, 0.001, 0.001)
    every = {f"r{rank}": fast for rank in range(4)}
    assert not any(group.steps(3000, **{**every, "r1": (0.0, 0.004, 0.001)}))
    assert group.steps(3000, **{**every, "r1": (0.0, 0.03, 0.001)}).count(True) == 1


def test_others_take_over_after_a_fault():
    group = Group()
    group.steps(40, r1=(0.3, 0.03, 0.06))
    assert group.paces.named is not None
    group.paces.clear()
    assert group.paces.named is None
    assert not group.steps(8, r1=(0.3, 0.03, 0.06))[-1]
