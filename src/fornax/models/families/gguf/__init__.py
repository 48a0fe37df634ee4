"""GGUF files as models, read and written: metadata beside config.json, tensors beside its names."""

from fornax.models.families.gguf.config import gguf_config
from fornax.models.families.gguf.tensors import gguf_tensors
from fornax.models.families.gguf.writing import Source, gguf_metadata, gguf_sources, writable

__all__ = ["Source", "gguf_config", "gguf_metadata", "gguf_sources", "gguf_tensors", "writable"]
