"""Running each token through its experts: sorted by expert, multiplied in groups, put back.

On a mesh each device sorts the tokens that it holds; experts' widths are divided over the axes of
`mlp`, and what is divided over those of `embed` is gathered first. Experts are divided over the
axes of `expert`: a device sends each token to those that have its experts, or all gather the tokens
of all, run their own experts, and reduce and scatter the outputs. Buffers have room for the worst
case, min(P, E / k) times what an even load fills; or, where experts have a capacity, for that.

Legend: B batch, T tokens, D model width, F width of an expert, E experts, k experts per token,
P devices that experts are divided over, M tokens of a device, A = M k assignments of a token to an
expert, R rows that a device's experts run, C tokens of a row that an expert has room for.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.mesh import axes_in_use, dividing, mesh_in_use, shards
from fornax.models.mlp import GatedActivation

__all__ = ["ExpertArrays", "ExpertWeight", "SortedRows", "run_experts"]


@dataclass(frozen=True)
class SortedRows:
    """Whose the rows of a product are."""

    sizes_E: jax.Array
    """int32: rows of each of the device's experts, which are consecutive."""
    experts_R: jax.Array
    """int32: each row's expert; the last one for rows that no expert has."""
    tokens_R: jax.Array | None
    """int32: each row's token, of those that the device holds [M]; None: of other devices."""


class ExpertWeight(Protocol):
    """A weight [E, K, N] that knows its own product, as with adapters: a registered pytree."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it stands for."""
        ...

    def grouped(self, x_RK: jax.Array, rows: SortedRows) -> jax.Array:
        """Return what `kernels.grouped_matmul(x, array, rows.sizes_E)` would."""
        ...

    def axes(self, inputs: str, outputs: str) -> Any:
        """The same structure with the logical axes of each of its arrays, as a tuple."""
        ...


ExpertArrays = dict[str, Any]
"""Parameters of all experts, in the dtype of their products: `gate`, `up` [E, D, F], `down`
[E, F, D], each an array, an `ExpertWeight` or, on one device, a layer of a `kernels.GroupedWeight`
or `kernels.PackedWeight`, and where they have biases `gate_bias`, `up_bias` [E, F], `down_bias`
[E, D]."""

_AXES: dict[str, tuple[str, ...]] = {
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "gate_bias": ("mlp",),
    "up_bias": ("mlp",),
    "down_bias": ("embed",),
}
"""Their logical axes, that of experts aside."""

Multiply = Callable[[jax.Array, SortedRows], jax.Array]
"""(rows [R, D], whose they are) to [R, D]."""
Axes = tuple[str, ...]


@dataclass(frozen=True)
class _Division:
    """The axes of the mesh that arrays are divided over; none without a mesh."""

    experts: Axes = ()
    tokens: Axes = ()
    """Those of `experts` that tokens are divided over too."""
    embed: Axes = ()
    width: Axes = ()


def run_experts(
    x_BTD: jax.Array,
    weights_BTk: jax.Array,
    experts_BTk: jax.Array,
    arrays: ExpertArrays,
    activate: GatedActivation,
    *,
    weigh_input: bool = False,
    exchange: Literal["auto", "all_to_all", "all_gather"] = "auto",
    capacity: int | None = None,
) -> jax.Array:
    """Sum each token's experts, weighted -> y [B, T, D] in the dtype of x.

    Args:
      x_BTD: tokens, in the dtype of `arrays`.
      weights_BTk: float32 weights of each token's experts.
      experts_BTk: int32 experts, all different; E for none, as padding has.
      arrays: the experts.
      activate: of gate's and up's products.
      weigh_input: whether the weights multiply the experts' inputs, not their outputs.
      exchange: `ExpertsConfig.exchange`. Tokens that every device has are not sent.
      capacity: C, when no expert has more tokens of a row, as `drop_tokens` leaves them: buffers
        have no room for more. None: as many as there are.
    """
    run = functools.partial(
        _run_local, activate=activate, weigh_input=weigh_input, capacity=capacity
    )
    mesh = mesh_in_use()
    if mesh is None:
        return run(x_BTD, weights_BTk, experts_BTk, arrays, division=_Division(), sends=False)
    rows, length = dividing("batch", x_BTD.shape[0]), dividing("length", x_BTD.shape[1])
    division = _divide(arrays["gate"].shape, (*(rows or ()), *(length or ())))
    sends = exchange == "all_to_all" or (
        exchange == "auto" and experts_BTk.shape[-1] < shards(division.experts)
    )
    run = functools.partial(
        run, division=division, sends=sends and division.tokens == division.experts != ()
    )
    token = PartitionSpec(rows, length, None)
    axes = {"expert": division.experts, "embed": division.embed, "mlp": division.width}

    def spec(_: jax.Array, logical: tuple[str | None, ...]) -> PartitionSpec:
        return PartitionSpec(*(axes.get(axis or "") or None for axis in logical))

    of_arrays = jax.tree.map(spec, arrays, _axes_of(arrays))
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(token, token, token, of_arrays),
        out_specs=token,
        check_vma=False,
    )(x_BTD, weights_BTk, experts_BTk, arrays)


