"""Runs of an MLflow server, by a server that keeps to MLflow's documented REST interface.

https://mlflow.org/docs/latest/rest-api.html: it checks requests as a tracking server does (limits
of a batch, parameters that never change, runs and experiments that must be there), and tests look
at what it holds in the end.
"""

import dataclasses
import json
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.local_http import Handler, serving
from tests.ports import held_port
from tests.unit.train.test_run import CONFIG, task

from fornax.config import ConfigError
from fornax.config.jsonl import JsonLines
from fornax.config.progress import Quiet
from fornax.train import EvalConfig, LogConfig, MLflowConfig, read_metrics, train
from fornax.train.mlflow import MLflow


class RefusedError(Exception):
    """An answer with one of MLflow's codes."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Tracking:
    """What a tracking server holds."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.away = False
        self.got = threading.Condition()

    def ask(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        if self.away:
            raise RefusedError(503, "TEMPORARILY_UNAVAILABLE")
        match path:
            case "experiments/get-by-name":
                name = query["experiment_name"]
                if name not in self.experiments:
                    raise RefusedError(404, "RESOURCE_DOES_NOT_EXIST")
                return {"experiment": {"experiment_id": self.experiments[name], "name": name}}
            case "experiments/create":
                if body["name"] in self.experiments:
                    raise RefusedError(400, "RESOURCE_ALREADY_EXISTS")
                found = self.experiments[body["name"]] = str(len(self.experiments) + 7)
                return {"experiment_id": found}
            case "runs/create":
                assert body["experiment_id"] in self.experiments.values()
                name = f"{len(self.runs):032x}"
                tags = {tag["key"]: tag["value"] for tag in body["tags"]}
                info = {"run_id": name, "run_name": body["run_name"], "status": "RUNNING"}
                info["lifecycle_stage"] = "active"
                self.runs[name] = {"info": info, "tags": tags, "params": {}, "metrics": []}
                return {"run": {"info": info}}
            case "runs/get":
                return {"run": self.described(self.run(query["run_id"]))}
            case "runs/update":
                info = self.run(body["run_id"])["info"]
                assert body["status"] in ("RUNNING", "FINISHED", "FAILED", "KILLED")
                info["status"] = body["status"]
                return {"run_info": info}
            case "runs/log-batch":
                return self.log_batch(self.run(body["run_id"]), body)
        raise RefusedError(404, "ENDPOINT_NOT_FOUND")

    def run(self, name: str) -> dict[str, Any]:
        if name not in self.runs:
            raise RefusedError(404, "RESOURCE_DOES_NOT_EXIST")
        return self.runs[name]

    def log_batch(self, run: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        metrics, params = body.get("metrics", []), body.get("params", [])
        if len(metrics) > 1000 or len(params) > 100 or len(metrics) + len(params) > 1000:
            raise RefusedError(400, "INVALID_PARAMETER_VALUE")
        for one in params:
            assert isinstance(one["value"], str)
            assert len(one["value"]) <= 6000
            if run["params"].setdefault(one["key"], one["value"]) != one["value"]:
                raise RefusedError(400, "INVALID_PARAMETER_VALUE")
        for one in metrics:
            assert isinstance(one["step"], int)
            assert isinstance(one["timestamp"], int)
            run["metrics"].append((one["key"], one["step"], float(one["value"])))
        return {}

    def described(self, run: dict[str, Any]) -> dict[str, Any]:
        """As `runs/get` says it: of each metric the latest value."""
        latest: dict[str, tuple[int, float]] = {}
        for key, step, value in run["metrics"]:
            latest[key] = max(latest.get(key, (step, value)), (step, value))
        metrics = [{"key": k, "step": s, "value": v} for k, (s, v) in latest.items()]
        return {"info": run["info"], "data": {"metrics": metrics}}

    def wait(self, condition: Any) -> None:
        """Until what it holds fulfils a condition."""
        with self.got:
            assert self.got.wait_for(condition, timeout=120)


@pytest.fixture
def server() -> Iterator[tuple[Tracking, str]]:
    tracking = Tracking()

    class Answers(Handler):
        def answer(self, body: bytes) -> None:
            path, _, query = self.path.partition("?")
            path = path.removeprefix("/api/2.0/mlflow/")
            tracking.headers.append(dict(self.headers))
            try:
                given = dict(urllib.parse.parse_qsl(query))
                found, status = tracking.ask(path, given, json.loads(body or b"{}")), 200
            except RefusedError as error:
                found, status = {"error_code": error.code, "message": "no"}, error.status
            with tracking.got:
                tracking.got.notify_all()
            self.send(status, json.dumps(found).encode(), "application/json")

    with serving(Answers) as address:
        yield tracking, address


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's end waits as long as a busy machine needs."""
    monkeypatch.setattr("fornax.train.mlflow._AT_END", 240.0)


def record(step: int, **more: float) -> dict[str, Any]:
    return {"step": step, "time": 100.0 + step, "loss": 1 / step, "skipped": False, **more}


class Written:
    """A sink behind its `metrics.jsonl`, as a run has it."""

    def __init__(self, run_dir: Path, url: str, **resolved: Any) -> None:
        run_dir.mkdir(exist_ok=True)
        self.said: list[str] = []
        self.lines = JsonLines(run_dir / "metrics.jsonl")
        self.sink = MLflow(MLflowConfig(url=url), run_dir, resolved, self.said.append)

    def write(self, found: dict[str, Any]) -> None:
        self.lines.write(found)
        self.sink.write(found)

    def close(self) -> None:
        self.lines.close()
        self.sink.close()


def only_run(tracking: Tracking) -> dict[str, Any]:
    (run,) = tracking.runs.values()
    return run


def test_a_run_sends_its_metrics_parameters_and_tags(server, tmp_path):
    tracking, url = server
    log = LogConfig(tensorboard=False, mlflow=MLflowConfig(url=url, experiment="slopes"))
    config = dataclasses.replace(CONFIG, log=log, eval=EvalConfig(every=4, batches=2))
    run_dir = tmp_path / "mine"
    train(config, run_dir, task=task(), progress="none")
    run = only_run(tracking)
    assert set(tracking.experiments) == {"slopes"}
    assert run["info"]["run_name"] == "mine"
    assert run["info"]["status"] == "FINISHED"
    assert run["tags"]["fornax.run_dir"] == str(run_dir)
    assert run["params"]["optim.optimizer.type"] == "sgd"
    assert run["params"]["steps"] == "10"
    assert run["params"]["optim.optimizer.momentum"] == "null"
    kept = read_metrics(run_dir / "metrics.jsonl")
    for name in ("loss", "eval/loss", "grad_norm", "points_per_second"):
        sent = [(step, value) for key, step, value in run["metrics"] if key == name]
        assert sent == [(r["step"], r[name]) for r in kept if name in r]
    assert len({r["step"] for r in kept}) == 10


def test_a_resumed_run_continues_without_repeating_steps(server, tmp_path):
    tracking, url = server
    first = Written(tmp_path, url, steps=6)
    for step in range(1, 5):
        first.write(record(step))
    first.close()
    assert only_run(tracking)["info"]["status"] == "KILLED"  # it stopped before its last step
    # Resumed from step 2: 3 and 4 come again, their times are others.
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record(step)) + "\n" for step in (1, 2))
    )
    again = Written(tmp_path, url, steps=6)
    for step in range(3, 7):
        again.write({**record(step), "time": 500.0 + step})
    again.close()
    run = only_run(tracking)
    assert [s for key, s, _ in run["metrics"] if key == "loss"] == [1, 2, 3, 4, 5, 6]
    assert run["info"]["status"] == "FINISHED"
    assert run["params"] == {"steps": "6"}
    assert first.said == again.said == []


