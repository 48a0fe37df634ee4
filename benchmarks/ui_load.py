"""`fornax ui` beside TensorBoard over the same runs: the list, curves, an appended line, memory.

    pip install --target DIR tensorboard
    python benchmarks/ui_load.py --peer DIR

Makes --runs run directories of --points steps, as metrics.jsonl and as event files of the same
scalars; a few are written, the others are hard links to them, so that neither server waits for a
disk. Each round restarts both servers, in turns.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import _harness
from fornax.train.tensorboard import TensorBoard

NAMES = ("grad_norm", "learning_rate", "accuracy", "tokens_per_second", "step_seconds", "mfu")
DISTINCT = 6
CONFIG = "seed: {seed}\nsteps: {points}\nseq_len: 1024\noptim: {{learning_rate: {rate}}}\n"

Timings = dict[str, float]


def records(seed: int, points: int) -> Iterator[dict[str, Any]]:
    """The metrics of a run: a loss that falls, and noise."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(points, len(NAMES) + 1))
    for n in range(points):
        loss = 2 + 3 * float(np.exp(-n / 5000)) + 0.05 * float(noise[n, 0])
        others = {name: float(x) for name, x in zip(NAMES, noise[n, 1:], strict=True)}
        yield {"step": n + 1, "loss": loss, **others, "tokens": 4096 * n, "time": 1.7e9 + n / 2}


def make(folder: Path, runs: int, points: int) -> None:
    """Write the runs, once."""
    if (folder / "made").exists():
        return
    for number in range(runs):
        name = f"sweep{number % 3}/run{number:03}"
        run, events = folder / "runs" / name, folder / "events" / name
        run.mkdir(parents=True, exist_ok=True)
        events.mkdir(parents=True, exist_ok=True)
        text = CONFIG.format(seed=number, points=points, rate=1e-4 * (1 + number))
        (run / "config.yaml").write_text(text)
        if number < DISTINCT:
            writer = TensorBoard(events, 0)
            with (run / "metrics.jsonl").open("w") as file:
                for record in records(number, points):
                    file.write(json.dumps(record) + "\n")
                    writer.write(record)
            writer.close()
            continue
        first = f"sweep{number % DISTINCT % 3}/run{number % DISTINCT:03}"
        for source in (folder / "events" / first).iterdir():
            os.link(source, events / source.name)
        os.link(folder / "runs" / first / "metrics.jsonl", run / "metrics.jsonl")
    (folder / "made").touch()


def until(done: Callable[[], bool], pause: float = 0.02, seconds: float = 600) -> float:
    """Seconds until something is so."""
    began = time.perf_counter()
    while not done():
        if time.perf_counter() - began > seconds:
            return float("nan")
        time.sleep(pause)
    return time.perf_counter() - began


def tree(pid: int) -> list[int]:
    """A process and its children."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():  # each has its own children
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def peak_bytes(pid: int) -> float:
    """Most memory that a process and its children held."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    total += int(line.split()[1]) * 1024
    return total


