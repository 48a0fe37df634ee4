"""GGUF files: a model, its config and its tokenizer in one file, as llama.cpp writes them."""

from fornax.gguf.blocks import TYPES, BlockIntegers, dequantize, integers
from fornax.gguf.file import GGUFFile, GGUFTensor, Value, is_gguf, open_gguf
from fornax.gguf.rounding import quantize
from fornax.gguf.tokenizer import end_tokens, special_token, tokenizer_file, write_tokenizer
from fornax.gguf.tokenizer_writing import tokenizer_metadata
from fornax.gguf.writing import NewTensor, write_gguf

__all__ = [
    "TYPES",
    "BlockIntegers",
    "GGUFFile",
    "GGUFTensor",
    "NewTensor",
    "Value",
    "dequantize",
    "end_tokens",
    "integers",
    "is_gguf",
    "open_gguf",
    "quantize",
    "special_token",
    "tokenizer_file",
    "tokenizer_metadata",
    "write_gguf",
    "write_tokenizer",
]
