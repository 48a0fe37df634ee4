"""Work, memory traffic and live memory of a traced program, without compiling it.

A jaxpr says which products, convolutions and kernels run and how often; loops count as often as
they run. What lies between them is taken to be fused as compilers do: an elementwise value is made
where it is used, and passes through memory when a product, a kernel, a loop or a second use needs
it, reading what it is made of. Reductions are a pass of their own.

A value "in memory" is one that has a buffer; the others exist only inside of fusions.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fornax.kernels._attention.blocks import Band, choose_blocks, product_flops
from fornax.plan.facts import Work

__all__ = ["Traced", "walk"]

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint"),
        *("custom_lin", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
"""Calls of a program that run once, in whose place it can stand."""
_SPLASH = re.compile(r"splash_mha_(fwd|dkv|dq)")
"""Kernels of attention for TPUs: forward, and the gradients of keys and values, and of queries."""
_PARTS = frozenset(("slice", "dynamic_slice", "gather"))
"""Operations that read no more of their operand than they return."""
_REDUCTIONS = frozenset(
    ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "cumsum", "sort")
)
_PASSES = _REDUCTIONS | {"scatter", "scatter-add", "scatter_add", "dynamic_update_slice"}
_CAST = "convert_element_type"
_LOOPS = frozenset(("scan", "while", "cond"))
_KEPT = 2.0
"""How much more than its own bytes a value must read to be kept for its further uses: compilers
rather compute it again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """What a program does.

    Attributes:
      work: its products, convolutions, kernels and passes over memory.
      peak_bytes: most bytes alive at once of what it makes, its results included, not its
        arguments.
      keys: bytes of the keys and values of an attention over as many queries as keys, to how often
        it runs forward.
    """

    work: tuple[Work, ...]
    peak_bytes: float
    keys: Mapping[float, float]

    @property
    def flops(self) -> float:
        """Of all products, convolutions and kernels."""
        return sum(one.flops * one.count for one in self.work)


def walk(
    closed: core.ClosedJaxpr, *, scale: Mapping[int, float] | None = None, dtype: str = "bfloat16"
) -> Traced:
    """Read a program.

    Args:
      closed: as `jax.make_jaxpr` returns it, traced for the platform that it would run on.
      scale: by position, arguments and whatever is made of them alone count for this share of
        their bytes: arrays that a mesh divides. Results take the share of the argument of the same
        shape and dtype, as gradients do.
      dtype: products of other dtypes are marked with theirs.
    """
    found = _Program(closed.jaxpr, scale or {}, dtype, top=True)
    return Traced(work=tuple(found.work), peak_bytes=found.peak(), keys=found.keys)


class _Array:
    """A value of a program whose calls are put in their places: two runs of one call have two."""

    def __init__(self, aval: Any) -> None:
        self.shape = tuple(getattr(aval, "shape", ()))
        self.dtype = str(getattr(aval, "dtype", ""))
        self.item: int = getattr(getattr(aval, "dtype", None), "itemsize", 4)

    @property
    def bytes(self) -> float:
        return float(math.prod(self.shape) * self.item)


@dataclasses.dataclass(frozen=True)
class _Step:
    """An equation; constants are not operands."""

    name: str
    params: Mapping[str, Any]
    operands: tuple[_Array, ...]
    results: tuple[_Array, ...]
    inputs: tuple[_Array | None, ...]
    """The operands, with None in the places of constants."""


