"""Topologies as users write them: what is understood, and what an error says of the rest."""

import math

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.errors import ConfigError
from fornax.mesh.hardware import CHIPS
from fornax.plan import topology
from fornax.plan.topology import Topology, parse_topology, topology_shapes

_TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]


@pytest.mark.parametrize(
    ("text", "chips", "devices", "hosts", "wrap"),
    [
        ("v5p:4x4x4", 64, 64, 16, (True, True, True)),
        ("v5p:2x4x4", 32, 32, 8, (False, False, False)),
        ("v5p:2x2x1", 4, 4, 1, (False, False, False)),
        ("v5e:2x4", 8, 8, 1, (False, False)),
        ("v5e:4x4", 16, 16, 4, (False, False)),
        ("v5e:8x16", 128, 128, 32, (False, True)),
        ("2*v6e:16x16", 512, 512, 128, (True, True)),
        ("tpu7x:4x4x8", 128, 256, 32, (True, True, True)),
        ("h100:8", 8, 8, 1, (False, False)),
        ("h100:4x8", 32, 32, 4, (False, False)),
    ],
)
def test_counts_and_wrap(
    text: str, chips: int, devices: int, hosts: int, wrap: tuple[bool, ...]
) -> None:
    found = parse_topology(text)
    assert (found.num_chips, found.num_devices, found.num_hosts) == (chips, devices, hosts)
    assert found.wrap == wrap
    assert found.name == text


def test_other_spellings_have_one_name() -> None:
    assert parse_topology(" 1*Trillium:2x4 ").name == "v6e:2x4"
    assert parse_topology("v5litepod:4x4").name == "v5e:4x4"
    assert parse_topology("2 * ironwood:4x4x4").name == "2*tpu7x:4x4x4"
    assert parse_topology("h100:1x8").name == "h100:8"


@given(
    st.sampled_from(_TPUS).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(topology_shapes(CHIPS[name])))
    ),
    st.integers(1, 256),
)
def test_every_shape_reads_back(named: tuple[str, tuple[int, ...]], slices: int) -> None:
    name, shape = named
    whole = Topology(chip=CHIPS[name], shape=shape, slices=slices)
    assert parse_topology(whole.name) == whole
    assert whole.num_hosts * math.prod(whole.host_shape) == whole.num_chips


@given(st.text(max_size=24))
def test_any_text_is_a_topology_or_one_paragraph(text: str) -> None:
    hypothesis.assume("cpu" not in text.lower())
    assert "\n" not in _answer(text)


def _answer(text: str) -> str:
    try:
        return parse_topology(text).name
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p:8x4x4", "nearest is v5p:4x4x8"),
        ("v5p:4x4x5", "ascending multiples of 4"),
        ("v6e:3x3", "nearest is v6e:2x4"),
        ("v6e:4x4x4", "its slices are 1x1, 2x2"),
        ("v5p-128", "counts TensorCores.*v5p:4x4x4"),
        ("v6e-8", "counts chips.*v6e:2x4"),
        ("h100:16", "nearest is h100:2x8"),
        ("2*h100:8", "write h100:2x8"),
        ("v9:2x2", "chip 'v9' is not known"),
        ("v5p", "names no chips"),
        ("cpu:2x2", "cpu:8 for virtual devices"),
        ("0*v5e:2x2", "1 to 256 slices"),
        ("v5e:", "write it like v5p:4x4x4"),
    ],
)
def test_errors_say_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_topology(text)


def test_a_cpu_is_shared_by_its_virtual_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(devices: int) -> object:
        asked.append(devices)
        return CHIPS["l4"]

    monkeypatch.setattr(topology, "cpu_chip", measured)
    assert parse_topology("cpu").num_devices == 1
    assert parse_topology("cpu:8").num_devices == 8
    assert asked == [1, 8]
