"""A bundle's StableHLO to programs: rebuilt as jax's Exported, compiled for one bucket."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import export

from fornax.config.errors import BundleError
from fornax.export import _exported
from fornax.export.calls import check_calls
from fornax.export.dtypes import numpy_dtype
from fornax.export.executables import memory_of
from fornax.export.manifest import Function, Weight
from fornax.export.placement import Placement, platform_of
from fornax.export.program import Program
from fornax.export.trace import abstract_argument, x64
from fornax.export.weights import Weights

__all__ = ["compile_program", "loaded_program", "rebuild"]


def rebuild(
    f: Function, platform: str, module: bytes, weights: Mapping[str, Weight]
) -> export.Exported:
    """The function as jax has it: positional arrays (weights, inputs, lengths) to a tuple.

    Raises:
      BundleError: when the module or its sizes are none that this jax can read.
    """
    _exported.stablehlo_version(module)
    check_calls(module)
    program = f.programs[platform]
    try:
        scope = export.SymbolicScope(f.constraints)
        with x64(f.x64):
            arguments = [abstract_argument(spec, scope) for spec in f.signature.arguments]
            outputs = [abstract_argument(spec, scope) for spec in f.signature.outputs.values()]
    except Exception as error:
        raise BundleError(f"its sizes cannot be read by jax: {error}") from None
    stored = [weights[name] for name in f.weights]
    return _exported.rebuild(
        name=f.signature.name,
        inputs=[
            *(_exported.abstract(w.shape, numpy_dtype(w.dtype)) for w in stored),
            *(_exported.abstract(a.shape, a.dtype) for a in arguments),
        ],
        outputs=[_exported.abstract(o.shape, o.dtype) for o in outputs],
        module=module,
        platform=platform,
        kept=program.kept,
        calling_convention=program.calling_convention,
        uses_global_constants=program.uses_global_constants,
    )


def compile_program(
    f: Function,
    exported: export.Exported,
    dims: Mapping[str, int],
    weights: Weights,
    placement: Placement,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """The function compiled for sizes, which need not be a bucket's.

    Args:
      options: XLA's, for this program alone.

    Raises:
      BundleError: when the dimensions are not the function's, or it does not compile here.
    """
    signature = f.signature
    if set(dims) != set(signature.dims):
        raise BundleError(
            f"{signature.name!r} has the dimensions {', '.join(signature.dims)}; {dict(dims)} "
            "names others"
        )
    held = [weights.params[name] for name in f.weights]
    shardings = [
        *(array.sharding for array in held),
        *(
            placement.spread(s.sizes(dims), s.axes, signature.rows_of(s))
            for s in signature.arguments
        ),
    ]
    arguments = [
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held),
        *(
            jax.ShapeDtypeStruct(spec.sizes(dims), numpy_dtype(spec.dtype))
            for spec in signature.arguments
        ),
    ]
    with x64(f.x64):
        try:
            jitted = jax.jit(_named(exported), in_shardings=tuple(shardings), keep_unused=True)
            compiled = jitted.lower(*arguments).compile(dict(options) if options else None)
        except Exception as error:
            raise BundleError(
                f"{signature.name!r} cannot be compiled for {dict(dims)} on "
                f"{platform_of(placement)} with jax {jax.__version__}: {error}"
            ) from error
    executable: Any = compiled.runtime_executable()
    one = len(placement.devices) == 1
    return Program(
        executable=executable,
        call=_call_one(f, executable, dims, placement) if one else _call_compiled(compiled),
        signature=signature,
        dims=dims,
        weights=held,
        placement=placement,
        memory=memory_of(compiled.memory_analysis()),
        x64=f.x64,
        ahead=False,
    )


def loaded_program(
    f: Function,
    executable: Any,
    dims: Mapping[str, int],
    weights: Weights,
    placement: Placement,
) -> Program:
    """The function from native code that was compiled ahead of time, on one device."""
    return Program(
        executable=executable,
        call=_call_one(f, executable, dims, placement),
        signature=f.signature,
        dims=dims,
        weights=[weights.params[name] for name in f.weights],
        placement=placement,
        memory=memory_of(executable.get_compiled_memory_stats()),
        x64=f.x64,
        ahead=True,
    )


def _named(exported: export.Exported) -> Any:
    def call(*arrays: Any) -> Any:
        return exported.call(*arrays)

    call.__name__ = call.__qualname__ = exported.fun_name
    return call


def _call_one(
    f: Function, executable: Any, dims: Mapping[str, int], placement: Placement
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    outputs = [
        _exported.abstract(spec.sizes(dims), numpy_dtype(spec.dtype))
        for spec in f.signature.outputs.values()
    ]
    sharding = jax.sharding.SingleDeviceSharding(placement.devices[0])
    return _exported.fast_call(executable, outputs, sharding)


def _call_compiled(compiled: Any) -> Any:
    return lambda arrays: list(compiled(*arrays))
