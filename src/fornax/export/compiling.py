"""A bundle's StableHLO to programs: rebuilt as jax's Exported, compiled for one bucket."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from fornax.config.errors import BundleError
from fornax.export import _exported
from fornax.export.dtypes import numpy_dtype
from fornax.export.executables import memory_of
from fornax.export.graph import check_calls
from fornax.export.manifest import Function, Weight
from fornax.export.placement import Placement, platform_of
from fornax.export.program import Program
from fornax.export.trace import x64
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
    stored = [weights[name] for name in f.weights]
    try:
        with x64(f.x64):
            return _exported.rebuild(
                name=f.signature.name,
                inputs=[(a.shape, numpy_dtype(a.dtype)) for a in (*stored, *f.signature.arguments)],
                outputs=[(a.shape, numpy_dtype(a.dtype)) for a in f.signature.outputs.values()],
                constraints=f.constraints,
                module=module,
                platform=platform,
                kept=program.kept,
                calling_convention=program.calling_convention,
                uses_global_constants=program.uses_global_constants,
                x64=f.x64,
            )
    except BundleError:
        raise
    except Exception as error:
        raise BundleError(f"its sizes cannot be read by jax: {error}") from None


def compile_program(
    f: Function,
    exported: export.Exported,
    dims: Mapping[str, int],
    weights: Weights,
    placement: Placement,
    options: Mapping[str, object] | None = None,
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
            jitted = jax.jit(
                _named(exported),
                in_shardings=tuple(shardings),
                compiler_options=dict(options) if options else None,
            )
            lowered = jitted.lower(*arguments)
            compiled = lowered.compile()
            everywhere = placement.sharding("", (), None)
            whole = None
            if not everywhere.is_fully_addressable:
                whole = _whole(lowered, compiled, everywhere)
        except Exception as error:
            raise BundleError(
                f"{signature.name!r} cannot be compiled for {dict(dims)} on "
                f"{platform_of(placement)} with jax {jax.__version__}: {error}"
            ) from error
    # jax 0.10 takes the layout of committed arrays of less than a byte for one that `compiled`,
    # which checks it, does not accept; `jitted` finds the same program and does not check.
    packed = any(jnp.iinfo(a.dtype).bits < 8 for a in held if jnp.issubdtype(a.dtype, jnp.integer))
    call = jitted if packed else compiled
    memory = memory_of(compiled.memory_analysis())
    if whole is not None:
        more = memory_of(whole.memory_analysis()).outputs
        memory = dataclasses.replace(memory, outputs=memory.outputs + more)

    def run(arrays: list[jax.Array | np.ndarray]) -> list[jax.Array]:
        outputs = call(*arrays)
        return list(outputs if whole is None else whole(*outputs))

    return Program(
        executable=compiled.runtime_executable(),
        call=run,
        signature=signature,
        dims=dims,
        weights=held,
        placement=placement,
        memory=memory,
        x64=f.x64,
        ahead=False,
    )


def _whole(lowered: Any, compiled: Any, everywhere: jax.sharding.Sharding) -> Any:
    """The program that gives each process all of the outputs, of which it has a part.

    A program of its own: asked for whole outputs, the compiler might divide the work otherwise, and
    several processes would not give the bits of one.
    """
    parts = [
        jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding)
        for out, sharding in zip(lowered.out_info, compiled.output_shardings, strict=True)
    ]
    return jax.jit(lambda *arrays: arrays, out_shardings=everywhere).lower(*parts).compile()


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
        call=executable.execute,
        signature=f.signature,
        dims=dims,
        weights=[weights.params[name] for name in f.weights],
        placement=placement,
        memory=memory_of(executable.get_compiled_memory_stats()),
        x64=f.x64,
        ahead=True,
    )


def _named(exported: export.Exported) -> Callable[..., object]:
    def call(*arrays: jax.Array) -> object:
        return exported.call(*arrays)

    call.__name__ = call.__qualname__ = exported.fun_name
    return call
