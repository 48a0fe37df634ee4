"""Defaults, then the YAML file, then the command line; every mistake is named in one paragraph."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from fornax.config import (
    ConfigError,
    FornaxError,
    ShardingError,
    dump_yaml,
    from_mapping,
    from_yaml,
    load,
)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    type: Literal["adamw"] = "adamw"
    b1: float = 0.9
    eps: float = 1e-8
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Lion:
    type: Literal["lion"] = "lion"
    b1: float = 0.95
    fused: int = 0


@dataclass(frozen=True, kw_only=True)
class Optim:
    optimizer: AdamW | Lion = field(default_factory=lambda: AdamW(b1=0.8))
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Model:
    num_layers: int = 2
    width: int = 8
    heads: int = 2
    tie: bool = False
    no_bias: bool = False
    remat: Literal["none", "full"] = "none"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ShardingError(
                f"width={self.width} does not divide into heads={self.heads}; "
                f"use a multiple of {self.heads}"
            )


@dataclass(frozen=True, kw_only=True)
class Root:
    model: Model = field(default_factory=lambda: Model(num_layers=3))
    optim: Optim = field(default_factory=Optim)
    rules: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"embed": ("fsdp",)})
    paths: tuple[Path, ...] = ()
    name: str | None = None
    size: int | Literal["auto"] = "auto"
    threads: int | float = 1
    show: bool | str = False
    sources: tuple[AdamW | Lion, ...] = (AdamW(),)
    teacher: Model | None = None


@dataclass(frozen=True, kw_only=True)
class Needy:
    vocab: int
    out: Path
    depth: int = 1


@pytest.fixture
def run(tmp_path):
    """Load Root from YAML text (in run.yaml) and words of a command line."""

    def _run(text: str, *words: str) -> Root:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return load(Root, file=file, overrides=words)

    return _run


@pytest.fixture
def refusal(run, tmp_path):
    """The paragraph with which Root refuses, the folder's name taken out."""

    def _refusal(text: str, *words: str) -> str:
        with pytest.raises(FornaxError) as caught:
            run(text, *words)
        message = str(caught.value).replace(f"{tmp_path}/", "")
        assert "\n" not in message
        return message

    return _refusal


@pytest.mark.parametrize("text", ["", "# nothing here\n", "---\n", "{}"])
def test_a_file_without_keys_keeps_every_default(run, text):
    assert run(text) == Root()


def test_a_sparse_mapping_keeps_the_other_values_of_the_default_around_it(run):
    config = run("model: {width: 16}\noptim: {optimizer: {eps: 1e-6}}")
    assert config.model == Model(num_layers=3, width=16)
    assert config.optim.optimizer == AdamW(b1=0.8, eps=1e-6)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(run):
    config = run("model: {num_layers: 5, width: 16}", "--model.num-layers", "7")
    assert (config.model.num_layers, config.model.width, config.model.heads) == (7, 16, 2)


def test_flags_need_no_file():
    assert load(Root, overrides=["--model.num_layers=4"]).model.num_layers == 4


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("-.5", -0.5), ("1_000.5", 1000.5), ("3", 3.0), (".inf", 9e999)],
)
def test_numbers_without_a_point_are_numbers(run, text, number):
    lr = run(f"optim: {{lr: {text}}}").optim.lr
    assert lr == number
    assert type(lr) is float


@pytest.mark.parametrize(
    ("text", "number"), [("1_000", 1000), ("010", 10), ("0x10", 16), ("0o10", 8), ("-3", -3)]
)
def test_integers_are_read_as_yaml_1_2_does(run, text, number):
    assert run(f"model: {{num_layers: {text}}}").model.num_layers == number


@pytest.mark.parametrize("text", ["no", "on", "1:30", "2026-01-01", "0o9", "=", "<<"])
def test_words_that_yaml_1_1_would_convert_stay_text(run, text):
    assert run(f"name: {text}").name == text


def test_a_union_of_scalars_keeps_the_type_given(run):
    assert type(run("threads: 3").threads) is int
    assert type(run("threads: 3.0").threads) is float
    assert run("size: 8").size == 8
    assert run("size: 8", "--size", "auto").size == "auto"


