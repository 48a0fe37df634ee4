"""Quantizing the weights of any NNX module in place, by rules that must match."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few, similar
from fornax.models.kernel_layout import layout_of
from fornax.quant.array import (
    QTYPES,
    Calibration,
    QType,
    QuantizedCodes,
    QuantizedWeight,
    parse_calibration,
    quantize_array,
)
from fornax.quant.dots import QuantizedConv, QuantizedDot, QuantizedEinsum, promote
from fornax.quant.products import Uses, find_uses
from fornax.quant.run import quantize

__all__ = ["ModuleReport", "QuantizationRule", "quantize_module"]

_TABLES = "take"
"""The operation that reads tables of embeddings."""


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """What becomes of the weights of the modules it finds; the fields are those of Qwix's rule."""

    module_path: str = ".*"
    """Regular expression for the whole of a module's path, such as `layers/0/mlp/.*`."""
    op_names: Collection[str] = ()
    """dot_general, einsum, conv_general_dilated, take; none for all but take."""
    weight_qtype: DTypeLike | str | None = None
    """int2 to int8, float8_e4m3fn or float8_e5m2; None keeps what is found as it is."""
    act_qtype: DTypeLike | str | None = None
    """The same for inputs, rounded as they come, by row."""
    tile_size: int | float | None = None
    """Inputs that share a scale along the last axis summed over; a float for a share of the axis;
    None for all."""
    weight_calibration_method: str = "absmax"
    """absmax[,factor], minmax[,factor], rms,factor, fixed,bound or fixed,least,greatest."""
    act_calibration_method: str | None = None
    """The same for inputs; None for absmax."""


@dataclass(frozen=True)
class ModuleReport:
    """What became of a module."""

    quantized: dict[str, str]
    """By path of a weight: its type, and the axes that share a scale."""
    kept: dict[str, str]
    """Other floating-point parameters, and why."""
    bytes_before: int
    """Of all parameters."""
    bytes_after: int


@dataclass(frozen=True)
class _Weight:
    """A parameter that could be quantized."""

    path: str
    owner: nnx.Module
    attribute: str
    summed: tuple[int, ...] = ()
    """Axes that its product sums over."""
    op: str = ""
    reason: str = ""
    """Why it cannot be quantized; nothing where it can."""


@dataclass(frozen=True)
class _Own:
    """A rule, checked."""

    rule: Any
    pattern: re.Pattern[str]
    weights: QType | None
    calibration: Calibration
    inputs: QType | None
    inputs_calibration: Calibration


@quantize.register(nnx.Module)  # pyrefly: ignore[bad-singledispatch-register]
def quantize_module(module: nnx.Module, rules: Sequence[Any], *inputs: Any) -> ModuleReport:
    """What `quantize` does with a module: codes and scales in place of weights, one at a time.

    A module reads a quantized weight as the floats it stands for; where a rule has an `act_qtype`,
    its product is made of codes. Embeddings stay floats unless a rule names the operation `take`.

    Args:
      module: changed in place. Its parameters of other kinds than flax's linear layers,
        convolutions and embeddings are found by what is done with them.
      rules: `QuantizationRule`, or Qwix's.
      inputs: what the module is called with, arrays or shapes, to find products of parameters that
        its own code multiplies by.

    Raises:
      ConfigError: a rule that is wrong, that finds nothing it could quantize, or finds a weight
        that another finds too; a tile that does not divide; `act_qtype` where inputs cannot be
        rounded.
    """
    own = [_check(rule) for rule in rules]
    weights = list(_weights(module, find_uses(module, inputs) if inputs else {}))
    chosen = _assign(weights, own)
    before = sum(_nbytes(weight) for weight in weights)
    quantized: dict[str, str] = {}
    kept: dict[str, str] = {}
    plans = []
    for weight, rule in chosen:
        if rule is None or rule.weights is None or weight.reason:
            kept[weight.path] = weight.reason or (
                "no rule finds it" if rule is None else "a rule keeps it"
            )
            continue
        plans.append((weight, rule, rule.weights, _tiles(weight, rule)))
    for weight, rule, qtype, tiles in plans:
        _put(weight, rule, qtype, tiles)
        shared = ", ".join(map(str, weight.summed))
        tile = f" by {next(iter(tiles.values()))}" if tiles else ""
        rows = f", inputs {rule.inputs.name}" if rule.inputs else ""
        quantized[weight.path] = f"{qtype.name}, one scale along {shared}{tile}{rows}"
    after = sum(_nbytes(weight) for weight in weights)
    return ModuleReport(quantized, kept, before, after)


