"""Parse the text of an HLO module, as a compiled JAX program prints it.

The grammar that is relied on: a line `HloModule name, attributes`; tables of stack frames; then
computations, `[ENTRY ]%name (parameters) -> shape {` … `}`, of instructions
`[ROOT ]%name = shape opcode(operands), attributes`, one per line (long constants continue over
several).

Executables and compiler dumps give a serialized `HloModuleProto` too. It is not read: jaxlib has no
Python schema for it, a table of its thirty messages and the code that turns them into these types
are as long as this parser, and the text is what a plan's cache keeps and people read.
"""

import re

from fornax.hlo.module import Computation, Frame, Instruction, Module, split_attributes
from fornax.hlo.shapes import COMMENT, SPECIAL

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(%]+) (?:\(.*\) -> .* )?\{(?:\s*//.*)?$")
_NAME = re.compile(r"%([^\s,(){}=]+)")
_BARE_NAME = re.compile(r"([A-Za-z_][\w.\-]*)\s*$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LITERALS = ("constant", "parameter")
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class HloParseError(ValueError):
    """A line that is not HLO as it is known here."""


def parse(text: str) -> Module:
    """Parse a module.

    Raises:
        HloParseError: naming the line that is not understood.
    """
    lines = text.split("\n")
    at = next((n for n, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if at is None:
        raise HloParseError("no line of the text begins with 'HloModule '")
    name, _, header = lines[at].removeprefix("HloModule ").partition(",")
    tables, at = _read_tables(lines, at + 1)
    module = Module(name.strip(), split_attributes(header), _frames(tables))
    _read_computations(lines[at:], module)
    if not module.entry_name:
        raise HloParseError(f"module {name}: no computation is marked ENTRY")
    return module


def _read_tables(lines: list[str], at: int) -> tuple[dict[str, dict[int, str]], int]:
    """Read `FileNames` and its like: lines of a number and a text."""
    tables: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    current: dict[int, str] | None = None
    while at < len(lines):
        line = lines[at].strip()
        if line in tables:
            current = tables[line]
        elif line and line[0].isdigit() and current is not None:
            number, _, value = line.partition(" ")
            current[int(number)] = value
        elif line:
            break
        at += 1
    return tables, at


def _frames(tables: dict[str, dict[int, str]]) -> dict[int, tuple[Frame, int]]:
    files = {number: text.strip('"') for number, text in tables["FileNames"].items()}
    functions = {number: text.strip('"') for number, text in tables["FunctionNames"].items()}
    places = {
        number: {key: int(value) for key, value in _FIELD.findall(text)}
        for number, text in tables["FileLocations"].items()
    }
    frames: dict[int, tuple[Frame, int]] = {}
    for number, text in tables["StackFrames"].items():
        fields = {key: int(value) for key, value in _FIELD.findall(text)}
        place = places.get(fields.get("file_location_id", 0), {})
        frame = Frame(
            files.get(place.get("file_name_id", 0), ""),
            functions.get(place.get("function_name_id", 0), ""),
            place.get("line", 0),
        )
        # The printed number of the caller is one too many (0 would be "none": it prints 1).
        frames[number] = (frame, max(fields.get("parent_frame_id", 1) - 1, 0))
    return frames


def _read_computations(lines: list[str], module: Module) -> None:
    current: Computation | None = None
    pending: list[str] = []

    def flush() -> None:
        if pending and current is not None:
            _add_instruction(current, "\n".join(pending))
        pending.clear()

    for line in lines:
        if current is None:
            found = _COMPUTATION.match(line)
            if found:
                current = Computation(module, found.group(2))
                module.computations[current.name] = current
                if found.group(1):
                    module.entry_name = current.name
            elif line.strip() and not line.startswith(("//", "#", "}")):
                raise HloParseError(f"neither a computation nor its end: {line[:200]!r}")
        elif _INSTRUCTION.match(line):
            flush()
            pending.append(line)
        elif line.startswith("}") and _closed(pending):
            flush()
            current = None
        elif pending:
            pending.append(line)
    flush()


def _closed(pending: list[str]) -> bool:
    """Tell whether a `}` in the first column ends the computation, not an instruction's braces."""
    tokens = SPECIAL.findall("\n".join(pending))
    return sum(_DEPTH.get(token, 0) for token in tokens) <= 0


def _add_instruction(computation: Computation, line: str) -> None:
    """Parse one instruction and join it to those that it takes, which are printed before it."""
    found = _INSTRUCTION.match(line)
    assert found
    start = found.end()
    end = _close(line, start) + 1 if line.startswith("(", start) else line.find(" ", start)
    opening = line.find("(", end)
    if end <= 0 or opening < 0:
        raise HloParseError(f"an instruction without shape or operands: {line[:200]!r}")
    opcode = line[end:opening].strip()
    closing = _close(line, opening)
    arguments = line[opening + 1 : closing]
    names = () if opcode in _LITERALS else _operands(arguments)
    missing = next((name for name in names if name not in computation.by_name), None)
    if missing:
        raise HloParseError(f"{missing!r} is used before it is made: {line[:200]!r}")
    instruction = Instruction(
        computation=computation,
        name=found.group(2),
        shape_text=line[start:end],
        opcode=opcode,
        operands=tuple(computation.by_name[name] for name in names),
        arguments=arguments,
        rest=line[closing + 1 :].lstrip(", "),
        is_root=bool(found.group(1)),
    )
    computation.by_name[instruction.name] = instruction
    for operand in dict.fromkeys(instruction.operands):
        operand.users.append(instruction)


def _operands(text: str) -> tuple[str, ...]:
    """Return the names in `%a, %b` or `f32[2]{0} %a, f32[2]{0} %b` or `a, b`."""
    names = tuple(_NAME.findall(text))
    if names or not text.strip():
        return names
    found = (_BARE_NAME.search(part) for part in COMMENT.sub("", text).split(","))
    return tuple(match.group(1) for match in found if match)


def _close(text: str, start: int) -> int:
    """Return where the bracket that opens at `start` closes.

    Raises:
        HloParseError: it does not.
    """
    depth = 0
    for found in SPECIAL.finditer(text, start):
        depth += _DEPTH.get(found.group(), 0)
        if depth == 0:
            return found.start()
    raise HloParseError(f"a bracket that never closes: {text[:200]!r}")