def _axes_of(arrays: ExpertArrays) -> dict[str, Any]:
    """The logical axes of each parameter, or of each array of one."""
    return {
        name: ("expert", *_AXES[name])
        if isinstance(weight, jax.Array)
        else weight.axes(*_AXES[name])
        for name, weight in arrays.items()
    }


def _divide(gate_shape: tuple[int, ...], token_axes: Axes) -> _Division:
    """How gates [E, D, F] lie on the mesh, as the rules say and sizes allow."""
    E, D, F = gate_shape
    experts, width = dividing("expert", E) or (), dividing("activation_mlp", F) or ()
    embed = tuple(axis for axis in axes_in_use("embed") if axis not in {*experts, *width})
    return _Division(
        experts=experts,
        tokens=tuple(axis for axis in experts if axis in token_axes),
        embed=embed if D % shards(embed) == 0 else (),
        width=width,
    )


def _run_local(
    x_BTD: jax.Array,
    weights_BTk: jax.Array,
    experts_BTk: jax.Array,
    arrays: ExpertArrays,
    *,
    activate: GatedActivation,
    weigh_input: bool,
    capacity: int | None,
    division: _Division,
    sends: bool,
) -> jax.Array:
    """`run_experts` on one device, for the tokens and the parts of the experts that it holds."""
    arrays = _whole_rows(arrays, division.embed)
    x_MD, weights_Mk, experts_Mk = (
        array.reshape(-1, array.shape[-1]) for array in (x_BTD, weights_BTk, experts_BTk)
    )
    own = arrays["gate"].shape[0]  # experts of this device
    M, k = experts_Mk.shape

    def room(experts: int, devices: int = 1) -> int:
        """Rows that this many experts can have of the tokens of this many devices."""
        most = M * min(k, experts)
        limited = most if capacity is None else min(most, len(x_BTD) * experts * capacity)
        return devices * limited

    multiply = functools.partial(
        _multiply, arrays=arrays, activate=activate, width_axes=division.width
    )
    if sends:
        E = own * shards(division.experts)
        there = functools.partial(_multiply_elsewhere, multiply, division.experts, own, room(own))
        y_MD = _run_sorted(x_MD, weights_Mk, experts_Mk, there, E, room(E), weigh_input)
    elif division.experts:
        rows = room(own, shards(division.tokens))
        y_MD = _run_gathered(
            x_MD, weights_Mk, experts_Mk, multiply, own, rows, weigh_input, division
        )
    elif kernels.fuses_experts(x_MD, arrays["gate"], arrays["up"], arrays["down"]):
        y_MD = kernels.fused_experts(
            x_MD,
            weights_Mk,
            experts_Mk,
            arrays["gate"],
            arrays["up"],
            arrays["down"],
            activation=activate.name,
            clip=activate.clip,
            gain=activate.clip_gain,
            gate_bias_EF=arrays.get("gate_bias"),
            up_bias_EF=arrays.get("up_bias"),
            down_bias_ED=arrays.get("down_bias"),
            weigh_input=weigh_input,
        )
    else:
        y_MD = _run_sorted(x_MD, weights_Mk, experts_Mk, multiply, own, room(own), weigh_input)
    y_MD = jax.lax.psum(y_MD, division.width) if division.width else y_MD
    return y_MD.reshape(x_BTD.shape)


