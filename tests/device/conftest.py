"""What all device tests need: the device itself, and a record of what ran on it."""

import datetime
import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import pytest
from tests.device.machine import DEVICE, ON_GPU

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_outcomes = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_outcomes] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write a results file of the run")


@pytest.fixture(autouse=True)
def device() -> jax.Device:
    """The device under test: DEVICE=gpu without a GPU is a failure, not a skip."""
    if ON_GPU and jax.default_backend() != "gpu":
        pytest.fail(f"DEVICE=gpu and jax has {jax.devices()}; install jax[cuda13], or DEVICE=cpu")
    return jax.local_devices()[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        name = item.nodeid.rpartition("tests/device/")[2]
        item.config.stash[_outcomes][name] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--record", default=False):
        return
    kind = jax.local_devices()[0].device_kind if ON_GPU else "cpu"
    told = {
        "device": kind,
        "platform": DEVICE,
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "tests": session.config.stash[_outcomes],
    }
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    name = f"{date}-{kind.lower().replace(' ', '_')}-device_test.json"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(told, indent=1) + "\n")
