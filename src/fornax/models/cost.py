"""Closed forms of what a decoder costs: parameters and floating-point operations."""

from fornax.models.config import DecoderConfig, LayerKind

__all__ = ["flops_per_token", "num_parameters"]


def num_parameters(config: DecoderConfig, *, active: bool = False) -> int:
    """How many numbers the model holds; a tied embedding counts once.

    Args:
      config: the model.
      active: count only what one token runs through: of the experts, those chosen for it.
    """
    D, V = config.hidden_size, config.vocab_size
    tables = V * D if config.tie_embeddings else 2 * V * D
    layers = sum(
        _attention_products(config)
        + _mlp_products(config, kind, active=active)
        + _layer_vectors(config, kind, active=active)
        for kind in config.layer_kinds()
    )
    return tables + D + layers


def _attention_products(config: DecoderConfig) -> int:
    """Weights of a layer's attention that take part in matrix products."""
    latent = config.latent
    if latent is not None:
        D, N, H, R = config.hidden_size, config.num_heads, config.head_width, latent.key_value_rank
        Q = latent.query_rank
        queries = D * N * H if Q is None else Q * (D + N * H)
        up = R * N * (latent.unrotated_dim + latent.value_dim)
        return queries + D * latent.cached_dim + up + N * latent.value_dim * D
    return config.hidden_size * config.head_width * (2 * config.num_heads + 2 * config.kv_heads)


def _mlp_products(config: DecoderConfig, kind: LayerKind, *, active: bool) -> int:
    """Those of its MLP, or of its router and experts."""
    D, experts = config.hidden_size, config.experts
    if kind.mlp == "mlp" or experts is None:
        return 3 * D * config.intermediate_size
    shared = 3 * D * (experts.shared_intermediate_size or 0) + D * experts.shared_gate
    count = experts.experts_per_token if active else experts.num_experts
    return 3 * D * experts.intermediate_size * count + D * experts.num_experts + shared


def _layer_vectors(config: DecoderConfig, kind: LayerKind, *, active: bool) -> int:
    """Norm weights and biases of one layer."""
    D, H, experts = config.hidden_size, config.head_width, config.experts
    N, K = config.num_heads, config.kv_heads
    count = D * (4 if config.norm_placement == "sandwich" else 2)
    count += {"none": 0, "head": 2 * H, "full": (N + K) * H}[config.qk_norm]
    count += (N + 2 * K) * H if config.qkv_bias else 0
    count += D if config.attention_output_bias else 0
    if config.latent is not None:
        Q, latent = config.latent.query_rank or 0, config.latent
        count += Q + latent.key_value_rank + (Q + latent.cached_dim) * latent.bias
    count += N if config.attention_sinks else 0
    if kind.mlp == "mlp" or experts is None:
        return count + (2 * config.intermediate_size + D if config.mlp_bias else 0)
    count += experts.num_experts * (experts.router_bias + experts.selection_bias)
    width, number = experts.intermediate_size, experts.num_experts
    number = experts.experts_per_token if active else number
    count += number * (2 * width + D) if experts.bias else 0
    shared = experts.shared_intermediate_size
    return count + (2 * shared + D if config.mlp_bias and shared else 0)


def flops_per_token(config: DecoderConfig, seq_len: int, *, training: bool = True) -> int:
    """Model FLOPs per token: the numerator of model FLOPs utilisation.

    2 for each weight in a matrix product and 2 x heads x (head + value width) for each key a query
    is scored against, times three for forward and backward (Chowdhery et al. 2022, PaLM, appendix
    B, whose 6N + 12LHQT this is). As there, the causal mask is not discounted; a window is.
    Recomputation (remat) does not count. Embedding look-ups are no products; the output
    projection is one, tied or not. Of experts those count that a token runs through.

    Args:
      config: the model.
      seq_len: T, tokens in a sequence.
      training: forward and backward; False for forward alone.
    """
    kinds = config.layer_kinds()
    products = sum(_mlp_products(config, kind, active=True) for kind in kinds)
    products += config.num_layers * _attention_products(config)
    products += config.vocab_size * config.hidden_size
    keys = sum(min(seq_len, kind.window or seq_len) for kind in kinds)
    value = config.head_width if config.latent is None else config.latent.value_dim
    forward = 2 * products + 2 * config.num_heads * (config.head_width + value) * keys
    return 3 * forward if training else forward
