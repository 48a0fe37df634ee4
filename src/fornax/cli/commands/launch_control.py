"""`fornax launch status`, `events`, `drill` and so on: a run, from another terminal."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT, Control
from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.cluster.drill import Fault
    from fornax.cluster.storm import Target

_FOLLOW_SECONDS = 0.2
_FAULTS: tuple["Fault", ...] = ("kill", "stop", "lose", "slow", "partition", "preempt")
_DONE = {"kill": "killed", "stop": "stopped"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusArguments:
    """Show what each rank of a launched run is doing, and where the time of the run went.

    Of a server it says what each replica does. heartbeat is the age of the last one, late
    how long after the first rank it entered its step; a slow rank says what it costs each step.
    goodput is the share of the time that went into steps that were kept; it is there for runs of
    fornax train as well.

    example:
      fornax launch status runs/four
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""
    json: Annotated[bool, NO_DEFAULT] = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventsArguments:
    """Print the events of a launched run, one per line: faults, their causes, and recoveries.

    examples:
      fornax launch events runs/four
      fornax launch events runs/four --follow
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""
    follow: Annotated[bool, NO_DEFAULT] = False
    """Continue until the run ends."""
    json: Annotated[bool, NO_DEFAULT] = False
    """Print the lines of events.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimelineArguments:
    """Draw a run's timeline: a lane per rank, its faults, losses, and where the time went.

    One self-contained page, in the run directory. Runs of fornax train have one lane.

    examples:
      fornax launch timeline runs/four
      fornax launch timeline runs/four --output picture.svg
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""
    output: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write this page, or the picture alone (.svg) (default: RUN/timeline.html)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrillArguments:
    """Inject faults into a launched run on this machine, and check that it recovers from each.

    Real signals: SIGKILL or SIGSTOP to the worker of a rank; to its host's agent SIGKILL, which
    takes the worker and the host's memory with it, or SIGTERM, as when a scheduler takes the host.
    A slow rank is stopped and continued until it is named. Several faults are injected in the order
    of the options below, five good steps between two. A line each says how long it took and what
    was over its limits. A replica of a server can be killed or stopped.

    examples:
      fornax launch drill runs/four --kill 2
      fornax launch drill --stop 0 --slow 1 --partition 3 --preempt 2
      fornax launch drill runs/four --storm 10 --seed 1
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""
    kill: Annotated[str | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Kill this rank, or a sampler or data worker: sampler:1, data:1."""
    stop: Annotated[str | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Stop this rank, or a sampler or data worker; it stays there and does nothing."""
    lose: Annotated[int | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Take the host of this rank away at once, with the snapshots in its memory."""
    slow: Annotated[int | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Slow this rank down to a quarter until the run names it."""
    partition: Annotated[int | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Cut the host of this rank off from the rest."""
    preempt: Annotated[int | None, arg(metavar="RANK", help_behavior_hint="")] = None
    """Take the host of this rank away, with notice."""
    controller: Annotated[bool, NO_DEFAULT] = False
    """Kill the controller: agents and ranks end with it."""
    storm: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Number of random faults of all these kinds, five good steps or more between two."""
    seed: Annotated[int | None, arg(metavar="S", help_behavior_hint="(default: 0)")] = None
    """Which faults a storm is of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeArguments:
    """Change the number of hosts of a launched training run, and wait until it trains on them.

    All finish a step and keep it in their agents' memory; a group of the new size resumes from
    there within the same launch, with the same global batches. Of a run with --hosts 3..8 it is the
    most that it takes.

    example:
      fornax launch resize runs/four --hosts 3
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""
    hosts: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollingRestartArguments:
    """Restart the replicas of a launched server one after another, without a failed request.

    Each gets no new requests, finishes those that it has, ends, and is started again with what is
    on disk now; the next one follows when it is ready. If one does not start, the others stay.

    example:
      fornax launch rolling-restart runs/serve-8000
    """

    run_dir: Annotated[Positional[Path | None], arg(metavar="RUN", help_behavior_hint="")] = None
    """The run directory (default: the one that is running below runs/)."""


def _serves(run_dir: Path) -> bool:
    """Whether a server was launched in a directory."""
    from fornax.cluster.files import ClusterFiles
    from fornax.config.jsonl import read_json_lines

    files = ClusterFiles(run_dir.expanduser())
    return any("replicas" in event for event in read_json_lines(files.events))


def _status(arguments: StatusArguments) -> int:
    run_dir = _named(arguments.run_dir)
    if _serves(run_dir):
        from fornax.cluster.routing import read_serving_status as read
    else:
        from fornax.cluster import read_status as read
    status = read(run_dir)
    if arguments.json:
        found = dataclasses.asdict(status)
        if (goodput := getattr(status, "goodput", None)) is not None:
            found["goodput"]["share"] = goodput.goodput
        _say(json.dumps(found, default=str))
        return 0
    for line in status.lines():
        _say(line)
    return 0


def _events(arguments: EventsArguments) -> int:
    from fornax.cluster import read_events

    run_dir, shown = _named(arguments.run_dir), 0
    while True:
        events = read_events(run_dir)
        for event in events[shown:]:
            _say(json.dumps(event) if arguments.json else _line(event))
        ended = bool(events) and events[-1].get("state") == "ended"
        shown = len(events)
        if ended or not arguments.follow:
            return 0
        time.sleep(_FOLLOW_SECONDS)


def _timeline(arguments: TimelineArguments) -> int:
    from fornax.cluster.timeline import write_timeline

    _say(str(write_timeline(_named(arguments.run_dir).expanduser(), arguments.output)))
    return 0


def _line(event: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    if "drill" in event:
        whom = [each for each in ("rank", "sampler", "data", "replica") if each in event]
        said = " ".join(["drill:", event["drill"], *(f"{each} {event[each]}" for each in whom)])
    elif "program" in event:
        said = f"{event['program']}: {event['how']} in {event['seconds']:.2f} s"
    elif "state" not in event:  # of a sampler, a data worker, or the controller
        said = event["why"]
    else:
        said = f"{event['state']}: {event['why']}"
    epoch = f"epoch {event['epoch']}  " if event["epoch"] else ""
    return f"{clock}  {epoch}{said}"


def _rolling_restart(arguments: RollingRestartArguments) -> int:
    run_dir = _named(arguments.run_dir)
    if not _serves(run_dir):
        raise ConfigError(
            f"{run_dir} is not a server's; a rolling restart is of fornax launch --replicas"
        )
    from fornax.cluster import read_events
    from fornax.cluster.routing import request_rolling_restart

    shown = request_rolling_restart(run_dir)
    while True:
        events = read_events(run_dir)
        for event in events[shown:]:
            _say(_line(event))
            if event.get("rolling") in ("done", "stopped") or event.get("state") == "ended":
                return 0 if event.get("rolling") == "done" else 1
        shown = len(events)
        time.sleep(_FOLLOW_SECONDS)


def _resize(arguments: ResizeArguments) -> int:
    run_dir, hosts = _named(arguments.run_dir), arguments.hosts
    if hosts is None or hosts < 1:
        raise ConfigError("say how many hosts are to train, 1 or more: --hosts N")
    from fornax.cluster import hosts_at_work, read_events, resize

    shown = resize(run_dir, hosts)
    while True:
        events = read_events(run_dir)
        for event in events[shown:]:
            _say(_line(event))
        shown = len(events)
        if events[-1].get("state") == "ended":
            return 1
        if hosts_at_work(events) == hosts:
            return 0
        time.sleep(_FOLLOW_SECONDS)


def _drill(arguments: DrillArguments) -> int:
    run_dir = _named(arguments.run_dir)
    asked = {fault: getattr(arguments, fault) for fault in _FAULTS}
    named = {fault: rank for fault, rank in asked.items() if rank is not None}
    if bool(named or arguments.controller) == (arguments.storm is not None):
        flags = ", ".join(f"--{fault} RANK" for fault in _FAULTS)
        raise ConfigError(
            f"a drill is named faults or a storm; write one of {flags}, --controller, several of "
            "them, or --storm N alone"
        )
    if arguments.seed is not None and arguments.storm is None:
        raise ConfigError(f"--seed {arguments.seed} is of a storm; add --storm N")
    serves = _serves(run_dir)
    if arguments.storm is not None:
        return _storm(run_dir, arguments.storm, arguments.seed or 0, serves=serves)
    faults = [(fault, *_target(fault, target)) for fault, target in named.items()]
    if serves and arguments.controller:
        raise ConfigError("--controller is for training; a replica has --kill N and --stop N")
    if serves:
        return _drill_replicas(run_dir, faults)
    from fornax.cluster import drills

    controller: list[tuple[Fault, Target, None]] = (
        [("controller", "rank", None)] if arguments.controller else []
    )
    for outcome in drills(run_dir, [*faults, *controller]):
        _say(str(outcome))
    return 0


def _drill_replicas(run_dir: Path, faults: "Sequence[tuple[Fault, Target, int]]") -> int:
    from fornax.cluster.routing import drill_replica

    for fault, target, _ in faults:
        if fault not in ("kill", "stop") or target != "rank":
            what = f"--{fault}" if target == "rank" else f"--{fault} {target}"
            raise ConfigError(f"{what} is for training; a replica has --kill N and --stop N")
    for fault, _, number in faults:
        pid = drill_replica(run_dir, fault, number)
        _say(f"{_DONE[fault]} replica {number}, process {pid}")
    return 0


def _target(fault: str, target: str | int) -> "tuple[Target, int]":
    """What is meant, and its number."""
    role, colon, number = str(target).rpartition(":")
    for known in ("sampler", "data"):
        if role == known and number.isdecimal():
            return known, int(number)
    if colon or not number.isdecimal():
        raise ConfigError(f"--{fault} {target} is not a rank, such as 2, nor sampler:1 or data:1")
    return "rank", int(number)


def _storm(run_dir: Path, count: int, seed: int, *, serves: bool) -> int:
    if serves or count < 1:
        raise ConfigError(f"--storm {count} is 1 or more faults, and for training runs")
    from fornax.cluster import storm

    for number, outcome in enumerate(storm(run_dir, count, seed), start=1):
        _say(f"{number}/{count}  {outcome}")
    return 0


def _named(run_dir: Path | None) -> Path:
    """The run directory that was given, or that of the one run that is launched below runs/."""
    if run_dir is not None:
        return run_dir
    from fornax.cluster.files import ClusterFiles

    found = sorted(path.parent for path in Path("runs").glob("*/cluster"))
    running = [path for path in found if ClusterFiles(path).is_held()]
    if len(running) != 1:
        there = f"{', '.join(map(str, running))} run" if running else "nothing is launched"
        raise ConfigError(
            f"no run is named, and {there} below runs/; write the run directory after the command"
        )
    return running[0]


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


_COMMANDS = {
    "status": Control(StatusArguments, _status),
    "events": Control(EventsArguments, _events),
    "timeline": Control(TimelineArguments, _timeline),
    "drill": Control(DrillArguments, _drill),
    "resize": Control(ResizeArguments, _resize),
    "rolling-restart": Control(RollingRestartArguments, _rolling_restart),
}


def command(name: str) -> Control:
    """The command of that name."""
    return _COMMANDS[name]
