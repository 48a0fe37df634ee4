"""Loops, traffic and live memory on programs written by hand, where each number is plain."""

import pytest

from fornax.hlo import Done, Operation, ProgramFacts, Run, Start, analyse, parse

MB = 1 << 20
_BIG = "f32[256,1024]{1,0}"  # 1 MiB
_STACK = "f32[8,256,1024]{2,1,0}"  # 8 MiB


def facts_of(entry: str, *others: str, header: str = "") -> ProgramFacts:
    """Analyse a module of an entry, given by its lines, and other computations."""
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    text = f"HloModule m, is_scheduled=true{header}\n\n" + "\n\n".join(others)
    return analyse(
        parse(f"{text}\n\nENTRY %main (x: f32[]) -> f32[] {{\n{body}\n}}\n"), {"data": 1}
    )


def computation(name: str, lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines.strip().splitlines())
    return f"%{name} (p: f32[]) -> f32[] {{\n{body}\n}}"


def loop(
    condition: str, start: str = "constant(0)", step: str = "constant(1)", copied: bool = False
) -> ProgramFacts:
    """Analyse a loop whose body is one elementwise operation."""
    state = "(s32[], f32[64]{0}, s32[])"
    return facts_of(
        f"""%x = f32[64]{{0}} parameter(0)
%start = s32[] {start}
%limit = s32[] constant(9)
%state = {state} tuple(%start, %x, %limit)
ROOT %loop = {state} while(%state), condition=%cond, body=%body""",
        computation(
            "body",
            f"""%s = {state} parameter(0)
%i = s32[] get-tuple-element(%s), index=0
%v = f32[64]{{0}} get-tuple-element(%s), index=1
%n = s32[] get-tuple-element(%s), index=2
%one = s32[] {step}
%next = s32[] add(%i, %one)
%kept = s32[] copy(%next)
%e = f32[64]{{0}} exponential(%v)
ROOT %t = {state} tuple(%{"kept" if copied else "next"}, %e, %n)""",
        ),
        computation("cond", f"%s = {state} parameter(0)\n{condition}"),
    )


_INDEX = "%i = s32[] get-tuple-element(%s), index=0\n"


@pytest.mark.parametrize(
    ("condition", "start", "step", "runs"),
    [
        ("%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=LT", 0, 1, 7),
        ("%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=LE", 0, 1, 8),
        ("%n = s32[] constant(7)\nROOT %c = pred[] compare(%n, %i), direction=GT", 0, 1, 7),
        ("%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=LT", 1, 2, 3),
        ("%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=LT", 9, 1, 0),
        (
            "%n = s32[] get-tuple-element(%s), index=2\n"
            "ROOT %c = pred[] compare(%i, %n), direction=LT",
            0,
            1,
            9,
        ),
    ],
)
def test_loops_are_counted_by_their_condition(
    condition: str, start: int, step: int, runs: int
) -> None:
    facts = loop(_INDEX + condition, f"constant({start})", f"constant({step})")
    assert facts.transcendentals == 64 * runs
    assert not facts.notes


def test_a_copy_of_the_induction_variable_is_looked_through() -> None:
    condition = "%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=LT"
    facts = loop(_INDEX + condition, copied=True)
    assert facts.transcendentals == 64 * 7
    assert not facts.notes


def test_a_condition_that_is_not_understood_is_said() -> None:
    facts = loop(_INDEX + "%n = s32[] constant(7)\nROOT %c = pred[] compare(%i, %n), direction=NE")
    assert facts.transcendentals == 64
    assert "how often this loop runs is not known" in facts.notes[0]