def test_lists_become_tuples_and_text_becomes_paths(run):
    config = run("paths: [a, b/c]\noptim: {betas: [1, 0.5]}")
    assert config.paths == (Path("a"), Path("b/c"))
    assert config.optim.betas == (1.0, 0.5)


def test_a_mapping_for_an_optional_dataclass_builds_it(run):
    assert run("teacher: {heads: 4}").teacher == Model(heads=4)
    assert run("", "--teacher.heads", "4").teacher == Model(heads=4)
    assert run("teacher: {heads: 4}", "--teacher", "none").teacher is None


class TestFlags:
    """How words of a command line become values."""

    @pytest.mark.parametrize(
        ("words", "value"),
        [
            (["--model.tie"], True),
            (["--model.tie", "false"], False),
            (["--model.tie=True"], True),
            (["--no-model.tie"], False),
            (["--model.no-tie"], False),
        ],
    )
    def test_a_switch(self, run, words, value):
        assert run("model: {tie: true}", *words).model.tie is value

    def test_a_field_whose_name_begins_with_no_is_a_field(self, run):
        assert run("", "--model.no-bias").model.no_bias is True
        assert run("", "--no-model.no-bias").model.no_bias is False

    def test_a_switch_that_also_takes_text(self, run):
        assert run("", "--show").show is True
        assert run("", "--show", "--name", "x").show is True
        assert run("", "--show", "part").show == "part"
        assert run("", "--show", "false").show is False

    def test_a_switch_in_one_variant_that_is_a_number_in_another(self, run):
        assert run("", "--sources.0.fused").sources == (AdamW(fused=True),)
        words = ["--sources", "[{type: lion}]", "--optim.optimizer.type", "lion"]
        config = run("", *words, "--optim.optimizer.fused", "3")
        assert config.optim.optimizer == Lion(fused=3)

    def test_negative_numbers_are_values(self, run):
        assert run("", "--optim.lr", "-1e-3").optim.lr == -1e-3

    def test_a_tuple_takes_every_word_up_to_the_next_flag(self, run):
        config = run("", "--paths", "a", "b,c", "--name", "x")
        assert config.paths == (Path("a"), Path("b,c"))
        assert config.name == "x"

    def test_a_tuple_takes_a_yaml_list(self, run):
        assert run("paths: [z]", "--paths", "[a, b]").paths == (Path("a"), Path("b"))
        assert run("paths: [z]", "--paths=[]").paths == ()

    def test_text_is_taken_as_it_stands(self, run):
        assert run("", "--name", "[x]").name == "[x]"
        assert run("", "--name=--odd").name == "--odd"
        assert run("", "--name", "12").name == "12"
        assert run("", "--name=").name == ""

    def test_none_clears_an_optional_key(self, run):
        assert run("name: a", "--name", "none").name is None
        assert run("model: {remat: full}", "--model.remat", "none").model.remat == "none"

    def test_a_key_of_a_dict_is_taken_as_typed_and_joins_the_others(self, run):
        assert run("", "--rules.kv-heads", "x", "y").rules == {
            "embed": ("fsdp",),
            "kv-heads": ("x", "y"),
        }
        assert run("rules: {a: [b]}", "--rules.c", "d").rules == {"a": ("b",), "c": ("d",)}

    def test_a_whole_mapping_replaces_that_of_the_file(self, run):
        assert run("rules: {a: [b]}", "--rules", "{c: [d]}").rules == {"c": ("d",)}

    def test_an_element_of_a_tuple_is_changed_by_its_index(self, run):
        assert run("", "--sources.0.b1", "0.5").sources == (AdamW(b1=0.5),)
        config = run("sources: [{type: lion}, {type: adamw, eps: 1.0}]", "--sources.1.b1", "0.5")
        assert config.sources == (Lion(), AdamW(b1=0.5, eps=1.0))

    def test_plain_values_under_dotted_keys(self):
        config = load(Root, overrides={"model.num-layers": 9, "rules": {"a": ["b"]}})
        assert config.model.num_layers == 9
        assert config.rules == {"a": ("b",)}