def _steps(jaxpr: core.Jaxpr, known: dict[Any, _Array]) -> Iterator[_Step]:
    """The equations in order, those of calls in place of the call; fills in what is known."""
    for eqn in jaxpr.eqns:
        if _changes_nothing(eqn):
            (var,), (out,) = eqn.invars, eqn.outvars
            known[out] = known[var] if isinstance(var, core.Var) else _Array(out.aval)
            continue
        inside = _inside(eqn) if eqn.primitive.name in _CALLS else None
        if inside is None:
            for var in eqn.outvars:
                known[var] = _Array(var.aval)
            inputs = tuple(known[v] if isinstance(v, core.Var) else None for v in eqn.invars)
            operands = tuple(array for array in inputs if array is not None)
            results = tuple(known[v] for v in eqn.outvars)
            yield _Step(eqn.primitive.name, eqn.params, operands, results, inputs)
            continue
        program = _open(inside)
        own = {v: _Array(v.aval) for v in program.constvars}
        # Some calls have operands before those of their program.
        given = eqn.invars[len(eqn.invars) - len(program.invars) :]
        for inner, outer in zip(program.invars, given, strict=True):
            own[inner] = known[outer] if isinstance(outer, core.Var) else _Array(inner.aval)
        yield from _steps(program, own)
        for inner, outer in zip(program.outvars, eqn.outvars, strict=True):
            known[outer] = own[inner] if isinstance(inner, core.Var) else _Array(outer.aval)


@dataclasses.dataclass(frozen=True)
class _Value:
    """What is known of an array while a program is read.

    Attributes:
      bytes: of its buffer, or of what a fusion makes.
      reads: arrays in memory that a fusion reads to make it, with their bytes; itself, where it is
        in memory.
      share: of the bytes, for arrays that the mesh divides; None where rows have a part in it.
    """

    bytes: float
    reads: Mapping[_Array, float]
    share: float | None


