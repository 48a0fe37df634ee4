"""Runs the contestants of the LLM benchmarks: processes that take turns on the same prompts.

What is said over their pipes is described in peers/_protocol.py. Every contestant of a cell (batch,
prompt length) gets the same prompts in the same round, new ones each round, in an order that
rotates; ratios are taken within a round.
"""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from _harness import FailedError, Worker

T = TypeVar("T")

PAUSE_S = 0.3
"""Between turns: threads of the last one stop spinning, caches of the processor settle."""


TOGETHER_S = 1e-4
"""Tokens of a row that come so soon after each other were handed over together."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is asked in one turn: rows, tokens of each prompt, tokens to generate for each."""

    batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Turn:
    """What one contestant did in one turn: for each row, when each token came, and which."""

    seconds: list[list[float]]
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """Generated tokens per second, from the first prompt handed over to the last token."""
        return sum(map(len, self.seconds)) / max(row[-1] for row in self.seconds)

    @property
    def first_token_s(self) -> float:
        """Median over rows of the time to the first token."""
        return statistics.median(row[0] for row in self.seconds)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive tokens of a row, of all rows."""
        return [gap for row in self.seconds for gap in _gaps(row)]

    def paces_s(self, *, all_rows: bool = False) -> list[float]:
        """Time that each token of a row took but the first ones, of all rows; of several that were
        handed over together the mean. With `all_rows` only those made while every row was decoding:
        after the last prompt was read and before the first row ended."""
        begin = max(row[0] for row in self.seconds) if all_rows else 0.0
        end = min(row[-1] for row in self.seconds) if all_rows else float("inf")
        found: list[float] = []
        for row in self.seconds:
            starts = [0, *(i + 1 for i, gap in enumerate(_gaps(row)) if gap > TOGETHER_S), len(row)]
            for before, at, after in zip(starts, starts[1:], starts[2:], strict=False):
                if row[before] >= begin and row[at] <= end + TOGETHER_S:
                    found += [(row[at] - row[before]) / (after - at)] * (after - at)
        return found


def _gaps(row: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(row)]


@dataclass
class Standing:
    """One contestant's turns in one cell, by round."""

    turns: list[Turn] = field(default_factory=list)

    def rate(self) -> float:
        return statistics.median(turn.rate for turn in self.turns)

    def first_token_s(self) -> float:
        return statistics.median(turn.first_token_s for turn in self.turns)

    def gap_s(self, percent: float) -> float:
        """Percentile of the time between tokens, over all rounds."""
        gaps = sorted(gap for turn in self.turns for gap in turn.gaps_s)
        return gaps[min(len(gaps) - 1, int(len(gaps) * percent / 100))] if gaps else 0.0

    def pace_s(self, *, all_rows: bool = False) -> float:
        """Median time of a token, over all rounds, as `Turn.paces_s` has it; 0 if there is none."""
        paces = [pace for turn in self.turns for pace in turn.paces_s(all_rows=all_rows)]
        return statistics.median(paces) if paces else 0.0


def ratio(mine: Standing, theirs: Standing) -> float:
    """Median over rounds of my tokens/s over theirs in the same round."""
    pairs = zip(mine.turns, theirs.turns, strict=True)
    return statistics.median(a.rate / b.rate for a, b in pairs)


def agreement(mine: Standing, theirs: Standing) -> float:
    """Share of rows, over all rounds, with exactly the same tokens."""
    pairs = [
        a == b
        for one, other in zip(mine.turns, theirs.turns, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=True)
    ]
    return sum(pairs) / len(pairs)


