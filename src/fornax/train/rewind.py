"""Going back to before a loss spike: recovery points, and what the processes agree to do.

Where the run resumes is decided by process 0; the others saw the same metrics and say so first.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fornax.checkpoint import Checkpointer
from fornax.config.errors import ClusterError, FornaxError
from fornax.config.spikes import Spike, SpikeConfig, SpikeDetector
from fornax.mesh import hosts
from fornax.train.config import TrainerConfig
from fornax.train.session import Programs, Start, from_checkpoint, from_scratch, of_all_hosts
from fornax.train.skip_list import Rewind, SkipList
from fornax.train.snapshot import Snapshot, check_room
from fornax.train.state import TrainState, as_tree

__all__ = ["LossSpikeError", "SpikeGuard", "discard_stale"]


class LossSpikeError(Exception):
    """A step was a spike; the loop catches it where no step is half done."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(str(spike))
        self.spike = spike


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A state in memory, and all that goes with it."""

    step: int
    total: float
    position: int
    data: dict[int, dict]
    """Of this host's virtual shards."""
    window: dict[str, list[float]]
    state: Snapshot


class SpikeGuard:
    """Watches the steps of a run, and takes it back."""

    def __init__(
        self,
        config: TrainerConfig,
        spikes: SpikeConfig,
        *,
        programs: Programs,
        checkpointer: Checkpointer,
        path: Path,
        begun: Start,
    ) -> None:
        """Stand where the run does.

        Args:
          config: the run's.
          spikes: the limits.
          programs: those of the run.
          checkpointer: its checkpoints.
          path: where the skip list is kept.
          begun: where the run begins.

        Raises:
          ConfigError: when the snapshots do not fit into a host's memory.
        """
        self._run, self._config, self._programs = config, spikes, programs
        self._checkpointer, self._path, self._origin = checkpointer, path, begun.origin
        self._batches, self._skip = begun.batches, begun.batches.skip
        self._detector = SpikeDetector(spikes)
        self._detector.restore(begun.window)
        self._points: deque[_Point] = deque(maxlen=spikes.snapshots)
        if spikes.snapshot_every is not None:
            check_room(as_tree(programs.abstract), spikes.snapshots)

    @property
    def rewinds(self) -> int:
        """How often the run went back so far."""
        return len(self._skip.rewinds)

    def window(self) -> dict[str, list[float]]:
        """What a checkpoint has to hold, so that a resumed run judges as this one."""
        return self._detector.state()

    def check(self, step: int, batch: int, metrics: Mapping[str, float]) -> None:
        """Judge a step.

        Raises:
          LossSpikeError: when it is one.
        """
        spike = self._detector.judge(step, batch, metrics)
        if spike is not None:
            raise LossSpikeError(spike)

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be remembered, once the step was judged."""
        every = self._config.snapshot_every
        return every is not None and step % every == 0

    def remember(self, state: TrainState, step: int, total: float) -> None:
        """Copy the state after `step` into memory; waits for it."""
        point = _Point(
            step=step,
            total=total,
            position=self._batches.position,
            data=self._batches.state(),
            window=self._detector.state(),
            state=Snapshot(as_tree(state)),
        )
        self._points.append(point)

    def plan(self, spike: Spike) -> Rewind:
        """Decide what to leave out and where to go back to, and put it on the list.

        All processes call it together; the list is on disk when it returns, and checkpoints that
        were trained on what it now leaves out are gone.

        Raises:
          FornaxError: when the run went back too often already.
          ClusterError: when the processes do not see the same spike.
        """
        _agree(spike)
        rewind = Rewind(**hosts.decide(lambda: dataclasses.asdict(self._choose(spike))))
        last_good = self._last_good(rewind)
        self._skip.add(rewind)
        hosts.decide(lambda: self._skip.write(self._path))
        self._checkpointer.discard(last_good)
        while self._points and self._points[-1].step > last_good:
            self._points.pop()
        return rewind

    def go_back(self, rewind: Rewind) -> Start:
        """The state and position that the plan names; the stream stands there."""
        start = self._restored(rewind)
        self._detector.restore(start.window)
        return start

    def _choose(self, spike: Spike) -> Rewind:
        recent = [r for r in self._skip.rewinds if r.step > spike.step - self._config.within]
        if len(recent) >= self._config.max_rewinds:
            raise FornaxError(self._give_up(spike, recent))
        before = min(self._before(spike), spike.step - 1)
        skipped = self._batches.neighbours(
            spike.batch, before=before, after=self._config.skip_after
        )
        finite = spike.limit is not None
        planned = Rewind(
            step=spike.step,
            batch=spike.batch,
            metric=spike.metric,
            value=spike.value if finite else None,
            median=spike.median,
            limit=spike.limit,
            skipped=skipped,
            back_to=0,
            source="start",
            time=round(time.time(), 3),
        )
        last_good = self._last_good(planned)
        found = [(0, "start")]
        found += [(s, "checkpoint") for s in self._checkpointer.all_steps() if s <= last_good]
        found += [(p.step, "memory") for p in self._points if p.step <= last_good]
        step, source = max(found)  # memory before a checkpoint of the same step, by name
        return dataclasses.replace(planned, back_to=step, source=source)

    def _before(self, spike: Spike) -> int:
        """Batches to leave out before the spike's.

        When another batch at the same place is a spike too, for the second time, the cause is
        earlier: twice as many each time.
        """
        again = 0
        for rewind in reversed(self._skip.rewinds):
            if rewind.step < spike.step:
                break
            again += 1
        least = self._config.skip_before
        return least if again < 2 else max(1, least) * 2 ** (again - 1)

    @staticmethod
    def _last_good(rewind: Rewind) -> int:
        """The last step whose state no batch of the rewind went into."""
        return rewind.step - 1 - sum(number < rewind.batch for number in rewind.skipped)

    def _restored(self, rewind: Rewind) -> Start:
        if rewind.source == "checkpoint":
            return from_checkpoint(
                self._programs, self._checkpointer, self._batches, rewind.back_to
            )
        if rewind.source == "start":
            self._batches.restore(of_all_hosts(self._origin), 0)
            return from_scratch(self._run, self._programs, self._batches, self._origin)
        point = next(p for p in self._points if p.step == rewind.back_to)
        self._batches.restore(of_all_hosts(point.data), point.position)
        return Start(
            state=TrainState(**point.state.arrays()),
            step=point.step,
            total=point.total,
            batches=self._batches,
            window=point.window,
        )

    def _give_up(self, spike: Spike, recent: list[Rewind]) -> str:
        made = ", ".join(f"{r.step} (batch {r.batch})" for r in recent)
        return (
            f"{spike}, and the run went back {len(recent)} times within {self._config.within} steps"
            + (f" already, from the steps {made}" if recent else "")
            + "; the cause is not a few bad batches. Lower optim.learning_rate, clip gradients, "
            "look at the data around this batch, leave out more with spikes.skip_before, or, "
            "where such values are usual, raise spikes.loss or spikes.grad_norm; the same command "
            "resumes from the last checkpoint"
        )


def _agree(spike: Spike) -> None:
    seen = hosts.gather([spike.step, spike.batch, spike.metric])
    others = [f"process {n} {said}" for n, said in enumerate(seen) if said != seen[0]]
    if others:
        raise ClusterError(
            f"the processes do not see the same loss spike: process 0 has [step, batch, metric] "
            f"{seen[0]}, {', '.join(others)}; their states differ. Start all of them again: they "
            "resume from the last checkpoint"
        )


def discard_stale(checkpointer: Checkpointer, skip: SkipList) -> list[int]:
    """Delete the newest checkpoints while they were trained on a batch of the list.

    A run that was killed between the two leaves such. All processes call it together.

    Returns:
      The steps that were deleted.
    """
    gone = []
    while skip.batches and (step := checkpointer.resume_step()) is not None:
        if not hosts.decide(lambda at=step: skip.contradicts(checkpointer.read_metadata(at))):
            break
        checkpointer.discard(step - 1)
        gone.append(step)
    return gone
