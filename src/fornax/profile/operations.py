"""What measured operations do: work, roofline bound, module and line, from captured programs."""

import dataclasses
import re
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from fornax.hlo import Collective as HloCollective
from fornax.hlo import (
    HloParseError,
    Instruction,
    Module,
    ProgramFacts,
    Rates,
    analyse,
    calibration_of,
    operation_seconds,
    parse,
    source_lines,
)
from fornax.hlo import Operation as HloOperation
from fornax.mesh.hardware import Chip
from fornax.profile.facts import Operation, Program
from fornax.profile.schema import HloProto
from fornax.profile.simulation import with_simulation

_UNWRAPPED = frozenset(["jvp", "vmap", "transpose", "remat", "checkpoint", "linearize"])
"""Transformations that jax writes around a scope: `jvp(layers)`."""
_CONTROL_NAMES = (
    "while body cond branch closed_call core_call checkpoint rematted_computation remat remat2 "
    "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_lin eval_jaxpr shard_map pjit "
    "scan"
)
_CONTROL = frozenset(_CONTROL_NAMES.split())
"""Parts of a path that are jax's own, between the scopes of a model."""
_EINSUM = "->"
"""Of the scope that `jnp.einsum` names after its subscripts."""
_BRANCH = re.compile(r"branch_\d+_fun$")
_WRAPPED = re.compile(r"([\w.\-<>]+)\((.*)\)$")
CONTAINERS = frozenset(["while", "conditional", "call", "async-start", "async-done"])
"""Opcodes whose events enclose those of other operations."""


def read_program(
    name: str, module_id: int, rank: int, proto: bytes, text: str, devices: int
) -> tuple[Program, Module | None, str]:
    """A program from its serialized HloProto, its module, and what was not understood.

    Args:
        name: its name.
        module_id: its number in the capture.
        rank: the rank whose capture holds it.
        proto: serialized `xla.HloProto`; of a program that carries no simulation of its heap, the
            program gets one.
        text: its module, as `module_text` has it.
        devices: of the whole capture, of which the program's collectives count.
    """
    module, facts, note = None, None, ""
    try:
        module = parse(text)
        proto = with_simulation(proto, module)
        facts = analyse(module, {"devices": devices})
    except (HloParseError, KeyError, ValueError, IndexError) as error:
        note = f"program {name}: its HLO is not understood ({error}); its operations have no work"
    program = Program(
        name=name, module_id=module_id, rank=rank, proto=proto, text=text, facts=facts
    )
    return program, module, note


def module_text(proto: bytes) -> str:
    """The text of the module in a serialized HloProto; empty where jaxlib cannot read it.

    jaxlib has no public way from a serialized module to its text; its own tools use this one.
    """
    from jaxlib import _hlo

    try:
        module = HloProto.FromString(proto).hlo_module.SerializeToString()
        return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()
    except (DecodeError, RuntimeError, ValueError):
        return ""