def cpu_seconds(pid: int) -> float:
    """Processor time of the threads of a process and its children, to the nanosecond: what the
    kernel counts in ticks misses short work that a timer starts."""
    total = 0
    for each in tree(pid):
        for thread in Path(f"/proc/{each}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(thread.read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def server(
    words: list[str], environment: dict[str, str], *, verbose: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A server as a process, ended at the end; `verbose` shows its errors."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=None if verbose else subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answer(client: httpx.Client, address: str) -> Any:
    """The JSON of an answer; of what is none the status, headers and beginning."""
    response = client.get(address)
    if not response.headers.get("content-type", "").startswith("application/json"):
        found = f"{response.status_code} {dict(response.headers)} {response.content[:500]!r}"
        raise SystemExit(f"{address[:100]} answered no JSON: {found}")
    response.raise_for_status()
    return response.json()


def measure_ours(folder: Path) -> Timings:
    """One fresh server of ours."""
    found: Timings = {}
    command = began = time.perf_counter()
    words = [sys.executable, "-m", "fornax", "ui", str(folder / "runs"), "--port", "0"]
    with server(words, {}, verbose=True) as p:
        assert p.stdout is not None
        base = p.stdout.readline().split()[-1]
        found["start"] = time.perf_counter() - began
        with httpx.Client(base_url=base, timeout=600) as client:
            cpu = cpu_seconds(p.pid)
            began = time.perf_counter()
            runs = [run["id"] for run in answer(client, "/api/runs")["runs"]]
            found["list"] = time.perf_counter() - began
            found["to the list"] = found["start"] + found["list"]
            found["processor time of the list"] = cpu_seconds(p.pid) - cpu
            began = time.perf_counter()
            answer(client, "/api/runs")
            found["list again"] = time.perf_counter() - began
            query = "&".join(f"run={run}" for run in runs) + "&name=loss&points=1000"
            cpu = cpu_seconds(p.pid)
            began = time.perf_counter()
            curves = answer(client, f"/api/series?{query}")["series"]
            found["curves of all runs, first"] = time.perf_counter() - began
            found["processor time of the curves"] = cpu_seconds(p.pid) - cpu
            assert all(curve["n"] for curve in curves)
            left = set(runs)
            with client.stream("GET", f"/api/live?{query}") as response:
                left -= {c["run"] for c in curves if c["complete"]}
                kind = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    kind = value if name == "event" else kind
                    if name == "data" and kind == "complete":
                        left.discard(json.loads(value)["run"])
                    if not left:
                        break
            found["all read whole"] = time.perf_counter() - command
            found["processor time of that"] = cpu_seconds(p.pid)
            reading = peak_bytes(p.pid)  # with the processes that read, which end soon
            began = time.perf_counter()
            exact = answer(client, f"/api/series?{query}")["series"]
            found["curves of all runs, exact"] = time.perf_counter() - began
            found["exact"] = sum(curve["complete"] for curve in exact) / len(exact)
            ten = "&".join(f"run={run}" for run in runs[-10:]) + "&name=mfu&points=1000"
            began = time.perf_counter()
            answer(client, f"/api/series?{ten}")
            found["10 curves of another metric"] = time.perf_counter() - began
            found["memory"] = max(reading, peak_bytes(p.pid))
            found["appended line shows"] = appended(client, folder)
            found["processor share while followed"] = followed(client, query, p.pid)
    return found


def appended(client: httpx.Client, folder: Path) -> float:
    """Median seconds until a line that was appended to a run is at a client that follows it."""
    path = folder / "runs" / "live" / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"step": 0, "loss": 1.0}\n')
    waits: list[float] = []

    def write() -> None:
        for step in range(1, 12):
            time.sleep(0.53)
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0, "at": time.time()}) + "\n")

    thread = threading.Thread(target=write)
    with client.stream("GET", "/api/live?run=live") as response:
        thread.start()
        for line in response.iter_lines():
            if line.startswith("data: ") and '"records"' in line:
                waits += [time.time() - r["at"] for r in json.loads(line[6:])["records"]]
            if len(waits) >= 11:
                break
    thread.join()
    path.unlink()
    path.parent.rmdir()
    return statistics.median(waits)


def followed(client: httpx.Client, query: str, pid: int) -> float:
    """Share of a core that a server takes while a client follows all of its quiet runs."""
    with client.stream("GET", f"/api/live?{query}") as response:
        told = response.iter_bytes()  # kept: without it the connection closes
        next(told)
        time.sleep(3)
        before = cpu_seconds(pid)
        time.sleep(10)
        return (cpu_seconds(pid) - before) / 10


def measure_tensorboard(folder: Path, peer: Path, port: int) -> Timings:
    """One fresh TensorBoard, with its own data server."""
    found: Timings = {}
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder / "events")]
    words += ["--port", str(port), "--reload_interval", "1", "--load_fast", "true"]
    base = f"http://127.0.0.1:{port}"
    count = sum(1 for _ in (folder / "events").glob("*/*"))

    def listed() -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            tags = client.get("/data/plugin/scalars/tags").json()
            return sum("loss" in each for each in tags.values()) == count
        return False

    def read() -> bool:
        found["last curves"] = float("nan")
        began = time.perf_counter()
        told = client.post("/data/plugin/timeseries/timeSeries", data={"requests": asked})
        if told.status_code != 200:  # it is busy
            return False
        series = told.json()[0]["runToSeries"]
        found["last curves"] = time.perf_counter() - began
        return len(series) == count and all(s[-1]["step"] >= last for s in series.values())

    last = json.loads((folder / "points").read_text())
    asked = json.dumps([{"plugin": "scalars", "tag": "loss"}])
    began = time.perf_counter()
    with (
        server(words, {"PYTHONPATH": f"{peer}:{os.environ.get('PYTHONPATH', '')}"}) as p,
        httpx.Client(base_url=base, timeout=600) as client,
    ):
        found["to the list"] = until(listed)
        began_list = time.perf_counter()
        listed()
        found["list again"] = time.perf_counter() - began_list
        began_curves = time.perf_counter()
        client.post("/data/plugin/timeseries/timeSeries", data={"requests": asked}).json()
        found["curves of all runs, first"] = time.perf_counter() - began_curves
        until(read, pause=0.5)
        found["all read whole"] = time.perf_counter() - began
        found["processor time of that"] = cpu_seconds(p.pid)
        found["curves of all runs, exact"] = found.pop("last curves")
        found["memory"] = peak_bytes(p.pid)
        before = cpu_seconds(p.pid)
        time.sleep(10)
        found["processor share while followed"] = (cpu_seconds(p.pid) - before) / 10
        found["appended line shows"] = appended_event(client, folder)
    return found


