"""A function to StableHLO: symbolic dimensions, all platforms, 64-bit types, stable calls only."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import export
from jax.extend.core import Jaxpr

from fornax.config.errors import BundleError
from fornax.export import _exported, expressions
from fornax.export.dtypes import TENSORS, Shaped, is_wide, numpy_dtype
from fornax.export.spec import Signature, TensorSpec

__all__ = ["Flat", "Traced", "abstract_argument", "flat_function", "is_x64", "trace", "x64"]

Flat = Callable[..., tuple[jax.Array, ...]]
"""A function of arrays in order (weights, inputs, lengths) to its outputs in order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A function's StableHLO by platform; `weights` are the parameters that it uses."""

    signature: Signature
    weights: tuple[str, ...]
    modules: Mapping[str, bytes]
    kept: Mapping[str, tuple[int, ...]]
    calling_convention: int
    uses_global_constants: Mapping[str, bool]
    constraints: tuple[str, ...]
    x64: bool


def x64(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """64-bit types, or none, for this thread whatever the process has."""
    return jax.enable_x64(wanted)


def flat_function(
    fn: Callable[..., object],
    signature: Signature,
    params: Sequence[str],
    preprocess: Callable[..., object] | None,
    postprocess: Callable[..., object] | None,
    names: list[str],
) -> Flat:
    """A function of arrays in order (weights, inputs, lengths) to a tuple of outputs.

    `fn` takes the weights by the names in `params`. Tracing it fills `names` with its outputs'.
    """
    count = len(params)

    def flat(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        weights = dict(zip(params, arrays[:count], strict=True))
        arguments = [spec.name for spec in signature.arguments]
        inputs = dict(zip(arguments, arrays[count:], strict=True))
        if preprocess is not None:
            inputs = _named(preprocess(**inputs), f"preprocess of {signature.name!r}")
        outputs = _named(fn(weights, **inputs), f"function {signature.name!r}")
        if postprocess is not None:
            outputs = _named(postprocess(**outputs), f"postprocess of {signature.name!r}")
        names[:] = list(outputs)
        return tuple(jax.numpy.asarray(value) for value in outputs.values())

    flat.__name__ = flat.__qualname__ = signature.name
    return flat


def _named(found: object, who: str) -> dict[str, jax.typing.ArrayLike]:
    if not isinstance(found, Mapping) or not found or not all(isinstance(k, str) for k in found):
        raise BundleError(
            f"{who} returned a {type(found).__name__}; it returns a dict of arrays by name, "
            "as in {'score': score}"
        )
    for name, value in found.items():
        if isinstance(value, Mapping | list | tuple) or value is None:
            raise BundleError(f"{who} returned {name!r} as a {type(value).__name__}, not an array")
    return dict(found)


def trace(
    flat: Flat,
    signature: Signature,
    weights: Mapping[str, Shaped],
    names: list[str],
    platforms: Sequence[str],
) -> Traced:
    """Trace and lower for every platform, with the dimensions left open.

    Raises:
      BundleError: when the function cannot be traced with open dimensions, or calls code that
        no other version of jax is promised to have.
    """
    wide = is_x64(signature) or any(is_wide(np.dtype(w.dtype).name) for w in weights.values())
    with x64(wide):
        constraints, used, exports = _attempts(flat, signature, weights, platforms)
    first = next(iter(exports.values()))
    return Traced(
        signature=dataclasses.replace(signature, outputs=_outputs(signature, first, names)),
        weights=used,
        modules={
            p: _exported.portable(bytes(e.mlir_module_serialized)) for p, e in exports.items()
        },
        kept={p: tuple(e.module_kept_var_idx) for p, e in exports.items()},
        calling_convention=first.calling_convention_version,
        uses_global_constants={p: e.uses_global_constants for p, e in exports.items()},
        constraints=constraints,
        x64=wide,
    )


def is_x64(signature: Signature) -> bool:
    """Whether a function is traced with 64-bit types: an input has one, or the process does."""
    wide = any(is_wide(spec.dtype) for spec in signature.arguments)
    return wide or bool(jax.config.read("jax_enable_x64"))


def _attempts(
    flat: Flat, signature: Signature, weights: Mapping[str, Shaped], platforms: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, export.Exported]]:
    """Lower with open dimensions; where that does not do, with what the buckets say of them."""
    first: Exception | None = None
    for constraints in ((), _limits(signature), _known(signature)):
        try:
            return (constraints, *_lower(flat, signature, weights, platforms, constraints))
        except BundleError:
            raise
        except Exception as error:
            first = first or error
    if not isinstance(first, _exported.Inconclusive):
        raise first or AssertionError
    reason = str(first).strip().split("\n", 1)[0]
    raise BundleError(
        f"{signature.name!r} decides something by the size of a dimension that is open "
        f"({', '.join(signature.dims)}): {reason}. Write it without that decision, or give the "
        "dimension as a number in its Spec"
    ) from first


def _limits(signature: Signature) -> tuple[str, ...]:
    """The largest size of each dimension: `positions[:t]` needs to know it."""
    return tuple(f"{name} <= {sizes[-1]}" for name, sizes in signature.buckets.items())


def _known(signature: Signature) -> tuple[str, ...]:
    """All that the buckets say of each dimension: limits, and a common divisor."""
    found = list(_limits(signature))
    for name, sizes in signature.buckets.items():
        found.append(f"{name} >= {sizes[0]}")
        divisor = int(np.gcd.reduce(sizes))
        if divisor > 1:
            found.append(f"mod({name}, {divisor}) == 0")
    return tuple(found)


_Lowered = tuple[tuple[str, ...], dict[str, export.Exported]]


def _lower(
    flat: Flat,
    signature: Signature,
    weights: Mapping[str, Shaped],
    platforms: Sequence[str],
    constraints: tuple[str, ...],
) -> _Lowered:
    """The names of the weights that are used, and the function of these, by platform."""
    scope = export.SymbolicScope(constraints)
    held = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights.values()]
    inputs = [abstract_argument(spec, scope) for spec in signature.arguments]
    jitted = jax.jit(flat)
    traced = jitted.trace(*held, *inputs)
    _refuse_callbacks(signature.name, traced.jaxpr.jaxpr)
    used = _used(traced, len(held))
    if len(used) < len(held):
        jitted = jax.jit(_without(flat, held, used))
        held = [held[i] for i in used]
    names = tuple(weights)
    return tuple(names[i] for i in used), {
        platform: _lower_one(jitted, signature, platform, [*held, *inputs])
        for platform in platforms
    }


