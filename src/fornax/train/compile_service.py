"""One process of a group compiles a program, and the others load it; kept for the next group.

Under `fornax launch` the agent of each host keeps the programs of its process (`ProgramMemory`).
When a group needs one, a process that has it gives it to those that lack it; where none has,
process 0 compiles it. So a group that forms again after a fault compiles nothing, and neither does
one of another number of processes whose programs were made ahead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from fornax.mesh import hosts
from fornax.mesh.compilation import Made, compile_as, program_key
from fornax.train.program_memory import ProgramMemory

__all__ = ["CompileService", "Event", "why_off"]


def why_off() -> str | None:
    """Why programs are not shared here; None where they are."""
    platform = jax.default_backend()
    if platform == "cpu":
        return None
    return (
        f"each process compiles its own programs: giving those of one to the others is tested on "
        f"cpu devices, and these are {platform}"
    )


@dataclass(frozen=True, kw_only=True)
class Event:
    """How the group came by a program."""

    program: str
    how: str
    """`loaded` when no process compiled it, else `compiled`."""
    seconds: float
    """The longest that a process took."""
    ranks: tuple[int, ...]
    """The processes that compiled it."""

    def __str__(self) -> str:
        """For people."""
        if self.how == "loaded":
            return f"{self.program}: loaded in {self.seconds:.2f} s"
        who = ", ".join(map(str, self.ranks))
        return f"{self.program}: compiled in {self.seconds:.2f} s by rank {who}"


class CompileService:
    """The programs of this process's group. All processes ask for the same ones in one order."""

    def __init__(
        self, memory: ProgramMemory, devices: np.ndarray, tell: Callable[[Event], None]
    ) -> None:
        """Share programs.

        Args:
          memory: of this host.
          devices: of the mesh that the programs run on.
          tell: called with how each program came to be, in all processes.
        """
        self._memory, self._devices, self._tell = memory, devices, tell
        self._on_trial: list[str] = []

    def compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The executable of a program that all processes have lowered.

        Args:
          name: for people.
          lowered: the program.
        """
        key = program_key(lowered, self._devices)
        image, refused = self._memory.find(key)
        said = hosts.gather([key, image is not None, refused])
        began = time.monotonic()
        if len({theirs for theirs, *_ in said}) > 1:
            compiled, made = compile_as(lowered, None)  # other processors, or other programs
        else:
            has = [have for _, have, _ in said]
            compiled, made = self._of_group(key, lowered, image, has, any(r for *_, r in said))
        self._report(name, time.monotonic() - began, made)
        return compiled

    def _of_group(
        self,
        key: str,
        lowered: jax.stages.Lowered,
        image: bytes | None,
        has: Sequence[bool],
        refused: bool,
    ) -> tuple[jax.stages.Compiled, Made]:
        first = jax.process_index() == 0
        if refused or not any(has):
            mine = compile_as(lowered, None, anew=refused) if first else None
            given = hosts.share(mine[1].image or b"" if mine else None, 0)
            if mine is None:
                mine = compile_as(lowered, given or None)
        else:
            given = image if all(has) else hosts.share(image, has.index(True))
            mine = compile_as(lowered, given)
        made = mine[1]
        if made.image is not None:
            if made.image is not image:
                self._memory.keep(key, made.image)
            self._memory.begin_trial(key)
            self._on_trial.append(key)
        return mine

    def _report(self, name: str, seconds: float, made: Made) -> None:
        said = hosts.gather([made.loaded, seconds])
        ranks = tuple(n for n, (loaded, _) in enumerate(said) if not loaded)
        longest = max(took for _, took in said)
        how = "compiled" if ranks else "loaded"
        self._tell(Event(program=name, how=how, seconds=round(longest, 3), ranks=ranks))

    def end_trials(self, results: object) -> None:
        """Wait for the results of the programs that ran for the first time: they are tried."""
        if self._on_trial:
            jax.block_until_ready(results)
            while self._on_trial:
                self._memory.end_trial(self._on_trial.pop())
