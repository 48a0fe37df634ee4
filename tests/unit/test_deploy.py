"""Files of `deploy/` name what exists: metrics and their labels, options, probes, images."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from tests.unit.serving.test_watching import MEMORY, _Host

from fornax.config import load
from fornax.diffusion.server.metrics import Metrics as ImageMetrics
from fornax.llm.server import Metrics
from fornax.llm.server.launch import ServeConfig
from fornax.llm.server.middleware import RequestContext
from fornax.serving.config import HostConfig
from fornax.serving.telemetry.metrics import Metrics as HostMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = DEPLOY / "compose" / "grafana" / "dashboards"


def _shown(kind: str) -> dict[str, set[str]]:
    """The labels of each series of a server that has answered, by its name as it is exposed."""
    if kind == "host":
        metrics = HostMetrics(_Host(), MEMORY)
    else:
        metrics = Metrics("m", max_model_len=64) if kind == "serve" else ImageMetrics("m")
        request = RequestContext(id="1", method="GET", path="/health", client="", send=None)
        request.status = 200
        metrics.request(request)
        if kind == "images":
            metrics.finished("done", 1.0, 0.5)
    text = metrics.exposition()[0].decode()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([\w:]+)(?:\{(.*)\})? [^ ]+$", text, flags=re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize("kind", ["serve", "host", "images"])
def test_every_query_of_a_dashboard_is_of_a_series_that_its_server_shows(kind):
    shown = _shown(kind)
    dashboard = json.loads((DASHBOARDS / f"{kind}.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 9
    for query in queries:
        bare = re.sub(r"\bby \([^)]*\)|\[[^]]*\]", " ", query)
        names = re.findall(r"(?<![\w:.])[a-zA-Z_][\w:]*(?![\w:]*\s*\()", bare)
        assert names, query
        for name in names:
            assert name in shown, f"{query}: {name} is not shown"
        labels = {
            label.strip()
            for each in re.findall(r"by \(([^)]*)\)", query)
            for label in each.split(",")
        }
        for name in names:
            assert labels <= shown[name], f"{query}: {name} has {shown[name]}"


def test_dashboards_are_what_their_script_writes():
    spec = importlib.util.spec_from_file_location("dashboards", DEPLOY / "dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for made in (module.SERVE, module.HOST, module.IMAGES):
        path = DASHBOARDS / f"{made['uid'].removeprefix('fornax-')}.json"
        assert json.loads(path.read_text(encoding="utf-8")) == made, "run deploy/dashboards.py"
        assert path.name in {"serve.json", "host.json", "images.json"}


@pytest.mark.parametrize("kind", ["serve", "host"])
def test_a_deployment_starts_a_server_with_options_that_exist(kind):
    text = (DEPLOY / "kubernetes" / f"{kind}.yaml").read_text(encoding="utf-8")
    deployment, service, scaler = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, model, *flags = container["args"]
    assert command == kind
    config = load(ServeConfig if kind == "serve" else HostConfig, overrides=flags)
    drain = (
        config.shutdown_timeout + 5
        if kind == "serve"
        else (config.drain_delay_seconds + config.drain_seconds)
    )
    assert pod["terminationGracePeriodSeconds"] > drain
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    if kind == "serve":
        assert ports == {"http": config.port}
    else:
        assert ports == {"http": config.http_address().port, "grpc": config.grpc_address().port}
    assert {each["targetPort"] for each in service["spec"]["ports"]} == set(ports)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert model in mounts.values()
    assert set(mounts) == {each["name"] for each in pod["volumes"]}
    stages = re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert container["image"].removeprefix("fornax:") in stages
    for each in scaler["spec"]["metrics"]:
        assert each["pods"]["metric"]["name"] in _shown(kind)
    names = {d["metadata"]["name"] for d in (deployment, service, scaler)}
    assert names == {scaler["spec"]["scaleTargetRef"]["name"]}


def test_compose_mounts_files_that_exist_and_starts_a_server():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("."):
                assert (DEPLOY / "compose" / volume.split(":")[0]).exists()
    serve = compose["services"]["fornax"]["command"]
    config = load(ServeConfig, overrides=serve[2:])
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"fornax:{config.port}"]
