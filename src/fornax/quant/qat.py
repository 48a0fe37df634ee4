"""Quantization-aware training: a forward pass over the weights that `quantize` would write.

Weights are rounded by the functions that round a file's, so that what is trained is what is
served. Gradients are taken at the rounded weights and applied to the float ones, the
straight-through estimator (Bengio et al. 2013, arXiv:1308.3432; Jacob et al. 2018,
arXiv:1712.05877).

Legend: N matrices of O outputs and I inputs, X and Y in either order; R rows, K inputs, M outputs
of a product of E experts.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few
from fornax.mesh import path_name
from fornax.models import Decoder
from fornax.models.dispatch import SortedRows
from fornax.models.layout import Slot, flat_variables
from fornax.quant.config import QuantConfig
from fornax.quant.inputs import RoundedInputs
from fornax.quant.leaves import Leaf, assign, parse_rule, planned_leaves
from fornax.quant.rounding import find_scales, nearest, rounded_to
from fornax.quant.schemes import TRAINED, Inputs, Scheme, scheme_named

__all__ = ["FakeQuantizer", "RoundedProduct", "fake_quantize", "plan_qat"]


@dataclass(frozen=True)
class _Parameter:
    """How a parameter is rounded."""

    slot: Slot
    """Any of its layers and experts."""
    schemes: tuple[Scheme | None, ...]
    """By layer of a stack, or of the one matrix. None: it stays as it is."""

    @property
    def inputs(self) -> Inputs | None:
        """How the inputs of its products are rounded."""
        scheme = self.schemes[0]
        return None if scheme is None or not _is_kernel(self.slot) else scheme.inputs


def _is_kernel(slot: Slot) -> bool:
    """Whether it is multiplied by, unlike a table."""
    return slot.num_inputs > 0 or slot.of_all_experts


@dataclass(frozen=True)
class FakeQuantizer:
    """Which parameters of a decoder are rounded in its forward pass, and how."""

    parameters: Mapping[str, _Parameter]
    """By path, such as layers/attention/q/kernel."""
    kept: Mapping[str, str]
    """Matrices that stay floats, by their names in a file, and why."""

    def round(self, params: Any) -> Any:
        """The parameters of a forward pass: those that are quantized as they will be read.

        Args:
          params: nested dicts by path, of float32 or bfloat16 arrays.
        """

        def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
            rounded = self.parameters.get(path_name(path))
            return value if rounded is None else _round_parameter(value, rounded)

        return jax.tree_util.tree_map_with_path(one, params)

    def round_inputs(self, model: Decoder) -> None:
        """Let products round their inputs where the scheme of their weights says so, in place.

        Args:
          model: merged while tracing, its parameters rounded.
        """
        variables = flat_variables(model)
        for path in self.rounds_inputs:
            rule = self.parameters[path].inputs
            assert rule is not None
            variables[path].set_value(RoundedProduct(variables[path].get_value(), rule))

    @property
    def rounds_inputs(self) -> tuple[str, ...]:
        """The parameters whose products round their inputs."""
        return tuple(path for path, own in self.parameters.items() if own.inputs is not None)

    def __str__(self) -> str:
        """What is rounded and what is not, in a line."""
        counts: dict[str, int] = {}
        for rounded in self.parameters.values():
            for scheme in rounded.schemes:
                if scheme is not None:
                    counts[scheme.name] = counts.get(scheme.name, 0) + 1
        found = ", ".join(f"{count} as {name}" for name, count in counts.items())
        return (
            f"the forward pass rounds the weights of linear layers ({found}); {len(self.kept)} "
            f"matrices stay floats: {first_few([f'{n} ({why})' for n, why in self.kept.items()])}"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedProduct:
    """A weight whose products round their inputs: a `kernels.Weight` and an `ExpertWeight`."""

    array: jax.Array
    """[*in, *out], or [E, K, M] of experts."""
    rule: Inputs = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """The array's."""
        return self.array.dtype

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """See `kernels.linear`."""
        lead = x.shape[: x.ndim - inputs]
        x = _round_rows(x.reshape(*lead, -1), self.rule).reshape(x.shape)
        return kernels.linear(x, self.array.astype(x.dtype), inputs=inputs)

    def grouped(self, x_RK: jax.Array, rows: SortedRows) -> jax.Array:
        """See `kernels.grouped_matmul`."""
        x_RK = _round_rows(x_RK, self.rule)
        return kernels.grouped_matmul(x_RK, self.array.astype(x_RK.dtype), rows.sizes_E)

    def axes(self, inputs: str, outputs: str) -> Any:
        """The logical axes in the array's place."""
        return RoundedProduct(("expert", inputs, outputs), self.rule)  # pyrefly: ignore[bad-argument-type]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_rows(x: jax.Array, rule: Inputs) -> jax.Array:
    """The last axis rounded as it comes; the gradient passes."""
    return RoundedInputs(rule=rule)(x)


