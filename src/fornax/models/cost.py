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
    inputs = config.layer_inputs
    if inputs is not None:
        tables += inputs.vocab_size * config.num_layers * inputs.width + inputs.width
    layers = _input_products(config) + sum(
        _attention_products(config, kind)
        + _mlp_products(config, kind, active=active)
        + _layer_vectors(config, kind, active=active)
        for kind in config.kinds_with_modules()
    )
    modules = config.num_mtp_modules * (2 * D * D + 3 * D)
    return tables + D + layers + modules


def _input_products(config: DecoderConfig) -> int:
    """Weights that make the layers' further inputs and take them in."""
    inputs = config.layer_inputs
    return 0 if inputs is None else 3 * config.hidden_size * config.num_layers * inputs.width


def _attention_products(config: DecoderConfig, kind: LayerKind) -> int:
    """Weights of a layer's attention that take part in matrix products."""
    latent, linear = config.latent, config.linear
    if kind.linear and linear is not None:
        return linear.num_weights(config.hidden_size)
    if latent is not None:
        D, N, H, R = config.hidden_size, config.num_heads, config.head_width, latent.key_value_rank
        Q = latent.query_rank
        queries = D * N * H if Q is None else Q * (D + N * H)
        up = R * N * (latent.unrotated_dim + latent.value_dim)
        return queries + D * latent.cached_dim + up + N * latent.value_dim * D
    K, H = config.kv_shape(kind)
    queries = (3 if config.attention_gate else 2) * config.num_heads
    return config.hidden_size * H * (queries + _key_projections(config, kind) * K)


def _key_projections(config: DecoderConfig, kind: LayerKind) -> int:
    """How many projections a layer has for its keys and values."""
    if kind.keys == "shared":
        return 0
    wide = config.global_heads if kind.global_heads else None
    return 1 if wide is not None and wide.keys_as_values else 2


def _mlp_products(config: DecoderConfig, kind: LayerKind, *, active: bool) -> int:
    """Those of its MLP, or of its router and experts."""
    D, experts = config.hidden_size, config.experts
    if kind.mlp == "none":
        return 0
    if kind.mlp == "mlp" or experts is None:
        return 3 * D * config.intermediate_size * (2 if kind.wide_mlp else 1)
    shared = 3 * D * (experts.shared_intermediate_size or 0) + D * experts.shared_gate
    count = experts.experts_per_token if active else experts.num_experts
    return 3 * D * experts.intermediate_size * count + D * experts.num_experts + shared


def _layer_vectors(config: DecoderConfig, kind: LayerKind, *, active: bool) -> int:
    """Norm weights and biases of one layer."""
    D, experts = config.hidden_size, config.experts
    branches = 1 if kind.mlp == "none" else 2
    count = D * branches * (2 if config.norm_placement == "sandwich" else 1)
    count += _attention_vectors(config, kind)
    count += (D if kind.layer_input else 0) + kind.layer_scale
    if kind.mlp == "none":
        return count
    if kind.mlp == "mlp" or experts is None:
        width = config.intermediate_size * (2 if kind.wide_mlp else 1)
        return count + (2 * width + D if config.mlp_bias else 0)
    count += experts.num_experts * (experts.router_bias + experts.selection_bias)
    count += (4 * D + experts.num_experts) * experts.separate_norms
    width, number = experts.intermediate_size, experts.num_experts
    number = experts.experts_per_token if active else number
    count += number * (2 * width + D) if experts.bias else 0
    shared = experts.shared_intermediate_size
    return count + (2 * shared + D if config.mlp_bias and shared else 0)


def _attention_vectors(config: DecoderConfig, kind: LayerKind) -> int:
    """Those of its attention, and the weights of convolutions."""
    D, N, (K, H) = config.hidden_size, config.num_heads, config.kv_shape(kind)
    latent, linear = config.latent, config.linear
    if kind.linear and linear is not None:
        return linear.num_vectors(D)
    projections = _key_projections(config, kind)
    of_head, of_all = (2 * H, (N + K) * H) if projections else (H, N * H)
    count = {"none": 0, "unweighted": 0, "head": of_head, "full": of_all}[config.qk_norm]
    queries = 2 * N if config.attention_gate else N
    count += (queries + projections * K) * H if config.qkv_bias else 0
    count += D if config.attention_output_bias else 0
    if latent is not None:
        Q = latent.query_rank or 0
        count += Q + latent.key_value_rank + (Q + latent.cached_dim) * latent.bias
    return count + (N if config.attention_sinks else 0)


def _score_widths(config: DecoderConfig, kind: LayerKind) -> int:
    """Widths of a head's query and of its value together."""
    if config.latent is not None:
        return config.head_width + config.value_width
    return 2 * config.kv_shape(kind)[1]


def flops_per_token(config: DecoderConfig, seq_len: int, *, training: bool = True) -> int:
    """Model FLOPs per token: the numerator of model FLOPs utilisation.

    2 for each weight in a matrix product and 2 x heads x (head + value width) for each key a query
    is scored against, times three for forward and backward (Chowdhery et al. 2022, PaLM, appendix
    B, whose 6N + 12LHQT this is). In a linear layer it is 2 for each number of the state and each
    thing done with it: what the key finds (gated DeltaNet), what is written, what is read. The
    causal mask is not discounted, as in PaLM; a window is. Recomputation (remat) does not count.
    Embedding look-ups are not products; the output projection is one, tied or not. Of experts those
    count that a token runs through.

    Args:
      config: the model.
      seq_len: T, tokens in a sequence.
      training: forward and backward; False for forward alone.
    """
    kinds, modules = config.kinds_with_modules(), config.num_mtp_modules
    products = sum(_mlp_products(config, kind, active=True) for kind in kinds)
    products += sum(_attention_products(config, kind) for kind in kinds)
    products += (1 + modules) * config.vocab_size * config.hidden_size + _input_products(config)
    products += modules * 2 * config.hidden_size**2
    scored = sum(
        min(seq_len, kind.window or seq_len) * _score_widths(config, kind)
        for kind in kinds
        if not kind.linear
    )
    forward = 2 * products + 2 * config.num_heads * scored
    if config.linear is not None:
        forward += sum(kind.linear for kind in kinds) * config.linear.state_flops
    return 3 * forward if training else forward