class TestUnions:
    """Variants chosen by `type:`."""

    def test_the_file_chooses_a_variant_with_its_own_defaults(self, run):
        assert run("optim: {optimizer: {type: lion}}").optim.optimizer == Lion()

    def test_the_command_line_chooses_a_variant(self, run):
        words = ["--optim.optimizer.type", "lion", "--optim.optimizer.b1", "0.5"]
        assert run("", *words).optim.optimizer == Lion(b1=0.5)

    def test_a_switched_variant_keeps_the_keys_both_have(self, run):
        config = run("optim: {optimizer: {b1: 0.3}}", "--optim.optimizer.type", "lion")
        assert config.optim.optimizer == Lion(b1=0.3)

    def test_a_switched_variant_names_the_file_keys_it_lacks(self, refusal):
        message = refusal(
            "optim:\n  optimizer:\n    b1: 0.3\n    eps: 1e-6\n", "--optim.optimizer.type", "lion"
        )
        assert message == (
            "optim.optimizer.type (--optim.optimizer.type on the command line) chose lion, which "
            "has no eps (run.yaml, line 4); it takes type, b1, fused. Remove what it lacks from "
            "the file, or replace the whole: --optim.optimizer '{type: lion}'"
        )

    def test_a_whole_variant_on_the_command_line_drops_that_of_the_file(self, run):
        config = run("optim: {optimizer: {eps: 1e-6}}", "--optim.optimizer", "{type: lion}")
        assert config.optim.optimizer == Lion()

    def test_an_element_without_a_type_names_the_choices(self, refusal):
        message = refusal("sources: [{b1: 0.5}]")
        assert message == "sources.0 (run.yaml, line 1) needs the key type: one of adamw, lion"

    @pytest.mark.parametrize("type_", ["lyon", "3", "[a]"])
    def test_an_unknown_type_names_the_choices(self, refusal, type_):
        message = refusal(f"optim:\n  optimizer: {{type: {type_}}}")
        assert "optim.optimizer.type=" in message
        assert "(run.yaml, line 2) is not one of adamw, lion" in message

    def test_an_unknown_type_names_the_nearest(self, refusal):
        assert "did you mean lion?" in refusal("", "--optim.optimizer.type", "lyon")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (
            "model:\n  width: 8\n  num_layer: 3",
            [],
            "model.num_layer (run.yaml, line 3) is not a key of Model; did you mean "
            "model.num_layers? model takes num_layers, width, heads, tie, no_bias, remat",
        ),
        (
            "",
            ["--model.num-layer", "3"],
            "model.num_layer (--model.num-layer on the command line) is not a key of Model; did "
            "you mean model.num_layers? model takes num_layers, width, heads, tie, no_bias, remat",
        ),
        (
            "",
            ["--betas", "3"],
            "betas (--betas on the command line) is not a key of Root; did you mean optim.betas? "
            "Root takes model, optim, rules, paths, name, size, threads, show, sources, teacher",
        ),
        (
            "model: {num_layers: many}",
            [],
            "model.num_layers=many (run.yaml, line 1) is text, but this key takes an integer",
        ),
        (
            "model: {num_layers: 1e3}",
            [],
            "model.num_layers=1000.0 (run.yaml, line 1) is a number with a fraction or exponent, "
            "but this key takes an integer; write 1000",
        ),
        (
            "model: {num_layers: true}",
            [],
            "model.num_layers=true (run.yaml, line 1) is a truth value, but this key takes an "
            "integer",
        ),
        (
            "optim: {lr: true}",
            [],
            "optim.lr=true (run.yaml, line 1) is a truth value, but this key takes a number",
        ),
        (
            "model: {tie: yes}",
            [],
            "model.tie=yes (run.yaml, line 1) is text, but this key takes true or false; write "
            "true",
        ),
        (
            "model: {remat: ful}",
            [],
            "model.remat=ful (run.yaml, line 1) is not one of none, full; did you mean full?",
        ),
        (
            "name: 12",
            [],
            "name=12 (run.yaml, line 1) is an integer, but this key takes text or null; put it in "
            "quotes: '12'",
        ),
        (
            "size: big",
            [],
            "size=big (run.yaml, line 1) is text, but this key takes an integer or one of auto",
        ),
        (
            "model:",
            [],
            "model=null (run.yaml, line 1) is null, but this key takes a mapping with the keys of "
            "Model; leave the key out to keep its default",
        ),
        (
            "paths: a",
            [],
            "paths=a (run.yaml, line 1) is text, but this key takes a list (tuple[path, ...]); "
            "write [a]",
        ),
        (
            "optim: {betas: [1, 2, 3]}",
            [],
            "optim.betas=[1, 2, 3] (run.yaml, line 1) has 3 elements, not the 2 this key takes",
        ),
        (
            "rules:\n  a:\n    - 1",
            [],
            "rules.a.0=1 (run.yaml, line 3) is an integer, but this key takes text; put it in "
            "quotes: '1'",
        ),
        (
            "optim: {lr: .nan}",
            [],
            "optim.lr=.nan (run.yaml, line 1) is not a number, and no key takes it; write a number",
        ),
        (
            "model:\n  width: 7",
            [],
            "model (run.yaml, line 2): width=7 does not divide into heads=2; use a multiple of 2",
        ),
        (
            "",
            ["--model.width=7"],
            "model (--model.width on the command line): width=7 does not divide into heads=2; use "
            "a multiple of 2",
        ),
        (
            "model:\n  num_layers: 3\n  width: 7",
            ["--model.heads=4"],
            "model (run.yaml, line 3): width=7 does not divide into heads=4; use a multiple of 4",
        ),
        (
            "",
            ["--mode.width=7"],
            "mode (--mode.width on the command line) is not a key of Root; did you mean model? "
            "Root takes model, optim, rules, paths, name, size, threads, show, sources, teacher",
        ),
        (
            "",
            ["--model.num-layers", "4.5"],
            "model.num_layers=4.5 (--model.num-layers on the command line) does not fit: this key "
            "takes an integer",
        ),
        (
            "",
            ["--optim.lr", "nan"],
            "optim.lr=nan (--optim.lr on the command line) does not fit: this key takes a number",
        ),
        (
            "",
            ["--model.num-layers", "--name", "x"],
            "--model.num-layers needs a value (int); write --model.num-layers=VALUE",
        ),
        (
            "",
            ["--model.tie", "--model.tie=false"],
            "model.tie is given twice, as true and false; give it once",
        ),
        (
            "",
            ["--teacher", "{}", "--teacher.heads", "4"],
            "teacher and teacher.heads are both given; put teacher.heads inside teacher",
        ),
        (
            "",
            ["--teacher.heads", "4", "--teacher", "{}"],
            "teacher and teacher.heads are both given; put teacher.heads inside teacher",
        ),
        ("", ["--no-model.tie=1"], "--no-model.tie=1 is not a switch; write --no-model.tie alone"),
        (
            "",
            ["--name", "a", "b"],
            "'b' is a loose word on the command line; a key is changed with --key=value",
        ),
        (
            "optim:\n  optimizer:\n    eps: 1",
            ["--optim.optimizer", "{type: lion, eps: 2}"],
            "optim.optimizer.eps (--optim.optimizer on the command line) is not a key of Lion; "
            "optim.optimizer takes type, b1, fused",
        ),
        (
            "model: 3",
            ["--model.tie"],
            "model=3 (run.yaml, line 1) is not a mapping, so its key tie cannot be changed",
        ),
        (
            "",
            ["--sources.1.b1", "0.5"],
            "sources (--sources.1.b1 on the command line) has the indexes 0 to 0, not 1; to "
            "replace the list give it whole",
        ),
        (
            "sources: []",
            ["--sources.0.b1", "0.5"],
            "sources (run.yaml, line 1) has no elements yet, not 0; to replace the list give it "
            "whole",
        ),
    ],
)
def test_a_mistake_is_one_paragraph_with_path_source_and_fix(refusal, text, words, message):
    assert refusal(text, *words) == message


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (
            "model: 1\nname: a\nmodel: 2",
            r"run\.yaml: the key model is given twice, on lines 1 and 3",
        ),
        ("model: {tie: true, tie: false}", r"the key model\.tie is given twice, on lines 1 and 1"),
        ("name: a\nmodel:\n\twidth: 7", r"run\.yaml, line 3: not valid YAML"),
        ("model: {width: 8", r"run\.yaml, line 1: not valid YAML"),
        ("a: 1\n---\nb: 2", r"run\.yaml, line 2: not valid YAML .*another document"),
        ("- a", r"run\.yaml holds a list, not a mapping"),
        ("just text", r"run\.yaml holds text, not a mapping"),
        ("name: &x a\nmodel: *x", r"run\.yaml, line 1: anchors and aliases \(&x\)"),
        ("name: !!python/name:os.system ''", r"run\.yaml, line 1: the tag .*os\.system"),
        ("rules: {1: [a]}", r"run\.yaml, line 1: the key 1 is not text; put it in quotes"),
        ("? [a]\n: 1", r"run\.yaml, line 1: the key a list or mapping is not text"),
        ("name: " + "[" * 2000 + "]" * 2000, r"run\.yaml, line 1: more than 64 levels"),
        ("model: {width: " + "9" * 5000 + "}", r"line 1: an integer of 5000 digits is too long"),
        ("name: 'a\x00b'", r"run\.yaml is not YAML text: .*save it as UTF-8"),
    ],
)
def test_a_broken_file_names_the_line(refusal, text, pattern):
    assert re.search(pattern, refusal(text))