def test_a_server_that_is_away_is_said_once_and_gets_everything_later(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr("fornax.train.mlflow._AGAIN", 0.01)
    tracking, url = server
    tracking.away = True
    written = Written(tmp_path, url, steps=4)
    written.write(record(1))
    asked = len(tracking.headers)
    tracking.wait(lambda: len(tracking.headers) > asked + 1)
    written.write(record(2))
    written.write(record(3))
    (said,) = written.said
    assert "HTTP 503" in said
    assert "Training continues" in said
    tracking.away = False
    written.write(record(4))
    written.close()
    assert [s for key, s, _ in only_run(tracking)["metrics"] if key == "loss"] == [1, 2, 3, 4]
    assert len(written.said) == 1


def test_no_server_at_all_stops_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr("fornax.train.mlflow._AGAIN", 0.01)
    said: list[str] = []

    class Told(Quiet):
        def log(self, line: str) -> None:
            said.append(line)

    log = LogConfig(tensorboard=False, mlflow=MLflowConfig(url=f"http://127.0.0.1:{held_port()}"))
    config = dataclasses.replace(CONFIG, log=log, eval=EvalConfig(), save_every=None)
    result = train(config, tmp_path / "run", task=task(), progress=Told())
    assert result.reason == "finished"
    assert len([line for line in said if "cannot be used" in line]) == 1
    assert [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 10


def test_what_one_request_cannot_hold_goes_in_several(server, tmp_path):
    tracking, url = server
    many = {f"expert {n}!": float(n) for n in range(300)}
    for step in range(1, 6):  # of a run that had no server: they come from its file
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(step, **many)) + "\n")
    resolved = {f"key_{n}": n for n in range(250)}
    written = Written(tmp_path, url, **resolved, long="x" * 9000)
    written.write(record(6, broken=float("nan")))
    written.close()
    run = only_run(tracking)
    assert len(run["params"]) == 251
    assert run["params"]["key_7"] == "7"
    sent = [step for key, step, _ in run["metrics"] if key == "expert 299_"]
    assert sent == [1, 2, 3, 4, 5]
    (value,) = [value for key, _, value in run["metrics"] if key == "broken"]
    assert value != value


