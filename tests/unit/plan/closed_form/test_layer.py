"""What the closed forms say a layer keeps and computes again is what jax's tracing of it says."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.interpreters import partial_eval
from tests.cases import one_in

from fornax import kernels
from fornax.config import from_mapping
from fornax.kernels._delta_rule import CHUNK
from fornax.models import DecoderConfig, Remat, abstract_decoder, flops_per_token
from fornax.plan.closed_form.layer import layer_graph, policy_of, replay
from fornax.plan.closed_form.memory import _inputs_kept, kept_bytes
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
    "room": {
        "experts": {
            "num_experts": 8,
            "experts_per_token": CHOSEN,
            "intermediate_size": 56,
            "shared_intermediate_size": 72,
            "capacity_factor": 0.5,
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
    "output gate": {"attention_gate": True, "qk_norm": "head"},
    "gated delta": {
        "attention_pattern": ["linear"],
        "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24},
    },
    "mamba": {
        "attention_pattern": ["linear"],
        "mamba2": {"num_heads": 4, "head_dim": 24, "state_dim": 16, "num_groups": 2},
        "mlp_pattern": ["none"],
    },
    "shared experts behind a gate": {
        "experts": {
            "num_experts": 8,
            "experts_per_token": CHOSEN,
            "intermediate_size": 56,
            "shared_intermediate_size": 72,
            "shared_gate": True,
        }
    },
    "separate norms": {
        "norm_placement": "sandwich",
        "experts": {
            "num_experts": 8,
            "experts_per_token": CHOSEN,
            "intermediate_size": 56,
            "shared_intermediate_size": 72,
            "separate_norms": True,
        },
    },
    "layer inputs": {
        "layer_inputs": {"vocab_size": 1000, "width": 40},
        "layer_scale": True,
        "value_norm": True,
        "qk_norm": "head",
        "norm_placement": "sandwich",
    },
    "hybrid": {
        "num_layers": 6,
        "attention_pattern": ["linear", "linear", "full"],
        "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 24},
        "attention_gate": True,
    },
    "granite": {
        "num_layers": 3,
        "attention_pattern": ["linear", "full", "linear"],
        "mamba2": {"num_heads": 4, "head_dim": 24, "state_dim": 16},
        "mlp_pattern": ["none", "mlp", "mlp"],
        "rope_pattern": [False],
    },
    "shared keys": {
        "num_layers": 6,
        "attention_pattern": ["sliding", "full"],
        "sliding_window": 128,
        "global_heads": {"head_dim": 64, "num_kv_heads": 1, "keys_as_values": True},
        "shared_kv_layers": 3,
        "wide_shared_mlp": True,
        "value_norm": True,
        "qk_norm": "head",
    },
}
UNIFORM = [name for name, told in MODELS.items() if "num_layers" not in told]
"""Models whose layers are all of one kind."""
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


ALL_POLICIES = ("llama", "qwen", "olmo", "gemma", "experts", "latent")
QUICK = {
    *((model, remat) for model in ALL_POLICIES for remat in REMATS),
    *(("hybrid", "dots"), ("hybrid", "save_attention"), ("granite", "dots")),
    *(("shared keys", "full"), ("shared keys", "minimal"), ("layer inputs", "full")),
}
"""What CI tries."""
CASES = [
    *one_in(3, sorted(QUICK)),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in itertools.product(MODELS, REMATS)
        if case not in QUICK
    ),
]


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
        decoder = nnx.merge(graphdef, params)
        return decoder.hidden_and_routing(
            tokens, remat=remat, implementation="blockwise", drop_tokens=True
        )[0]

    if gradient:
        total = lambda params, tokens: jnp.sum(hidden(params, tokens).astype(jnp.float32))  # noqa: E731
        return jax.make_jaxpr(jax.grad(total))(params, tokens)
    saved = lambda params, tokens: jax.vjp(lambda p: hidden(p, tokens), params)[1]  # noqa: E731
    with kernels.target_platform("gpu"):  # on one CPU norms and activations keep less
        return jax.eval_shape(saved, params, tokens)


def _kept_bytes(model: DecoderConfig, remat: Remat, *, of_all: bool = True) -> int:
    """Bytes that differentiation keeps of all layers: what a loop stacks that has rows, and of all
    together keys and values that layers hand to later ones."""
    leaves = jax.tree.leaves(_traced(model, remat, gradient=False))
    stacked = [x for x in leaves if x.ndim and x.shape[0] != ROWS and _has_rows(x.shape[1:])]
    stacked = [x for x in stacked if not jnp.issubdtype(x.dtype, jnp.integer)]
    handed = [x for x in leaves if x.ndim == 4 and x.shape[:2] == (ROWS, LENGTH)]
    kept = [x for x in stacked if of_all or x.shape[0] == LAYERS]
    kept += [x for x in handed if of_all and x.dtype == jnp.bfloat16]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept)


def _has_rows(shape: tuple[int, ...]) -> bool:
    """Whether an array is of rows, by token or by chunk, rather than a weight."""
    by_row = ROWS in shape and {LENGTH, LENGTH // CHUNK} & set(shape)
    tokens = (1, CHOSEN, CHOSEN / 2)  # themselves, by their experts, and those with room
    return bool(by_row or {ROWS * LENGTH * each for each in tokens} & set(shape))


@pytest.mark.parametrize(("model", "remat"), CASES)
def test_kept_values_are_those_that_differentiation_keeps(model: str, remat: str) -> None:
    """Bytes per token kept by each policy, against the residuals of the real decoder."""
    config, policy = _model(**MODELS[model]), REMATS[remat]
    local = local_step(_config(config, policy), parse_topology("v5e:1x1"))
    found = [replay(config, local.shares, policy_of(policy), kind) for kind in config.layer_kinds()]
    nodes = [node for layer in found for node in layer.kept]
    predicted = ROWS * LENGTH * sum(2 * node.width + 4 * node.wide for node in nodes)
    assert predicted == _kept_bytes(config, policy)


@pytest.mark.parametrize("model", UNIFORM)
def test_without_a_policy_norms_and_activations_keep_values_of_their_own(model: str) -> None:
    """Differentiation also keeps attention's output twice, which the compiler makes one, and a few
    numbers a token of each norm."""
    config, policy = _model(**MODELS[model]), Remat(policy="none")
    local = local_step(_config(config, policy), parse_topology("h100:1"))
    output = 0 if not config.attends else LAYERS * ROWS * LENGTH * 5 * config.value_width * 2
    traced = _kept_bytes(config, policy, of_all=False) - output
    assert kept_bytes(local) - _inputs_kept(local) == pytest.approx(traced, rel=0.02)


def _dot_flops(jaxpr: Any, times: float = 1.0) -> float:
    """FLOPs of the products in a jaxpr, loops by their length."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (left, _), _ = eqn.params["dimension_numbers"]
            contracted = math.prod(eqn.invars[0].aval.shape[dim] for dim in left)
            total += times * 2 * contracted * math.prod(eqn.outvars[0].aval.shape)
        if eqn.primitive.name == "native_matmul":  # [M, K] or [K, M] to [M, N]
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


