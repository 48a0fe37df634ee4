"""Which type each tensor of a GGUF file gets: llama.cpp's file types, as a table and two rules."""

from collections.abc import Mapping
from dataclasses import dataclass

from fornax.gguf import TYPES
from fornax.gguf.blocks import BlockType

__all__ = ["GGUF_SCHEMES", "GGUFScheme"]

_TYPES = {kind.name: kind for kind in TYPES.values()}
_MORE = ("attn_v", "ffn_down", "ffn_down_exps")


@dataclass(frozen=True, kw_only=True)
class GGUFScheme:
    """The types of one kind of file."""

    name: str
    file_type: int
    """`general.file_type`."""
    matrices: str
    output: str
    """Of the output projection, and of embeddings where they are tied to it."""
    more: str | None = None
    """Of attention's values and the MLP's last matrix, in the first and last eighth of the layers
    and in every third one between them; None: as the others."""

    def type_of(
        self, part: str, shape: tuple[int, ...], layer: int | None, layers: int, *, tied: bool
    ) -> BlockType:
        """The type of a tensor; Q8_0 where the type's blocks do not divide rows, F16 where that
        one's do not either. Vectors and routers are F32."""
        if len(shape) < 2 or part.startswith("ffn_gate_inp"):
            return _TYPES["F32"]
        name = self.matrices
        if part == "output" or (tied and part == "token_embd"):
            name = self.output
        elif self.more and part in _MORE and layer is not None and _has_more(layer, layers):
            name = self.more
        for kind in (_TYPES[name], _TYPES["Q8_0"]):
            if shape[-1] % kind.size == 0:
                return kind
        return _TYPES["F16"]


def _has_more(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


GGUF_SCHEMES: Mapping[str, GGUFScheme] = {
    scheme.name: scheme
    for scheme in (
        GGUFScheme(name="f32", file_type=0, matrices="F32", output="F32"),
        GGUFScheme(name="f16", file_type=1, matrices="F16", output="F16"),
        GGUFScheme(name="bf16", file_type=32, matrices="BF16", output="BF16"),
        GGUFScheme(name="q8_0", file_type=7, matrices="Q8_0", output="Q8_0"),
        GGUFScheme(name="q4_0", file_type=2, matrices="Q4_0", output="Q6_K"),
        GGUFScheme(name="q4_k_m", file_type=15, matrices="Q4_K", output="Q6_K", more="Q6_K"),
        GGUFScheme(name="q6_k", file_type=18, matrices="Q6_K", output="Q6_K"),
    )
}
"""What there is, by name: llama.cpp's, in lower case."""