_UPDATE = computation(
    "update",
    f"""%p0 = {_STACK} parameter(0)
%p1 = {_BIG} parameter(1)
%p2 = s32[] parameter(2)
%zero = s32[] constant(0)
%b = f32[1,256,1024]{{2,1,0}} bitcast(%p1)
ROOT %d = {_STACK} dynamic-update-slice(%p0, %b, %p2, %zero, %zero)""",
)
_TAKE = computation(
    "take",
    f"""%p0 = {_STACK} parameter(0)
%p1 = s32[] parameter(1)
%zero = s32[] constant(0)
%e = {_STACK} multiply(%p0, %p0)
%d = f32[1,256,1024]{{2,1,0}} dynamic-slice(%e, %p1, %zero, %zero)
ROOT %b = {_BIG} bitcast(%d)""",
)
_NESTS = computation(
    "nests",
    f"""%p0 = {_STACK} parameter(0)
%p1 = s32[] parameter(1)
%inner = {_BIG} fusion(%p0, %p1), kind=kLoop, calls=%take
ROOT %n = {_BIG} negate(%inner)""",
)
_RETILE = computation(
    "retile",
    f"""%p0 = {_STACK} parameter(0)
ROOT %c = f32[8,256,1024]{{2,1,0:T(8,128)}} copy(%p0)""",
)
_NESTED_UPDATE = f"""%p0 = {_STACK} parameter(0)
%p1 = {_BIG} parameter(1)
%p2 = s32[] parameter(2)
%zero = s32[] constant(0)
%f = {_STACK} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%retile
%b = f32[1,256,1024]{{2,1,0}} bitcast(%p1)
ROOT %d = {_STACK} dynamic-update-slice(%f, %b, %p2, %zero, %zero)"""
_RETILED = computation("retiled", _NESTED_UPDATE)
_DOUBLE = computation("double", f"%p0 = {_STACK} parameter(0)\nROOT %a = {_STACK} add(%p0, %p0)")
_ELSEWHERE = computation("elsewhere", _NESTED_UPDATE.replace("%retile", "%double"))


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        (f"ROOT %r = {_BIG} negate(%big)", 2),
        (f"ROOT %r = {_BIG} fusion(%stack, %i), kind=kLoop, calls=%take", 2),
        (f"ROOT %r = {_BIG} fusion(%stack, %i), kind=kOutput, calls=%nests", 2),
        (f"ROOT %r = {_STACK} fusion(%stack, %big, %i), kind=kLoop, calls=%update", 2),
        (f"ROOT %r = {_STACK} fusion(%stack, %big, %i), kind=kLoop, calls=%retiled", 2),
        (f"ROOT %r = {_STACK} fusion(%stack, %big, %i), kind=kLoop, calls=%elsewhere", 16),
        (f"ROOT %r = {_STACK} dynamic-update-slice(%stack, %part, %i, %i, %i)", 2),
        ("ROOT %r = f32[1,256,1024]{2,1,0} dynamic-slice(%stack, %i, %i, %i)", 2),
        (f"ROOT %r = {_BIG} bitcast(%big)", 0),
        ("ROOT %r = f32[256,1024]{1,0:S(1)} copy(%big)", 1),
        ("ROOT %r = f32[256,1024]{1,0:S(1)} negate(%fast)", 0),
        (f"ROOT %r = ({_BIG}, {_BIG}, u32[]) copy-start(%big)", 2),
        (f"ROOT %r = (f32[256,1024]{{1,0:S(1)}}, {_BIG}, u32[]) copy-start(%big)", 1),
    ],
)
def test_only_what_is_touched_is_traffic(line: str, moved: int) -> None:
    facts = facts_of(
        f"""%big = {_BIG} parameter(0)
%stack = {_STACK} parameter(1)
%part = f32[1,256,1024]{{2,1,0}} parameter(2)
%i = s32[] parameter(3)
%fast = f32[256,1024]{{1,0:S(1)}} parameter(4)
{line}""",
        _UPDATE,
        _TAKE,
        _NESTS,
        _RETILE,
        _RETILED,
        _DOUBLE,
        _ELSEWHERE,
    )
    assert facts.bytes == pytest.approx(moved * MB, rel=1e-4)


def test_a_scatter_in_place_touches_its_rows() -> None:
    rows = "f32[4,1024]{1,0}"
    facts = facts_of(
        f"""%stack = f32[65536,1024]{{1,0}} parameter(0)
%indices = s32[4,1]{{1,0}} parameter(1)
%rows = {rows} parameter(2)
ROOT %s = f32[65536,1024]{{1,0}} fusion(%stack, %indices, %rows), kind=kCustom, calls=%scatter""",
        computation(
            "scatter",
            f"""%p0 = f32[65536,1024]{{1,0}} parameter(0)
%p1 = s32[4,1]{{1,0}} parameter(1)
%p2 = {rows} parameter(2)
ROOT %s = f32[65536,1024]{{1,0}} scatter(%p0, %p1, %p2), to_apply=%second""",
        ),
        computation("second", "%a = f32[] parameter(0)\nROOT %b = f32[] parameter(1)"),
    )
    assert facts.bytes == 2 * 4 * 1024 * 4 + 4 * 4


