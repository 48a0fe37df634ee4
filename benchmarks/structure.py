"""The size of each package, and the files that a request or a step enters.

    python benchmarks/structure.py

The first table counts each package: lines and files of Python, the median and the longest file,
`Any`, and groups of files that import each other. The second runs four commands on the models of
a tiny quickstart, each in a process of its own under a profile hook, and counts the distinct files
of Fornax whose functions ran during a chat request, a V2 request, a few training steps, and a few
steps of GRPO with their rollouts. Only commands and HTTP are used, so that two versions of the
sources compare: `--source OTHER/src` measures another checkout with this script.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _harness

ROOT = Path(__file__).resolve().parents[1]
WARM = 3
"""Requests before the one that is recorded: the first ones fill caches."""
WAIT_S = 300


# --- what is there -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """One package of Fornax, counted."""

    name: str
    lines: int
    files: int
    median: int
    longest: int
    any_types: int
    cycles: int
    """Groups of two or more files of the room that import each other, however late."""


def rooms(source: Path) -> list[Room]:
    """Every package under `source/fornax`, and the whole as the last one."""
    package = source / "fornax"
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    graph = imports(source)
    found = [_count(folder.name, folder, graph) for folder in folders]
    return [*found, _count("all", package, graph)]


def _count(name: str, folder: Path, graph: dict[str, set[str]]) -> Room:
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    lengths = [text.count("\n") for text in texts]
    prefix = "fornax." if name == "all" else f"fornax.{name}."
    inside = {module: {m for m in to if m.startswith(prefix)} for module, to in graph.items()}
    own = {module: to for module, to in inside.items() if module.startswith(prefix)}
    return Room(
        name=name,
        lines=sum(lengths),
        files=len(lengths),
        median=round(statistics.median(lengths)),
        longest=max(lengths),
        any_types=sum(len(re.findall(r"\bAny\b", text)) for text in texts),
        cycles=sum(len(group) > 1 for group in strongly_connected(own)),
    )


def imports(source: Path) -> dict[str, set[str]]:
    """Module -> modules that it imports at run time, names followed to where they are defined."""
    trees = {}
    for path in sorted((source / "fornax").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    named = {module: dict(_named(tree)) for module, tree in trees.items()}

    def defined(module: str, name: str) -> str:
        """The module that defines `name` of `module`: packages hand names on."""
        while module in trees:
            if f"{module}.{name}" in trees:
                return f"{module}.{name}"
            if name not in named[module]:
                return module
            module, name = named[module][name]
        return module

    return {
        module: {defined(*target) for target in named[module].values()} & trees.keys() - {module}
        for module in trees
    }


def _named(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names that a module imports from Fornax, and from where; imports for types are left out."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fornax"):
            for alias in node.names:
                yield alias.asname or alias.name, (str(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fornax."):
                    yield alias.name, tuple(alias.name.rsplit(".", 1))  # type: ignore[misc]
        else:
            yield from _named(node)


def strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other."""
    reached = {node: _reached(graph, node) for node in graph}
    groups: dict[frozenset[str], set[str]] = {}
    for node in graph:
        group = frozenset({node} | {m for m in reached[node] if node in reached.get(m, ())})
        groups[group] = set(group)
    return list(groups.values())


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    front = list(graph[start])
    while front:
        node = front.pop()
        if node not in found:
            found.add(node)
            front.extend(graph.get(node, ()))
    return found


# --- what a piece of work passes ---------------------------------------------------------------


def child(words: list[str]) -> int:
    """Run a command; between `start` and `stop PATH` on standard input, note the files entered."""
    import fornax

    home = str(Path(fornax.__file__).parent) + os.sep
    entered: set[str] = set()
    recording = threading.Event()

    def hook(frame: Any, event: str, _: Any) -> None:
        if event == "call" and recording.is_set():
            name = frame.f_code.co_filename
            if name.startswith(home):
                entered.add(name[len(home) :])

    def obey() -> None:
        for line in sys.stdin:
            word, _, path = line.strip().partition(" ")
            if word == "start":
                recording.set()
            else:
                recording.clear()
                Path(path).write_text(json.dumps(sorted(entered)))
                entered.clear()

    threading.Thread(target=obey, daemon=True).start()
    threading.setprofile(hook)
    sys.setprofile(hook)
    from fornax.cli.main import main as command

    return command(words)


