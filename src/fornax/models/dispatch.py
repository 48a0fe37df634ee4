"""Running each token through its experts: sorted by expert, multiplied in groups, put back.

No token is dropped. On a mesh each device sorts the tokens that it holds; experts' widths are
divided over the axes of `mlp`, and what is divided over those of `embed` is gathered first.

Legend: B batch, T tokens, D model width, F width of an expert, E experts, k experts a token,
M tokens of a device, A = M k assignments of a token to an expert.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from fornax import kernels
from fornax.mesh import dividing, mesh_in_use

__all__ = ["ExpertArrays", "run_experts"]


ExpertArrays = dict[str, jax.Array]
"""Parameters of all experts, in the dtype of their products: `gate`, `up` [E, D, F], `down`
[E, F, D], and where they have biases `gate_bias`, `up_bias` [E, F], `down_bias` [E, D]."""

_AXES: dict[str, tuple[str, ...]] = {
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
}
"""Their logical axes, that of experts aside."""

Activate = Callable[[jax.Array, jax.Array], jax.Array]


def run_experts(
    x_BTD: jax.Array,
    weights_BTk: jax.Array,
    experts_BTk: jax.Array,
    arrays: ExpertArrays,
    activate: Activate,
    *,
    weigh_input: bool = False,
) -> jax.Array:
    """Sum each token's experts, weighted -> y [B, T, D] in the dtype of x.

    Args:
      x_BTD: tokens, in the dtype of `arrays`.
      weights_BTk: float32 weights of each token's experts.
      experts_BTk: int32 experts; E for none, as padding has.
      arrays: the experts.
      activate: (gate [A, F], up [A, F]) to [A, F].
      weigh_input: whether the weights multiply the experts' inputs, not their outputs.
    """
    run = functools.partial(_run_local, activate=activate, weigh_input=weigh_input)
    mesh = mesh_in_use()
    if mesh is None:
        return run(x_BTD, weights_BTk, experts_BTk, arrays, width_axes=None)
    rows, length = dividing("batch", x_BTD.shape[0]), dividing("length", x_BTD.shape[1])
    width = dividing("activation_mlp", arrays["gate"].shape[2])
    embed = dividing("embed", x_BTD.shape[2])
    if embed is not None and set(embed) & set(width or ()):
        embed = None
    axes = {"embed": embed, "mlp": width}

    def gathered(
        x_BTD: jax.Array, weights_BTk: jax.Array, experts_BTk: jax.Array, parts: ExpertArrays
    ) -> jax.Array:
        if embed is not None:  # gradients are summed over its devices, and scattered back
            for name in parts:
                if "embed" in _AXES[name]:
                    dim = 1 + _AXES[name].index("embed")
                    whole = jax.lax.all_gather(parts[name], embed, axis=dim, tiled=True)
                    parts = {**parts, name: whole}
        return run(x_BTD, weights_BTk, experts_BTk, parts, width_axes=width)

    token = PartitionSpec(rows, length, None)
    of_arrays = {
        name: PartitionSpec(None, *(axes[axis] for axis in _AXES[name])) for name in arrays
    }
    return jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=(token, token, token, of_arrays),
        out_specs=token,
        check_vma=False,
    )(x_BTD, weights_BTk, experts_BTk, arrays)


Axes = tuple[str, ...] | None


def _run_local(
    x_BTD: jax.Array,
    weights_BTk: jax.Array,
    experts_BTk: jax.Array,
    arrays: ExpertArrays,
    *,
    activate: Activate,
    weigh_input: bool,
    width_axes: Axes,
) -> jax.Array:
    """`run_experts` on one device, for the tokens and the part of the width that it holds."""
    num_experts, k = len(arrays["gate"]), experts_BTk.shape[-1]
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    experts_A = experts_BTk.reshape(-1)
    weights_A = weights_BTk.reshape(-1, 1)
    order_A = jnp.argsort(experts_A, stable=True)
    sorted_A = experts_A[order_A]
    starts = jnp.searchsorted(sorted_A, jnp.arange(num_experts + 1), method="scan_unrolled")
    sizes_E = jnp.diff(starts).astype(jnp.int32)
    inverse_A = jnp.argsort(order_A)
    rows_AD = _spread(x_MD, order_A, inverse_A, k)
    if weigh_input:
        rows_AD = rows_AD * _permute(weights_A, order_A, inverse_A).astype(rows_AD.dtype)
    index_A = jnp.minimum(sorted_A, num_experts - 1)

    def product(rows: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = kernels.grouped_matmul(rows, w, sizes_E)
        return y if bias is None else y + bias[index_A]

    gate_AF = checkpoint_name(product(rows_AD, arrays["gate"], arrays.get("gate_bias")), "mlp_gate")
    up_AF = checkpoint_name(product(rows_AD, arrays["up"], arrays.get("up_bias")), "mlp_up")
    bias = arrays.get("down_bias")
    if bias is not None and width_axes:
        bias = bias * (jax.lax.axis_index(width_axes) == 0)
    y_AD = product(activate(gate_AF, up_AF), arrays["down"], bias)
    y_AD = _permute(y_AD, inverse_A, order_A).astype(jnp.float32)
    if not weigh_input:
        y_AD = y_AD * weights_A
    is_chosen_A1 = experts_A[:, None] < num_experts
    y_MD = jnp.sum(jnp.where(is_chosen_A1, y_AD, 0).reshape(len(x_MD), k, -1), axis=1)
    y_MD = y_MD.astype(x_BTD.dtype)
    y_MD = jax.lax.psum(y_MD, width_axes) if width_axes else y_MD
    return y_MD.reshape(x_BTD.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_MD: jax.Array, order_A: jax.Array, inverse_A: jax.Array, k: int) -> jax.Array:
    """Rows [A, D]: each token k times, in the order of its assignments.

    The gradient gathers, where that of indexing would add up element by element.
    """
    return x_MD[order_A // k]


def _spread_forward(
    x_MD: jax.Array, order_A: jax.Array, inverse_A: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    return _spread(x_MD, order_A, inverse_A, k), inverse_A


def _spread_backward(
    k: int, inverse_A: jax.Array, dy_AD: jax.Array
) -> tuple[jax.Array, None, None]:
    dy_MkD = dy_AD[inverse_A].reshape(-1, k, dy_AD.shape[-1])
    return jnp.sum(dy_MkD.astype(jnp.float32), axis=1).astype(dy_AD.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _permute(x_AD: jax.Array, order_A: jax.Array, inverse_A: jax.Array) -> jax.Array:
    """Rows of x in another order; the gradient puts them back."""
    return x_AD[order_A]


def _permute_forward(
    x_AD: jax.Array, order_A: jax.Array, inverse_A: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return x_AD[order_A], inverse_A


def _permute_backward(inverse_A: jax.Array, dy_AD: jax.Array) -> tuple[jax.Array, None, None]:
    return dy_AD[inverse_A], None, None


_permute.defvjp(_permute_forward, _permute_backward)
