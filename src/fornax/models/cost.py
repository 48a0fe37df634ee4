"""Closed forms of what a decoder costs: parameters and floating-point operations."""

from fornax.models.config import DecoderConfig

__all__ = ["flops_per_token", "num_parameters"]


def num_parameters(config: DecoderConfig) -> int:
    """How many numbers the model holds; a tied embedding counts once."""
    D, V = config.hidden_size, config.vocab_size
    tables = V * D if config.tie_embeddings else 2 * V * D
    return tables + D + config.num_layers * (_layer_products(config) + _layer_vectors(config))


def _layer_products(config: DecoderConfig) -> int:
    """Weights of one layer that take part in matrix products."""
    D, H = config.hidden_size, config.head_width
    attention = D * H * (2 * config.num_heads + 2 * config.kv_heads)
    return attention + 3 * D * config.intermediate_size


def _layer_vectors(config: DecoderConfig) -> int:
    """Norm weights and biases of one layer."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_width
    N, K = config.num_heads, config.kv_heads
    count = D * (4 if config.norm_placement == "sandwich" else 2)
    count += {"none": 0, "head": 2 * H, "full": (N + K) * H}[config.qk_norm]
    count += (N + 2 * K) * H if config.qkv_bias else 0
    count += D if config.attention_output_bias else 0
    return count + (2 * F + D if config.mlp_bias else 0)


def flops_per_token(config: DecoderConfig, seq_len: int, *, training: bool = True) -> int:
    """Model FLOPs per token: the numerator of model FLOPs utilisation.

    2 for each weight in a matrix product and 4 x heads x head width for each key a query is scored
    against, times three for forward and backward (Chowdhery et al. 2022, PaLM, appendix B, whose
    6N + 12LHQT this is). As there, the causal mask is not discounted; a sliding window is.
    Recomputation (remat) does not count. Embedding look-ups are no products; the output
    projection is one, tied or not.

    Args:
      config: the model.
      seq_len: T, tokens in a sequence.
      training: forward and backward; False for forward alone.
    """
    products = config.num_layers * _layer_products(config)
    products += config.vocab_size * config.hidden_size
    keys = sum(min(seq_len, kind.window or seq_len) for kind in config.layer_kinds())
    forward = 2 * products + 4 * config.num_heads * config.head_width * keys
    return 3 * forward if training else forward