def executed_flops(traced: Any) -> float:
    """FLOPs of a traced function's products, but for those whose results nobody reads."""
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return _dot_flops(jaxpr)


@pytest.mark.parametrize(("model", "remat"), CASES)
def test_flops_are_those_of_the_traced_gradient(model: str, remat: str) -> None:
    """Executed products, recomputation included, against the gradient's own products.

    In float32, where a GPU's attention is the one that is traced.
    """
    config, policy = _model(**MODELS[model]), REMATS[remat]
    traced = _traced(config, policy, gradient=True)
    local = local_step(_config(config, policy, "float32"), parse_topology("h100:1"))
    pieces = [piece for piece in step_work(local) if piece.kind in _LAYER_KINDS]
    predicted = sum(piece.flops * piece.count for piece in pieces)
    assert predicted == pytest.approx(executed_flops(traced), rel=1e-3)


@pytest.mark.parametrize("model", sorted({*MODELS} - {"room"}))
def test_model_flops_are_those_of_the_layers_products(model: str) -> None:
    """What utilisation counts: every product with weights once, dropped tokens' too, and each use
    of a linear layer's state, as the recurrence has it."""
    config = _model(**MODELS[model])
    local = local_step(_config(config, REMATS["full"]), parse_topology("h100:1"))
    found = 2 * config.vocab_size * config.hidden_size
    for kind in config.layer_kinds():
        graph, _ = layer_graph(config, local.shares, kind)
        found += sum(node.flops for node in graph.values() if node.kind == "product")
        if config.linear is not None and kind.linear:
            found += config.linear.state_flops
    if config.layer_inputs is not None:
        found += 2 * config.hidden_size * config.num_layers * config.layer_inputs.width
    assert flops_per_token(config, 0, training=False) == found


_LAYER_KINDS = (
    *("attention", "attention_projections", "linear_attention", "mlp", "experts", "layer_inputs"),
)
