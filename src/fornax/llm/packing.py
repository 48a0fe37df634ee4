"""Weights as packed products take them: rounded from floats, or a quantized file's own codes."""

import dataclasses
import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from fornax import kernels
from fornax.config.errors import EngineError
from fornax.llm.placement import Placement
from fornax.models import CodeFormat, Codes, Decoder, StoredModel
from fornax.models.experts import ExpertProjection
from fornax.models.projection import Projection

__all__ = [
    "ParamPath",
    "describe_weight",
    "first_layers",
    "is_packed",
    "pack_layers",
    "pack_like",
    "pack_stored",
    "pack_weight",
]

ParamPath = tuple[Hashable, ...]
"""Names from the model down to a parameter."""


def is_packed(
    model: Decoder, path: ParamPath, where: Placement, form: CodeFormat | None = None
) -> bool:
    """Whether it is the kernel of a projection, or of experts that have few bits.

    What latent attention reads as an array stays as it is (`models.latent`), and so does a single
    output, which would be packed as 32. Experts in floats are read where they lie.

    Args:
      model: abstract.
      path: of the parameter.
      where: where weights lie.
      form: of its files' codes, where products take them.
    """
    if where.precision is None or path[-1] != "kernel":
        return False
    owner = _owner(model, path)
    if isinstance(owner, ExpertProjection):
        return form is not None or where.precision not in ("float32", "bfloat16")
    is_kernel = isinstance(owner, Projection) and path[-2] != "kv_up"
    return is_kernel and owner.kernel.shape[-1] > 1


def _owner(model: Decoder, path: ParamPath) -> Any:
    return functools.reduce(getattr, map(str, path[:-1]), model)


def describe_weight(
    model: Decoder,
    path: ParamPath,
    shape: Any,
    where: Placement,
    place: Sharding | None,
    form: CodeFormat | None = None,
) -> Any:
    """The shapes of what a parameter of this shape and dtype becomes.

    Args:
      model: abstract.
      path: of the parameter.
      shape: its shape and dtype.
      where: where weights lie.
      place: the sharding to say; None for none.
      form: of its files' codes, where these are packed.
    """
    if is_packed(model, path, where, form):
        if form is not None and form.kinds:
            shape = _block_weight(model, path, shape, form)
        else:
            pack = functools.partial(pack_weight, model, path, where=where, form=form)
            shape = jax.eval_shape(pack, shape)
        if form is not None and form.ordered:
            order = jax.ShapeDtypeStruct(
                (shape.values.shape[0], math.prod(shape.inputs)), jnp.int32
            )
            shape = dataclasses.replace(shape, order=order)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shape)


def pack_stored(
    model: Decoder,
    path: ParamPath,
    like: Any,
    where: Placement,
    form: CodeFormat,
    stored: StoredModel,
) -> kernels.PackedWeight:
    """A parameter's codes as its files have them, one layer or expert laid out at a time.

    Raises:
      CheckpointError: scales that are not finite.
    """
    shape = describe_weight(model, path, like, where, None, form)
    name = "/".join(map(str, path))
    if form.kinds:
        kinds = iter(form.kinds)
        values = stored.concatenate_blocks(
            name, lambda held: kernels.lay_out_blocks(next(kinds), held), shape.values.shape
        )
        return dataclasses.replace(shape, values=values)
    precision, stacked = form.precision, shape.stacked
    assert precision != "blocks", f"{name} has blocks without their types"

    def lay_out(codes: Codes) -> tuple[jax.Array, ...]:
        values, scales = jnp.asarray(codes.values.T), jnp.asarray(codes.scales.T)
        weight = kernels.pack_codes(
            values[None],
            scales[None],
            None if codes.zeros is None else jnp.asarray(codes.zeros.T)[None],
            precision=precision,
            group=form.group,
            order=None if codes.order is None else jnp.asarray(codes.order)[None],
            inputs=shape.inputs,
            outputs=shape.outputs,
            dtype=shape.dtype,
            stacked=stacked,
            implementation=shape.implementation,
        )
        leaves = jax.block_until_ready(jax.tree.leaves(weight))
        return tuple(leaf[0] for leaf in leaves) if stacked else tuple(leaves)

    return _as_described(shape, stored.convert_codes(name, lay_out), path)


