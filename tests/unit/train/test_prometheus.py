"""The page for Prometheus: what its own parser reads there, while a run writes."""

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fornax.config.errors import ConfigError
from fornax.train.config import PrometheusConfig
from fornax.train.prometheus import Prometheus


def read(page: Prometheus) -> dict[str, float]:
    """Values by name; every sample has the run's label and no other."""
    with urllib.request.urlopen(page.address, timeout=120) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels == {"run": "my run"} for sample in samples)
    assert {family.type for family in families} <= {"gauge"}
    return {sample.name: sample.value for sample in samples}


@pytest.fixture
def page(tmp_path: Path):
    made = Prometheus(PrometheusConfig(port=0), tmp_path / "my run")
    yield made
    made.close()


def test_each_number_of_the_latest_record_is_a_gauge(page: Prometheus):
    assert page.address.startswith("http://127.0.0.1:")
    assert read(page) == {}
    page.write({"step": 1, "time": 10.5, "loss": 3.0, "eval/loss": 4.0, "skipped": False})
    page.write({"step": 2, "time": 11.5, "loss": 2.0, "skipped": True, "experts": [1, 2]})
    assert read(page) == {
        "fornax_train_step": 2,
        "fornax_train_time_seconds": 11.5,
        "fornax_train_loss": 2.0,
        "fornax_train_eval_loss": 4.0,
        "fornax_train_skipped": 1.0,
    }


def test_what_a_rewind_forgets_is_not_shown(page: Prometheus):
    page.write({"step": 9, "time": 1.0, "loss": 30.0, "eval/loss": 4.0})
    page.rewind(6)
    assert read(page) == {}
    page.write({"step": 7, "time": 2.0, "loss": float("nan")})
    found = read(page)
    assert found["fornax_train_step"] == 7
    assert found["fornax_train_loss"] != found["fornax_train_loss"]
    assert "fornax_train_eval_loss" not in found


def test_a_port_in_use_is_named(page: Prometheus, tmp_path: Path):
    port = int(page.address.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*another port"):
        Prometheus(PrometheusConfig(port=port), tmp_path)


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(port: int):
    with pytest.raises(ConfigError, match="is not a port; use 0 to 65535"):
        PrometheusConfig(port=port)