def _check(rule: Any) -> _Own:
    """A rule of ours or of Qwix's.

    Raises:
      ConfigError: for what neither has, or what is not done.
    """
    known = {field.name for field in dataclasses.fields(QuantizationRule)}
    if not dataclasses.is_dataclass(rule) or not known <= {
        f.name for f in dataclasses.fields(rule)
    }:
        raise ConfigError(f"a rule must be a QuantizationRule; {rule!r} is none")
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name not in known and value != field.default and value not in (None, False):
            raise ConfigError(
                f"rule {rule.module_path!r}: {field.name}={value!r} is not supported; use "
                f"{', '.join(sorted(known))}"
            )
    try:
        pattern = re.compile(rule.module_path)
    except re.error as error:
        raise ConfigError(
            f"module_path {rule.module_path!r} is not a regular expression: {error}"
        ) from None
    wrong = set(rule.op_names) - {"dot_general", "einsum", "conv_general_dilated", _TABLES}
    if wrong:
        raise ConfigError(
            f"rule {rule.module_path!r}: op_names {sorted(wrong)} are none of dot_general, einsum, "
            "conv_general_dilated and take"
        )
    weights, inputs = _qtype(rule.weight_qtype), _qtype(rule.act_qtype)
    if inputs is not None and weights is None:
        raise ConfigError(f"rule {rule.module_path!r}: act_qtype needs a weight_qtype beside it")
    some = weights or QTYPES["int8"]
    return _Own(
        rule,
        pattern,
        weights,
        parse_calibration(rule.weight_calibration_method, some),
        inputs,
        parse_calibration(rule.act_calibration_method or "absmax", inputs or some),
    )


def _qtype(value: Any) -> QType | None:
    if value is None:
        return None
    try:
        name = value if isinstance(value, str) else jnp.dtype(value).name
    except TypeError:
        name = repr(value)
    if name not in QTYPES:
        raise ConfigError(f"qtype {name} is none of {', '.join(QTYPES)}")
    return QTYPES[name]


def _weights(module: nnx.Module, uses: dict[str, Uses]) -> Iterator[_Weight]:
    """Every floating-point parameter, by path."""
    for where, owner in nnx.iter_modules(module):
        for attribute, value in sorted(vars(owner).items()):
            if not isinstance(value, nnx.Param):
                continue
            array = value.get_value()
            if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.floating):
                continue
            path = "/".join(map(str, (*where, attribute)))
            yield _weight(_Weight(path, owner, attribute), array.ndim, uses.get(path))


def _weight(weight: _Weight, axes: int, uses: Uses | None) -> _Weight:
    """A parameter with the axes that its product sums over, or the reason why it is kept."""
    found = partial(dataclasses.replace, weight)
    owner, name = weight.owner, weight.attribute
    if isinstance(owner, nnx.Embed) and name == "embedding":
        return found(summed=(-1,), op=_TABLES)
    if isinstance(owner, nnx.Conv) and name == "kernel":
        return found(summed=tuple(range(-axes, -1)), op="conv_general_dilated")
    if isinstance(owner, nnx.ConvTranspose) and name == "kernel":
        outputs = -2 if owner.transpose_kernel else -1
        summed = tuple(axis for axis in range(-axes, 0) if axis != outputs)
        return found(summed=summed, op="conv_general_dilated")
    layout = layout_of(owner) if name == "kernel" else None
    if layout is not None:
        summed = tuple(layout.stacked + axis - axes for axis in layout.inputs)
        return found(summed=summed, op="einsum" if isinstance(owner, nnx.Einsum) else "dot_general")
    if axes < 2:
        return found(reason="one axis: a bias or a scale")
    if uses is None:
        return found(
            reason="read by a module's own code: give inputs, so that its products are found"
        )
    if not uses.products:
        return found(
            reason=f"multiplied by nothing; read by {', '.join(sorted(uses.others)) or 'nothing'}"
        )
    if len({summed for _, summed in uses.products}) > 1:
        return found(reason="multiplied along different axes")
    op, summed = min(uses.products)
    return found(summed=summed, op=op)


