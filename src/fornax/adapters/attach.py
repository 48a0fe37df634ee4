"""Putting adapters on a model in place, taking them off, and looking past them.

Legend: R rank.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.adapters.config import LoRA
from fornax.adapters.module import (
    LoRAParam,
    QuantizedParam,
    Spec,
    adapted_class,
    base_kernel,
    dora_norm,
    is_adapted_module,
)
from fornax.adapters.quantize import Blocks, block_size, quantize, quantize_array
from fornax.adapters.rules import first_match, matches, select
from fornax.adapters.stored import Held, stored_blocks
from fornax.config.errors import ConfigError
from fornax.models import Decoder
from fornax.models.experts import ExpertProjection
from fornax.models.kernel_layout import KernelLayout, layout_of

__all__ = [
    "ReadQuantized",
    "adapted_modules",
    "attach",
    "detach",
    "disabled",
    "is_adapted",
    "make_plain",
]

_OF_ADAPTER = ("lora", "lora_a", "lora_b", "lora_magnitude", "lora_dropout")
_READ_DIRECTLY = ("lm_head",)
"""Modules of a Decoder whose kernel is read, not called: an adapter there would do nothing."""
_DEFAULT_TARGETS = (
    "attention/*",
    "global_attention/*",
    "shared_attention/*",
    "global_shared_attention/*",
    "attention1/*",
    "attention2/*",
    "mlp/*",
    "wide_mlp/*",
    "experts/gate",
    "experts/up",
    "experts/down",
    "experts/shared/*",
)
"""The projections of a decoder's or a U-Net's layers, as far as it has them."""


ReadQuantized = Callable[[str, Blocks], tuple[jax.Array, ...]]
"""(path of a module, how its kernel is held) to the kernel's codes and scales."""


def attach(
    model: nnx.Module,
    config: LoRA,
    *,
    rngs: nnx.Rngs,
    read: ReadQuantized | None = None,
    held: Mapping[str, Held] | None = None,
) -> list[str]:
    """Put adapters on a model, in place; until trained they change nothing.

    The modules keep their paths and those of their parameters; beside a kernel there are then
    `lora_a` and `lora_b` (and `lora_magnitude`), which are `LoRAParam`s. Layers that are stacked
    get stacked adapters.

    Args:
        model: any NNX model with `models.Projection`, `nnx.Linear`, `nnx.LinearGeneral` or
            `nnx.Einsum` modules, or a mixture's experts; may be abstract.
        config: what is adapted, and how.
        rngs: draws A; seeds dropout.
        read: gives the quantized kernels of an abstract model, whose adapters are then arrays;
            None quantizes the model's own.
        held: how the files of the model hold its kernels, for `quantize` "stored".

    Returns:
        Paths of the adapted modules, such as layers/attention/q.

    Raises:
        ConfigError: a pattern that finds no module that can be adapted, naming near ones, a model
            with adapters already, dropout for experts, or adapters shared by experts where none
            are adapted.
    """
    adaptable, others = _adaptable(model)
    if is_adapted(model):
        raise ConfigError("the model has adapters already; merge them, or detach them first")
    targets = config.targets
    if targets is None:
        targets = [one for one in _DEFAULT_TARGETS if any(matches(one, path) for path in adaptable)]
    paths = select(targets or _DEFAULT_TARGETS, list(adaptable), others, where="lora.targets")
    for name in ("rank_pattern", "alpha_pattern"):
        select(getattr(config, name), paths, {**others}, where=f"lora.{name}")
    modules = dict(_modules(model))
    if config.experts == "shared" and not any(
        isinstance(modules[path], ExpertProjection) for path in paths
    ):
        raise ConfigError(
            "lora.experts=shared, and lora.targets adapts no experts; leave it out, or name them"
        )
    for path in paths:
        _adapt(path, modules[path], adaptable[path], config, rngs, read, held)
    return paths


def detach(model: nnx.Module) -> None:
    """Take the adapters off, in place; the base's weights stay, dequantized where they were not."""
    for _, module in list(adapted_modules(model)):
        make_plain(module, base_kernel(module))


def make_plain(module: Any, kernel: jax.Array) -> None:
    """Turn an adapted module back into one of its base's class, with this kernel."""
    like = module.kernel_base if module.lora.merged else module.kernel
    module.kernel = nnx.Param(kernel, **like.get_metadata())
    for name in (*_OF_ADAPTER, "kernel_scale", "kernel_base"):
        if name in vars(module):
            delattr(module, name)
    object.__setattr__(module, "__class__", type(module).adapted_from)


@contextmanager
def disabled(model: nnx.Module) -> Iterator[Any]:
    """Inside, the model computes what its base does: a reference without a second copy.

    Works on concrete models and while tracing.

    Example:
        with adapters.disabled(model):
            reference = models.token_logprobs(model, tokens_BT, targets_BT)
    """
    found = [module for _, module in adapted_modules(model)]
    specs = [module.lora for module in found]
    try:
        for module, spec in zip(found, specs, strict=True):
            if spec.merged:
                raise ConfigError("the adapters are merged; call unmerge first")
            _set_spec(module, dataclasses.replace(spec, active=False))
        yield model
    finally:
        for module, spec in zip(found, specs, strict=True):
            _set_spec(module, spec)


def is_adapted(model: nnx.Module) -> bool:
    """Whether the model has adapters."""
    return any(True for _ in adapted_modules(model))