def test_values_live_until_they_are_last_read() -> None:
    facts = facts_of(
        f"""%x = {_BIG} parameter(0)
%a = f32[1024,256]{{1,0}} transpose(%x), dimensions={{1,0}}
%b = f32[1024,256]{{1,0}} reverse(%a), dimensions={{0}}
%c = f32[1024,256]{{1,0}} reverse(%b), dimensions={{1}}
%d = f32[1024,256]{{1,0}} add(%b, %c)
ROOT %e = f32[]{{:T(128)}} constant(0)"""
    )
    # b and c, and d takes the place of one of them.
    assert facts.peak.temporaries == 2 * MB
    assert facts.peak.bytes == 3 * MB
    assert {buffer.kind for buffer in facts.peak.buffers} == {"argument", "temporary"}


def test_an_output_in_the_place_of_an_argument_costs_nothing() -> None:
    lines = f"%x = {_BIG} parameter(0)\nROOT %y = {_BIG} negate(%x)"
    kept = facts_of(lines)
    given_up = facts_of(lines, header=", input_output_alias={ {}: (0, {}, may-alias) }")
    assert (kept.peak.bytes, given_up.peak.bytes) == (2 * MB, MB)
    assert [buffer.kind for buffer in kept.peak.buffers] == ["argument", "output"]


_SAVED = 'metadata={op_name="jit(f)/saved" stack_frame_id=1}'
_STACK_TABLES = """
FileNames
1 "/home/me/model.py"

FunctionNames
1 "save"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
"""


def loop_with_stack(after: str) -> ProgramFacts:
    """Analyse a loop that fills a stack, and what comes after it."""
    state = f"(s32[], {_STACK}, {_BIG})"
    return facts_of(
        f"""%x = {_BIG} parameter(0)
%zero = s32[] constant(0)
%room = {_STACK} custom-call(), custom_call_target="AllocateBuffer"
%weight = {_BIG} reverse(%x), dimensions={{0}}
%state = {state} tuple(%zero, %room, %weight)
%loop = {state} while(%state), condition=%cond, body=%body
%filled = {_STACK} get-tuple-element(%loop), index=1
%after = {_BIG} reverse(%x), dimensions={{1}}
%later = {_BIG} reverse(%after), dimensions={{1}}
{after}""",
        _UPDATE,
        computation(
            "body",
            f"""%s = {state} parameter(0)
%i = s32[] get-tuple-element(%s), index=0
%stack = {_STACK} get-tuple-element(%s), index=1
%w = {_BIG} get-tuple-element(%s), index=2
%one = s32[] constant(1)
%next = s32[] add(%i, %one)
%r = {_BIG} reverse(%w), dimensions={{0}}, {_SAVED}
%u = {_STACK} fusion(%stack, %r, %i), kind=kLoop, calls=%update
ROOT %t = {state} tuple(%next, %u, %w)""",
        ),
        computation(
            "cond",
            f"""%s = {state} parameter(0)
%i = s32[] get-tuple-element(%s), index=0
%n = s32[] constant(8)
ROOT %c = pred[] compare(%i, %n), direction=LT""",
        ),
        header=f"\n{_STACK_TABLES}",
    )


def test_a_loop_works_in_place_and_adds_its_bodys_peak() -> None:
    facts = loop_with_stack(f"ROOT %end = {_BIG} slice(%filled), slice={{[0:1]}}")
    # The stack, the weight, and the body's one value.
    assert facts.peak.temporaries == pytest.approx(10 * MB, abs=4096)
    assert facts.peak.instruction.startswith("loop > ")