class _Program:
    """A program, or the body of a loop, as it is read."""

    def __init__(
        self, jaxpr: core.Jaxpr, scale: Mapping[int, float], dtype: str, *, top: bool
    ) -> None:
        self.dtype = dtype
        self.work: list[Work] = []
        self.keys: dict[float, float] = {}
        self.made: dict[_Array, int] = {}
        """Buffers of this program to the step that makes them."""
        self.last: dict[_Array, int] = {}
        """Buffers to the last step that reads them."""
        self.passed: set[frozenset[_Array]] = set()
        """Sets of arrays that a reduction passed over."""
        self.inner: dict[int, float] = {}
        """Steps to what is alive inside of them besides."""
        self.values: dict[_Array, _Value] = {}
        known = {v: _Array(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars)}
        shares = {jaxpr.invars[position]: share for position, share in scale.items()}
        self.shares = {_like(known[var]): share for var, share in shares.items()}
        for var, array in known.items():
            share = shares.get(var)
            size = array.bytes * (1.0 if share is None else share)
            self.values[array] = _Value(size, {array: size}, share)
        self.steps = list(_steps(jaxpr, known))
        self.inputs = [known[v] for v in jaxpr.invars]
        self.results = [known[v] for v in jaxpr.outvars if isinstance(v, core.Var)]
        self.gradients = set(self.results) if top else set()
        self.uses = Counter(array for step in self.steps for array in set(step.operands))
        self.uses.update(self.results)
        for number, step in enumerate(self.steps):
            self.add(number, step)
        for array in self.results:
            self.store(len(self.steps), array)
            self.last[array] = len(self.steps)

    def add(self, number: int, step: _Step) -> None:
        product = step.name in ("dot_general", "conv_general_dilated")
        if product:
            read = sum(self.operand(number, array) for array in step.operands)
            one = _product(step, self.dtype)
            self.work.append(dataclasses.replace(one, bytes=one.bytes + read))
            self.buffers(number, step)
        elif step.name in ("pallas_call", "ffi_call"):
            for array in step.operands:
                self.store(number, array)
            self.work.append(_kernel(step))
            size = _keys(step)
            if size:
                self.keys[size] = self.keys.get(size, 0.0) + 1
            self.buffers(number, step)
        elif step.name in _LOOPS:
            self.nested(number, step)
        else:
            self.fused(number, step)
            if step.name in _PASSES:
                for array in step.results:
                    self.reduced(number, array)

    def nested(self, number: int, step: _Step) -> None:
        """A loop or a branch."""
        for array in step.operands:
            self.store(number, array)
        bodies, times = _bodies(step)
        found = [_Program(body, {}, self.dtype, top=False) for body in bodies]
        chosen = max(found, key=lambda one: (one.flops, sum(w.bytes for w in one.work)))
        self.work += [dataclasses.replace(w, count=w.count * times) for w in chosen.work]
        for size, count in chosen.keys.items():
            self.keys[size] = self.keys.get(size, 0.0) + count * times
        self.inner[number] = chosen.peak()
        if step.name == "scan":
            self.inner[number] += self.casts(step, chosen)
        self.buffers(number, step)

    def casts(self, step: _Step, body: "_Program") -> float:
        """Bytes of what the body of a loop reads as narrower numbers alone: compilers cast the
        whole of it before the loop."""
        found = 0.0
        for array, inside in zip(step.inputs, body.inputs, strict=True):
            users = [user for user in body.steps if inside in user.operands]
            if array is not None and users and all(user.name == _CAST for user in users):
                share = max(user.results[0].item for user in users) / array.item
                found += self.values[array].bytes * share if share < 1 else 0.0
        return found

    def operand(self, number: int, array: _Array) -> float:
        """Bytes that a product reads of an operand: what it is made of, where that is fused."""
        value = self.values.get(array)
        if value is None:
            return array.bytes
        if self.uses[array] > 1:
            self.store(number, array)
        self.note(number, self.values[array].reads)
        return sum(self.values[array].reads.values())

    def reduced(self, number: int, array: _Array) -> None:
        """The result of a reduction: one pass serves all over the same arrays."""
        value = self.values[array]
        key = frozenset(value.reads)
        if key in self.passed and value.reads:
            self.note(number, value.reads)
            self.buffer(number, array, value.share)
            return
        self.passed.add(key)
        self.store(number, array)

    def fused(self, number: int, step: _Step) -> None:
        """An operation that is made where it is used."""
        reads: dict[_Array, float] = {}
        shares: list[float] = []
        divided = True
        out = sum(array.bytes for array in step.results)
        for array in step.operands:
            value = self.values.get(array)
            if value is None:
                continue
            divided = divided and value.share is not None
            shares.append(value.share or 0.0)
            for source, size in value.reads.items():
                part = min(size, out) if step.name in _PARTS else size
                reads[source] = max(reads.get(source, 0.0), part)
        share = float(np.mean(shares)) if shares and divided else None
        self.note(number, reads)
        for array in step.results:
            size = array.bytes * (1.0 if share is None else share)
            self.values[array] = _Value(size, reads, share)
            # What several steps use is kept, where that is far less than what it is made of.
            if self.uses[array] > 1 and sum(reads.values()) > _KEPT * size:
                self.store(number, array)

    def store(self, number: int, array: _Array) -> None:
        """Give a fused value a buffer: a pass over memory."""
        value = self.values.get(array)
        if value is None:
            return
        self.note(number, value.reads)
        if array in value.reads:
            return
        moved = sum(value.reads.values())
        if moved:
            moved += value.bytes
            self.work.append(Work(kind="norms_elementwise", bytes=moved))
        self.buffer(number, array, value.share)

    def buffers(self, number: int, step: _Step) -> None:
        for array in step.results:
            self.buffer(number, array, None)

    def buffer(self, number: int, array: _Array, share: float | None) -> None:
        if share is None and array in self.gradients:
            share = self.shares.get(_like(array))
        size = array.bytes * (1.0 if share is None else share)
        self.values[array] = _Value(size, {array: size}, share)
        self.made.setdefault(array, number)
        self.last[array] = max(self.last.get(array, number), number)

    def note(self, number: int, reads: Mapping[_Array, float]) -> None:
        for array in reads:
            self.last[array] = max(self.last.get(array, number), number)

    @property
    def flops(self) -> float:
        return sum(one.flops * one.count for one in self.work)

    def peak(self) -> float:
        """Most bytes alive after a step, or inside of one."""
        end = len(self.steps)
        change = np.zeros(end + 2)
        for array, begun in self.made.items():
            change[begun] += self.values[array].bytes
            change[self.last.get(array, begun) + 1] -= self.values[array].bytes
        alive = np.cumsum(change)[: end + 1]
        for number, size in self.inner.items():
            alive[number] += size
        return float(alive.max(initial=0.0))


