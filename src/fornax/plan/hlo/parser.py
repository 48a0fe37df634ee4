"""Parse the text of an HLO module, as a compiled JAX program prints it.

The grammar that is relied on: a line `HloModule name, attributes`; tables of stack frames; then
computations, `[ENTRY ]%name (parameters) -> shape {` … `}`, of instructions
`[ROOT ]%name = shape opcode(operands), attributes`, one a line (long constants go on over several).
"""

import re

from fornax.plan.hlo.module import Computation, Frame, Instruction, Module, split_attributes

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(%]+) (?:\(.*\) -> .* )?\{(?:\s*//.*)?$")
_NAME = re.compile(r"%([^\s,(){}=]+)")
_BARE_NAME = re.compile(r"([A-Za-z_][\w.\-]*)\s*$")
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[(){}\[\]]', re.DOTALL)
_PARENTHESIS = re.compile(r"[()]")
_COMMENT = re.compile(r"/\*.*?\*/")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r"(\w+)=(\d+)")
_LITERALS = ("constant", "parameter", "iota", "partition-id", "replica-id")


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
    computations, entry = _read_computations(lines, at)
    if entry is None:
        raise HloParseError(f"module {name}: no computation is marked ENTRY")
    return Module(name.strip(), split_attributes(header), computations, entry, _frames(tables))


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


def _read_computations(
    lines: list[str], at: int
) -> tuple[dict[str, Computation], Computation | None]:
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: Computation | None = None
    pending: list[str] = []

    def flush() -> None:
        if pending and current is not None:
            current.instructions.append(parse_instruction("\n".join(pending)))
        pending.clear()

    for line in lines[at:]:
        if current is None:
            found = _COMPUTATION.match(line)
            if found:
                current = Computation(found.group(2), [])
                computations[current.name] = current
                entry = current if found.group(1) else entry
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
    return computations, entry


def _closed(pending: list[str]) -> bool:
    """Tell whether a `}` in the first column ends the computation, not an instruction's braces."""
    depth = 0
    for found in _BRACKET.finditer("\n".join(pending)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found.group(), 0)
    return depth <= 0


def parse_instruction(line: str) -> Instruction:
    """Parse one instruction.

    Raises:
        HloParseError: the text is not an instruction.
    """
    found = _INSTRUCTION.match(line)
    if not found:
        raise HloParseError(f"not an instruction: {line[:200]!r}")
    start = found.end()
    if line.startswith("(", start):
        end = _close(line, start, _PARENTHESIS) + 1
    else:
        end = line.find(" ", start)
    opening = line.find("(", end)
    if end <= 0 or opening < 0:
        raise HloParseError(f"an instruction without shape or operands: {line[:200]!r}")
    opcode = line[end:opening].strip()
    closing = _close(line, opening, _BRACKET)
    arguments = line[opening + 1 : closing]
    operands = () if opcode in _LITERALS else _operands(arguments)
    rest = line[closing + 1 :].lstrip(", ")
    return Instruction(
        found.group(2), line[start:end], opcode, operands, arguments, rest, bool(found.group(1))
    )


def _operands(text: str) -> tuple[str, ...]:
    """Return the names in `%a, %b` or `f32[2]{0} %a, f32[2]{0} %b` or `a, b`."""
    names = tuple(_NAME.findall(text))
    if names or not text.strip():
        return names
    found = (_BARE_NAME.search(part) for part in _COMMENT.sub("", text).split(","))
    return tuple(match.group(1) for match in found if match)


def _close(text: str, start: int, brackets: re.Pattern[str]) -> int:
    """Return where the bracket that opens at `start` closes.

    Raises:
        HloParseError: it does not.
    """
    depth = 0
    for found in brackets.finditer(text, start):
        token = found.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
            if depth == 0:
                return found.start()
    raise HloParseError(f"a bracket that never closes: {text[:200]!r}")