def test_a_carried_value_is_dead_from_its_copy_to_the_next_one() -> None:
    """As XLA lays out loops on CPU: the copy is worked on, and what it was made of is free."""
    state = f"(s32[], {_BIG})"
    facts = facts_of(
        f"""%x = {_BIG} parameter(0)
%zero = s32[] constant(0)
%first = {_BIG} reverse(%x), dimensions={{0}}
%state = {state} tuple(%zero, %first)
%loop = {state} while(%state), condition=%cond, body=%body
ROOT %end = {_BIG} get-tuple-element(%loop), index=1""",
        computation(
            "body",
            f"""%s = {state} parameter(0)
%i = s32[] get-tuple-element(%s), index=0
%w = {_BIG} get-tuple-element(%s), index=1
%one = s32[] constant(1)
%next = s32[] add(%i, %one)
%copied = {_BIG} copy(%w)
%a = {_BIG} reverse(%copied), dimensions={{0}}
%b = {_BIG} reverse(%a), dimensions={{1}}
%r = {_BIG} reverse(%b), dimensions={{0}}
ROOT %t = {state} tuple(%next, %r)""",
        ),
        computation(
            "cond",
            f"""%s = {state} parameter(0)
%i = s32[] get-tuple-element(%s), index=0
%n = s32[] constant(8)
ROOT %c = pred[] compare(%i, %n), direction=LT""",
        ),
    )
    # Two at a time: `copied` and what came in, or `a` and `b` in place of it.
    assert facts.peak.temporaries == pytest.approx(2 * MB, abs=4096)


def test_what_no_one_reads_after_a_loop_is_dead() -> None:
    facts = loop_with_stack(
        f"""%more = {_STACK} reverse(%filled), dimensions={{0}}
ROOT %end = {_BIG} slice(%more), slice={{[0:1]}}"""
    )
    # Two stacks and `later`; the weight died with the loop.
    assert facts.peak.instruction == "more"
    assert facts.peak.temporaries == pytest.approx(16 * MB, abs=4096)


def test_a_stack_is_told_by_what_fills_it() -> None:
    facts = loop_with_stack(f"ROOT %end = {_BIG} slice(%filled), slice={{[0:1]}}")
    stack = facts.peak.buffers[0]
    assert (stack.name, stack.bytes) == ("room", 8 * MB)
    assert (stack.op_name, stack.source) == ("jit(f)/saved", "/home/me/model.py:7 (save)")


def test_an_unknown_custom_call_is_named_and_its_traffic_counted() -> None:
    facts = facts_of(
        f'%x = {_BIG} parameter(0)\nROOT %y = {_BIG} custom-call(%x), custom_call_target="mystery"'
    )
    assert facts.bytes == 2 * MB
    assert "no cost is known for custom call 'mystery'" in facts.notes[0]


def test_a_library_product_is_counted_from_its_shapes() -> None:
    facts = facts_of(
        """%x = f32[64,96]{1,0} parameter(0)
%w = f32[96,32]{1,0} parameter(1)
ROOT %y = f32[64,32]{1,0} custom-call(%x, %w), custom_call_target="__onednn$matmul\""""
    )
    assert facts.flops == 2 * 64 * 96 * 32


def test_of_weights_in_blocks_one_layer_is_read() -> None:
    """Two layers of 256 x 32 in 4.625 bits each."""
    facts = facts_of(
        """%x = f32[4,256]{1,0} parameter(0)
%values = u8[148,64]{1,0} parameter(1)
%types = s32[2]{0} parameter(2)
%layer = s32[] parameter(3)
ROOT %y = f32[4,32]{1,0} custom-call(%x, %values, %types, %layer), \
custom_call_target="fornax_linear_blocks\""""
    )
    assert facts.flops == 2 * 4 * 256 * 32
    assert facts.bytes == 4 * 256 * 4 + 256 * 32 * 4.625 / 8 + 4 * 32 * 4
    assert not facts.notes


def pallas_call(op_name: str, config: str = "{}") -> ProgramFacts:
    return facts_of(
        f"""%q = bf16[8,512,128]{{2,1,0}} parameter(0)
ROOT %y = bf16[8,512,128]{{2,1,0}} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", \
metadata={{op_name="{op_name}"}}, backend_config={{"custom_call_config":{config}}}"""
    )


def test_our_attention_says_what_it_costs_in_its_scope() -> None:
    scope = "jit(step)/while/body/splash:fwd=1000,dkv=2000,dq=300/vmap()"
    for phase, flops in {"fwd_residuals": 1000, "dkv_no_residuals": 2000, "dq": 300}.items():
        facts = pallas_call(f"{scope}/splash_mha_{phase}/pallas_call")
        (operation,) = facts.operations
        assert (operation.category, operation.flops) == ("attention", flops)
        assert not facts.notes