@jax.named_scope("gather")
def _whole_rows(arrays: ExpertArrays, axes: Axes) -> ExpertArrays:
    """The arrays with D gathered; gradients are summed over its devices, and scattered back."""
    if not axes:
        return arrays

    def gather(array: jax.Array, logical: tuple[str | None, ...]) -> jax.Array:
        if "embed" not in logical:
            return array
        return jax.lax.all_gather(array, axes, axis=logical.index("embed"), tiled=True)

    return jax.tree.map(gather, arrays, _axes_of(arrays))


def _run_gathered(
    x_MD: jax.Array,
    weights_Mk: jax.Array,
    experts_Mk: jax.Array,
    multiply: Multiply,
    own: int,
    rows: int,
    weigh_input: bool,
    division: _Division,
) -> jax.Array:
    """Run this device's experts for the tokens of all; add up what they all have for its own."""
    tokens = division.tokens
    same = tuple(axis for axis in division.experts if axis not in tokens)
    if tokens:
        x_MD, weights_Mk, experts_Mk = (
            jax.lax.all_gather(array, tokens, axis=0, tiled=True)
            for array in (x_MD, weights_Mk, experts_Mk)
        )
    experts_Mk = experts_Mk - jax.lax.axis_index(division.experts) * own
    experts_Mk = jnp.where((experts_Mk >= 0) & (experts_Mk < own), experts_Mk, own)
    y_MD = _run_sorted(x_MD, weights_Mk, experts_Mk, multiply, own, rows, weigh_input)
    if tokens:
        y_MD = jax.lax.psum_scatter(y_MD, tokens, scatter_dimension=0, tiled=True)
    return jax.lax.psum(y_MD, same) if same else y_MD


