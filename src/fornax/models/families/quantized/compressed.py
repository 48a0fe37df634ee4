"""compressed-tensors (`quant_method: compressed-tensors`; llm-compressor): which module has what.

Groups of modules each have a scheme: `targets` names modules, patterns (`re:`) or classes, and
`ignore` takes modules out. How a scheme's weights lie in a file is in `compressed_weights.py`.
Activations and caches that such a config quantizes stay floats here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few
from fornax.models.families.quantized.compressed_weights import (
    LAYOUTS,
    PARTS,
    UNUSED,
    WeightScheme,
    dequantized_weight,
)
from fornax.models.families.quantized.tensors import Module, Tensor, modules, refuse
from fornax.models.families.reader import ConfigReader

__all__ = ["CompressedTensors", "read_compressed"]


@dataclass(frozen=True)
class Group:
    """Modules that are quantized alike."""

    targets: tuple[str, ...]
    scheme: WeightScheme


@dataclass(frozen=True)
class CompressedTensors:
    """The format of a file."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]

    def dequantize(
        self, stored: Mapping[str, StoredTensor], dtype: np.dtype | None
    ) -> dict[str, Tensor]:
        """See `Scheme.dequantize`."""
        quantized, others = modules(stored, "weight_scale", PARTS, UNUSED)
        made = {}
        for module in quantized:
            scheme = self._scheme(module)
            made[f"{module.name}.weight"] = dequantized_weight(module, scheme, dtype)
        return {**others, **made}

    def _scheme(self, module: Module) -> WeightScheme:
        scale = module.parts["weight_scale"]
        # Files of a larger architecture may be named as they are or as its decoder is alone.
        names = (module.name, scale.name.removesuffix(".weight_scale"))
        if ignored := [x for x in self.ignore if _rank(x, names) is not None]:
            refuse(
                scale, f"belongs to a module that `ignore` says is not quantized ({ignored[0]!r})"
            )
        ranked = [
            (rank, number)
            for number, group in enumerate(self.groups)
            for target in group.targets
            if (rank := _rank(target, names)) is not None
        ]
        if not ranked:
            targets = [repr(target) for group in self.groups for target in group.targets]
            refuse(scale, f"belongs to a module that no target names ({first_few(targets)})")
        return self.groups[min(ranked)[1]].scheme


def _rank(target: str, names: Sequence[str]) -> int | None:
    """How closely a target fits a module: 0 by name, 1 by pattern, 2 by class; None not at all."""
    if target in names:
        return 0
    if target.startswith("re:"):
        pattern = target.removeprefix("re:")
        return 1 if any(re.match(pattern, name) for name in names) else None
    table = names[0].endswith("embed_tokens")
    return 2 if target == ("Embedding" if table else "Linear") else None


def read_compressed(reader: ConfigReader) -> CompressedTensors:
    """The format that a quantization_config describes.

    Raises:
      ConfigError: for a format or a value that is not supported.
    """
    for key in ("version", "global_compression_ratio", "run_compressed"):
        reader.take(key, None)
    reader.take("kv_cache_scheme", None)  # of computing, not weights
    reader.expect("quantization_status", "compressed", "frozen")
    reader.expect("transform_config", None, {})
    sparsity = reader.take("sparsity_config", None)
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise ConfigError(
            f"{reader.source}: sparsity_config={sparsity!r} is not supported; only the format "
            "dense is: save the model without sparse compression"
        )
    layout = reader.take("format", None)
    ignore = _strings(reader, "ignore", reader.take("ignore", None) or [])
    given = reader.take("config_groups")
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            f"{reader.source}: config_groups={given!r} must be a mapping with at least one group"
        )
    groups = [
        _group(reader.nested(f"config_groups[{name!r}]", group), layout)
        for name, group in given.items()
    ]
    return CompressedTensors(tuple(group for group in groups if group is not None), ignore)


def _group(reader: ConfigReader, layout: object) -> Group | None:
    for key in ("input_activations", "output_activations"):  # of computing, not weights
        reader.take(key, None)
    targets = _strings(reader, "targets", reader.take("targets"))
    own = reader.take("format", None)
    weights = reader.take("weights", None)
    reader.finish()
    if weights is None:
        return None
    return Group(targets, _scheme(reader.nested("weights", weights), own or layout))


def _scheme(reader: ConfigReader, layout: object) -> WeightScheme:
    for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):  # how it was made
        reader.take(key, None)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ConfigError(
            f"{reader.source}: format={layout!r} is not supported; use one of {', '.join(LAYOUTS)}"
        )
    reader.expect("dynamic", False, None)
    reader.expect("actorder", None, False, True, "group", "weight", "static", "dynamic")
    scheme = WeightScheme(
        layout=layout,
        bits=reader.take("num_bits", 8),
        type=reader.take("type", "int"),
        symmetric=reader.take("symmetric", True),
        strategy=reader.take("strategy", None),
        group_size=reader.take("group_size", None),
        block=reader.take("block_structure", None),
    )
    reader.finish()
    return scheme.checked(reader.source)


def _strings(reader: ConfigReader, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{reader.source}: {key}={value!r} must be a list of names")
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(
                    f"{reader.source}: {key} has {item!r}, which is not a pattern: {error}"
                ) from error
    return tuple(value)