class Recorded:
    """A command in a process of its own that tells which files its work entered."""

    def __init__(self, source: Path, words: list[str], log: Path) -> None:
        self._log = log
        self._answer = log.with_suffix(".json")
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child", *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"},
            )

    def wait_for(self, said: Callable[[], Any]) -> Any:
        """What `said` returns once it is true."""
        end = time.monotonic() + WAIT_S
        while not (found := said()):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the command did not get there:\n{self._log.read_text()}")
            time.sleep(0.1)
        return found

    def address(self) -> str:
        """Where the server listens."""
        pattern = re.compile(r"http://127\.0\.0\.1:\d+")
        return self.wait_for(lambda: pattern.search(self._log.read_text())).group()

    def record(self, work: Callable[[], None]) -> list[str]:
        """The files entered while `work` ran."""
        self._tell("start")
        time.sleep(0.2)
        work()
        time.sleep(0.2)
        self._tell(f"stop {self._answer}")
        self.wait_for(lambda: self._answer.exists() and self._answer.read_text().endswith("]"))
        found = json.loads(self._answer.read_text())
        self._answer.unlink()
        return found

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def passed(source: Path, run: Path, folder: Path) -> dict[str, list[str]]:
    """Files entered by each kind of work, on the models of the tiny quickstart at `run`."""
    return {
        "chat request": _served(
            Recorded(source, ["serve", str(run / "hf-tuned"), "--port", "0"], folder / "serve.log"),
            "/ready",
            "/v1/chat/completions",
            {
                "model": str(run / "hf-tuned"),
                "messages": [{"role": "user", "content": "def f(x):"}],
                "max_tokens": 8,
                "stream": True,
            },
        ),
        "V2 request": _served(
            Recorded(
                source,
                ["host", str(run / "models"), "--http", "127.0.0.1:0", "--grpc", "none"],
                folder / "host.log",
            ),
            "/v2/health/ready",
            "/v2/models/lm/infer",
            {
                "inputs": [
                    {
                        "name": "tokens",
                        "datatype": "INT32",
                        "shape": [1, 4],
                        "data": [[5, 6, 7, 8]],
                    },
                ]
            },
        ),
        "training step": _stepped(
            source, ["train", "--config", str(run / "config.yaml")], folder / "train"
        ),
        "rollout and GRPO step": _stepped(
            source, ["tune", "grpo", "--config", str(run / "grpo" / "config.yaml")], folder / "grpo"
        ),
    }


def _served(server: Recorded, ready: str, path: str, body: dict[str, Any]) -> list[str]:
    with server:
        address = server.address()
        server.wait_for(lambda: _get(address + ready))
        for _ in range(WARM):
            _post(address + path, body)
        return server.record(lambda: _post(address + path, body))


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except OSError:
        return False


def _post(url: str, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read()[:500]!r}") from error


def _stepped(source: Path, words: list[str], run: Path) -> list[str]:
    """A few steps of a run that neither saves nor evaluates meanwhile."""
    place = "--out" if words[0] == "tune" else "--run-dir"
    if words[0] == "train":
        words += ["--eval.every", "4000"]
    words = [*words, place, str(run), "--steps", "4000", "--save-every", "4000"]
    words += ["--log.every", "1"]

    def steps() -> int:
        metrics = run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    with Recorded(source, words, run.with_suffix(".log")) as command:
        command.wait_for(lambda: steps() >= WARM)

        def work() -> None:
            begun = steps()
            command.wait_for(lambda: steps() >= begun + WARM)

        return command.record(work)


# --- the command -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="sources to measure")
    parser.add_argument("--run", type=Path, help="a finished `fornax quickstart --size tiny`")
    parser.add_argument("--files", action="store_true", help="list the files that are passed")
    args = parser.parse_args()
    source = args.source.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = args.run or _quickstart(source, folder / "quickstart")
        work = passed(source, run.resolve(), folder)
    head = ["package", "lines", "files", "median", "longest", "`Any`", "cycles"]
    table = _harness.table(head, [[str(v) for v in vars(room).values()] for room in rooms(source)])
    print(table, "\n")
    print(_harness.table(["work", "files"], [[k, str(len(v))] for k, v in work.items()]))
    if args.files:
        for kind, files in work.items():
            print(f"\n{kind}\n  " + "\n  ".join(files))


def _quickstart(source: Path, run: Path) -> Path:
    command = [sys.executable, "-m", "fornax", "quickstart", "--size", "tiny", "--run-dir"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([*command, str(run)], env=environment, check=True, stdout=subprocess.DEVNULL)
    return run


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        raise SystemExit(child(sys.argv[2:]))
    main()
