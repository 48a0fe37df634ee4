"""Layers divided over pipeline stages: losses, gradients and routing are those of one device."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from tests.unit.models.conftest import CONFIGS, tokens_of

from fornax.config.errors import ConfigError
from fornax.hlo import analyse, parse
from fornax.mesh import (
    MeshConfig,
    Rules,
    make_mesh,
    named_sharding,
    tree_shardings,
    use_mesh,
)
from fornax.models import (
    Decoder,
    DecoderConfig,
    PipelineConfig,
    Remat,
    create_decoder,
    layers_outside,
    router_losses,
)
from fornax.train import TrainConfig
from fornax.train.diloco.config import DilocoConfig

B, T = 16, 12
MODELS = {
    "windowed": dataclasses.replace(CONFIGS["windowed"], num_layers=8),
    "experts": dataclasses.replace(
        CONFIGS["clipped"], num_layers=8, attention_pattern=("chunked",), rope_pattern=(True,)
    ),
    "ring": dataclasses.replace(CONFIGS["windowed"], num_layers=8, context_exchange="ring"),
    "nine": dataclasses.replace(CONFIGS["windowed"], num_layers=9),
    "latent": dataclasses.replace(CONFIGS["latent"], num_layers=8),
    "dense first": dataclasses.replace(
        CONFIGS["experts"], num_layers=5, mlp_pattern=("mlp", *["experts"] * 4)
    ),
}
NAMED = Remat(policy="names", save=("query", "attention", "mlp_up"))
OFFLOADED = Remat(policy="names", save=("mlp_up",), offload=("layer_input", "key", "attention"))


def _ids() -> np.ndarray:
    """Documents of other lengths in each row, padding in some."""
    rng = np.random.default_rng(0)
    starts = rng.random((B, T)) < 0.25
    ids = 1 + np.cumsum(starts, axis=1)
    ids[::3, -4:] = 0
    return ids.astype(np.int32)


def _compute(
    graphdef: Any,
    remat: str | Remat,
    pipeline: PipelineConfig | None,
    state: Any,
    tokens: jax.Array,
    ids: jax.Array,
) -> Any:
    def loss(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        x_BTD, routing = model.hidden_and_routing(tokens, None, ids, remat=remat, pipeline=pipeline)
        log_probs = jax.nn.log_softmax(model.logits(x_BTD)[:, :-1])
        picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        total = -jnp.sum(picked * (ids[:, :-1] == ids[:, 1:]) * (ids[:, 1:] > 0))
        if routing is not None:
            losses = router_losses(routing)
            total = total + 30 * (losses["balance"] + losses["router_z"])
        return total, routing

    return jax.value_and_grad(loss, has_aux=True)(state)


def _laid_out(sizes: Mapping[str, int]) -> tuple[Mesh, Rules]:
    """A mesh of these sizes and its rules; slices divide layers."""
    across = "stage" if "slice" in sizes else "data"
    config = MeshConfig(**{"fsdp": 1, **sizes}, across=across)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return make_mesh(config, devices), config.resolved_rules()


@functools.cache
def _model(name: str) -> tuple[Any, Any]:
    return nnx.split(create_decoder(MODELS[name]))


@functools.cache
def _one_device(name: str) -> Any:
    graphdef, state = _model(name)
    run = functools.partial(_compute, graphdef, "none", None)
    return jax.device_get(jax.jit(run)(state, tokens_of(B, T), _ids()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "microbatches", "repeats", "remat"),
    [
        ("windowed", {"stage": 2, "tensor": 2, "data": 2}, 4, 2, "none"),
        pytest.param(
            "experts", {"stage": 4, "fsdp": 2}, None, 2, "full", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "windowed", {"stage": 2, "fsdp": 4}, None, 1, "none", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "windowed", {"stage": 2, "data": 4}, 2, 1, "dots", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "windowed", {"stage": 2, "data": 2}, 8, 2, "dots_no_batch", marks=pytest.mark.exhaustive
        ),
        ("windowed", {"stage": 2, "fsdp": 2}, 2, 2, NAMED),
        pytest.param(
            "windowed", {"stage": 4, "data": 2}, 4, 1, OFFLOADED, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "experts",
            {"stage": 2, "expert": 2, "fsdp": 2},
            None,
            1,
            "dots",
            marks=pytest.mark.exhaustive,
        ),
        ("experts", {"stage": 4, "expert": 2}, 4, 2, "save_attention"),
        ("windowed", {"stage": 2, "context": 2, "data": 2}, 4, 1, "full"),
        pytest.param(
            "ring",
            {"stage": 2, "context": 2, "data": 2},
            4,
            1,
            "full",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("nine", {"stage": 4, "fsdp": 2}, 4, 1, "dots", marks=pytest.mark.exhaustive),
        pytest.param(
            "dense first",
            {"stage": 2, "fsdp": 2, "tensor": 2},
            None,
            2,
            "none",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "latent", {"stage": 2, "fsdp": 2}, None, 1, "dots", marks=pytest.mark.exhaustive
        ),
        ("windowed", {"slice": 2, "stage": 2, "fsdp": 2}, None, 1, "dots"),
        pytest.param(
            "experts",
            {"slice": 2, "stage": 1, "expert": 2, "data": 2},
            4,
            2,
            "full",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_one_device(
    name: str,
    sizes: dict[str, int],
    microbatches: int | None,
    repeats: int,
    remat: str | Remat,
) -> None:
    mesh, rules = _laid_out(sizes)
    graphdef, state = _model(name)
    shardings = tree_shardings(state, mesh, rules)
    rows = named_sharding(mesh, ("batch", "length"), rules)
    pipeline = PipelineConfig(microbatches=microbatches, repeats=repeats)
    run = jax.jit(
        functools.partial(_compute, graphdef, remat, pipeline), out_shardings=(None, shardings)
    )
    with use_mesh(mesh, rules):
        found = run(
            jax.device_put(state, shardings), *jax.device_put((tokens_of(B, T), _ids()), rows)
        )
    (loss, routing), gradients = found
    (expected_loss, expected_routing), expected = _one_device(name)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    for got, want in zip(
        jax.tree.leaves((routing, gradients)),
        jax.tree.leaves((expected_routing, expected)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1.0, np.abs(want).max()))
    if routing is not None:
        np.testing.assert_array_equal(routing.assigned_E, expected_routing.assigned_E)
        np.testing.assert_array_equal(routing.tokens, expected_routing.tokens)
    attention = "latent" if name == "latent" else "attention"
    kernel = gradients["layers"][attention]["o"]["kernel"].get_value()
    stages = sizes["stage"] * sizes.get("slice", 1)
    share = stages * sizes.get("fsdp", 1) * sizes.get("tensor", 1) * sizes.get("expert", 1)
    assert kernel.addressable_shards[0].data.size * share == kernel.size
    if kernel.shape[0] == 8:
        assert kernel.addressable_shards[0].data.shape[0] == 8 // stages


TINY = DecoderConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=12, num_heads=1, head_dim=8
)


TINY_TOKENS = tokens_of(12, 3) % 16


def _tiny_loss(state: Any, pipeline: PipelineConfig | None = None) -> tuple[jax.Array, jax.Array]:
    x_BTD = nnx.merge(_tiny()[0], state).hidden(jnp.asarray(TINY_TOKENS), pipeline=pipeline)
    return jnp.sum(jnp.sin(x_BTD)), x_BTD


@functools.cache
def _tiny() -> tuple[Any, Any]:
    return nnx.split(create_decoder(TINY))


@functools.cache
def _tiny_on_one() -> Any:
    return jax.device_get(jax.jit(jax.grad(_tiny_loss, has_aux=True))(_tiny()[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "stages", "microbatches", "repeats"),
    [(1, 2, 2, 3), (1, 3, 6, 2), (1, 4, 12, 3), (1, 6, 12, 2), (2, 3, 12, 2), (3, 1, 3, 1)],
)
def test_every_microbatch_meets_every_layer_in_order(
    slices: int, stages: int, microbatches: int, repeats: int
) -> None:
    """For numbers that share factors or none, and rings that turn less and more than once."""
    mesh, rules = _laid_out({"stage": stages, **({"slice": slices} if slices > 1 else {})})
    pipeline = PipelineConfig(microbatches=microbatches, repeats=repeats)
    _, state = _tiny()
    placed = jax.device_put(state, tree_shardings(state, mesh, {**rules, "embed": ()}))
    if stages != 2:  # gradients once: they are most of the compiler's work
        run = jax.jit(lambda state: _tiny_loss(state, pipeline)[1])
    else:
        run = jax.jit(jax.grad(functools.partial(_tiny_loss, pipeline=pipeline), has_aux=True))
    with use_mesh(mesh, rules):
        found = run(placed)
    expected = _tiny_on_one() if stages == 2 else _tiny_on_one()[1]
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@functools.cache
def _flops(layers: int, remat: str, sizes: tuple[tuple[str, int], ...], repeats: int) -> float:
    """FLOPs per device of the compiled gradients, loops counted as often as they run."""
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=4,
        num_layers=layers,
    )
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    mesh, rules = _laid_out(dict(sizes))
    shardings = tree_shardings(state, mesh, rules)
    rows = named_sharding(mesh, ("batch", "length"), rules)
    tokens = jax.ShapeDtypeStruct((B, 16), jnp.int32, sharding=rows)
    put = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )

    def loss(state: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        x_BTD = model.hidden(
            tokens,
            remat=remat,
            implementation="xla",
            pipeline=PipelineConfig(microbatches=8, repeats=repeats),
        )
        return jnp.sum(jax.nn.logsumexp(model.logits(x_BTD), axis=-1))

    with use_mesh(mesh, rules):
        compiled = jax.jit(jax.grad(loss), out_shardings=shardings).lower(put, tokens).compile()
    text = compiled.as_text()
    assert text is not None
    return analyse(parse(text), dict(mesh.shape)).flops


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("sizes", "repeats", "depth"),
    [
        pytest.param({"stage": 4, "data": 2}, 1, 8, marks=pytest.mark.exhaustive),
        ({"stage": 2, "tensor": 2, "fsdp": 2}, 2, 8),
        ({"stage": 4, "data": 2}, 1, 9),
        pytest.param({"slice": 2, "stage": 2, "fsdp": 2}, 1, 8, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_device_computes_its_share_and_the_bubble(
    sizes: dict[str, int], repeats: int, depth: int, remat: str
) -> None:
    """A layer's work is the difference of two depths on one device; the rest has no bubble, a layer
    that is too much for the parts included."""
    one = (("data", 1),)
    eight, four = _flops(8, remat, one, 1), _flops(4, remat, one, 1)
    layers = 2 * (eight - four)
    bubble = (sizes["stage"] * sizes.get("slice", 1) - 1) / (8 * repeats)
    ideal = (eight + bubble * layers + (depth - 8) * layers / 8) / 8
    assert layers > 0.7 * eight
    assert _flops(depth, remat, tuple(sizes.items()), repeats) <= 1.1 * ideal


def _kept(remat: str, repeats: int) -> int:
    """Numbers kept for the backward pass."""
    graphdef, state = _model("windowed")
    mesh = make_mesh(MeshConfig(stage=2, fsdp=1), jax.devices()[:2])

    def loss(state: Any) -> jax.Array:
        x_BTD = nnx.merge(graphdef, state).hidden(
            jnp.asarray(tokens_of(B, T)),
            None,
            jnp.asarray(_ids()),
            remat=remat,
            pipeline=PipelineConfig(microbatches=16, repeats=repeats),
        )
        return jnp.sum(x_BTD)

    with use_mesh(mesh):
        _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), state)
    return sum(leaf.size for leaf in jax.tree.leaves(vjp))


@pytest.mark.slow
def test_parameters_are_not_kept_for_each_microbatch() -> None:
    """What layers chosen from two stacks keep does not grow by copies of the stack."""
    stack = sum(leaf.size for leaf in jax.tree.leaves(_model("windowed")[1]["layers"]))
    assert _kept("none", 2) < _kept("none", 1) + 2 * stack
    assert _kept("full", 2) < _kept("dots_no_batch", 2) < _kept("dots", 2) < _kept("none", 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 3}, r"cuts the 3 layers into 4 parts.*products that fit are 2, 3; change"),
        (
            {"sliding_window": 4, "attention_pattern": ("sliding", "full"), "num_layers": 4},
            r"of the same kinds in the same order; products that fit are 2; change",
        ),
        (
            {"num_layers": 2, "attention_pattern": ("full", "sliding"), "sliding_window": 4},
            r"in the same order; give the devices of mesh.stage to mesh.fsdp",
        ),
    ],
)
def test_layers_without_equal_parts_are_refused_with_what_fits(
    changes: dict[str, Any], said: str
) -> None:
    model = DecoderConfig(**{"num_layers": 8, **changes})
    with pytest.raises(ConfigError, match=said):
        layers_outside(model.layer_kinds(), 2, PipelineConfig(repeats=2))
    with pytest.raises(ConfigError, match=said):
        TrainConfig(
            model=model,
            batch_size=16,
            mesh=MeshConfig(stage=2),
            pipeline=PipelineConfig(repeats=2),
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": {"stage": 1}, "pipeline": {"repeats": 2}}, "mesh.stage, which is 1; leave it"),
        ({"pipeline": {"microbatches": 3}}, "microbatches=3 is not a multiple of mesh.stage=2; us"),
        ({"pipeline": {"microbatches": 0}}, "microbatches=0 must be 1 or more"),
        ({"pipeline": {"repeats": 0}}, "repeats=0 must be 1 or more"),
        ({"batch_size": 6}, "batch_size=6 does not divide into accumulate=1 x 4 microbatches"),
        ({"batch_size": 12, "accumulate": 4}, "accumulate=4 x 4 .*; use a multiple of 16, or"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_the_fix(
    changes: dict[str, Any], said: str
) -> None:
    given = {"batch_size": 16, "mesh": {"stage": 2}, "pipeline": {}, **changes}
    with pytest.raises(ConfigError, match=said):
        TrainConfig(
            **{
                **given,
                "mesh": MeshConfig(**given["mesh"]),
                "pipeline": PipelineConfig(**given["pipeline"]),
            }
        )


@pytest.mark.parametrize(
    ("num_layers", "microbatches", "said"),
    [
        (
            6,
            None,
            r"mesh.slice=2 x mesh.stage=2 x .* cuts the 6 layers into 4 parts, .* order, with",
        ),
        (
            6,
            None,
            r"with none left over between slices; products that fit are 2, 6; change them, or",
        ),
        (5, None, r"none left over between slices; set mesh.across to data"),
        (8, 6, r"microbatches=6 is not a multiple of mesh.slice=2 x mesh.stage=2; use 8, or null"),
    ],
)
def test_stages_that_do_not_fit_slices_are_refused_with_the_fix(
    num_layers: int, microbatches: int | None, said: str
) -> None:
    """What is left over would run in all slices, and its gradients cross between them."""
    with pytest.raises(ConfigError, match=said):
        TrainConfig(
            model=DecoderConfig(num_layers=num_layers),
            batch_size=48,
            mesh=MeshConfig(slice=2, stage=2, across="stage"),
            pipeline=PipelineConfig(microbatches=microbatches),
        )


def test_slices_of_diloco_have_all_stages() -> None:
    with pytest.raises(ConfigError, match=r"diloco is set and mesh.across=stage: .* to data, or"):
        TrainConfig(
            batch_size=64,
            model=DecoderConfig(num_layers=8),
            mesh=MeshConfig(slice=2, stage=2, across="stage"),
            diloco=DilocoConfig(),
        )


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_the_fix() -> None:
    graphdef, state = _tiny()
    said = r"12 rows .* 4 microbatches over 2 data shards .* / accumulate a multiple of 8"
    with (
        use_mesh(make_mesh(MeshConfig(stage=2, data=2, fsdp=1), jax.devices()[:4])),
        pytest.raises(ConfigError, match=said),
    ):
        jax.eval_shape(
            lambda state: nnx.merge(graphdef, state).hidden(jnp.asarray(tokens_of(12, 3))), state
        )


@pytest.mark.parametrize(
    ("changes", "outside"),
    [
        ({"num_layers": 8}, 0),
        ({"num_layers": 11}, 3),
        ({"sliding_window": 4, "attention_pattern": ("sliding", "full"), "num_layers": 10}, 2),
        ({"sliding_window": 4, "attention_pattern": ("sliding", *["full"] * 8)}, 4),
    ],
)
def test_as_few_layers_as_can_be_run_before_the_pipeline(
    changes: dict[str, Any], outside: int
) -> None:
    model = DecoderConfig(**{"num_layers": 8, **changes})
    assert layers_outside(model.layer_kinds(), 2, PipelineConfig(repeats=2)) == outside
