"""The config.json of the model in a GGUF file."""

from typing import Any

from fornax.gguf import GGUFFile, end_tokens, special_token
from fornax.models.families.gguf.architectures import architecture_of
from fornax.models.families.gguf.reading import Metadata

__all__ = ["gguf_config"]


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The values that `config_from_hf` reads.

    Raises:
      CheckpointError: an architecture that is not read, or metadata that is missing or damaged.
      ConfigError: metadata that would change what the model computes and is not supported.
    """
    architecture = architecture_of(file)
    metadata = Metadata(file, architecture.name)
    own = architecture.read(metadata)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        file.refuse(
            "there is no table of embeddings (token_embd.weight); this is not a whole model"
        )
    eps = metadata.real("attention.layer_norm_rms_epsilon", None)
    if eps is None:
        file.refuse(f"{architecture.name}.attention.layer_norm_rms_epsilon is missing")
    if not architecture.experts:
        for key in ("expert_count", "expert_used_count"):
            metadata.expect(key, 0)
    metadata.expect("vocab_size", table.shape[0])
    metadata.expect("attention.causal", True)
    ends = end_tokens(file)
    activation, function = architecture.activation
    heads = metadata.number("attention.head_count")
    values = {
        "architectures": [architecture.target],
        "vocab_size": table.shape[0],
        "hidden_size": metadata.number("embedding_length"),
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": metadata.head_dim,
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": eps,
        "rope_theta": metadata.theta,
        activation: function,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": special_token(file, "bos"),
        "eos_token_id": ends or None,
        "pad_token_id": special_token(file, "padding"),
        **own,
    }
    metadata.finish()
    return values