def test_an_integer_too_large_for_a_float_is_refused(refusal):
    assert "optim.lr=" in refusal("optim: {lr: 1" + "0" * 400 + "}")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None])
def test_a_file_that_cannot_be_read_is_named(tmp_path, make):
    path = tmp_path / "run.yaml"
    make(path)
    with pytest.raises(ConfigError, match=r"the config file .*run\.yaml cannot be read: .*check"):
        load(Root, file=path)


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.yaml is not UTF-8 text \(byte 6\)"):
        load(Root, file=path)


def test_required_keys_are_named_together():
    message = (
        "the config lacks vocab, out, which are required (Needy); give them in the file or as "
        "--vocab=VALUE"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load(Needy)
    with pytest.raises(ConfigError, match="lacks out, which is required"):
        load(Needy, overrides=["--vocab", "3"])
    assert load(Needy, overrides=["--vocab", "3", "--out", "x"]) == Needy(vocab=3, out=Path("x"))


def test_a_refused_combination_keeps_its_kind_of_error():
    with pytest.raises(ShardingError, match=r"^model: width=7 does not divide"):
        from_mapping(Root, {"model": {"width": 7}})


def test_from_mapping_puts_its_path_before_every_key():
    with pytest.raises(ConfigError, match=r"^run\.optim\.lt is not a key of Optim"):
        from_mapping(Root, {"optim": {"lt": 1}}, path="run")
    with pytest.raises(ConfigError, match=r"^run=3 is not a mapping; Root is read from keys"):
        from_mapping(Root, 3, path="run")  # pyrefly: ignore[bad-argument-type]


def test_from_mapping_refuses_keys_that_are_not_text():
    with pytest.raises(ConfigError, match=r"rules has the key 1, which is not text"):
        from_mapping(Root, {"rules": {1: ["a"]}})
    with pytest.raises(ConfigError, match=r"^1 is not a key of Root"):
        from_mapping(Root, {1: 2})  # pyrefly: ignore[bad-assignment]


def test_saved_text_names_its_source():
    with pytest.raises(ConfigError, match=r"^nam \(checkpoint 10, line 1\) is not a key"):
        from_yaml(Root, "nam: x", source="checkpoint 10")
    assert from_yaml(Root, dump_yaml(Root(name="x"))) == Root(name="x")


def test_defaults_are_never_shared_between_configs():
    first = load(Root, overrides=["--rules.a", "b"])
    assert load(Root).rules == {"embed": ("fsdp",)}
    assert first.rules == {"embed": ("fsdp",), "a": ("b",)}