def test_a_run_that_the_server_deleted_is_made_again(server, tmp_path):
    tracking, url = server
    first = Written(tmp_path, url, steps=9)
    first.write(record(1))
    first.close()
    tracking.runs.clear()
    again = Written(tmp_path, url, steps=9)
    again.write(record(2))
    again.close()
    assert [s for key, s, _ in only_run(tracking)["metrics"] if key == "loss"] == [1, 2]


def test_credentials_come_from_the_environment(server, tmp_path, monkeypatch):
    tracking, url = server
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    written = Written(tmp_path, url, steps=1)
    written.write(record(1))
    written.close()
    assert {h["Authorization"] for h in tracking.headers} == {"Basic YWRhOnNlY3JldA=="}
    assert "secret" not in json.dumps(only_run(tracking))


def test_training_does_not_wait_for_a_slow_server(server, tmp_path):
    tracking, url = server
    go = threading.Event()
    ask = tracking.ask

    def slow(*words: Any) -> Any:
        assert go.wait(120)
        return ask(*words)

    tracking.ask = slow
    written = Written(tmp_path, url, steps=3)
    for step in (1, 2, 3):
        written.write(record(step))  # would hang here
    go.set()
    written.close()
    assert only_run(tracking)["info"]["status"] == "FINISHED"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "./mlruns"}, "is not the address of an MLflow server"),
        ({"url": "sqlite:///mlflow.db"}, "is not the address of an MLflow server"),
        ({"url": "http://a:b@host"}, "MLFLOW_TRACKING_PASSWORD instead"),
        ({"experiment": ""}, "experiment is empty"),
    ],
)
def test_what_is_no_server_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        MLflowConfig(**given)
