"""The meeting with jax's internals: an Exported rebuilt from its parts, and PJRT's fast calls.

What a bundle keeps of `jax.export.Exported` is the portable StableHLO artifact and the calling
convention; the class differs between versions of jax by private fields, which are filled here.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from fornax.config.environment import one_cpu_thread
from fornax.config.errors import BundleError

__all__ = [
    "Inconclusive",
    "abstract",
    "calling_device",
    "compiled_anew",
    "fast_call",
    "load_executable",
    "portable",
    "put",
    "rebuild",
    "stable_calls",
    "stablehlo_version",
    "supported_conventions",
    "without_places",
]

_errors: Any = jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
Inconclusive: type[Exception] = _errors.InconclusiveDimensionOperation
"""What tracing raises where it would have to know the size of an open dimension."""

_EMPTY_BY_POSITION = ("_in_named_shardings", "in_shardings_hlo")
_EMPTY_BY_OUTPUT = ("_out_named_shardings", "out_shardings_hlo")


def rebuild(
    *,
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    module: bytes,
    platform: str,
    kept: tuple[int, ...],
    calling_convention: int,
    uses_global_constants: bool,
) -> export.Exported:
    """An `Exported` of a function of positional arrays to a tuple of arrays.

    Raises:
      BundleError: when this jax does not know the calling convention.
    """
    least, most = supported_conventions()
    if not least <= calling_convention <= most:
        raise BundleError(
            f"{name!r} has jax calling convention {calling_convention} and jax "
            f"{jax.__version__} calls {least} to {most}; use another jax or export again"
        )
    fields: dict[str, Any] = {
        "fun_name": name,
        "in_tree": jax.tree.structure((tuple(0 for _ in inputs), {})),
        "in_avals": tuple(inputs),
        "out_tree": jax.tree.structure(tuple(0 for _ in outputs)),
        "out_avals": tuple(outputs),
        "_has_named_shardings": True,
        "nr_devices": 1,
        "platforms": (platform,),
        "ordered_effects": (),
        "unordered_effects": (),
        "disabled_safety_checks": (),
        "mlir_module_serialized": module,
        "calling_convention_version": calling_convention,
        "module_kept_var_idx": kept,
        "uses_global_constants": uses_global_constants,
        "_get_vjp": None,
    }
    fields |= {key: (None,) * len(inputs) for key in _EMPTY_BY_POSITION}
    fields |= {key: (None,) * len(outputs) for key in _EMPTY_BY_OUTPUT}
    wanted = [f.name for f in dataclasses.fields(export.Exported)]
    unknown = [key for key in wanted if key not in fields]
    if unknown:
        raise BundleError(
            f"jax {jax.__version__} wants {', '.join(unknown)} of an exported function, which "
            "this Fornax does not know; use a jax that it supports"
        )
    return export.Exported(**{key: fields[key] for key in wanted})


def supported_conventions() -> tuple[int, int]:
    """Oldest and newest calling convention that this jax calls."""
    return (
        export.minimum_supported_calling_convention_version,
        export.maximum_supported_calling_convention_version,
    )


def abstract(shape: Sequence[Any], dtype: np.dtype) -> jax.core.ShapedArray:
    """An abstract value; sizes may be symbolic."""
    return jax.core.ShapedArray(tuple(shape), dtype)


def stablehlo_version(module: bytes) -> str:
    """The version in a portable artifact's header.

    Raises:
      BundleError: when the bytes are no portable artifact.
    """
    start = module.find(b"StableHLO_v", 0, 64)
    end = module.find(b"\0", start)
    if not module.startswith(b"ML\xefR") or start < 0 or end < 0:
        raise BundleError("it is no portable artifact of StableHLO")
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
    from jax._src import config

    with config.traceback_in_locations_limit(0):
        yield


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


@contextlib.contextmanager
def compiled_anew(wanted: bool) -> Iterator[None]:
    """Compile everything in this process meanwhile, if `wanted`: nothing is read from jax's cache.

    What was read from it cannot be serialized: the result loads, and fails when it runs (jaxlib
    0.10.2: `Function … not found`).
    """
    if not wanted:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is in use is asked once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def load_executable(data: bytes, device: Any) -> Any:
    """Native code from `LoadedExecutable.serialize`, for one device. It can do anything."""
    from jax._src.lib import xla_client

    return device.client.deserialize_executable(
        data, executable_devices=xla_client.DeviceList((device,))
    )


def fast_call(
    executable: Any, outputs: Sequence[Any], sharding: Any
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """A call of a one-device executable: arrays in its order to arrays, asynchronously.

    `LoadedExecutable.execute` takes its results apart shard by shard; jax's own handlers make the
    same arrays in half of the time (5 us a call instead of 9).
    """
    try:
        from jax._src.interpreters import pxla

        handlers = [pxla.global_aval_to_result_handler(aval, sharding, True) for aval in outputs]
        start = executable.execute_sharded
    except (ImportError, AttributeError, TypeError):
        return executable.execute
    return lambda arrays: start(arrays).consume_with_handlers(handlers)


@functools.cache
def calling_device() -> Any | None:
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


def _device_put(aval: Any, sharding: Any, arrays: list[Any], devices: list[Any]) -> jax.Array:
    return jax.device_put(arrays[0], sharding)


def _fast_put() -> Any:
    try:  # 3 us a call where jax.device_put takes 20
        from jax._src.lib import xla_client

        return xla_client.batched_device_put
    except (ImportError, AttributeError):
        return _device_put


put = _fast_put()
"""`put(aval, sharding, [array], [device])`: a host array onto one device, without checks."""
