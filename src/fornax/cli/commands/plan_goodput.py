"""`fornax plan goodput`: tiers, snapshot intervals and spares of a run with failures, simulated."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.plan.goodput import RunSpec
    from fornax.plan.goodput.inputs import Name

_TIME = arg(metavar="TIME", help_behavior_hint="")
_RATE = arg(metavar="RATE", help_behavior_hint="")
_SOFTWARE, _SWITCHES = 54 / 419, 35 / 419
"""Shares of a run's failures that only end processes, and that take hosts together: software, and
switches and cables, of 419 unexpected interruptions (The Llama 3 Herd of Models, 2024, table 5)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Choose tiers, snapshot interval and spares for a run with failures, by simulation.

    A time, size or rate has a unit: 12s, 25000h, 1.2TB, 300GiB, 2GB/s. What is not given is that
    of --measured, else a default, named with its source; give the bandwidths of accelerators.

    examples:
      fornax plan goodput --hosts 4096 --mtbf 25000h --step 12s --state 1.2TB
      fornax plan goodput --hosts 512 --step 4s --state 900GB --memory 25GB/s --peer 12GB/s
      fornax plan goodput --hosts 64 --step 2s --state 150GB --tiers store --interval 10min
      fornax plan goodput --measured runs/four --hosts 4096 --step 12s --state 1.2TB
    """

    measured: Annotated[Path | None, arg(metavar="RUN", help_behavior_hint="")] = None
    """Run directory to take figures from that are not given."""
    hosts: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Hosts that train, spares not counted."""
    step: Annotated[str | None, _TIME] = None
    """One training step."""
    state: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """What a restart needs, of all hosts together: parameters, optimizer."""
    mtbf: Annotated[str, _TIME] = "6300h"
    """Between two failures of one host, restarts apart (default: 6300h)."""
    slice_hosts: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Hosts that fail together (default: largest divisor of hosts to 64)."""
    slice_mtbf: Annotated[str | None, _TIME] = None
    """Between two failures of one slice (default: 8.4 % of failures)."""
    restart_mtbf: Annotated[str, _TIME] = "720h"
    """Between two ends of all processes at once (default: 720h)."""
    memory: Annotated[str | None, _RATE] = None
    """A host's, devices to its memory, which blocks (default: 2GB/s)."""
    peer: Annotated[str, _RATE] = "2.1GB/s"
    """A host's to the host that holds its replica (default: 2.1GB/s)."""
    disk: Annotated[str, _RATE] = "270MB/s"
    """A host's local disk, synced (default: 270MB/s)."""
    store: Annotated[str, _RATE] = "25GB/s"
    """The object store's, all hosts together (default: 25GB/s)."""
    store_interval: Annotated[str, _TIME] = "10min"
    """Least between two snapshots in the store (default: 10min)."""
    detection: Annotated[str | None, _TIME] = None
    """From a failure to its verdict (default: 5 steps, at least 1 s)."""
    recovery: Annotated[str | None, _TIME] = None
    """From the verdict to a new group, state not read (default: 8s)."""
    compile: Annotated[str | None, _TIME] = None
    """Compiling the step in a new group (default: in --recovery)."""
    repair: Annotated[str, _TIME] = "4h"
    """Until a host that failed is a spare (default: 4h)."""
    tiers: Annotated[str | None, arg(metavar="NAMES", help_behavior_hint="")] = None
    """Use these, of memory,peer,disk,store (default: what is best)."""
    interval: Annotated[str | None, _TIME] = None
    """Between snapshots (default: what is best)."""
    spares: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Spare hosts (default: what is best)."""
    horizon: Annotated[str, _TIME] = "30d"
    """Wall time of a simulated run (default: 30d)."""
    seeds: int = 32
    """Runs to simulate."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""


_SOURCES = {
    "mtbf": "419 interruptions in 54 days on 2,048 hosts (Llama 3, table 5)",
    "slice_mtbf": "switches and cables, 35 of those 419",
    "restart_mtbf": "assumed",
    "memory": "measured on a CPU, /dev/shm; no accelerator was measured",
    "peer": "measured on a CPU, TCP on loopback",
    "disk": "measured on a CPU, with fsync",
    "store": "assumed, 200 Gbit/s; look at your bucket's quota",
    "store_interval": "assumed: traffic is paid",
    "detection": "limit of the stall drill",
    "recovery": "limit of the kill drill on CPU; 2.2 s were measured there",
    "compile": "in recovery",
    "repair": "assumed",
}