def _refuse_callbacks(name: str, jaxpr: Jaxpr) -> None:
    for eqn in jaxpr.eqns:
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            raise BundleError(
                f"{name!r} calls Python while it runs ({eqn.primitive.name}), and nothing in a "
                "bundle runs Python; take callbacks and jax.debug.print out of what is exported"
            )
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                _refuse_callbacks(name, getattr(value, "jaxpr", value))


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _used(traced: jax.stages.Traced, weights: int) -> list[int]:
    jaxpr = traced.jaxpr.jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return [i for i, v in enumerate(jaxpr.invars[:weights]) if id(v) in read]


def _without(flat: Flat, held: list[jax.ShapeDtypeStruct], used: list[int]) -> Flat:
    """`flat` of the used weights only; nothing reads the zeros that stand for the others."""

    def pruned(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        whole = [jax.numpy.zeros(w.shape, w.dtype) for w in held]
        for at, i in enumerate(used):
            whole[i] = arrays[at]
        return flat(*whole, *arrays[len(used) :])

    pruned.__name__ = pruned.__qualname__ = flat.__name__
    return pruned


def _lower_one(
    flat: Flat, signature: Signature, platform: str, arguments: list[jax.ShapeDtypeStruct]
) -> export.Exported:
    try:
        with _exported.without_places():
            found = export.export(jax.jit(flat), platforms=[platform])(*arguments)
    except ValueError as error:
        if "custom calls whose targets" not in str(error):
            raise
        raise BundleError(_unstable(signature.name, platform, str(error))) from None
    if found.ordered_effects or found.unordered_effects:
        raise BundleError(f"{signature.name!r} has side effects, which a bundle cannot have")
    if found.nr_devices != 1:
        raise BundleError(
            f"{signature.name!r} was traced over {found.nr_devices} devices; export the plain "
            "function and give Spec and save their axes: the mesh is chosen at load"
        )
    return found


def _unstable(name: str, platform: str, message: str) -> str:
    targets = sorted(
        set(re.findall(r'call_target_name = "([^"]+)"|custom_call @([\w.$]+)', message))
    )
    shown = ", ".join(a or b for a, b in targets) or "a custom call"
    return (
        f"{name!r} calls {shown} on {platform}, native code that a bundle cannot hold: no other "
        "machine is promised to have it. Use XLA's implementation when exporting, as in "
        "kernels.attention(…, implementation='xla') or the model's configuration of it"
    )


def abstract_argument(spec: TensorSpec, scope: export.SymbolicScope) -> jax.ShapeDtypeStruct:
    """An input with its dimensions open."""
    shape = export.symbolic_shape(",".join(map(str, spec.shape)), scope=scope)
    return jax.ShapeDtypeStruct(shape, numpy_dtype(spec.dtype))


def _outputs(
    signature: Signature, exported: export.Exported, names: list[str]
) -> dict[str, TensorSpec]:
    outputs = {}
    for name, aval in zip(names, exported.out_avals, strict=True):
        dtype = np.dtype(aval.dtype).name
        if dtype not in TENSORS:
            raise BundleError(
                f"output {name!r} of {signature.name!r} has dtype {dtype}; outputs are of "
                f"{', '.join(TENSORS)}"
            )
        shape = tuple(s if isinstance(s, int) else str(s) for s in aval.shape)
        outputs[name] = TensorSpec(name=name, shape=shape, dtype=dtype)
        _check_batch(signature, outputs[name])
    return outputs


def _check_batch(signature: Signature, output: TensorSpec) -> None:
    if signature.batch is None:
        return
    for axis, size in enumerate(output.shape):
        if not isinstance(size, str) or signature.batch not in expressions.names(size):
            continue
        if axis or size != signature.batch:
            raise BundleError(
                f"output {output.name!r} of {signature.name!r} has shape "
                f"({', '.join(map(str, output.shape))}), so its rows are not the inputs' rows; "
                f"return the batch {signature.batch!r} as dimension 0 and nowhere else, or pass "
                "batch=None"
            )
