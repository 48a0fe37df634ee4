"""A run's numbers for an MLflow tracking server, by its REST interface; nothing to install.

https://mlflow.org/docs/latest/rest-api.html. The server may be slow, or away. A thread talks to it,
training never waits for it, and what it missed is read from `metrics.jsonl` when it is back.
"""

import base64
import contextlib
import json
import math
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax import __version__
from fornax.config.environment import mlflow_credentials
from fornax.config.errors import FornaxError
from fornax.config.files import write_whole
from fornax.config.jsonl import read_json_lines
from fornax.train.config import MLflowConfig
from fornax.train.metrics import Record, numbers

__all__ = ["MLflow"]

_UNFIT = re.compile(r"[^\w\-./ ]")
_METRICS, _PARAMS, _LONGEST = 1000, 100, 6000
"""Most that one request may hold, and characters of a parameter."""
_WAITING = 10_000
"""Records that wait in memory; those beyond are read from `metrics.jsonl`."""
_PAUSE, _AGAIN, _AT_END, _TIMEOUT = 0.5, 10.0, 10.0, 30.0
"""Seconds between two batches, before another try, for what is left at the end, for an answer."""


class _RefusedError(FornaxError):
    """What the server answered."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MLflow:
    """A run of an MLflow experiment; a resumed run continues it.

    Metrics have their names and steps here, parameters are the config's keys, tags name the run
    directory, Fornax's version and the commit. MLflow deletes no metric: steps that it has already
    are not sent again, so of steps that a resume or a loss spike repeats it keeps the first.
    """

    def __init__(
        self,
        config: MLflowConfig,
        run_dir: Path,
        resolved: Mapping[str, object],
        log: Callable[[str], None],
    ) -> None:
        """Begin to talk to the server; nothing is waited for.

        Args:
          config: where it is.
          run_dir: the run's, whose `metrics.jsonl` has every record before it comes here.
          resolved: the run's config, for the parameters.
          log: shows a line, once, where the server cannot be used.
        """
        self._config, self._run_dir, self._log = config, run_dir.resolve(), log
        self._params = dict(_flat(resolved))
        self._steps = resolved.get("steps")
        self._file = self._run_dir / "mlflow.json"
        self._headers = {"Content-Type": "application/json", **_authorization()}
        self._waiting: deque[Record] = deque()
        self._behind = True  # whether metrics.jsonl has records that never waited here
        self._run: str | None = None
        self._sent = -1
        self._problem, self._told = "", False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fornax-mlflow", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Have the record sent soon."""
        if len(self._waiting) < _WAITING:
            self._waiting.append(record)
        else:
            self._behind = True
        self._tell()

    def rewind(self, step: int) -> None:
        """Nothing: the server keeps what it was sent first."""

    def close(self) -> None:
        """Send what waits, for some seconds, and say how the run ended."""
        self._stop.set()
        self._thread.join(_AT_END)
        if self._thread.is_alive() and not self._problem:
            self._problem = f"no answer within {_AT_END:g} s"
        self._tell()

    def _tell(self) -> None:
        if self._problem and not self._told:
            self._told = True
            self._log(
                f"MLflow at {self._config.url} cannot be used: {self._problem}. Training "
                "continues, metrics.jsonl has every metric, and they are sent when the server is "
                "there, or when the run is resumed"
            )

    def _work(self) -> None:
        pause, stopping = 0.0, False
        while not stopping:
            stopping = self._stop.wait(pause)
            pause = _PAUSE
            try:
                self._send()
                if stopping:
                    self._update("FINISHED" if self._sent == self._steps else "KILLED")
            except (OSError, ValueError, FornaxError) as error:
                self._problem = str(error) or type(error).__name__
                pause = _AGAIN

    def _send(self) -> None:
        """Everything that the server does not have yet."""
        if self._run is None:
            self._run, self._sent = self._begin()
        while self._waiting or self._behind:
            if self._behind:
                self._behind = False
                found = read_json_lines(self._run_dir / "metrics.jsonl")
                self._batches([_restored(one) for one in found if one["step"] > self._sent])
            while self._waiting:
                count = min(len(self._waiting), _METRICS)
                first = [self._waiting[n] for n in range(count)]
                self._batches([one for one in first if one["step"] > self._sent])
                for _ in first:
                    self._waiting.popleft()

    def _batches(self, records: Sequence[Record]) -> None:
        """Send records in order, whole ones, as many at once as a request holds."""
        batch: list[dict[str, object]] = []
        last = self._sent
        for record in records:
            made = _metrics(record)[:_METRICS]
            if len(batch) + len(made) > _METRICS:
                self._log_batch(metrics=batch)
                batch, self._sent = [], last
            batch += made
            last = record["step"]
        if batch:
            self._log_batch(metrics=batch)
        self._sent = last

    def _begin(self) -> tuple[str, int]:
        """The run to continue, or a new one, and the last step that it has."""
        known = self._known()
        if known is not None:
            run, last, complete = known
        else:
            run, last, complete = self._create(), -1, False
        if not complete:
            keys = list(self._params.items())
            for start in range(0, len(keys), _PARAMS):
                part = keys[start : start + _PARAMS]
                self._log_batch(run, params=[{"key": k, "value": v} for k, v in part])
            self._remember(run, complete=True)
        return run, last

    def _known(self) -> tuple[str, int, bool] | None:
        """The run that this directory's records went to, if the server has it still."""
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if (stored["url"], stored["experiment"]) != (self._config.url, self._config.experiment):
                return None
            run, complete = str(stored["run_id"]), bool(stored["params"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        try:
            found = self._get("runs/get", run_id=run)["run"]
        except _RefusedError as error:
            if error.code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if found["info"].get("lifecycle_stage") == "deleted":
            return None
        self._run = run
        self._update("RUNNING")
        steps = [int(one.get("step", 0)) for one in found.get("data", {}).get("metrics", ())]
        return run, max(steps, default=-1), complete

    def _create(self) -> str:
        name = self._config.name or self._run_dir.name
        tags = {
            "mlflow.runName": name,
            "mlflow.source.name": "fornax",
            "fornax.version": __version__,
            "fornax.run_dir": str(self._run_dir),
            **_commit(),
        }
        made = self._post(
            "runs/create",
            experiment_id=self._experiment(),
            run_name=name,
            start_time=int(time.time() * 1000),
            tags=[{"key": key, "value": value} for key, value in tags.items()],
        )
        run = str(made["run"]["info"]["run_id"])
        self._remember(run, complete=False)
        return run

    def _experiment(self) -> str:
        name = self._config.experiment
        try:
            found = self._get("experiments/get-by-name", experiment_name=name)
            return str(found["experiment"]["experiment_id"])
        except _RefusedError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return str(self._post("experiments/create", name=name)["experiment_id"])

    def _remember(self, run: str, *, complete: bool) -> None:
        stored = {
            "url": self._config.url,
            "experiment": self._config.experiment,
            "run_id": run,
            "params": complete,
        }
        write_whole(self._file, json.dumps(stored, indent=2) + "\n")

    def _log_batch(self, run: str | None = None, **what: Sequence[Mapping[str, object]]) -> None:
        self._post("runs/log-batch", run_id=run or self._run, **what)

    def _update(self, status: str) -> None:
        ended = {} if status == "RUNNING" else {"end_time": int(time.time() * 1000)}
        self._post("runs/update", run_id=self._run, status=status, **ended)

    def _get(self, path: str, **values: str) -> dict[str, Any]:
        return self._ask(f"{path}?{urllib.parse.urlencode(values)}", None)

    def _post(self, path: str, **values: object) -> dict[str, Any]:
        return self._ask(path, json.dumps(values, allow_nan=False).encode())

    def _ask(self, path: str, body: bytes | None) -> dict[str, Any]:
        """The server's answer.

        Raises:
          _RefusedError: what it refused, by its own code.
          OSError, ValueError: no answer, or one that is none of MLflow's.
        """
        address = f"{self._config.url.rstrip('/')}/api/2.0/mlflow/{path}"
        request = urllib.request.Request(address, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            said: Any = {}
            with contextlib.suppress(ValueError):
                said = json.loads(text)
            said = said if isinstance(said, dict) else {}
            code = str(said.get("error_code", error.code))
            message = str(said.get("message") or error.reason)[:500]
            raise _RefusedError(code, f"HTTP {error.code}, {message}") from error


def _metrics(record: Record) -> list[dict[str, object]]:
    """A record as MLflow takes it; numbers that JSON has not as its protocol writes them."""
    common = {"timestamp": int(record["time"] * 1000), "step": record["step"]}
    return [
        {"key": _UNFIT.sub("_", name), "value": _value(value), **common}
        for name, value in numbers(record)
    ]


def _restored(record: Record) -> dict[str, Any]:
    """A record of the file, which has null for numbers that are not finite."""
    return {name: math.nan if value is None else value for name, value in record.items()}


def _value(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The keys of nested mappings, with dots between, and their values as text."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield _UNFIT.sub("_", path), text[:_LONGEST]


def _authorization() -> dict[str, str]:
    token, user, password = mlflow_credentials()
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    return {}


def _commit() -> dict[str, str]:
    """The commit of the folder that the run is started in, and whether files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    commit, _, dirty = found.stdout.strip().partition("-")
    return {"mlflow.source.git.commit": commit, "fornax.git.dirty": str(bool(dirty)).lower()}
