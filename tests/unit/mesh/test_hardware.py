"""The table of hardware facts: complete, consistent with itself, and found by any of its names."""

import dataclasses

import pytest

from fornax.config.errors import ConfigError
from fornax.mesh.hardware import CHIPS, Chip, chip_of, find_chip

_SOURCED = (
    *("peak_flops", "memory_bytes", "usable_bytes", "memory_bandwidth", "link_bandwidth"),
    *("network_bandwidth", "host_bandwidth", "host_chips"),
)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_every_figure_has_a_source_and_makes_sense(chip: Chip) -> None:
    known = {field.name for field in dataclasses.fields(Chip)}
    assert set(chip.sources) <= known
    for field in _SOURCED:
        assert chip.sources.get(field), field
    assert (chip.clock is None) == ("clock" not in chip.sources)
    assert 0.5 * chip.memory_bytes < chip.usable_bytes <= chip.memory_bytes
    assert chip.memory_bandwidth > chip.link_bandwidth > chip.network_bandwidth / 2
    assert chip.peak("bfloat16") <= chip.peak("float8_e4m3fn")
    assert chip.peak("float32") <= chip.peak("bfloat16") <= chip.peak("int8")


def test_a_dtype_without_a_unit_runs_at_the_next_wider_rate() -> None:
    v5e = CHIPS["v5e"]
    assert v5e.peak("float8_e5m2") == v5e.peak("bfloat16")
    assert v5e.peak("int4") == v5e.peak("int8")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_jax_devices_are_recognised(kind: str, name: str) -> None:
    found = chip_of(kind)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("kind", ["TPU v4 lite", "NVIDIA L40S", "NVIDIA H100 NVL", "cpu"])
def test_a_relative_of_a_known_chip_is_not_taken_for_it(kind: str) -> None:
    assert chip_of(kind) is None


def test_names_of_users_are_found_and_misspelt_ones_named() -> None:
    assert find_chip("Trillium").name == "v6e"
    assert find_chip("tpu-v5p").name == "v5p"
    with pytest.raises(ConfigError, match=r"'h10' is not known.*did you mean h100"):
        find_chip("h10")
