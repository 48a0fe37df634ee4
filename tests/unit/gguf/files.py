"""Small GGUF files, written by hand so that they can be wrong in any place."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fornax.gguf import TYPES

__all__ = ["TINY", "Stored", "key", "tiny_tensors", "tiny_tokenizer", "write", "write_tiny"]

_TYPES = {kind.name: number for number, kind in TYPES.items()}

Stored = tuple[str, np.ndarray]
"""A tensor in blocks: its type, and its rows as bytes along the last axis."""


def text(value: str) -> bytes:
    """A length, then UTF-8."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(given: Any) -> bytes:
    """A type and a value: whole numbers are uint32, others float32."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, bytes):
        return given
    if isinstance(given, bool):
        return struct.pack("<IB", 7, given)
    if isinstance(given, int):
        return struct.pack("<II", 4, given)
    if isinstance(given, float):
        return struct.pack("<If", 6, given)
    if isinstance(given, np.ndarray):
        code = {"int32": 5, "float32": 6, "uint32": 4, "bool": 7}[given.dtype.name]
        return struct.pack("<IIQ", 9, code, len(given)) + given.tobytes()
    return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(text(each) for each in given)


def key(name: str, given: Any) -> bytes:
    """A key with its value."""
    return text(name) + value(given)


def write(
    path: Path,
    metadata: Mapping[str, Any] | Sequence[bytes],
    tensors: Mapping[str, "np.ndarray | Stored"],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file; blocks, and arrays of float32 and float16, as they are, arrays of int8 as
    blocks of Q8_0 with the scale 0.5."""
    entries = metadata if not isinstance(metadata, Mapping) else [key(*x) for x in metadata.items()]
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    data = b""
    for name, given in tensors.items():
        if isinstance(given, tuple):
            kind, array = given
            type_ = TYPES[_TYPES[kind]]
            shape = (*array.shape[:-1], array.shape[-1] // type_.bytes * type_.size)
        else:
            array, shape = given, given.shape
            kind = {"float32": "F32", "float16": "F16", "int8": "Q8_0"}[array.dtype.name]
        data += b"\0" * (-len(data) % alignment)
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", _TYPES[kind], len(data))
        if array.dtype == np.int8:
            blocks = np.zeros((array.size // 32,), [("d", "<f2"), ("codes", "i1", 32)])
            blocks["d"], blocks["codes"] = 0.5, array.reshape(-1, 32)
            array = blocks
        data += array.tobytes()
    path.write_bytes(header + b"\0" * (-len(header) % alignment) + data)
    return path


TINY = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 8,
}
"""Metadata of a Llama of two layers."""


def tiny_tokenizer() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of 300 tokens, the last three added ones."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "i n", "in g"]
    made = [merge.replace(" ", "") for merge in merges]
    unused = [f"[PAD{number}]" for number in range(300 - 256 - len(made) - 3)]
    tokens = [*alphabet, *made, *unused, "<|begin|>", "<|im_end|>", "<tool>"]
    types = [1] * (256 + len(made)) + [5] * len(unused) + [3, 3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 297,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of `TINY`, by the file's names, float32."""
    rng = np.random.default_rng(seed)
    layer = {
        "attn_norm": (32,),
        "attn_q": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
        "attn_output": (32, 32),
        "ffn_norm": (32,),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }
    shapes = {
        "token_embd.weight": (300, 32),
        "output_norm.weight": (32,),
        "output.weight": (300, 32),
        **{f"blk.{n}.{x}.weight": shape for n in range(2) for x, shape in layer.items()},
    }
    return {x: rng.standard_normal(shape, np.float32) * 0.2 for x, shape in shapes.items()}


def write_tiny(path: Path, **changed: Any) -> Path:
    """Write the Llama with its tokenizer, some of its keys changed, left out with None; a dot in a
    name is two underscores."""
    metadata = {**TINY, **tiny_tokenizer()}
    metadata |= {name.replace("__", "."): given for name, given in changed.items()}
    kept = {name: given for name, given in metadata.items() if given is not None}
    return write(path, kept, tiny_tensors())
