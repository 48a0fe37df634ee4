"""`fornax launch`: a command as several processes that recover from faults."""

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError
from fornax.config.run_paths import default_run_dir

if TYPE_CHECKING:
    from fornax.cluster.ray_engine import RayEngine

_LAUNCHED = ("train", "tune")
_PROGRAM = "fornax.cli.main:main"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Run a command as several processes, one per host, and recover from faults.

    The words after -- are a command, train or tune, as for one process; each process is one host
    of its run. A process that dies, stops or hangs is named, and all resume from memory or the
    newest checkpoint, to the same losses. Ctrl-C and SIGTERM save and stop; the same command
    resumes. Logs are in RUN/cluster, events in RUN/events.jsonl; those of a slice in RUN/slice-K.

    examples:
      fornax launch --hosts 4 -- train --config recipes/stdlib.yaml --run-dir runs/four
      fornax launch --slices 2 -- train --config run.yaml --diloco.sync-every 50 --run-dir runs/two
      fornax launch --engine ray --hosts 3..8 -- train --config run.yaml
      fornax launch --hosts 2 --samplers 2 -- tune grpo --model DIR --data p.jsonl --reward r.py:f
      fornax launch status runs/four        (also events, drill, resize, rolling-restart)
      fornax launch --replicas 3 -- serve DIR --port 8000
    """

    hosts: Annotated[str | None, arg(metavar="N|N..M", help_behavior_hint="(default: 2)")] = None
    """Hosts of a run or slice (3..8: those that are there), or processes of a replica."""
    engine: Literal["local", "ray"] = "local"
    """Hosts and replicas are processes of this machine, or what Ray places."""
    address: Annotated[str | None, arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """auto, HOST:PORT or ray://HOST:PORT of Ray (default: one is started, and ends with this)."""
    private_network: Annotated[bool, NO_DEFAULT] = False
    """Use other machines of Ray's: their network is private."""
    slices: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Slices of a DiLoCo run, which continues without a lost one."""
    samplers: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Processes that draw completions for tune grpo or ppo."""
    data_workers: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Processes that read and transform the input."""
    stall_limit: Annotated[
        float | None,
        arg(metavar="SECONDS", help_behavior_hint="(default: 1 in steps, else 5; of replicas 30)"),
    ] = None
    """A process counts as hung after this long without a heartbeat; at least five median steps."""
    mtbf: Annotated[str | None, arg(metavar="TIME", help_behavior_hint="(default: 24h)")] = None
    """Between failures of a host: how often to snapshot."""
    local_checkpoints: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """On each host's own disk: copies of snapshots, for the next launch."""
    slow: Annotated[
        Literal["report", "evict"] | None,
        arg(metavar="report|evict", help_behavior_hint="(default: report)"),
    ] = None
    """Name a host that holds up steps, or replace it too."""
    no_spares: Annotated[bool, NO_DEFAULT] = False
    """No process ready for each host: slower after a fault."""
    replicas: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many replicas of serve or host."""
    run_dir: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Of replicas (default: runs/COMMAND-PORT)."""
    routing: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE", help_behavior_hint="")] = ()
    """policy=prefix-aware, least-requests, round-robin, ..."""


def run(arguments: Arguments, words: Sequence[str]) -> int:
    """Launch; the exit code is that of the run."""
    from fornax.cli.replicas import REPLICATED

    if arguments.replicas is not None or (words and words[0] in REPLICATED):
        return _replicas(arguments, words)
    if arguments.run_dir is not None or arguments.routing:
        raise ConfigError(
            "--run-dir and --routing before the two dashes are for --replicas; write the run "
            "directory of a training command after them"
        )
    from fornax.cluster import Job, Limits, launch
    from fornax.cluster.launch import check_local_checkpoints
    from fornax.config.quantities import parse_time

    least, most = _hosts(arguments.hosts or "2")
    limits = Limits()
    if (given := arguments.stall_limit) is not None:
        if given < 1:
            raise ConfigError(f"--stall-limit {given:g} must be 1 or more")
        limits = Limits(frozen=given, stall=given)
    if arguments.data_workers is not None:
        _check_data_workers(arguments.data_workers, words)
    words, run_dir = _with_run_dir(words)
    if arguments.slices is not None:
        return _slices(arguments.slices, arguments, words, run_dir)
    if arguments.samplers is not None:
        _check_samplers(arguments.samplers, arguments, words)
    job = Job(
        hosts=most,
        least=least,
        words=tuple(words),
        limits=limits,
        mtbf=parse_time("mtbf", arguments.mtbf or "24h"),
        local_checkpoints=check_local_checkpoints(arguments.local_checkpoints, arguments.engine),
        slow=arguments.slow or "report",
    )
    bar = None
    if sys.stderr.isatty():
        from fornax.config.progress import Bar

        bar = Bar()
    return launch(
        job,
        run_dir,
        engine=arguments.engine,
        address=arguments.address,
        private_network=arguments.private_network,
        spare=not arguments.no_spares,
        bar=bar,
        samplers=arguments.samplers or 0,
        sampler_program="fornax.cli.sampler:serve",
        data_workers=arguments.data_workers or 0,
    )


def _check_data_workers(count: int, words: Sequence[str]) -> None:
    if count < 1:
        raise ConfigError(f"--data-workers {count} must be 1 or more")
    if words[:1] == ["tune"]:
        raise ConfigError("--data-workers read for train: tune encodes its own; leave it out")