def _like(array: _Array) -> tuple[Any, ...]:
    return array.shape, array.dtype


def _bodies(step: _Step) -> tuple[list[core.Jaxpr], float]:
    """Programs of which one runs, and how often; of a loop whose end is not known once."""
    if step.name == "scan":
        return [_open(step.params["jaxpr"])], float(step.params["length"])
    if step.name == "while":
        return [_open(step.params["body_jaxpr"])], 1.0
    return [_open(branch) for branch in step.params["branches"]], 1.0


def _open(program: Any) -> core.Jaxpr:
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program


def _changes_nothing(eqn: core.JaxprEqn) -> bool:
    """Whether compilers drop it: names, and the rounding to its own dtype that JAX puts around what
    a rematerialized layer keeps."""
    if eqn.primitive.name == "reduce_precision":
        own = jnp.finfo(_Array(eqn.invars[0].aval).dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (own.nexp, own.nmant)
    return eqn.primitive.name == "name"


def _inside(eqn: core.JaxprEqn) -> Any:
    """The program of a call that runs once."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if isinstance(eqn.params.get(name), core.Jaxpr | core.ClosedJaxpr):
            return eqn.params[name]
    return None


def _product(step: _Step, usual: str) -> Work:
    """A product of matrices, one of every row and head (which is attention's), a convolution; of
    its bytes those of the result."""
    left, right = step.operands[:2]
    out = step.results[0]
    dtype = left.dtype
    common = {"bytes": out.bytes, "dtype": None if dtype == usual else dtype}
    if step.name == "conv_general_dilated":
        numbers = step.params["dimension_numbers"]
        columns = right.shape[numbers.rhs_spec[0]]
        contract = math.prod(right.shape) // columns
        rows = math.prod(out.shape) // columns
        return Work(
            kind="convolutions",
            flops=2.0 * rows * contract * columns,
            sides=(rows, contract, columns),
            **common,
        )
    (over, _), (batch, _) = step.params["dimension_numbers"]
    contract = math.prod(left.shape[axis] for axis in over)
    repeats = math.prod(left.shape[axis] for axis in batch)
    rows = math.prod(left.shape) // contract // repeats
    columns = math.prod(right.shape) // contract // repeats
    flops = 2.0 * repeats * rows * contract * columns
    if repeats > 1 and 1 in (rows, columns):  # a sum of products, and no work of matrix units
        return Work(kind="norms_elementwise", flops=flops, bytes=out.bytes)
    kind = "attention" if repeats > 1 else "products"
    return Work(kind=kind, flops=flops, sides=(rows, contract, columns), **common)


def _heads(step: _Step) -> list[_Array]:
    """Queries, keys and values of attention for TPUs: [B, heads, tokens, width] each; of one row
    without B."""
    found = [a for a in step.operands if a.dtype.endswith(("float32", "bfloat16"))]
    return [array for array in found if len(array.shape) >= 3][:3]


def _keys(step: _Step) -> float:
    """Bytes of keys and values, of attention among the tokens themselves on its way forward."""
    which = _SPLASH.match(str(step.params.get("name", "")))
    if which is None or which[1] != "fwd":
        return 0.0
    q, k, v = _heads(step)
    return k.bytes + v.bytes if q.shape[-2] == k.shape[-2] else 0.0


def _kernel(step: _Step) -> Work:
    """A kernel of our own: its operands and results, and of attention for TPUs its products."""
    moved = sum(array.bytes for array in (*step.operands, *step.results))
    which = _SPLASH.match(str(step.params.get("name", "")))
    if which is None:
        return Work(kind="norms_elementwise", bytes=moved)
    q_BNTH, k_BKSH, v_BKSV = _heads(step)
    *rows, T, H = q_BNTH.shape
    S, V = k_BKSH.shape[-2], v_BKSV.shape[-1]
    blocks = choose_blocks(T, S, max(H, V), q_BNTH.item, None)
    flops = product_flops(Band(least=None, most=None), blocks, T, S, H, V, S - T)
    return Work(kind="attention", flops=float(math.prod(rows) * flops[which[1]]), bytes=moved)