def pack_layers(
    model: Decoder, path: ParamPath, like: Any, where: Placement, stored: StoredModel
) -> kernels.PackedWeight:
    """A stacked parameter's floats, one layer rounded and laid out at a time."""
    shape = describe_weight(model, path, like, where, None)

    def lay_out(layer: jax.Array) -> tuple[jax.Array, ...]:
        leaves = jax.tree.leaves(pack_weight(model, path, layer, where, one_layer=True))
        return tuple(leaf[0] for leaf in jax.block_until_ready(leaves))

    return _as_described(shape, stored.convert("/".join(map(str, path)), lay_out), path)


def _as_described(
    shape: kernels.PackedWeight, arrays: tuple[jax.Array, ...], path: ParamPath
) -> kernels.PackedWeight:
    """The weight of these arrays, of modules those that are served."""
    if path[0] == "mtp":
        arrays = tuple(first_layers(array, shape.shape[0]) for array in arrays)
    return jax.tree.unflatten(jax.tree.structure(shape), arrays)


def _block_weight(
    model: Decoder, path: ParamPath, like: Any, form: CodeFormat
) -> kernels.PackedWeight:
    """The shapes of a parameter in the blocks of its file."""
    stacked = path[0] in _STACKS
    sizes, inputs = like.shape[stacked:], _projection(model, path).num_inputs
    whole = math.prod(sizes[:inputs]), math.prod(sizes[inputs:])
    units = sum(kernels.block_units(kind, *whole) for kind in form.kinds)
    make = functools.partial(
        kernels.block_weight,
        kinds=form.kinds,
        inputs=sizes[:inputs],
        outputs=sizes[inputs:],
        dtype=like.dtype,
        stacked=stacked,
    )
    return jax.eval_shape(make, jax.ShapeDtypeStruct((units, 64), jnp.uint8))


_STACKS = ("layers", "mtp")
"""Where parameters are stacks of layers."""


def _projection(model: Decoder, path: ParamPath) -> Projection | ExpertProjection:
    projection = _owner(model, path)
    assert isinstance(projection, Projection | ExpertProjection), f"{path} is not of a projection"
    return projection


_OF_OUTPUTS: dict[kernels.Precision, kernels.Precision] = {"int4": "int8", "mxfp4": "fp8"}
"""What the output projection has where the layers have 4 bits: its error is each logit's own."""


def pack_weight(
    model: Decoder,
    path: ParamPath,
    value: jax.Array,
    where: Placement,
    form: CodeFormat | None = None,
    *,
    one_layer: bool = False,
) -> kernels.PackedWeight:
    """A parameter's values, or those of one layer of it, rounded to what its place asks for, or to
    `form`."""
    projection = _projection(model, path)
    precision: kernels.Precision = where.precision or "float32"
    group = None
    if form is not None:
        assert form.precision != "blocks", f"{path}: floats are not rounded to blocks"
        precision, group = form.precision, form.group
    elif "router" in projection.kernel.get_metadata()["axes"]:
        precision = "float32"  # whatever its experts do
    elif path[0] == "lm_head":
        precision = _OF_OUTPUTS.get(precision, precision)
    return kernels.pack(
        jnp.asarray(value),
        inputs=projection.num_inputs,
        precision=precision,
        group=group,
        stacked=path[0] in _STACKS and not one_layer,
        experts=isinstance(projection, ExpertProjection),
    )


def pack_like(now: kernels.PackedWeight, value: jax.Array) -> kernels.PackedWeight:
    """Other values of a packed weight, on the device where it lies, their inputs in its order.

    Raises:
      EngineError: it is in the blocks of a GGUF file.
    """
    if now.precision == "blocks":
        raise EngineError(
            f"the weights are served in their GGUF file's own blocks ({now.kinds[0]}), to which "
            "others are not rounded; to give others later, start with --quantization int8 or int4, "
            "or from a Hugging Face directory (fornax convert makes one)"
        )
    (device,) = now.values.devices()
    value = jax.device_put(jnp.asarray(value, now.dtype), device)
    if now.order is not None:
        w_LKN = value.reshape(*now.order.shape, -1)
        value = jnp.take_along_axis(w_LKN, now.order[..., None], axis=1).reshape(value.shape)
    packed = kernels.pack(
        value,
        inputs=len(now.inputs),
        precision=now.precision,
        group=now.group,
        stacked=now.stacked,
        experts=now.experts is not None,
        implementation=now.implementation,
    )
    return dataclasses.replace(packed, order=now.order)


def first_layers(layers: jax.Array, count: int) -> jax.Array:
    """Those of the layers that are served."""
    return layers if len(layers) == count else layers[:count]