def _hosts(text: str) -> tuple[int, int]:
    """The fewest and the most hosts of `4` or `3..8`."""
    match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(
            f"--hosts {text} must be 1 or more, such as 4, or a range from fewer to more, such as "
            "3..8"
        )
    return least, most


def _replicas(arguments: Arguments, words: Sequence[str]) -> int:
    from fornax.cli.replicas import run_replicas

    of_training = (
        *(arguments.slices, arguments.mtbf, arguments.slow, arguments.samplers),
        arguments.no_spares or None,
        *(arguments.data_workers, arguments.local_checkpoints),
    )
    if any(given is not None for given in of_training):
        raise ConfigError(
            "--slices, --samplers, --data-workers, --mtbf, --slow, --local-checkpoints and "
            "--no-spares are for training commands; leave them out for serve and host"
        )
    if arguments.engine == "local" and (arguments.address or arguments.private_network):
        raise ConfigError(
            "--address and --private-network are of a Ray cluster; add --engine ray, or leave them "
            "out"
        )
    if arguments.replicas is None and arguments.hosts is None:
        raise ConfigError(
            f"{words[0]} is launched with --replicas, --hosts or both: fornax launch --replicas 3 "
            f"-- {' '.join(words)}"
        )
    least, hosts = _hosts(arguments.hosts or "1")
    if least != hosts:
        raise ConfigError(
            f"--hosts {arguments.hosts} is a range, and a replica has one size; give one number"
        )
    return run_replicas(
        1 if arguments.replicas is None else arguments.replicas,
        words,
        hosts=hosts,
        run_dir=arguments.run_dir,
        routing=arguments.routing,
        stall_limit=arguments.stall_limit,
        ray=_ray(arguments) if arguments.engine == "ray" else None,
    )


def _ray(arguments: Arguments) -> "Callable[[int], RayEngine]":
    """Connects to Ray, or starts it for this many processes."""
    from fornax.cluster.launch import open_ray

    return lambda processes: open_ray(
        processes, arguments.address, private_network=arguments.private_network
    )


def _slices(count: int, arguments: Arguments, words: Sequence[str], run_dir: Path) -> int:
    from fornax.cluster import launch_slices

    if count < 1:
        raise ConfigError(f"--slices {count} must be 1 or more")
    if arguments.engine != "local" or arguments.address or arguments.private_network:
        raise ConfigError("--slices works with processes of this machine; leave --engine out")
    if arguments.local_checkpoints is not None:
        raise ConfigError(
            "--local-checkpoints has copies of snapshots in memory, which slices do not make: one "
            "that is lost resumes from another's state; leave it out"
        )
    if arguments.samplers is not None or words[:1] == ["tune"]:
        raise ConfigError("--slices is for train: tune has no slices; leave it out")
    return launch_slices(
        _PROGRAM,
        lambda directory: ["launch", *_flags(arguments), "--", *_moved(words, directory)],
        run_dir,
        count,
    )


def _check_samplers(count: int, arguments: Arguments, words: Sequence[str]) -> None:
    from fornax.cluster.launch import check_sampled

    if count < 1:
        raise ConfigError(f"--samplers {count} must be 1 or more")
    check_sampled(words)


def _flags(arguments: Arguments) -> list[str]:
    """The flags of one slice's launch."""
    found = []
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if field.name != "slices" and value != field.default:
            found.append(f"--{field.name.replace('_', '-')}")
            found += [] if value is True else [str(value)]
    return found


def _moved(words: Sequence[str], directory: Path) -> list[str]:
    """The words with another run directory."""
    found = list(words)
    for number, word in enumerate(words):
        flag, inline, _ = word.partition("=")
        if flag.replace("_", "-") == "--run-dir":
            place, text = (number, f"--run-dir={directory}") if inline else (number + 1, directory)
            found[place] = str(text)
    return found


def _method(words: Sequence[str]) -> str:
    from fornax.tune.methods import METHODS

    if len(words) < 2 or words[1] not in METHODS:
        what = f"tune {words[1]}" if len(words) > 1 else "tune alone"
        raise ConfigError(f"{what} cannot be launched; name a method: {', '.join(METHODS)}")
    return words[1]


def _with_run_dir(words: Sequence[str]) -> tuple[list[str], Path]:
    """The command with its run directory named, its own default where it names none; and that.

    Raises:
      ConfigError: for a command that cannot be launched, or whose config is not there.
    """
    if not words or words[0] not in _LAUNCHED:
        what = f"{words[0]} cannot be launched" if words else "no command is named"
        raise ConfigError(
            f"{what}; fornax launch runs {', '.join(_LAUNCHED)}, written after two dashes: fornax "
            "launch --hosts 4 -- train --config run.yaml; and serve and host with --replicas"
        )
    config = _value(words, "--config")
    if config is not None and not Path(config).is_file():
        raise ConfigError(f"the config file {config} cannot be read: no such file; check the path")
    if words[0] == "tune":
        verb, flag, default = words[:2], "--out", default_run_dir(_method(words))
    else:
        verb, flag, default = words[:1], "--run-dir", default_run_dir("train", config)
    named = _value(words, flag)
    if named is not None:
        return list(words), Path(named)
    return [*verb, flag, str(default), *words[len(verb) :]], default


def _value(words: Sequence[str], wanted: str) -> str | None:
    """What a flag of the launched command says; None where it is not there."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, inline, value = word.partition("=")
        if flag.replace("_", "-") == wanted:
            found = value if inline else following
            if not found or found.startswith("--"):
                raise ConfigError(f"{wanted} needs a value; write {wanted}=PATH")
            return found
    return None
