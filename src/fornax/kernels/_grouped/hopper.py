"""Grouped products on NVIDIA Hopper: Tokamax's Mosaic kernels, an optional package.

Each of the three products is a kernel, called alone: the derivative is ours. The kernels skip
rows beyond the last group: of the product they leave memory as it was, and in the gradient of the
matrices zeros times such a row would count, so that both are masked here.

Legend: M rows, E groups, K inputs, N outputs.
"""

import functools

import jax

from fornax.kernels._grouped.call import GroupedCall, GroupedProducts
from fornax.kernels._grouped.ragged import CONTRACTED, own, plain_or_transposed
from fornax.kernels.registry import interpreting

__all__ = ["declines", "tokamax"]

_SIDE = 128
"""Of inputs and outputs the kernels take whole blocks, and of rows where there are more than:"""
_FEW_ROWS = 64


def declines(call: GroupedCall) -> str | None:
    """Say why Tokamax's kernels cannot run `call`."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.devices > 1:
        return f"the mesh in use divides arrays over {call.devices} devices; call it in shard_map"
    if call.inputs % _SIDE or call.outputs % _SIDE:
        return (
            f"it takes inputs and outputs in multiples of {_SIDE}, not {call.inputs} and "
            f"{call.outputs}"
        )
    if call.rows > _FEW_ROWS and call.rows % _SIDE:
        return f"it takes up to {_FEW_ROWS} rows or a multiple of {_SIDE}, not {call.rows}"
    return _missing() or (None if interpreting() else _other_device())


@functools.cache
def _missing() -> str | None:
    """Import the library, and say why that cannot be done."""
    try:
        import tokamax  # noqa: F401  # pyrefly: ignore[missing-import]
        from absl import flags
    except ImportError as error:
        return f"{error}; pip install 'fornax-ai[tokamax]' (Python 3.12 or newer)"
    if not flags.FLAGS.is_parsed():  # or else the library parses this program's arguments
        flags.FLAGS.mark_as_parsed()
    return None


def _other_device() -> str | None:
    """The library asks this machine's device what to compile for."""
    if jax.default_backend() != "gpu":
        return "it compiles for this machine's GPU, and there is none"
    capability = float(getattr(jax.local_devices()[0], "compute_capability", "") or 0)
    if 9 <= capability < 10:
        return None
    return f"its kernels for all three products are Hopper's (9.0), not for {capability}"


def _multiply(
    a: jax.Array,
    b: jax.Array,
    sizes_E: jax.Array,
    numbers: jax.lax.RaggedDotDimensionNumbers,
) -> jax.Array:
    """Call the library; interpreted, its implementation for XLA, which means the same."""
    import tokamax  # pyrefly: ignore[missing-import]

    return tokamax.ragged_dot_general(
        a,
        b,
        sizes_E,
        numbers,
        preferred_element_type=a.dtype,
        implementation="xla" if interpreting() else "mosaic_gpu",
    )


def _by_group(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    return own(_multiply(x_MK, w, sizes_E, plain_or_transposed(transposed)), sizes_E)


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    x_MK, y_MN = own(x_MK, sizes_E), own(y_MN, sizes_E)
    return _multiply(x_MK, y_MN, sizes_E, CONTRACTED)


tokamax = GroupedProducts(_by_group, _outer)
