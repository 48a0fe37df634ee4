"""Whatever a config holds, its YAML and its flags load back equal; a diff says what differs."""

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fornax.config import FornaxError, diff, dump_yaml, from_mapping, from_yaml, load, to_mapping


@dataclass(frozen=True, kw_only=True)
class Constant:
    type: Literal["constant"] = "constant"
    warmup: int = 0


@dataclass(frozen=True, kw_only=True)
class Piecewise:
    type: Literal["piecewise"] = "piecewise"
    scales: tuple[float, ...] = (1.0, 0.5)
    at: dict[str, int] = field(default_factory=lambda: {"half": 5})


@dataclass(frozen=True, kw_only=True)
class Everything:
    flag: bool = True
    count: int = 3
    rate: float = 1e-4
    name: str = "x"
    path: Path = Path("runs")
    maybe: str | None = "set"
    number: int | float | None = 2
    mode: Literal["none", "1", "true", 1, 2] = "none"
    pair: tuple[int, str] = (1, "a")
    paths: tuple[Path, ...] = (Path("a"),)
    rules: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"embed": ("fsdp",)})
    schedule: Constant | Piecewise = field(default_factory=Piecewise)
    schedules: tuple[Constant | Piecewise, ...] = (Constant(warmup=1),)
    extra: Constant | None = None
    by_name: dict[str, Constant] = field(default_factory=dict)


floats = st.floats(allow_nan=False)
text = st.text(max_size=12)
paths = text.filter(lambda name: "\x00" not in name).map(Path)
constants = st.builds(Constant, warmup=st.integers())
schedules = constants | st.builds(
    Piecewise,
    scales=st.lists(floats, max_size=3).map(tuple),
    at=st.dictionaries(text, st.integers(), max_size=3),
)
configs = st.builds(
    Everything,
    flag=st.booleans(),
    count=st.integers(),
    rate=floats,
    name=text | st.sampled_from(["1e-4", "null", "~", "no", "true", ".inf", "0x1F", "- a", "a: b"]),
    path=paths,
    maybe=st.none() | text,
    number=st.none() | st.integers() | floats,
    mode=st.sampled_from(["none", "1", "true", 1, 2]),
    pair=st.tuples(st.integers(), text),
    paths=st.lists(paths, max_size=3).map(tuple),
    rules=st.dictionaries(text, st.lists(text, max_size=2).map(tuple), max_size=3),
    schedule=schedules,
    schedules=st.lists(schedules, max_size=3).map(tuple),
    extra=st.none() | constants,
    by_name=st.dictionaries(text, constants, max_size=2),
)


@settings(deadline=None)
@example(Everything(name="\x85", maybe="a\u2028", rules={"\ufeff\u2029": ()}))
@given(configs)
def test_yaml_loads_back_equal(config):
    written = dump_yaml(config)
    assert from_yaml(Everything, written) == config
    assert dump_yaml(from_yaml(Everything, written)) == written


@settings(deadline=None)
@given(configs)
def test_plain_values_load_back_equal(config):
    again = from_mapping(Everything, to_mapping(config))
    assert again == config
    assert type(again.number) is type(config.number)
    assert type(again.mode) is type(config.mode)


@settings(deadline=None)
@given(configs, configs)
def test_differences_applied_to_the_old_config_give_the_new_one(old, new):
    changes = diff(old, new)
    assert (not changes) == (old == new)
    changed = {change.path.split(".")[0] for change in changes}
    assert replace(old, **{name: getattr(new, name) for name in changed}) == new


@settings(deadline=None)
@given(configs)
def test_scalars_given_as_flags_load_back_equal(config):
    words = [
        f"--flag={config.flag}",
        f"--count={config.count}",
        f"--rate={config.rate!r}",
        f"--name={config.name}",
        f"--path={config.path}",
    ]
    again = load(Everything, overrides=words)
    for name in ("flag", "count", "rate", "name", "path"):
        assert getattr(again, name) == getattr(config, name)


def test_a_file_on_disk_loads_back_equal(tmp_path):
    config = Everything(name="tab\there", rate=1e-5, paths=(Path("ü"),))
    (tmp_path / "c.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load(Everything, file=tmp_path / "c.yaml") == config


def test_diff_names_paths_and_both_values():
    old = Everything()
    new = replace(old, count=4, schedule=Constant(warmup=2), rules={})
    assert [str(change) for change in diff(old, new)] == [
        "count: 3 -> 4",
        "rules.embed: [fsdp] -> absent",
        "schedule.type: piecewise -> constant",
        "schedule.scales: [1.0, 0.5] -> absent",
        "schedule.at: {half: 5} -> absent",
        "schedule.warmup: absent -> 2",
    ]


def test_diff_goes_into_lists_of_equal_length():
    old = Everything(schedules=(Constant(), Constant()))
    new = Everything(schedules=(Constant(), Constant(warmup=9)))
    assert [change.path for change in diff(old, new)] == ["schedules.1.warmup"]


def test_diff_tells_a_truth_value_from_a_number():
    assert diff(Everything(mode=1), Everything(mode=True))  # pyrefly: ignore[bad-argument-type]


def test_a_value_no_key_can_hold_is_named():
    odd = Everything(name=b"bytes")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match=r"^name=b'bytes' is not a value"):
        to_mapping(odd)
    with pytest.raises(TypeError, match="takes a dataclass instance"):
        to_mapping(Everything)


fields = [field.name for field in dataclasses.fields(Everything)]
names = st.sampled_from(["flag", "schedule", "type", "rules", "pair", "by_name", "0", "nope"])
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(names | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def refuses_or_loads(call) -> None:
    """Whatever is given ends in a config or in one paragraph, never in another exception."""
    try:
        message = f"loaded {call()}"
    except FornaxError as error:
        message = str(error)
    assert len(message) > 10
    assert message.isprintable()


@settings(deadline=None)
@given(st.dictionaries(names | st.sampled_from(fields), junk, max_size=4))
def test_any_mapping_loads_or_is_refused(mapping):
    refuses_or_loads(lambda: from_mapping(Everything, mapping))


@settings(deadline=None)
@given(st.text(alphabet="flagtype01 :-[]{}'\"&*!#\n\t,.%@`|>", max_size=40) | st.text(max_size=20))
def test_any_text_loads_or_is_refused(text):
    refuses_or_loads(lambda: from_yaml(Everything, text))


words = (
    st.tuples(
        st.lists(names | st.sampled_from(fields), min_size=1, max_size=3), st.text(max_size=5)
    ).map(lambda pair: f"--{'.'.join(pair[0])}={pair[1]}")
    | st.sampled_from(
        ["--flag", "--no-flag", "--no-", "--", "--=", "--.", "--flag.", "[", "{a", "-"]
    )
    | st.lists(names | st.sampled_from(fields), max_size=3).map(lambda path: f"--{'.'.join(path)}")
    | st.text(max_size=4)
)


@settings(deadline=None)
@given(st.lists(words, max_size=4))
def test_any_command_line_loads_or_is_refused(arguments):
    refuses_or_loads(lambda: load(Everything, overrides=arguments))