class Lookup:
    """Operations of one program by name, made when an event first asks for them."""

    def __init__(self, program: Program, module: Module | None, at: int, chip: Chip | None) -> None:
        """`at` is the program's position in the profile, `chip` what ran it where that is known."""
        self._at = at
        self._rates = Rates(chip=chip, calibration=calibration_of(chip)) if chip else None
        self._facts = dict(_by_name(program.facts)) if program.facts else {}
        self._instructions: dict[str, Instruction] = {}
        for computation in module.computations.values() if module else ():
            for instruction in computation.instructions:
                self._instructions.setdefault(instruction.name, instruction)

    def operation(self, name: str) -> Operation:
        """The operation of that name; without work where the program has none."""
        fact, instruction = self._facts.get(name), self._instructions.get(name)
        if isinstance(fact, HloOperation):
            return self._computing(fact)
        if fact is not None:
            return self._moving(fact, name)
        return self._other(name, instruction)

    def _computing(self, fact: HloOperation) -> Operation:
        scope, backward = scope_of(fact.op_name)
        bound = seconds = planned = None
        if self._rates is not None:
            compute = fact.flops / self._rates.peak(fact)
            chip = self._rates.chip
            memory = fact.bytes / (chip.memory_bandwidth / chip.devices)
            seconds = max(compute, memory)
            bound = "compute" if compute >= memory else "memory"
            planned = operation_seconds(fact, self._rates).seconds
        return Operation(
            program=self._at,
            name=fact.name,
            opcode=fact.opcode,
            category=fact.category,
            scope=scope,
            backward=backward,
            op_name=fact.op_name,
            source=fact.source,
            fornax_source=fact.fornax_source,
            dtype=fact.dtype,
            flops=fact.flops,
            bytes=fact.bytes,
            bound_seconds=seconds,
            bound=bound,
            planned_seconds=planned,
        )

    def _moving(self, fact: HloCollective, name: str) -> Operation:
        scope, backward = scope_of(fact.op_name)
        return dataclasses.replace(
            unknown(name, self._at),
            opcode=fact.kind,
            category="exchange",
            scope=scope,
            backward=backward,
            op_name=fact.op_name,
            source=fact.source,
            fornax_source=fact.fornax_source,
            dtype=fact.dtype,
            bytes=fact.bytes,
        )

    def _other(self, name: str, instruction: Instruction | None) -> Operation:
        found = unknown(name, self._at)
        if instruction is None:
            return found
        start = instruction
        while start.opcode.endswith(("-done", "-update")) and start.operands:
            start = start.operands[0]
        exchange = isinstance(self._facts.get(start.name), HloCollective)
        scope, backward = scope_of(instruction.op_name)
        source, ours = source_lines(instruction)
        return dataclasses.replace(
            found,
            opcode=instruction.opcode,
            category="exchange" if exchange else "other",
            bound_seconds=None if exchange else 0.0,
            planned_seconds=None if exchange else 0.0,
            scope=scope,
            backward=backward,
            op_name=instruction.op_name,
            source=source,
            fornax_source=ours,
        )


_EXCHANGES = re.compile(
    r"^(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|send|recv)|nccl|ragged",
    re.IGNORECASE,
)


def unknown(name: str, program: int) -> Operation:
    """An operation of which only the name is known."""
    return Operation(
        program=program,
        name=name,
        opcode="",
        category="exchange" if _EXCHANGES.search(name) else "other",
        scope=(),
        backward=False,
        op_name="",
        source="",
        fornax_source="",
        dtype="",
        flops=0.0,
        bytes=0,
        bound_seconds=None,
        bound=None,
        planned_seconds=None,
    )


def _by_name(facts: ProgramFacts) -> Iterator[tuple[str, HloOperation | HloCollective]]:
    for each in (*facts.operations, *facts.collectives):
        yield each.name, each


def scope_of(op_name: str) -> tuple[tuple[str, ...], bool]:
    """The modules of a model in the path of an operation, and whether it is of a gradient.

    `jit(step)/transpose(jvp(layers))/while/body/checkpoint/attention/dot_general` is
    (("layers", "attention"), True): transformations are unwrapped, the names of jitted functions,
    jax's own control flow and the primitive at the end are left out.
    """
    # Of a fusion XLA may join several names; the longest is the deepest.
    path, backward = _parts(max(op_name.split(";"), key=len))
    kept = tuple(part for part in path[:-1] if part)
    return kept, backward


def _parts(text: str) -> tuple[list[str], bool]:
    found: list[str] = []
    backward = False
    for part in _split(text):
        wrapped = _WRAPPED.match(part)
        if wrapped is None:
            own = part in _CONTROL or _BRANCH.match(part) or _EINSUM in part
            found.append("" if own else part)
        elif wrapped.group(1) in _UNWRAPPED:
            inside, turned = _parts(wrapped.group(2))
            found += inside
            backward |= turned or wrapped.group(1) == "transpose"
        else:
            found.append("")
    return found, backward


def _split(text: str) -> list[str]:
    """Split a path at slashes that are in no parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