def run(arguments: Arguments) -> int:
    """Simulate, choose, print, write."""
    from fornax.config.quantities import parse_time
    from fornax.plan.goodput import plan_goodput, print_goodput, write_goodput

    measured = _measured(arguments)
    spec = run_spec(arguments, measured)
    if arguments.spares is not None and arguments.spares < 0:
        raise ConfigError(f"spares={arguments.spares} is not a number of hosts; give 0 or more")
    interval = arguments.interval
    plan = plan_goodput(
        spec,
        horizon=parse_time("horizon", arguments.horizon),
        seeds=arguments.seeds,
        store_interval=parse_time("store_interval", arguments.store_interval),
        tiers=_tiers(arguments.tiers),
        interval=None if interval is None else parse_time("interval", interval),
        spares=arguments.spares,
    )
    print_goodput(plan, _sources(arguments, spec, measured))
    if arguments.json:
        print(write_goodput(plan, arguments.json))  # noqa: T201
    return 0


def _measured(arguments: Arguments) -> dict[str, float]:
    """Figures of the run that was named, in seconds, bytes and bytes/s, where it has them."""
    from fornax.plan.goodput import measure

    if arguments.measured is None:
        return {}
    found = measure(arguments.measured.expanduser())
    figures = {
        "hosts": found.hosts,
        "step": found.step,
        "state": found.state,
        "memory": found.memory_rate,
        "detection": found.detection,
        "recovery": found.recovery,
        "compile": found.compile,
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def run_spec(arguments: Arguments, measured: dict[str, float]) -> "RunSpec":
    """The run to simulate; `measured` as in `fornax.plan.goodput.Measured`."""
    from fornax.config.quantities import parse_bytes, parse_rate, parse_time
    from fornax.plan.goodput import RunSpec

    def figure(name: str, parse: Callable[[str, str], float], default: float | None) -> float:
        """What is given, what was measured, or the default."""
        text = getattr(arguments, name)
        value = measured.get(name, default) if text is None else parse(name, text)
        if value is None:
            raise ConfigError(
                "fornax plan goodput needs --hosts, --step and --state, such as --hosts 4096 "
                "--step 12s --state 1.2TB, or a run that --measured them"
            )
        return value

    hosts = int(figure("hosts", lambda name, count: int(count), None))
    if hosts < 1:
        raise ConfigError(f"hosts={hosts} is not a run; give 1 or more")
    size = arguments.slice_hosts
    if size is None:
        size = max(n for n in range(1, 65) if hosts % n == 0)
    step, state = figure("step", parse_time, None), figure("state", parse_bytes, None)
    failures = hosts / parse_time("mtbf", arguments.mtbf)
    slices = failures * _SWITCHES
    if arguments.slice_mtbf is not None:
        slices = hosts / size / parse_time("slice_mtbf", arguments.slice_mtbf)
    return RunSpec(
        hosts=hosts,
        step=step,
        state=state,
        rates={
            "process": failures * _SOFTWARE,
            "host": failures * (1 - _SOFTWARE - _SWITCHES),
            "slice": slices,
            "restart": 1 / parse_time("restart_mtbf", arguments.restart_mtbf),
        },
        memory_rate=figure("memory", parse_rate, 2e9),
        peer_rate=parse_rate("peer", arguments.peer),
        disk_rate=parse_rate("disk", arguments.disk),
        store_rate=parse_rate("store", arguments.store),
        detection=figure("detection", parse_time, max(1.0, 5 * step)),
        recovery=figure("recovery", parse_time, 8.0),
        compile=figure("compile", parse_time, 0.0),
        repair=parse_time("repair", arguments.repair),
        slice_hosts=size,
    )


def _tiers(text: str | None) -> "tuple[Name, ...] | None":
    from fornax.plan.goodput.inputs import TIERS

    if text is None:
        return None
    names = text.split(",")
    if len(set(names)) < len(names) or not set(names) <= set(TIERS):
        raise ConfigError(
            f"tiers={text!r} are not tiers; name each once, with commas, of {', '.join(TIERS)}"
        )
    return tuple(name for name in TIERS if name in names)


def _sources(arguments: Arguments, spec: "RunSpec", measured: dict[str, float]) -> dict[str, str]:
    """Each input with its value and where that is from."""
    from fornax.plan.format import format_count, format_seconds

    made = {
        "slice_mtbf": format_seconds(spec.slices / spec.rates["slice"]),
        "memory": f"{format_count(spec.memory_rate, 'B')}/s",
        "detection": format_seconds(spec.detection),
        "recovery": format_seconds(spec.recovery),
        "compile": format_seconds(spec.compile) if spec.compile else "0 s",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(Arguments)}
    found = {}
    for name, source in _SOURCES.items():
        value = getattr(arguments, name)
        if value != defaults[name]:
            source = "given"
        elif name in measured:
            source = f"measured in {arguments.measured}"
        found[name] = f"{value or made[name]} ({source})"
    return found
