"""What an HLO module holds: computations, their instructions, and the stacks that made them."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fornax.hlo.shapes import Shape, numbers, parse_shape, split_outer

_OP_NAME = re.compile(r'op_name="([^"\\]*(?:\\.[^"\\]*)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_QUOTED = re.compile(r"\\(.)")
_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+), \{([\d, ]*)\}")
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
_RUNNING = frozenset(["while", "fusion", "call", "async-start", "call-start", "fusion-start"])

Index = tuple[int, ...]
"""Positions in nested tuples, from the outermost."""


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Instruction:
    """One instruction; `rest` is the text of its attributes, parsed when first asked for."""

    computation: "Computation"
    name: str
    shape_text: str
    opcode: str
    operands: tuple["Instruction", ...]
    arguments: str
    """The text between the parentheses: the value of a constant, the number of a parameter."""
    rest: str
    is_root: bool
    users: list["Instruction"] = dataclasses.field(default_factory=list)
    """Instructions that take it, in order, each once."""
    _attributes: dict[str, str] | None = None
    _config: Mapping[str, Any] | None = None

    @property
    def module(self) -> "Module":
        return self.computation.module

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
    def target(self) -> str:
        """The target of a custom call, else empty."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def parameter_number(self) -> int:
        return int(self.arguments)

    @property
    def tuple_index(self) -> int:
        """Of a get-tuple-element: which element."""
        return int(self.attributes["index"])

    def callee(self, key: str = "calls") -> "Computation":
        """The computation that an attribute names: what a fusion runs, a loop's `body`."""
        return self.module.computations[self.attributes[key].lstrip("%")]

    def called(self) -> tuple["Computation", ...]:
        """The computations it calls, `to_apply` of reductions included."""
        known = self.module.computations
        names = [
            name.strip().lstrip("%")
            for key in _CALLERS
            for name in self.attributes.get(key, "").strip("{}").split(",")
        ]
        return tuple(known[name] for name in names if name in known)

    def stack(self) -> Iterator["Frame"]:
        """Yield the frames of the Python stack that made it, innermost first."""
        frames, number, seen = self.module.frames, self.frame, set()
        while number in frames and number not in seen:
            seen.add(number)
            frame, number = frames[number]
            yield frame


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """A function: instructions in the order they run (in a module that is scheduled)."""

    module: "Module"
    name: str
    by_name: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(self.by_name.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value is returned; the last one where none is marked."""
        marked = (instruction for instruction in self.instructions if instruction.is_root)
        return next(marked, self.instructions[-1])

    @functools.cached_property
    def results(self) -> tuple[Instruction, ...]:
        """What is returned: the elements of a tuple, or the root."""
        return self.root.operands if self.root.opcode == "tuple" else (self.root,)

    @property
    def caller(self) -> Instruction | None:
        """The fusion, loop, call or start that runs it; the first one where there are several."""
        return self.module.callers.get(self.name)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {i.parameter_number: i for i in self.instructions if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.function})" if self.function else "")


@dataclasses.dataclass(eq=False, repr=False)
class Module:
    """A module of optimized HLO."""

    name: str
    header: Mapping[str, str]
    """The attributes of the line `HloModule …`, as printed."""
    frames: Mapping[int, tuple[Frame, int]]
    """Number -> the frame and its caller's number (0: none)."""
    computations: dict[str, Computation] = dataclasses.field(default_factory=dict)
    entry_name: str = ""
    lines: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """What `source_lines` found, by the innermost frame's number."""

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    @functools.cached_property
    def callers(self) -> dict[str, Instruction]:
        """Name of a computation -> the first fusion, loop, call or start that runs it."""
        found: dict[str, Instruction] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                if instruction.opcode in _RUNNING:
                    for called in instruction.called():
                        found.setdefault(called.name, instruction)
        return found

    @property
    def is_scheduled(self) -> bool:
        return self.header.get("is_scheduled") == "true"

    @functools.cached_property
    def aliases(self) -> dict[Index, tuple[int, Index]]:
        """Index in the output -> the parameter (number, index in it) whose memory it takes."""
        pairs = parse_aliases(self.header.get("input_output_alias", ""))
        return {out: (number, inside) for out, number, inside in pairs}


def parse_aliases(text: str) -> list[tuple[Index, int, Index]]:
    """Parse `{{1}: (0, {2}, …)}`: index in the result, number of the operand, index in that."""
    return [
        (numbers(out), int(number), numbers(inside)) for out, number, inside in _ALIAS.findall(text)
    ]


def split_attributes(text: str) -> dict[str, str]:
    """Split `key=value, key={…}, …` at its own commas, not those in strings and brackets."""
    attributes: dict[str, str] = {}
    for part in map(str.strip, split_outer(text)):
        key, equals, value = part.partition("=")
        if key == "device_ids" and "replica_groups" in attributes:
            # `replica_groups=mesh['a'=8,'b'=4], device_ids=([8,4]T(1,0)) {'a'}` is one attribute.
            attributes["replica_groups"] += f", {part}"
        elif key:
            attributes[key] = value if equals else "true"
    return attributes


def _json(text: str) -> Mapping[str, Any]:
    if text.startswith('"'):
        text = _QUOTED.sub(r"\1", text[1:-1])
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
