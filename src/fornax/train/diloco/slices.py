"""What a run does differently as one slice of several: its rows, its place, where it begins."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.data import Hosts
from fornax.train.agreement import code_digest
from fornax.train.config import TrainConfig, TrainerConfig
from fornax.train.diloco.config import DilocoConfig
from fornax.train.diloco.link import Link, SlicePlace, find_slice
from fornax.train.diloco.outer import OuterOptimizer
from fornax.train.diloco.sync import SliceSync
from fornax.train.resume import fixed_keys
from fornax.train.session import Programs, Start
from fornax.train.task import Batches, Task

__all__ = ["SliceRun", "slice_run"]


class SliceRun:
    """One slice's part in a run."""

    def __init__(self, config: TrainConfig, diloco: DilocoConfig, place: SlicePlace) -> None:
        """Connect nothing yet.

        Raises:
          ConfigError: for a batch that the slices cannot share.
        """
        if config.batch_size % place.count:
            raise ConfigError(
                f"batch_size={config.batch_size} does not divide into {place.count} slices; it "
                f"counts the rows of a step over all of them, so use a multiple of {place.count}"
            )
        self._config, self._diloco, self.place = config, diloco, place

    def task(self, task: Task) -> Task:
        """`task` over this slice's rows of each training batch; evaluation reads all of its own."""
        index, count = self.place.index, self.place.count

        def batches(split: str, hosts: Hosts) -> Batches:
            if split == "train":
                hosts = Hosts(
                    index=index * hosts.count + hosts.index,
                    count=count * hosts.count,
                    multiple=count * hosts.multiple,
                )
            return task.batches(split, hosts)

        return replace(task, batches=batches)

    def begin(
        self, programs: Programs, checkpointer: Checkpointer, load: Callable[[Any], Start]
    ) -> tuple[SliceSync, Start]:
        """Join the other slices.

        Args:
          programs: of the run.
          checkpointer: of this slice; checkpoints newer than the one that all slices begin at are
            deleted.
          load: to the newest checkpoint's state, or the first, given what the state of the outer
            optimizer looks like.

        Returns:
          What exchanges, and where the slice begins.

        Raises:
          ClusterError: when the slices do not fit together, or the exchange cannot be reached.
        """
        optimizer = OuterOptimizer(self._diloco, programs.parts, programs.abstract.params)
        link = Link(
            self.place,
            rank=jax.process_index(),
            ranks=jax.process_count(),
            timeout=self._diloco.timeout,
            join_timeout=self._config.processes.join_timeout,
        )
        sync = SliceSync(self._diloco, optimizer, link)
        begun: list[Start] = []

        def loaded(step: int | None) -> tuple[Any, int, Any]:
            if step is not None:
                checkpointer.discard(step)
            if begun:
                begun.pop().batches.close()
            begun.append(load(optimizer.abstract()))
            return begun[0].state, begun[0].step, begun[0].outer

        state, step, taken = sync.begin(checkpointer.all_steps, self._same(), loaded)
        (start,) = begun
        return sync, replace(start, state=state, step=step, saved=not taken)

    def _same(self) -> Mapping[str, str]:
        """What all slices must have in common, by name."""
        return {
            **fixed_keys(self._config),
            "the code": code_digest(),
            "processes": str(jax.process_count()),
            "devices": str(jax.local_device_count()),
        }


def slice_run(config: TrainerConfig) -> SliceRun | None:
    """This process's slice; None for a run that is not divided into slices.

    Raises:
      ConfigError: when the config has slices and the environment does not, or the other way.
    """
    place = find_slice()
    diloco = config.diloco if isinstance(config, TrainConfig) else None
    if place is None and diloco is None:
        return None
    if place is None:
        raise ConfigError(
            "diloco is set, and this process belongs to no slice; start the run with fornax launch "
            "--slices 2 -- train …, or remove diloco"
        )
    if diloco is None or not isinstance(config, TrainConfig):
        raise ConfigError(
            f"this is slice {place.index} of {place.count}, and the config does not say how slices "
            "exchange; add diloco to it, such as diloco: {sync_every: 100}, or launch one group "
            "without --slices"
        )
    return SliceRun(config, diloco, place)
