"""A matrix of few bits as tensors of compressed-tensors, and the config that describes them.

The layouts are those in `fornax.models.families.quantized.compressed_weights`, which reads them.

Legend: O outputs, I inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fornax.quant.leaves import Leaf
from fornax.quant.rounding import Codes
from fornax.quant.schemes import Scheme

__all__ = [
    "config_of",
    "pack",
    "pack_pairs",
    "quantization_config",
    "tensors_of",
    "tensors_of_experts",
]


def tensors_of(module: str, codes: Codes, scheme: Scheme) -> dict[str, np.ndarray]:
    """The tensors of a module in place of its `weight`, by name."""
    scales, zeros, divisor = codes.grid
    if scheme.codes.name == "float4_e2m1fn":
        found = {
            f"{module}.weight_packed": pack_pairs(codes.values_OI),
            f"{module}.weight_scale": scales.view(np.uint8) if divisor is None else scales,
        }
        return (
            found
            if divisor is None
            else {**found, f"{module}.weight_global_scale": np.array([divisor])}
        )
    if scheme.layout != "pack-quantized":
        return {f"{module}.weight": codes.values_OI, f"{module}.weight_scale": scales}
    found = {
        f"{module}.weight_packed": pack(codes.values_OI, scheme.bits),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": np.array(codes.values_OI.shape, np.int64),
    }
    if zeros is not None:  # packed along the outputs
        words = pack(np.ascontiguousarray(zeros.T), scheme.bits)
        found[f"{module}.weight_zero_point"] = np.ascontiguousarray(words.T)
    return found


def tensors_of_experts(name: str, codes: Codes, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The tensors of gpt-oss's files in place of a tensor of all experts, by name.

    Args:
      name: of that tensor.
      codes: of all experts' outputs, MXFP4.
      shape: [E, O, I].
    """
    experts, outputs, inputs = shape
    blocks = pack_pairs(codes.values_OI).reshape(experts, outputs, inputs // 32, 16)
    scales = codes.grid.scales_PG.view(np.uint8).reshape(experts, outputs, inputs // 32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """float4_e2m1fn [..., C] two to a byte, the first in its low bits: uint8 [..., C / 2]."""
    bits = codes.view(np.uint8)
    return bits[..., ::2] | bits[..., 1::2] << 4


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes as one stream of bits along the last axis, lowest bits first.

    Args:
      codes: int8 [R, C] from -2^(bits - 1).
      bits: of a code, 2 to 8.

    Returns:
      int32 [R, ceil(C bits / 32)] of codes plus 2^(bits - 1).
    """
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns * bits // 32)), np.uint32)
    shifted = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint32)
    for lane in range(32):  # 32 codes fill `bits` words, each lane at the same place in all of them
        own = shifted[:, lane::32]
        if not own.shape[1]:
            break
        word, bit = divmod(lane * bits, 32)
        words[:, word::bits][:, : own.shape[1]] |= own << bit
        if bit + bits > 32:
            words[:, word + 1 :: bits][:, : own.shape[1]] |= own >> (32 - bit)
    return words.view(np.int32)


def quantization_config(modules: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
    """`quantization_config` of config.json.

    Args:
      modules: the scheme of each quantized module, by name.
      ignored: linear modules that stay floats.
    """
    schemes = {scheme.name: scheme for scheme in modules.values()}
    if any(scheme.layout == "gpt-oss" for scheme in schemes.values()):
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}
    groups = {}
    for number, (name, scheme) in enumerate(schemes.items()):
        of_scheme = [module for module, own in modules.items() if own.name == name]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else of_scheme,
            "weights": scheme.weights(),
            "input_activations": None if scheme.inputs is None else scheme.inputs.config(),
            "output_activations": None,
            "format": scheme.layout,
        }
    layouts = {scheme.layout for scheme in schemes.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def config_of(config: Mapping[str, Any], leaves: Sequence[Leaf]) -> dict[str, Any]:
    """config.json of a directory whose leaves have their schemes, from that of the float model."""
    modules = {
        module: leaf.scheme for leaf in leaves if leaf.scheme is not None for module in leaf.modules
    }
    ignored = [
        leaf.module
        for leaf in leaves
        if leaf.scheme is None and len(leaf.tensor.shape) == 2 and leaf.module != leaf.tensor.name
    ]
    if "lm_head" not in (*modules, *ignored):  # transformers has one where embeddings are tied too
        ignored.append("lm_head")
    return {**config, "quantization_config": quantization_config(modules, ignored)}
