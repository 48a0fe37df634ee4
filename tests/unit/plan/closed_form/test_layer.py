"""What the closed forms say a layer keeps and computes again is what jax's tracing of it says."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.interpreters import partial_eval

from fornax.config import from_mapping
from fornax.models import DecoderConfig, Remat, abstract_decoder
from fornax.plan.closed_form.layer import policy_of, replay
from fornax.plan.closed_form.memory import kept_bytes
from fornax.plan.closed_form.shards import local_step
from fornax.plan.closed_form.work import step_work
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

ROWS, LENGTH, LAYERS, CHOSEN = 3, 640, 2, 3

MODELS = {
    "llama": {},
    "qwen": {"qk_norm": "head"},
    "olmo": {"qk_norm": "full", "norm_placement": "post"},
    "gemma": {"qk_norm": "head", "norm_placement": "sandwich", "activation": "gelu_tanh"},
    "experts": {
        "experts": {
            "num_experts": 8,
            "experts_per_token": CHOSEN,
            "intermediate_size": 56,
            "shared_intermediate_size": 72,
        }
    },
    "latent": {
        "num_kv_heads": None,
        "head_dim": None,
        "latent": {
            "key_value_rank": 56,
            "query_rank": 72,
            "unrotated_dim": 24,
            "rotated_dim": 16,
            "value_dim": 32,
        },
    },
}
REMATS = {
    "full": Remat(policy="full"),
    "dots": Remat(policy="dots"),
    "dots_no_batch": Remat(policy="dots_no_batch"),
    "save_attention": Remat(policy="save_attention"),
    "minimal": Remat(
        policy="names",
        save=("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_down"),
    ),
    "inputs": Remat(policy="names", save=("layer_input", "attention")),
}


def _model(**more: Any) -> DecoderConfig:
    shape = {
        "vocab_size": 1000,
        "hidden_size": 96,
        "intermediate_size": 224,
        "num_layers": LAYERS,
        "num_heads": 5,
        "num_kv_heads": 1,
        "head_dim": 32,
    }
    return from_mapping(DecoderConfig, {**shape, **more})


def _config(model: DecoderConfig, remat: Remat, compute: str = "bfloat16") -> TrainConfig:
    return TrainConfig(
        model=model,
        batch_size=ROWS,
        seq_len=LENGTH,
        remat=remat.policy,
        remat_save=remat.save,
        dtypes=from_mapping(TrainConfig, {"dtypes": {"compute": compute}}).dtypes,
    )


def _traced(model: DecoderConfig, remat: Remat, *, gradient: bool) -> Any:
    decoder = abstract_decoder(model, compute_dtype=jnp.bfloat16)
    graphdef, params = nnx.split(decoder)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)

    def hidden(params: Any, tokens: Any) -> jax.Array:
        return nnx.merge(graphdef, params).hidden(tokens, remat=remat, implementation="blockwise")

    if gradient:
        total = lambda params, tokens: jnp.sum(hidden(params, tokens).astype(jnp.float32))  # noqa: E731
        return jax.make_jaxpr(jax.grad(total))(params, tokens)
    saved = lambda params, tokens: jax.vjp(lambda p: hidden(p, tokens), params)[1]  # noqa: E731
    return jax.eval_shape(saved, params, tokens)


def _kept_bytes(model: DecoderConfig, remat: Remat) -> int:
    """Bytes a layer that differentiation keeps: stacked arrays that have rows and tokens."""
    leaves = jax.tree.leaves(_traced(model, remat, gradient=False))
    tokens = ((LAYERS, ROWS * LENGTH), (LAYERS, ROWS * LENGTH * CHOSEN))
    stacked = [
        x
        for x in leaves
        if (x.shape[:2] == (LAYERS, ROWS) and LENGTH in x.shape)
        or (x.shape[:2] in tokens and x.dtype != jnp.int32)
    ]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in stacked) // LAYERS


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("remat", REMATS)
def test_kept_values_are_those_that_differentiation_keeps(model: str, remat: str) -> None:
    """Bytes a token kept by each policy, against the residuals of the real decoder."""
    config, policy = _model(**MODELS[model]), REMATS[remat]
    local = local_step(_config(config, policy), parse_topology("v5e:1x1"))
    found = replay(config, local.shares, policy_of(policy), config.mlps[0])
    predicted = ROWS * LENGTH * sum(2 * node.width + 4 * node.wide for node in found.kept)
    traced = _kept_bytes(config, policy)
    assert predicted == traced


@pytest.mark.parametrize("model", MODELS)
def test_without_a_policy_norms_and_activations_keep_values_of_their_own(model: str) -> None:
    """Differentiation also keeps attention's output twice, which the compiler makes one, and a few
    numbers a token of each norm."""
    config, policy = _model(**MODELS[model]), Remat(policy="none")
    local = local_step(_config(config, policy), parse_topology("h100:1"))
    predicted = kept_bytes(local) / LAYERS
    output = ROWS * LENGTH * 5 * config.value_width * 2
    assert predicted == pytest.approx(_kept_bytes(config, policy) - output, rel=0.02)


def _dot_flops(jaxpr: Any, times: float = 1.0) -> float:
    """FLOPs of the products in a jaxpr, loops by their length."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            contracted = math.prod(eqn.invars[0].aval.shape[dim] for dim in left)
            total += times * 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
        if eqn.primitive.name == "bfloat16_matmul":  # [M, K] or [K, M] to [M, N]
            total += times * 2 * eqn.invars[0].aval.size * eqn.outvars[0].aval.shape[1]
        if "fornax_grouped" in eqn.params.get("target_name", ""):  # each row with one matrix
            total += times * 2 * eqn.invars[0].aval.size * eqn.outvars[0].aval.shape[-1]
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            body = getattr(inner, "jaxpr", inner)
            if hasattr(body, "eqns"):
                total += _dot_flops(body, times * length)
    return total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("remat", REMATS)
def test_flops_are_those_of_the_traced_gradient(model: str, remat: str) -> None:
    """Executed products, recomputation included, against the gradient's own products.

    In float32, where a GPU's attention is the one that is traced.
    """
    config, policy = _model(**MODELS[model]), REMATS[remat]
    traced = _traced(config, policy, gradient=True)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    local = local_step(_config(config, policy, "float32"), parse_topology("h100:1"))
    pieces = [piece for piece in step_work(local) if piece.kind in _LAYER_KINDS]
    predicted = sum(piece.flops * piece.count for piece in pieces)
    assert predicted == pytest.approx(_dot_flops(jaxpr), rel=1e-3)


_LAYER_KINDS = ("attention", "attention_projections", "mlp", "experts")
