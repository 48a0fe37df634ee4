"""The meeting with jax's internals: an Exported rebuilt from its parts, native code, threads.

What a bundle keeps of `jax.export.Exported` is the portable StableHLO artifact and the calling
convention.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from fornax.config.environment import one_cpu_thread
from fornax.config.errors import BundleError

__all__ = [
    "Inconclusive",
    "calling_device",
    "load_executable",
    "portable",
    "rebuild",
    "stable_calls",
    "stablehlo_version",
    "supported_conventions",
    "without_places",
]

_errors: Any = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
Inconclusive: type[Exception] = _errors.InconclusiveDimensionOperation
"""What tracing raises where it would have to know the size of an open dimension."""


Array = tuple[tuple[int | str, ...], np.dtype]
"""Shape, whose open dimensions are expressions, and dtype."""


def rebuild(
    *,
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    constraints: Sequence[str],
    module: bytes,
    platform: str,
    kept: tuple[int, ...],
    calling_convention: int,
    uses_global_constants: bool,
    x64: bool,
) -> export.Exported:
    """An `Exported` of a function of positional arrays to a tuple of arrays.

    It has no gradient: `has_vjp()` is False.

    Args:
      name: of the function.
      inputs: in order, weights among them.
      outputs: in order.
      constraints: of the open dimensions, as `export.SymbolicScope` takes them.
      module: the portable artifact.
      platform: that it was lowered for.
      kept: indices of the inputs that the module takes.
      calling_convention: jax's, of the module.
      uses_global_constants: whether the module takes sizes as constants.
      x64: whether dtypes of 64 bits are enabled around this call.

    Raises:
      BundleError: when this jax does not know the calling convention.
    """
    least, most = supported_conventions()
    if not least <= calling_convention <= most:
        raise BundleError(
            f"{name!r} has jax calling convention {calling_convention} and jax "
            f"{jax.__version__} calls {least} to {most}; use another jax or export again"
        )

    signature = _signature(tuple(inputs), tuple(outputs), tuple(constraints), platform, x64)
    return dataclasses.replace(
        signature,
        _get_vjp=None,  # that of zeros; a `custom_jvp` that refuses stays in jax's caches for good
        fun_name=name,
        mlir_module_serialized=module,
        module_kept_var_idx=kept,
        calling_convention_version=calling_convention,
        uses_global_constants=uses_global_constants,
    )


@functools.lru_cache(maxsize=256)
def _signature(
    inputs: tuple[Array, ...],
    outputs: tuple[Array, ...],
    constraints: tuple[str, ...],
    platform: str,
    x64: bool,
) -> export.Exported:
    """What jax makes of a function of the same inputs and outputs: all but the module.

    Made once for each signature, since jax 0.12 keeps what it lowers with open dimensions for good:
    the entry of its cache holds its own weak key.
    """
    del x64  # dtypes of 64 bits are others without it
    scope = export.SymbolicScope(constraints)

    def abstract(array: Array) -> jax.ShapeDtypeStruct:
        shape = export.symbolic_shape(",".join(map(str, array[0])), scope=scope)
        return jax.ShapeDtypeStruct(shape, array[1])

    def empty(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        del arrays
        return tuple(jnp.zeros(made.shape, made.dtype) for made in map(abstract, outputs))

    return export.export(jax.jit(empty), platforms=[platform])(*map(abstract, inputs))


def supported_conventions() -> tuple[int, int]:
    """Oldest and newest calling convention that this jax calls."""
    return (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )


def stablehlo_version(module: bytes) -> str:
    """The version in a portable artifact's header.

    Raises:
      BundleError: when the bytes are not a portable artifact.
    """
    start = module.find(b"StableHLO_v", 0, 64)
    end = module.find(b"\0", start)
    if not module.startswith(b"ML\xefR") or start < 0 or end < 0:
        raise BundleError("it is not a portable artifact of StableHLO")
    return module[start + len(b"StableHLO_v") : end].decode("ascii", "replace")


_OLDEST = "1.13.0"
"""StableHLO that graphs are written in where they can be: every jax that Fornax supports reads it,
while jax itself writes what the releases of the last weeks read."""


def portable(module: bytes) -> bytes:
    """The artifact in an older StableHLO, for older readers; as it is where it needs its own."""
    from jax.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    if _numbers(stablehlo_version(module)) <= _numbers(_OLDEST):
        return module
    context = mlir.make_ir_context()
    with context:
        parsed = stablehlo.deserialize_portable_artifact(context, module)
        with context.attach_diagnostic_handler(lambda _: True):  # pyrefly: ignore[bad-context-manager]
            try:
                return stablehlo.serialize_portable_artifact(parsed, _OLDEST)
            except ValueError:  # an operation that the older one does not have
                return module


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@contextlib.contextmanager
def without_places() -> Iterator[None]:
    """Lower without the files and lines of the user's code: a bundle tells nobody's paths."""
    name = "jax_traceback_in_locations_limit"
    before = jax.config.values[name]
    jax.config.update(name, 0)
    try:
        yield
    finally:
        jax.config.update(name, before)


def stable_calls() -> frozenset[str]:
    """The custom calls that this jax has and promises to keep, those into TensorFlow left out.

    Raises:
      BundleError: when this jax keeps no such list where it is known to.
    """
    from jax._src.export import _export

    known = getattr(_export, "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", None)
    if known is None:
        raise BundleError(
            f"jax {jax.__version__} does not say which calls it keeps; use a jax that this Fornax "
            "supports"
        )
    return frozenset(known) - {"tf.call_tf_function"}


def load_executable(data: bytes, device: jax.Device) -> Any:
    """Native code from `LoadedExecutable.serialize`, for one device. It can do anything."""
    from jax._src.lib import xla_client

    return device.client.deserialize_executable(
        data, executable_devices=xla_client.DeviceList((device,))
    )


@functools.cache
def calling_device() -> jax.Device | None:
    """A CPU device whose programs run in the thread that calls them; None where jax has none.

    XLA's CPU client divides every program over its threads, and has as many as when it was made:
    one more client, with none to divide over, is the way to have a program that is not divided.
    """
    try:
        from jax._src.lib import xla_client

        with one_cpu_thread():
            return xla_client.make_cpu_client(asynchronous=False).local_devices()[0]
    except (ImportError, AttributeError, TypeError):
        return None
