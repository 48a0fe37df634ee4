"""Past one machine: simulated goodput of 64 to 8,192 hosts, and what a controller takes for them.

`goodput`: what `fornax plan goodput` chooses and expects, with the bandwidths measured on a CPU and
with those of accelerators' hosts. `slices`: the same hosts where all of a slice are lost at once
never, as often as switches fail, or ten times as often. Both are simulations with fixed seeds: they
say the same on every machine. `fan-in`: real agents on this machine; see fan_in.py.
`docs/guides/scale.md` has these tables:

    python benchmarks/scale.py [--parts goodput slices fan-in] [--seeds 32] [--guide]
"""

import argparse
import os
import textwrap
import time
from pathlib import Path

import fan_in
from _harness import machine, table, versions, write_guide, write_results
from fornax.cli.commands.plan_goodput import Arguments, run_spec
from fornax.plan.format import format_seconds
from fornax.plan.goodput import GoodputPlan, plan_goodput
from fornax.plan.goodput.search import Outcome

HOSTS = (64, 256, 1024, 4096, 8192)
DAYS = 30
STORE_INTERVAL = 600.0
RUN = {"step": "12s", "state": "1.2TB"}
MEASURED = {"mtbf": "25000h"}
ACCELERATORS = {"mtbf": "6300h", "memory": "25GB/s", "peer": "10GB/s", "disk": "2GB/s"}
FAN_IN = (4, 16, 48)

CPU_ONLY = (
    "Recovery in the process, spares, verdicts, leases, replicas of snapshots and the compile "
    "service: CPU devices with Gloo. On GPU and TPU the errors of a lost peer are known by their "
    "text and were not provoked.",
    "Collectives over hybrid meshes and DiLoCo between slices: processes of one machine. Programs "
    "of two slices were compiled for TPU and not run there.",
    "Several machines: Ray's emulated nodes on one machine, with loopback between them. Manifests "
    "were checked against schemas and not run on clusters.",
    "Samplers, data workers and replicas of servers: processes of one machine, or those nodes.",
    "Hosts that divide the GPUs of one machine: what each is given was checked, on no GPU.",
    "The bandwidths in the simulator's defaults; its other defaults are published or assumed.",
)
"""What no accelerator and no second machine has run."""
ONLY = [textwrap.fill(f"- {each}", 120, subsequent_indent="  ") for each in CPU_ONLY]


def plan(hosts: int, seeds: int, **changes: str) -> GoodputPlan:
    """What `fornax plan goodput` finds."""
    spec = run_spec(Arguments(hosts=hosts, **RUN, **changes), {})  # pyrefly: ignore
    horizon = DAYS * 86_400.0
    return plan_goodput(spec, horizon=horizon, seeds=seeds, store_interval=STORE_INTERVAL)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def spread(outcome: Outcome) -> str:
    """The mean and half of its 95 % interval."""
    half = 50 * (outcome.goodput.high - outcome.goodput.low)
    return f"{100 * outcome.goodput.mean:.2f} ± {half:.2f} %"


def goodput(seeds: int, title: str, flags: dict[str, str]) -> str:
    """What is recommended, what it comes to, and where the time goes."""
    chosen, causes = [], []
    for hosts in HOSTS:
        found = plan(hosts, seeds, **flags)
        best = found.chosen
        store = next(one for one in found.tier_sets if tuple(one.policy.every) == ("store",))
        chosen.append(
            [
                f"{hosts:,}",
                format_seconds(found.run.mtbf),
                f"{found.run.copy_seconds:.2f} s",
                f"{format_seconds(store.policy.steps * found.run.step)}, "
                f"{percent(store.goodput.mean)}",
                percent(found.minutely.goodput.mean),
                ", ".join(best.policy.every),
                format_seconds(best.policy.steps * found.run.step),
                format_seconds(found.young),
                best.policy.spares,
                spread(best),
                percent(best.closed_form),
                percent(best.effective),
            ]
        )
        part = best.causes
        downs = ("step", "save", "detection", "waiting")
        again = percent(part["recovery"] + part["restore"])
        shares = [*(percent(part[cause]) for cause in downs), again, percent(part["lost"])]
        causes.append([f"{hosts:,}", *shares])
    head = (
        *("hosts", "a failure every", "copy", "store alone: interval, goodput"),
        *("memory each minute", "recommended tiers", "interval", "Young", "spares", "goodput"),
        *("closed form", "of paid hosts"),
    )
    where = ("hosts", "step", "save", "detection", "waiting", "recovery and restore", "lost")
    options = " ".join(f"--{name} {value}" for name, value in {**RUN, **flags}.items())
    lines = [f"## {title}", "", f"`{options}`", "", table(head, chosen), ""]
    return "\n".join([*lines, table(where, causes), ""])


def slices(seeds: int) -> str:
    """Goodput by how often slices are lost, all else the same."""
    rows = []
    for hosts in HOSTS[1:]:
        usual = plan(hosts, seeds, **ACCELERATORS)
        every = usual.run.slices / usual.run.rates["slice"]
        ways = {
            "never": plan(hosts, seeds, **ACCELERATORS, slice_mtbf="1000000000h"),
            "as usual": usual,
            "ten times": plan(hosts, seeds, **ACCELERATORS, slice_mtbf=f"{every / 36_000:.4f}h"),
        }
        row: list[object] = [f"{hosts:,}", usual.run.slice_hosts, format_seconds(every)]
        for found in ways.values():
            row += [spread(found.chosen), found.chosen.policy.spares]
        rows.append([*row, usual.chosen.tiers["slice"]])
    head = (
        *("hosts", "of a slice", "a slice is lost every", "never lost", "spares"),
        *("as usual", "spares", "ten times as often", "spares", "a slice comes back from"),
    )
    options = " ".join(f"--{name} {value}" for name, value in {**RUN, **ACCELERATORS}.items())
    return "\n".join(
        ["## All hosts of a slice at once", "", f"`{options}`", "", table(head, rows), ""]
    )


def controllers(seconds: float) -> str:
    """What agents tell their controller."""
    rows = [fan_in.measure(hosts, 1.0, seconds) for hosts in FAN_IN]
    return "\n".join(["## Fan-in of a controller", "", table(fan_in.HEAD, rows), ""])


def main() -> None:
    """Simulate, measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("goodput", "slices", "fan-in")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--guide", action="store_true", help="write the guide's tables too")
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    began = time.monotonic()
    found: dict[str, str] = {}
    if "goodput" in given.parts:
        measured = goodput(given.seeds, "Bandwidths as measured on a CPU", MEASURED)
        assumed = goodput(given.seeds, "Bandwidths of accelerators' hosts", ACCELERATORS)
        found["goodput"] = f"{measured}\n{assumed}"
    if "slices" in given.parts:
        found["slices"] = slices(given.seeds)
    if "fan-in" in given.parts:
        found["fan-in"] = controllers(given.seconds)
    text = "\n".join(
        [
            "# Past one machine",
            "",
            f"{machine()}; {versions('jax')}; load {os.getloadavg()[0]:.1f}. Goodput is simulated: "
            f"{given.seeds} runs of {DAYS} days, {time.monotonic() - began:.0f} s in all.",
            "",
            *found.values(),
            "## Only ever run on CPU",
            "",
            *ONLY,
            "",
        ]
    )
    print(text)
    write_results("scale", text)
    if given.guide:
        for mark, each in found.items():
            write_guide("scale.md", mark, each.replace("## ", "### "))
        write_guide("scale.md", "cpu", "\n".join(ONLY))


if __name__ == "__main__":
    main()
