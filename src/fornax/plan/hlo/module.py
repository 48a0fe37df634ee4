"""What an HLO module holds: computations, their instructions, and the stacks that made them."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fornax.plan.hlo.shapes import Shape, parse_shape

_SPECIAL = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[(){}\[\]]|,\s*', re.DOTALL)
_OP_NAME = re.compile(r'op_name="([^"\\]*(?:\\.[^"\\]*)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE = re.compile(r'source_file="([^"\\]*(?:\\.[^"\\]*)*)"')
_LINE = re.compile(r"source_line=(\d+)")
_QUOTED = re.compile(r"\\(.)")


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """One instruction; `rest` is the text of its attributes, parsed when first asked for."""

    name: str
    shape_text: str
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    arguments: str
    """The text between the parentheses: the value of a constant, the number of a parameter."""
    rest: str
    is_root: bool
    _attributes: dict[str, str] | None = None
    _config: Any = None

    @property
    def shape(self) -> Shape:
        return parse_shape(self.shape_text)

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes as printed, by key: `{"channel_id": "3", "metadata": "{…}"}`."""
        if self._attributes is None:
            self._attributes = split_attributes(self.rest)
        return self._attributes

    @property
    def backend_config(self) -> Mapping[str, Any]:
        """The backend's own JSON; empty where there is none or it is not JSON."""
        if self._config is None:
            self._config = _json(self.attributes.get("backend_config", ""))
        return self._config

    @property
    def op_name(self) -> str:
        """The path of traced functions that made it; of an entry parameter, its name."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return _QUOTED.sub(r"\1", found.group(1)) if found else ""

    @property
    def frame(self) -> int:
        """Number of the innermost stack frame, 0 for none."""
        found = _FRAME.search(self.attributes.get("metadata", ""))
        return int(found.group(1)) if found else 0

    @property
    def source(self) -> tuple[str, int]:
        """File and line as older modules print them in place; ("", 0) where they do not."""
        metadata = self.attributes.get("metadata", "")
        file, line = _FILE.search(metadata), _LINE.search(metadata)
        return (file.group(1) if file else ""), (int(line.group(1)) if line else 0)

    @property
    def target(self) -> str:
        """The target of a custom call, else empty."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def parameter_number(self) -> int:
        return int(self.arguments)

    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, `to_apply` of reductions included."""
        names: list[str] = []
        for key in _CALLERS:
            if key in self.attributes:
                names += [
                    name.strip().lstrip("%") for name in self.attributes[key].strip("{}").split(",")
                ]
        return tuple(names)


_CALLERS = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
)


@dataclasses.dataclass(eq=False)
class Computation:
    """A function: instructions in the order they run (in a module that is scheduled)."""

    name: str
    instructions: list[Instruction]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is returned; the last one where none is marked."""
        marked = [instruction for instruction in self.instructions if instruction.is_root]
        return marked[0] if marked else self.instructions[-1]

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {
            instruction.parameter_number: instruction
            for instruction in self.instructions
            if instruction.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """For each instruction's name, those that take it, in order."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands]


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.function})" if self.function else "")


@dataclasses.dataclass(eq=False)
class Module:
    """A module of optimized HLO."""

    name: str
    header: Mapping[str, str]
    """The attributes of the line `HloModule …`, as printed."""
    computations: dict[str, Computation]
    entry: Computation
    frames: Mapping[int, tuple[Frame, int]]
    """Number -> the frame and its caller's number (0: none)."""
    lines: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """What `sources` found, by the innermost frame's number."""

    @property
    def is_scheduled(self) -> bool:
        return self.header.get("is_scheduled") == "true"

    @functools.cached_property
    def aliases(self) -> dict[tuple[int, ...], tuple[int, tuple[int, ...]]]:
        """Index in the output -> the parameter (number, index in it) whose memory it takes."""
        pairs = re.findall(
            r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", self.header.get("input_output_alias", "")
        )
        return {_index(out): (int(number), _index(inside)) for out, number, inside in pairs}

    def stack(self, instruction: Instruction) -> Iterator[Frame]:
        """Yield the frames of the Python stack that made an instruction, innermost first."""
        number, seen = instruction.frame, set()
        while number in self.frames and number not in seen:
            seen.add(number)
            frame, number = self.frames[number]
            yield frame
        if not seen and instruction.source[0]:
            yield Frame(instruction.source[0], "", instruction.source[1])


def split_attributes(text: str) -> dict[str, str]:
    """Split `key=value, key={…}, …` at its own commas, not those in strings and brackets."""
    attributes: dict[str, str] = {}
    depth, start = 0, 0
    for found in _SPECIAL.finditer(text):
        token = found.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0:
            _add(attributes, text[start : found.start()])
            start = found.end()
    _add(attributes, text[start:])
    return attributes


def _add(attributes: dict[str, str], text: str) -> None:
    key, equals, value = text.strip().partition("=")
    if key == "device_ids" and "replica_groups" in attributes:
        # `replica_groups=mesh['a'=8,'b'=4], device_ids=([8,4]T(1,0)) {'a'}` is one attribute.
        attributes["replica_groups"] += f", {text.strip()}"
    elif equals:
        attributes[key] = value
    elif key:
        attributes[key] = "true"


def _json(text: str) -> Mapping[str, Any]:
    if text.startswith('"'):
        text = _QUOTED.sub(r"\1", text[1:-1])
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