def appended_event(client: httpx.Client, folder: Path) -> float:
    """Median seconds until TensorBoard tells of an event that was written, asked ever again."""
    live = folder / "events" / "live"
    live.mkdir()
    writer = TensorBoard(live, 0, flush_seconds=0.0)
    waits = []

    def told(step: int) -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            query = {"run": "live", "tag": "loss"}
            points = client.get("/data/plugin/scalars/scalars", params=query).json()
            return points[-1][1] >= step
        return False

    for step in range(1, 8):
        writer.write({"step": step, "loss": 1.0, "time": time.time()})
        waits.append(until(lambda step=step: told(step), seconds=30))
        time.sleep(0.37)
    writer.close()
    for file in live.iterdir():
        file.unlink()
    live.rmdir()
    return statistics.median(waits[1:])


ROWS = (
    ("to the list", "from the command until all runs are listed", "s"),
    ("list", "the list, first time it is asked for", "s"),
    ("processor time of the list", "processor time of that", "s"),
    ("list again", "the list again", "s"),
    ("curves of all runs, first", "loss of all runs, 1000 points each, first answer", "s"),
    ("processor time of the curves", "processor time of that", "s"),
    ("all read whole", "from the command until all points were read", "s"),
    ("processor time of that", "processor time until then", "s"),
    ("curves of all runs, exact", "loss of all runs, every point counted", "s"),
    ("10 curves of another metric", "another metric of 10 runs, exact", "s"),
    ("appended line shows", "an appended line is at the browser after", "s"),
    ("processor share while followed", "processor while all runs are followed and quiet", "%"),
    ("memory", "memory", "MB"),
)


def shown(value: float | None, unit: str) -> str:
    """A figure with its unit, a dash where there is none."""
    if value is None or value != value:
        return "—"
    if unit == "MB":
        return f"{value / 1e6:,.0f} MB"
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.2f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", type=Path, help="folder that TensorBoard is installed in")
    parser.add_argument("--folder", type=Path, help="where the runs are made and kept")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, arguments.runs, arguments.points)
        (folder / "points").write_text(str(arguments.points))
        ours: list[Timings] = []
        theirs: list[Timings] = []
        for number in range(arguments.rounds):
            ours.append(measure_ours(folder))
            print("ours", ours[-1], flush=True)
            if arguments.peer is not None:
                theirs.append(measure_tensorboard(folder, arguments.peer, 16_006 + number))
                print("TensorBoard", theirs[-1], flush=True)
    report(ours, theirs, arguments)


def report(ours: list[Timings], theirs: list[Timings], arguments: argparse.Namespace) -> None:
    """The table, of medians over the rounds."""
    rows = []
    for key, label, unit in ROWS:
        values = [
            statistics.median(t[key] for t in times) if times and key in times[0] else None
            for times in (ours, theirs)
        ]
        both = values[0] and values[1] and values[1] == values[1]
        ratio = f"{values[0] / values[1]:.3f}" if both else "—"  # pyrefly: ignore
        rows.append((label, shown(values[0], unit), shown(values[1], unit), ratio))
    table = _harness.table(("", "fornax ui", "TensorBoard", "ours / theirs"), rows)
    print(table)
    if not arguments.write:
        return
    peer = "" if not theirs else f", TensorBoard {_version(arguments.peer)}"
    text = f"""# The page over many runs

{_harness.machine()}; {_harness.versions("fastapi", "uvicorn", "orjson")}{peer}.

{arguments.runs} runs of {arguments.points:,} steps with {len(NAMES) + 1} metrics each
(`benchmarks/ui_load.py`), medians of {arguments.rounds} rounds in which each server is restarted,
in turns; files in the page cache. The first curves of `fornax ui` are samples spread over the
files; it says so, and draws again when a run was read whole. TensorBoard keeps 1000 sampled points
a curve and looks for new ones every second. "Quiet" is without any new line.

{table}
"""
    print(_harness.write_results("ui_load", text))


def _version(peer: Path) -> str:
    found = next(peer.glob("tensorboard-*.dist-info"), None)
    return "" if found is None else found.name.split("-")[1].removesuffix(".dist")


if __name__ == "__main__":
    main()