def adapted_modules(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The modules with adapters, by path."""
    return ((path, module) for path, module in _modules(model) if is_adapted_module(module))


def _set_spec(module: object, spec: Spec) -> None:
    # Not by assignment: NNX forbids it below the trace that made the module, and this is undone.
    vars(module)["lora"] = spec


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    found = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    return iter(sorted(found.items()))


def _adaptable(model: nnx.Module) -> tuple[dict[str, KernelLayout], dict[str, str]]:
    """Where adapters may go, and what else there is."""
    modules = dict(_modules(model))
    adaptable: dict[str, KernelLayout] = {}
    others: dict[str, str] = {}
    for path, module in modules.items():
        above, _, name = path.rpartition("/")
        if isinstance(modules.get(above), Decoder) and name in _READ_DIRECTLY:
            others[path] = "its kernel is read by the loss, not called"
            continue
        layout = layout_of(module)
        if layout is None:
            if path:
                others[path] = type(module).__name__
        else:
            adaptable[path] = layout
    return adaptable, others


def _adapt(
    path: str,
    module: Any,
    layout: KernelLayout,
    config: LoRA,
    rngs: nnx.Rngs,
    read: ReadQuantized | None,
    held: Mapping[str, Held] | None,
) -> None:
    rank = first_match(config.rank_pattern, path, config.rank)
    alpha = first_match(config.alpha_pattern, path, config.alpha)
    alpha = 2 * rank if alpha is None else alpha
    if isinstance(module, ExpertProjection):
        layout = dataclasses.replace(layout, shared=config.experts == "shared")
    spec = Spec(
        layout=layout,
        rank=rank,
        scale=alpha / (math.sqrt(rank) if config.rslora else rank),
        rslora=config.rslora,
        dora=config.dora,
        dropout=config.dropout > 0,
    )
    if config.dropout and isinstance(module, ExpertProjection):
        raise ConfigError(
            f"lora.dropout={config.dropout} has no place in {path}: experts' rows are sorted on "
            "each device; set lora.dropout=0, or leave experts out of lora.targets"
        )
    kernel = module.kernel
    shape, axes = kernel.get_value().shape, kernel.get_metadata().get("axes")
    abstract = isinstance(kernel.get_value(), jax.ShapeDtypeStruct) and read is None
    make = _Maker(shape, axes, abstract=abstract)
    object.__setattr__(module, "__class__", adapted_class(type(module)))
    module.lora = spec
    module.lora_a = make.param(
        LoRAParam, layout.a, rank, _start_of_a(config, layout, shape, rank, rngs)
    )
    module.lora_b = make.param(LoRAParam, layout.b, rank, lambda shape: jnp.zeros(shape))
    if config.dropout:
        module.lora_dropout = _dropout(config, layout, shape, rngs)
    if config.quantize is not None:
        _hold_quantized(path, module, config, make, read, held)
    if config.dora:
        module.lora_magnitude = make.param(
            LoRAParam,
            lambda values, *_: layout.magnitude(values),
            None,
            lambda _: dora_norm(module),
        )


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes variables beside a kernel."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...] | None
    abstract: bool

    def param(self, kind: type, pick: Any, rank: int | None, values: Any) -> Any:
        """A variable whose shape and logical axes `pick` takes from the kernel's."""
        shape = pick(self.shape, rank, 1)
        axes = {} if self.axes is None else {"axes": pick(self.axes, None, None)}
        if self.abstract:
            return kind(jax.ShapeDtypeStruct(shape, jnp.float32), **axes)
        return kind(values(shape), **axes)


def _start_of_a(
    config: LoRA, layout: KernelLayout, kernel: tuple[int, ...], rank: int, rngs: nnx.Rngs
) -> Any:
    inputs = math.prod(layout.of(kernel, layout.inputs))
    key = rngs.params()

    def draw(shape: tuple[int, ...]) -> jax.Array:
        if config.init == "gaussian":
            return jax.random.normal(key, shape) / rank
        bound = 1 / math.sqrt(inputs)
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return draw


def _dropout(
    config: LoRA, layout: KernelLayout, kernel: tuple[int, ...], rngs: nnx.Rngs
) -> nnx.Dropout:
    """Dropout with a random stream for each stacked layer."""
    stack = kernel[: layout.stacked]
    stream = nnx.Rngs(dropout=rngs.params())["dropout"]
    dropout = nnx.Dropout(config.dropout, rngs=stream)
    if stack:
        dropout.rngs = stream.split(stack)
    return dropout


def _hold_quantized(
    path: str,
    module: Any,
    config: LoRA,
    make: _Maker,
    read: ReadQuantized | None,
    held: Mapping[str, Held] | None,
) -> None:
    kernel, layout = module.kernel.get_value(), module.lora.layout
    assert config.quantize is not None
    axis = layout.stacked + layout.inputs[-1] - kernel.ndim
    dtype = jnp.dtype(kernel.dtype).name
    if config.quantize == "stored":
        blocks = stored_blocks(path, kernel.shape, axis, dtype, held)
    else:
        size = block_size(kernel.shape[axis], config.quantize_block, config.quantize, path)
        blocks = Blocks(config.quantize, axis, size, dtype)
    if make.abstract:
        codes, scale = jax.eval_shape(lambda x: quantize(x, blocks), kernel)
    elif read is not None:
        codes, scale = read(path, blocks)
    else:
        codes, scale = quantize_array(kernel, blocks)
    of_scale: dict[str, Any] = {}
    if make.axes is not None:  # blocks are few: their axis is not spread over devices
        position = kernel.ndim + axis
        of_scale = {"axes": (*make.axes[:position], None, *make.axes[position + 1 :])}
    module.lora = dataclasses.replace(module.lora, blocks=blocks)
    module.kernel = QuantizedParam(codes, **module.kernel.get_metadata())
    module.kernel_scale = QuantizedParam(scale, **of_scale)
