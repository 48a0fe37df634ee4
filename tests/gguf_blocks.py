"""Random blocks of GGUF files, every bit of which some file can hold, for the tests."""

from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.gguf.files import TINY, tiny_tokenizer, write

from fornax.gguf import TYPES

__all__ = ["KINDS", "gguf_file", "random_blocks"]

KINDS = {kind.name: kind for kind in TYPES.values()}
"""Types of tensors by name."""


def random_blocks(name: str, rows: int, columns: int, *, spread: float = 1.0) -> np.ndarray:
    """Rows of blocks, uint8 [rows, bytes of a row].

    Args:
        name: of the type.
        rows: outputs.
        columns: inputs.
        spread: how large the float16 scales are; with 1e-6 they are denormals.
    """
    kind = KINDS[name]
    rng = np.random.default_rng(columns)
    raw = rng.integers(0, 256, (rows, columns // kind.size * kind.bytes), dtype=np.uint8)
    blocks = raw.view(kind.layout)
    for scale in (name for name in ("d", "m") if name in kind.layout.names):
        blocks[scale] = spread * rng.standard_normal(blocks.shape)
    return raw


_LAYERS = {
    "attn_q": "Q4_K Q4_K",
    "attn_k": "Q8_0 Q5_0",
    "attn_v": "Q6_K Q4_K",
    "attn_output": "Q4_0 Q4_0",
    "ffn_gate": "Q5_K Q5_K",
    "ffn_up": "Q4_1 Q4_1",
    "ffn_down": "Q4_K F32",
}
"""Types of a small model's two layers: most are multiplied as they are."""


def gguf_file(path: Path, *, tied: bool = False, experts: int = 0) -> Path:
    """Write a Llama of two layers, with experts where they are asked for; see `_LAYERS`."""
    width, vocab = 256, 300
    rng = np.random.default_rng(0)
    sizes = {"llama.embedding_length": width, "llama.feed_forward_length": 512}
    heads = {"llama.attention.head_count": 8, "llama.rope.dimension_count": 32}
    rows = {"attn_k": 64, "attn_v": 64, "ffn_gate": 512, "ffn_up": 512}
    tensors: dict[str, Any] = {"token_embd.weight": ("Q6_K", random_blocks("Q6_K", vocab, width))}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm"):
        tensors[f"{name}.weight"] = np.ones(width, np.float32)
    tensors["blk.1.ffn_norm.weight"] = np.ones(width, np.float32)
    if not tied:
        tensors["output.weight"] = ("Q8_0", random_blocks("Q8_0", vocab, width, spread=1e-2))
    if experts:
        sizes |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
        for layer in range(2):
            router = rng.standard_normal((experts, width), np.float32)
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = router
    for part, kinds in _LAYERS.items():
        shape = (rows.get(part, width), 512 if part == "ffn_down" else width)
        count, name = (experts, f"{part}_exps") if experts and "ffn" in part else (1, part)
        lead = shape[:1] if name == part else (count, shape[0])
        for layer, kind in enumerate(kinds.split()):
            given: Any = rng.standard_normal((*lead, shape[1]), np.float32)
            if kind != "F32":
                raw = random_blocks(kind, count * shape[0], shape[1], spread=1e-3)
                given = (kind, raw.reshape(*lead, -1))
            tensors[f"blk.{layer}.{name}.weight"] = given
    return write(path, {**TINY, **tiny_tokenizer(), **sizes, **heads}, tensors)