def test_a_kernel_without_an_estimate_is_named() -> None:
    facts = pallas_call("jit(step)/my_kernel/pallas_call")
    assert facts.flops == 0
    assert facts.bytes == 4 * 8 * 512 * 128 * 2
    assert "'my_kernel' carries no cost estimate" in facts.notes[0]
    told = pallas_call(
        "jit(step)/my_kernel", '{"cost_estimate":{"flops":"7","bytes_accessed":"9"}}'
    )
    assert (told.flops, told.bytes, told.notes) == (7, 9, ())


@pytest.mark.parametrize(
    ("opcode", "key"),
    [("async-start", "calls"), ("fusion-start", "calls"), ("call-start", "to_apply")],
)
def test_work_in_the_background_is_one_operation(opcode: str, key: str) -> None:
    done = opcode.replace("start", "done")
    facts = facts_of(
        f"""%x = {_BIG} parameter(0)
%s = (({_BIG}), {_BIG}, u32[]) {opcode}(%x), {key}=%background
%other = {_BIG} negate(%x)
%d = {_BIG} {done}(%s)
ROOT %r = {_BIG} add(%d, %other)""",
        computation(
            "background",
            f"""%p = {_BIG} parameter(0)
%e = {_BIG} exponential(%p)
ROOT %l = {_BIG} log(%e)""",
        ),
    )
    first, between, last, _ = facts.schedule
    assert isinstance(first, Start)
    assert isinstance(last, Done)
    assert first.what is last.what
    work = first.what
    assert isinstance(work, Operation)
    assert (work.name, work.transcendentals) == ("s", 2 * 256 * 1024)
    assert isinstance(between, Run)
    assert between.what.name == "other"
    assert len(facts.operations) == 3


def test_a_gather_in_the_background_names_its_weight() -> None:
    facts = facts_of(
        f"""%w = {_BIG} parameter(0), metadata={{op_name="params['w']"}}
%s = (({_BIG}), {_BIG}, u32[]) call-start(%w), to_apply=%background
ROOT %d = {_BIG} call-done(%s)""",
        computation(
            "background",
            f"""%p = {_BIG} parameter(0)
ROOT %g = {_BIG} all-gather(%p), replica_groups={{}}, dimensions={{0}}""",
        ),
    )
    (gather,) = facts.collectives
    assert (gather.kind, gather.argument) == ("all-gather", "params['w']")


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels", "flops"),
    [
        ("64,96", "96,32", "64,32", "", "bf_io->bf", 2 * 64 * 96 * 32),
        ("3,64,96", "96,32,1", "3,64,32", "size=1", "0bf_io0->0bf", 2 * 3 * 64 * 96 * 32),
        # Contracted over two dimensions, and an outer product along one (a window that is padded).
        (
            "3,64,2,16,1",
            "2,16,8,32,1",
            "3,64,8,32,1",
            "size=1x8x2 pad=0_0x7_7x0_0 rhs_reversal=0x1x0",
            "0b2f1_2i1o0->0b1f2",
            2 * (3 * 64) * (2 * 16) * (8 * 32),
        ),
        (
            "48,2,16,1",
            "3,64,2,16",
            "48,3,64,1",
            "size=3x2 pad=2_2x0_0 rhs_reversal=1x0",
            "b1f0_0o1i->b0f1",
            2 * 48 * (3 * 64) * (2 * 16),
        ),
        ("3,64,2,16", "3,64,48,1", "2,16,48,1", "size=1x3", "1f0b_1io0->0bf1", 2 * 192 * 32 * 48),
        # A batch of products: the window's dilation keeps each with its own.
        (
            "4,64,96",
            "4,96,32",
            "4,64,32",
            "size=4 stride=3 pad=0_0 lhs_dilate=4",
            "0bf_0io->0bf",
            2 * 4 * 64 * 96 * 32,
        ),
    ],
)
def test_products_as_the_tpu_compiler_writes_them(
    left: str, right: str, out: str, window: str, labels: str, flops: int
) -> None:
    facts = facts_of(
        f"""%a = bf16[{left}] parameter(0)
%b = bf16[{right}] parameter(1)
ROOT %c = bf16[{out}] convolution(%a, %b), window={{{window}}}, dim_labels={labels}"""
    )
    assert facts.flops == flops