class Contestant:
    """One contestant's process."""

    def __init__(self, name: str, command: Sequence[str], cleanup: contextlib.ExitStack) -> None:
        self.name = name
        self._worker = Worker(name, command, cleanup)
        said = self._worker.receive()
        self.absent: str | None = said.get("absent")
        self.details: dict[str, Any] = said.get("ready", {})

    def prepare(self, cell: Cell) -> float:
        """Allocate, compile, warm up for the cell; return the seconds it took."""
        asked = {"batch": cell.batch, "prompt": cell.prompt, "new": cell.new}
        return self._worker.ask({"do": "prepare", **asked})["prepared"]

    def release(self) -> bool:
        """Have the memory of its cache given back until `prepare`."""
        return self._worker.ask({"do": "release"})["released"]

    def turn(self, prompts: list[list[int]], new: int) -> Turn:
        """Generate `new` tokens for each prompt."""
        said = self._worker.ask({"do": "turn", "prompts": prompts, "new": new})
        turn = Turn(said["seconds"], said["tokens"])
        lengths = {len(row) for row in turn.tokens}
        if lengths != {new} or len(turn.tokens) != len(prompts):
            raise FailedError(
                f"{self.name} made {sorted(lengths)} tokens a row where {new} were asked"
            )
        return turn


@contextlib.contextmanager
def started(commands: Mapping[str, Sequence[str]]) -> Iterator[list[Contestant]]:
    """Start a process for each command, ended with the context."""
    with contextlib.ExitStack() as cleanup:
        contestants = []
        for name, command in commands.items():
            note(f"starting {name}")
            contestants.append(Contestant(name, command, cleanup))
        yield contestants


def contest(
    contestants: Sequence[Contestant],
    cell: Cell,
    draw: Callable[[int], list[list[int]]],
    *,
    rounds: int,
    budget_s: float,
    one_by_one: bool = False,
) -> dict[str, Standing]:
    """Let the contestants take turns in one cell.

    One that fails is left out from then on, here and in later cells; `absent` says why.

    Args:
        draw: round number -> the prompts of that round.
        rounds: how many turns count; fewer when they take longer than `budget_s` together, at
            least one. A first round is thrown away unless it alone takes the budget.
        one_by_one: only who has the turn keeps memory for a cache, where all would be too many.
    """
    playing = [c for c in contestants if c.absent is None]
    if one_by_one:
        for contestant in playing:
            _managed(contestant, cell, contestant.release)
    else:
        playing = [c for c in playing if _managed(c, cell, c.prepare, cell) is not None]
    standings = {contestant.name: Standing() for contestant in playing}
    began = time.monotonic()
    for number in range(rounds + 1):
        prompts = draw(number)
        first = number % max(1, len(playing))
        for contestant in [*playing[first:], *playing[:first]]:
            turn = _turn(contestant, cell, prompts, one_by_one)
            if turn is None:
                playing.remove(contestant)
                del standings[contestant.name]
            else:
                standings[contestant.name].turns.append(turn)
        spent = time.monotonic() - began
        note(f"  {cell}: round {number}, {spent:.0f} s")
        if spent * (number + 2) / (number + 1) > budget_s:
            break
    for standing in standings.values():
        if len(standing.turns) > 1:
            del standing.turns[0]
    return standings


def _turn(
    contestant: Contestant, cell: Cell, prompts: list[list[int]], one_by_one: bool
) -> Turn | None:
    """One turn, None where it failed; with `one_by_one` also what comes before and after it."""
    if one_by_one:
        _managed(contestant, cell, contestant.prepare, cell)
    time.sleep(PAUSE_S)
    turn = _managed(contestant, cell, contestant.turn, prompts, cell.new)
    if one_by_one:
        _managed(contestant, cell, contestant.release)
    return turn


def _managed(contestant: Contestant, cell: Cell, do: Callable[..., T], *asked: Any) -> T | None:
    """Call `do`; None, and the contestant marked absent, where it failed, now or before."""
    if contestant.absent is not None:
        return None
    try:
        return do(*asked)
    except FailedError as failure:
        contestant.absent = f"failed at {cell}: {failure}"
        note(f"  {contestant.name} {contestant.absent}")
        return None


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def note(line: str) -> None:
    """Say on standard error how far the run is."""
    print(line, file=sys.stderr, flush=True)