@_round_rows.defjvp
def _pass_through(rule: Inputs, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _round_rows(*primals, rule), tangents[0]


def _round_parameter(value: jax.Array, rounded: _Parameter) -> jax.Array:
    """A parameter with the values that its codes stand for, each layer by its scheme."""
    schemes = {scheme.name: scheme for scheme in rounded.schemes if scheme is not None}
    for scheme in schemes.values():
        layers = [n for n, own in enumerate(rounded.schemes) if own == scheme]
        if len(layers) == len(rounded.schemes):
            return _round_stack(value, rounded.slot, scheme)
        index = np.array(layers)
        value = value.at[index].set(_round_stack(value[index], rounded.slot, scheme))
    return value


def _round_stack(value: jax.Array, slot: Slot, scheme: Scheme) -> jax.Array:
    """All layers and experts by one scheme."""
    if slot.of_all_experts:
        inputs, outputs = slot.shape[-2:]
    else:
        outputs, inputs = slot.stored_shape
    p, g = scheme.cell((outputs, inputs))
    matrix, cell = ((inputs, outputs), (g, p)) if _is_kernel(slot) else ((outputs, inputs), (p, g))
    w_NXY = value.astype(jnp.float32).reshape(-1, *matrix)
    found = fake_quantize(w_NXY, scheme, np.dtype(value.dtype), cell)
    return found.reshape(value.shape).astype(value.dtype)


def fake_quantize(
    w_NXY: jax.Array, scheme: Scheme, dtype: np.dtype, cell: tuple[int, int]
) -> jax.Array:
    """What the codes of matrices stand for, as a file with such scales is read, bit for bit.

    Args:
      w_NXY: float32.
      scheme: how; codes are the nearest.
      dtype: of scales, and of what is read: float32 or bfloat16, whose numbers the result has.
      cell: places of X and of Y that share a scale.

    Returns:
      float32 [N, X, Y].
    """
    N, X, Y = w_NXY.shape
    x, y = cell
    padded = jnp.pad(w_NXY, ((0, 0), (0, -X % x), (0, -Y % y)))
    cells = padded.reshape(N, padded.shape[1] // x, x, padded.shape[2] // y, y)
    scales, zeros = find_scales(cells, scheme, dtype)
    codes = nearest(cells, scales, zeros, scheme)
    if scheme.type == "int":  # which have no -0
        codes = codes.astype(jnp.int32).astype(jnp.float32)
    codes = codes if zeros is None else codes - zeros
    return rounded_to(codes * scales, dtype).reshape(padded.shape)[:, :X, :Y]


def plan_qat(model: Decoder, config: QuantConfig) -> FakeQuantizer | None:
    """What quantization-aware training rounds: the leaves that `quantize` quantizes, by the same
    rules. None where `config.qat` is null.

    Args:
      model: abstract is enough.
      config: the run's.

    Raises:
      ConfigError: no Hugging Face family can express the model, rules that do not fit, or what
        training cannot round as a file is rounded.
    """
    if config.qat is None:
        return None
    rules = [parse_rule(rule, config.group_size) for rule in config.rules]
    scheme = scheme_named(config.qat, config.group_size)
    leaves = assign(planned_leaves(model), scheme, rules, model.config)
    layers: dict[str, dict[int, tuple[Slot, Scheme | None]]] = {}
    for leaf in leaves:
        _check(leaf)
        for path, block in zip(leaf.parameters, leaf.blocks, strict=True):
            layers.setdefault(path, {})[block.slot.layer or 0] = (block.slot, leaf.scheme)
    found = {}
    for path, own in layers.items():
        schemes = tuple(own[layer][1] for layer in sorted(own))
        if any(schemes):
            found[path] = _checked(path, _Parameter(own[0][0], schemes))
    kept = {leaf.tensor.name: leaf.reason for leaf in leaves if leaf.matrix and not leaf.scheme}
    return FakeQuantizer(found, kept)


def _check(leaf: Leaf[Any]) -> None:
    """Refuse what a parameter's own values do not tell the codes of.

    Raises:
      ConfigError: naming the tensor.
    """
    scheme = leaf.scheme
    if scheme is None:
        return
    if scheme.not_trained:
        raise ConfigError(
            f"{first_few(leaf.paths)} would have the scheme {scheme.name}, which is none to train "
            f"with, because {scheme.not_trained}; use one of {', '.join(TRAINED)}"
        )
    height = 1 if scheme.block is None else scheme.block[0]
    apart = any(block.start % height or block.groups > 1 or block.step > 1 for block in leaf.blocks)
    if height > 1 and not leaf.stacked and len(leaf.blocks) > 1 and apart:
        raise ConfigError(
            f"{leaf.tensor.name} holds {first_few(leaf.paths)} as one matrix, whose blocks of "
            f"{height} rows ({scheme.name}) reach from one of them into the next; take a scheme "
            "with scales of outputs or groups, such as fp8 or w8a16"
        )


def _checked(path: str, rounded: _Parameter) -> _Parameter:
    """Refuse products that cannot round their inputs.

    Raises:
      ConfigError: naming the parameter.
    """
    rounding = {own.name: own.inputs is not None for own in rounded.schemes if own}
    if not any(rounding.values()) or not _is_kernel(rounded.slot):
        return rounded
    first = next(name for name, rounds in rounding.items() if rounds)
    why = ""
    if not path.startswith("layers/"):
        why = "it is outside the layers, where products take their inputs as they are"
    elif len({own and own.name for own in rounded.schemes}) > 1:
        why = "other layers of its stack have another scheme"
    if why:
        raise ConfigError(
            f"the scheme {first} of {path} rounds activations, and {why}; keep it with a rule, or "
            "take a scheme of weights alone, such as w8a16"
        )
    return rounded
