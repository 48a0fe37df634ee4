"""Without a topology a plan is for this machine, where that says enough."""

import dataclasses

import jax
import pytest

from fornax.config import ConfigError
from fornax.plan.topology import local_topology


@dataclasses.dataclass
class Device:
    platform: str
    device_kind: str


def see(monkeypatch, platform: str, kind: str, count: int) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(platform, kind)] * count)


def test_cpu_devices_count(monkeypatch):
    see(monkeypatch, "cpu", "cpu", 8)
    assert local_topology().name == "cpu:8"


def test_known_gpus_are_a_node(monkeypatch):
    see(monkeypatch, "gpu", "NVIDIA H100 80GB HBM3", 4)
    assert local_topology().name == "h100:4"


@pytest.mark.parametrize(("platform", "kind"), [("tpu", "TPU v5p"), ("gpu", "NVIDIA GT 710")])
def test_what_says_too_little_has_to_be_named(monkeypatch, platform, kind):
    see(monkeypatch, platform, kind, 4)
    with pytest.raises(ConfigError, match=f"4 devices of kind {kind}.*--topology"):
        local_topology()
