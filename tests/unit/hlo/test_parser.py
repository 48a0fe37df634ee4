"""The parser: strings with brackets, comments, operands with types, stacks, long constants."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.hlo import HloParseError, parse
from fornax.hlo.module import split_attributes

_MODULE = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), \
{1, 2}: (3, {1}, must-alias) }, entry_computation_layout={(f32[2]{0})->f32[2]{0}}, num_partitions=8

FileNames
1 "/lib/python3.11/site-packages/jax/_src/api.py"
2 "/home/me/train.py"

FunctionNames
1 "inner.<locals>.f"
2 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=68 end_line=68 column=33 end_column=92}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=5}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%region_0.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %add.1 = f32[]{:T(128)} add(%a, %b), metadata={op_name="jit(f)/x={1,2}, \\"y\\" } )"}
}

%c (s: (f32[2], s32[])) -> pred[] {
  %s = (f32[2]{0}, s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

%b (s.1: (f32[2], s32[])) -> (f32[2], s32[]) {
  ROOT %s.1 = (f32[2]{0}, s32[]) parameter(0)
}

ENTRY %main.7 (x: f32[2], y: (f32[2], s32[])) -> f32[2] {
  %x = f32[2]{0:T(128)S(1)} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %y = (f32[2]{0}, /*index=1*/s32[]) parameter(1)
  %constant.3 = f32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  }), metadata={op_name="k"}
  %zero = f32[] constant(0)
  %reduce.1 = f32[]{:T(128)} reduce(f32[2]{0} %x, f32[] %zero), dimensions={0}, \
to_apply=%region_0.1, metadata={op_name="sum" stack_frame_id=2}
  ROOT %while.35 = (f32[2]{0:T(8,128)(2,1)}, s32[]) while(%y), condition=%c, body=%b, \
backend_config={"known_trip_count":{"n":"8"},"text":"a } , b=("}
}
"""


def test_a_module_comes_apart() -> None:
    module = parse(_MODULE)
    assert module.name == "jit_step"
    assert module.is_scheduled
    assert module.header["num_partitions"] == "8"
    assert module.aliases == {(0,): (0, ()), (1, 2): (3, (1,))}
    assert list(module.computations) == ["region_0.1", "c", "b", "main.7"]
    entry = module.entry
    assert entry.root.name == "while.35"
    assert entry.root.operands == (entry.by_name["y"],)
    assert entry.root.called() == (module.computations["c"], module.computations["b"])
    assert module.computations["b"].caller is entry.root
    assert entry.root.backend_config["known_trip_count"] == {"n": "8"}
    assert entry.by_name["x"].op_name == "state.params['w']"
    assert entry.by_name["constant.3"].op_name == "k"
    assert entry.by_name["constant.3"].operands == ()
    assert [each.name for each in entry.by_name["reduce.1"].operands] == ["x", "zero"]
    assert entry.parameters[1].shape.at((1,)).dtype == "s32"
    assert entry.by_name["y"].users == [entry.root]
    inner = module.computations["region_0.1"].root
    assert inner.op_name == 'jit(f)/x={1,2}, "y" } )'


def test_the_stack_is_read_with_its_callers() -> None:
    module = parse(_MODULE)
    stack = list(module.entry.by_name["reduce.1"].stack())
    assert [(frame.file, frame.line) for frame in stack] == [
        ("/lib/python3.11/site-packages/jax/_src/api.py", 68),
        ("/home/me/train.py", 9),
    ]
    assert str(stack[1]) == "/home/me/train.py:9 (<module>)"
    assert list(module.entry.by_name["x"].stack()) == []


def test_stacks_that_go_round_end() -> None:
    module = parse(
        _MODULE.replace("location_id=2 parent_frame_id=1", "location_id=2 parent_frame_id=3")
    )
    assert len(list(module.entry.by_name["reduce.1"].stack())) == 2


@pytest.mark.parametrize("text", ["", "module @jit_f {}", "HloModule f\n\nwhat is this"])
def test_what_is_no_module_is_refused(text: str) -> None:
    with pytest.raises(HloParseError):
        parse(text)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%a = f32[2]{0} negate(%x", "never closes"),
        ("%a = f32[2]{0} add(%x, %later)", "'later' is used before it is made"),
        ("%a = f32[2]{0}", "without shape or operands"),
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str, why: str) -> None:
    with pytest.raises(HloParseError, match=why):
        parse(f"HloModule m\n\nENTRY %main () -> () {{\n  %x = f32[2]{{0}} parameter(0)\n  {line}")


_text = st.text(st.characters(codec="ascii", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85"))


@given(_text, st.dictionaries(_text, _text, max_size=3), st.booleans())
def test_strings_hide_what_they_hold(name: str, config: dict[str, str], root: bool) -> None:
    quoted = name.replace("\\", "\\\\").replace('"', '\\"').replace("'", "\\'")
    text = (
        "HloModule m\n\n%comp.3 (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n\n"
        "ENTRY %main () -> () {\n  %a.1 = f32[] parameter(0)\n  %b-c_2 = s32[] parameter(1)\n"
        f"  {'ROOT ' if root else ''}%fusion.1 = (f32[2,3]{{1,0:T(8,128)}}, /*index=1*/s32[]) "
        f'fusion(%a.1, /*index=5*/%b-c_2), kind=kLoop, calls=%comp.3, metadata={{op_name="{quoted}"'
        f" stack_frame_id=7}}, backend_config={json.dumps(config, separators=(',', ':'))}\n}}\n"
    )
    module = parse(text)
    instruction = module.entry.instructions[-1]
    assert instruction.is_root is root
    assert [each.name for each in instruction.operands] == ["a.1", "b-c_2"]
    assert instruction.op_name == name
    assert instruction.frame == 7
    assert instruction.backend_config == config
    assert instruction.attributes["kind"] == "kLoop"
    assert instruction.callee() is module.computations["comp.3"]
    assert instruction.shape.at((0,)).dims == (2, 3)


@given(st.lists(st.text("ab{}()[],= ", max_size=8), max_size=4))
def test_attributes_split_at_their_own_commas(values: list[str]) -> None:
    text = ", ".join(f'k{n}={{"{value}", x={{1,2}}}}' for n, value in enumerate(values))
    expected = {f"k{n}": f'{{"{value}", x={{1,2}}}}' for n, value in enumerate(values)}
    assert split_attributes(text) == expected