def _assign(weights: list[_Weight], rules: list[_Own]) -> list[tuple[_Weight, _Own | None]]:
    """Each weight with the rule that finds it."""
    hits: list[list[_Weight]] = [[] for _ in rules]
    chosen: list[tuple[_Weight, _Own | None]] = []
    for weight in weights:
        module = weight.path.rpartition("/")[0]
        found = [at for at, own in enumerate(rules) if _finds(own, module, weight.op)]
        if len(found) > 1 and not weight.reason:
            paths = [rules[at].rule.module_path for at in found]
            raise ConfigError(
                f"{weight.path} is found by the rules {first_few([repr(x) for x in paths])}; let "
                "one of them not match it, such as by (?!...) before its path"
            )
        for at in found:
            hits[at] += [] if weight.reason else [weight]
        chosen.append((weight, rules[found[0]] if found else None))
    for own, its in zip(rules, hits, strict=True):
        if not its:
            known = [w.path.rpartition("/")[0] for w in weights if not w.reason]
            near = similar(own.rule.module_path, known) or known
            kept = [
                f"{w.path} ({w.reason})"
                for w in weights
                if w.reason and _finds(own, w.path.rpartition("/")[0], w.op)
            ]
            also = f"; it finds {first_few(kept)}" if kept else ""
            raise ConfigError(
                f"rule {own.rule.module_path!r} finds no weight of a product{also}; modules that "
                f"have one are {first_few(near) or 'none'}"
            )
    return chosen


def _finds(own: _Own, module: str, op: str) -> bool:
    names = own.rule.op_names
    if not own.pattern.fullmatch(module):
        return False
    if not op:  # what has no product, named in errors and reports
        return True
    return op in names if names or op == _TABLES else True


def _tiles(weight: _Weight, own: _Own) -> dict[int, int]:
    size, array = own.rule.tile_size, getattr(weight.owner, weight.attribute).get_value()
    if own.inputs is not None:
        _check_inputs(weight, own)
    if size is None or own.calibration.method == "fixed":
        return {}
    axis = array.ndim + max(weight.summed)
    width = array.shape[axis]
    if weight.op == "conv_general_dilated":
        raise ConfigError(
            f"{weight.path}: tile_size={size} is for products of matrices, and this is a "
            "convolution; give it a rule without"
        )
    tile = round(width * size) if isinstance(size, float) else size
    if tile < 1 or width % tile:
        raise ConfigError(
            f"{weight.path}: tile_size={size} does not divide the {width} inputs that it sums over"
        )
    return {axis: tile}


_HOOKS = {
    nnx.Linear: ("dot_general", QuantizedDot),
    nnx.LinearGeneral: ("dot_general", QuantizedDot),
    nnx.Einsum: ("einsum_op", QuantizedEinsum),
    nnx.Conv: ("conv_general_dilated", QuantizedConv),
}
"""Where flax's modules let their product be replaced, and by what."""


def _hook(owner: nnx.Module) -> tuple[str, type] | None:
    return next((_HOOKS[base] for base in type(owner).__mro__ if base in _HOOKS), None)


def _check_inputs(weight: _Weight, own: _Own) -> None:
    if _hook(weight.owner) is None or getattr(weight.owner, "mask", None) is not None:
        raise ConfigError(
            f"{weight.path}: act_qtype={own.rule.act_qtype} is for nnx.Linear, LinearGeneral, "
            "Einsum and Conv without a mask; give this one a rule without"
        )


def _put(weight: _Weight, own: _Own, qtype: QType, tiles: dict[int, int]) -> None:
    """Put codes in a weight's place."""
    owner = weight.owner
    array = getattr(owner, weight.attribute).get_value()
    shared = tuple(array.ndim + axis for axis in weight.summed)
    made = _quantize(array, qtype, own.calibration, shared, tuple(tiles.items()))
    like = getattr(owner, weight.attribute)
    axes = {key: value for key, value in like.get_metadata().items() if key == "axes"}
    kind = QuantizedWeight if own.inputs is None else QuantizedCodes
    setattr(owner, weight.attribute, kind(made, **axes))
    if own.inputs is not None:
        hook = _hook(owner)
        assert hook is not None
        setattr(owner, hook[0], hook[1](own.inputs.name, own.inputs_calibration))
        owner.promote_dtype = promote  # pyrefly: ignore[missing-attribute]


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize(
    array: jax.Array,
    qtype: QType,
    calibration: Calibration,
    shared: tuple[int, ...],
    tiles: tuple[tuple[int, int], ...],
) -> Any:
    return quantize_array(array, qtype, calibration, shared, dict(tiles))


def _nbytes(weight: _Weight) -> int:
    value = getattr(weight.owner, weight.attribute).get_raw_value()
    return value.nbytes