def _run_sorted(
    x_MD: jax.Array,
    weights_Mk: jax.Array,
    experts_Mk: jax.Array,
    multiply: Multiply,
    num_experts: int,
    rows: int,
    weigh_input: bool,
) -> jax.Array:
    """Sum each token's experts, weighted; those of `num_experts` and above are not counted, and
    all others are at most `rows`."""
    M, k = experts_Mk.shape
    experts_A, weights_A = experts_Mk.reshape(-1), weights_Mk.reshape(-1, 1)
    with jax.named_scope("dispatch"):
        order_A, inverse_A, sizes_E = kernels.sort_by_group(experts_A, num_experts)
        order_R = order_A[:rows]  # the others are for no expert
        rows_RD = _spread(x_MD, order_R, inverse_A, k)
        if weigh_input:
            rows_RD = rows_RD * _permute(weights_A, order_R, inverse_A).astype(rows_RD.dtype)
        experts_R = jnp.minimum(experts_A[order_R], num_experts - 1)
    y_RD = multiply(rows_RD, SortedRows(sizes_E, experts_R, order_R // k))
    with jax.named_scope("combine"):
        y_AD = _permute(y_RD, inverse_A, order_R).astype(jnp.float32)
        if not weigh_input:
            y_AD = y_AD * weights_A
        is_chosen_A1 = experts_A[:, None] < num_experts
        y_MD = jnp.sum(jnp.where(is_chosen_A1, y_AD, 0).reshape(M, k, -1), axis=1)
        return y_MD.astype(x_MD.dtype)


def _multiply(
    rows_RD: jax.Array,
    rows: SortedRows,
    arrays: ExpertArrays,
    activate: GatedActivation,
    width_axes: Axes,
) -> jax.Array:
    """Each row through its expert; rows for no expert come last, and their results mean nothing."""

    def product(x: jax.Array, w: Any, bias: jax.Array | None) -> jax.Array:
        if isinstance(w, jax.Array | kernels.GroupedWeight | kernels.PackedWeight):
            y = kernels.grouped_matmul(x, w, rows.sizes_E)
        else:
            y = w.grouped(x, rows)
        return y if bias is None else y + bias[rows.experts_R]

    with jax.named_scope("gate"):
        gate_RF = product(rows_RD, arrays["gate"], arrays.get("gate_bias"))
    with jax.named_scope("up"):
        up_RF = product(rows_RD, arrays["up"], arrays.get("up_bias"))
    gate_RF, up_RF = checkpoint_name(gate_RF, "mlp_gate"), checkpoint_name(up_RF, "mlp_up")
    bias = arrays.get("down_bias")
    if bias is not None and width_axes:
        bias = bias * (jax.lax.axis_index(width_axes) == 0)
    with jax.named_scope("activation"):
        h_RF = activate(gate_RF, up_RF)
    with jax.named_scope("down"):
        y_RD = product(h_RF, arrays["down"], bias)
    return checkpoint_name(y_RD, "expert_down")


def _multiply_elsewhere(
    multiply: Multiply,
    axes: Axes,
    own: int,
    most: int,
    rows_AD: jax.Array,
    sorted_A: SortedRows,
) -> jax.Array:
    """`multiply` on the devices that have the experts.

    Args:
      multiply: of this device's experts, numbered from 0.
      axes: over which experts are divided.
      own: experts of each device.
      most: rows that one device can have for another.
      rows_AD: sorted by expert.
      sorted_A: of the experts of all devices.
    """
    devices = shards(axes)
    sizes_PE = jax.lax.all_gather(sorted_A.sizes_E[None], axes, axis=0, tiled=True)
    sizes_PPe = sizes_PE.reshape(devices, devices, own)
    counts_PP = jnp.sum(sizes_PPe, axis=-1)
    rows_RD = kernels.exchange_rows(rows_AD, counts_PP, devices * most, most, axes)
    received_X = sizes_PPe[:, jax.lax.axis_index(axes)].reshape(-1)
    part_R = jnp.searchsorted(jnp.cumsum(received_X), jnp.arange(len(rows_RD)), side="right")
    experts_R = jnp.where(part_R < len(received_X), part_R % own, own).astype(jnp.int32)
    order_R, inverse_R, sizes_E = kernels.sort_by_group(experts_R, own)
    rows = SortedRows(sizes_E, jnp.minimum(experts_R[order_R], own - 1), None)
    y_RD = multiply(_permute(rows_RD, order_R, inverse_R), rows)
    y_RD = _permute(y_RD, inverse_R, order_R)
    return kernels.exchange_rows(y_RD, counts_PP.T, len(rows_AD), most, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_MD: jax.Array, order_R: jax.Array, inverse_A: jax.Array, k: int) -> jax.Array:
    """Rows [R, D]: each token as often as it is in `order_R`, assignments in the wanted order.

    The gradient gathers, where that of indexing would add up element by element.
    """
    return x_MD[order_R // k]


def _spread_forward(
    x_MD: jax.Array, order_R: jax.Array, inverse_A: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    return _spread(x_MD, order_R, inverse_A, k), inverse_A


def _spread_backward(
    k: int, inverse_A: jax.Array, dy_RD: jax.Array
) -> tuple[jax.Array, None, None]:
    dy_MkD = _rows_or_zeros(dy_RD, inverse_A).reshape(-1, k, dy_RD.shape[-1])
    return jnp.sum(dy_MkD.astype(jnp.float32), axis=1).astype(dy_RD.dtype), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _permute(x_AD: jax.Array, order_R: jax.Array, inverse_A: jax.Array) -> jax.Array:
    """Rows of x in another order, zeros where x ends before; the gradient puts them back."""
    return _rows_or_zeros(x_AD, order_R)


def _permute_forward(
    x_AD: jax.Array, order_R: jax.Array, inverse_A: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _permute(x_AD, order_R, inverse_A), inverse_A


def _permute_backward(inverse_A: jax.Array, dy_RD: jax.Array) -> tuple[jax.Array, None, None]:
    return _rows_or_zeros(dy_RD, inverse_A), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _rows_or_zeros(x_RD: jax.Array, index_A: jax.Array) -> jax.Array:
    """Rows of x; zeros for those beyond its end, of which only a longer index has some."""
    if x_RD.shape[0] >= index_A.shape[0]:
        return x_RD[index_A]
    return x_RD.at[index_A].get(mode="fill", fill_value=0)
