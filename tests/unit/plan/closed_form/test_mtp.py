"""Modules for multi-token prediction in a plan: products, bytes and what is kept, as jax and XLA
make them."""

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.plan.closed_form import test_axes, test_layer

from fornax import kernels
from fornax.hlo import ProgramFacts
from fornax.hlo.facts import Collective
from fornax.models import DecoderConfig, Remat, abstract_decoder, num_parameters
from fornax.plan.closed_form.memory import kept_bytes
from fornax.plan.closed_form.shards import local_step
from fornax.plan.closed_form.work import step_work
from fornax.plan.cost.estimate import Estimate, estimate
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig

pytestmark = pytest.mark.usefixtures("optimized")

ROWS, LENGTH = test_layer.ROWS, test_layer.LENGTH
KINDS = (*test_layer._LAYER_KINDS, "modules")


def _config(model: DecoderConfig, remat: Remat, compute: str) -> TrainConfig:
    plain = dataclasses.replace(model, num_mtp_modules=0)
    weight = 0.3 if model.num_mtp_modules else None
    config = test_layer._config(plain, remat, compute)
    return dataclasses.replace(config, model=model, mtp_weight=weight)


def _outputs(model: DecoderConfig, remat: Remat) -> tuple[Any, Any, Any]:
    """A function of parameters and tokens to the outputs of the model and its modules, with its
    arguments' shapes."""
    graphdef, params = nnx.split(abstract_decoder(model, compute_dtype=jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)

    def run(params: Any, tokens: Any) -> Any:
        x, ahead, _ = nnx.merge(graphdef, params).hidden_ahead(
            tokens, remat=remat, implementation="blockwise", drop_tokens=True
        )
        return (x, *ahead)

    return run, params, tokens


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize(("name", "remat"), [("llama", "full"), ("experts", "dots")])
def test_flops_are_those_of_the_traced_gradient(name: str, remat: str, modules: int) -> None:
    model = test_layer._model(**test_layer.MODELS[name], num_mtp_modules=modules)
    policy = test_layer.REMATS[remat]
    run, params, tokens = _outputs(model, policy)

    def total(params: Any, tokens: Any) -> jax.Array:
        return sum(jnp.sum(y.astype(jnp.float32)) for y in run(params, tokens))

    traced = jax.make_jaxpr(jax.grad(total))(params, tokens)
    local = local_step(_config(model, policy, "float32"), parse_topology("h100:1"))
    planned = sum(work.flops * work.count for work in step_work(local) if work.kind in KINDS)
    assert planned == pytest.approx(test_layer.executed_flops(traced), rel=1e-3)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_kept_values_are_those_that_differentiation_keeps(remat: str) -> None:
    """Of a module's layer what the policy keeps, and beside it what no policy is asked about."""
    policy = test_layer.REMATS[remat]

    def kept(modules: int) -> tuple[Counter[Any], float]:
        model = test_layer._model(num_mtp_modules=modules)
        run, params, tokens = _outputs(model, policy)
        with kernels.target_platform("gpu"):  # on one CPU norms and activations keep less
            saved = jax.eval_shape(lambda p, t: jax.vjp(lambda q: run(q, t), p)[1], params, tokens)
        wide = [x for x in jax.tree.leaves(saved) if {ROWS, LENGTH} <= set(x.shape)]
        wide = [x for x in wide if x.shape[-1] > 1 and not jnp.issubdtype(x.dtype, jnp.integer)]
        local = local_step(_config(model, policy, "bfloat16"), parse_topology("h100:1"))
        return Counter((x.shape, x.dtype.itemsize) for x in wide), kept_bytes(local)

    (plain, before), (ahead, after) = kept(0), kept(1)
    more = ahead - plain
    assert not plain - ahead
    found = sum(math.prod(shape) * item * count for (shape, item), count in more.items())
    assert after - before == found


def _both(mesh: dict[str, int]) -> tuple[ProgramFacts, Estimate]:
    """A step of the compiler's, after it has computed all products of the planned one."""
    model = {**test_axes.MODEL, "num_mtp_modules": 1}
    config = test_axes.configure(mesh, model=model, mtp_weight=0.3, remat="full")
    found = test_axes.compiled(config)
    planned = estimate(config, parse_topology("cpu:8"))
    products = sum(row.flops * row.count for row in found.operations if row.category == "matmul")
    of_plan = (*test_axes.PRODUCTS, "modules")
    assert sum(row.flops for row in planned.step.work if row.name in of_plan) == products
    return found, planned


def _gathered(rows: Any) -> int:
    """Bytes over fsdp."""
    rows = [row for row in rows if row.axes == ("fsdp",) and row.kind == "all-gather"]
    return sum(round(row.bytes * row.count) for row in rows)


def _weights(found: ProgramFacts) -> list[Collective]:
    """Without token ids that are looked up."""
    return [row for row in found.collectives if "(Embed." not in row.source]


@pytest.mark.slow
def test_a_step_computes_and_exchanges_what_the_compiled_program_does() -> None:
    found, planned = _both({"fsdp": 8})
    assert _gathered(_weights(found)) == _gathered(planned.step.collectives) > 0
    sent = [
        test_axes.moved(rows, "fsdp")["all-to-all"]
        for rows in (found.collectives, planned.step.collectives)
    ]
    assert sent[0] == sent[1] > 0


@pytest.mark.exhaustive
def test_a_step_over_tensor_computes_and_gathers_what_the_compiled_program_does() -> None:
    # Weights alone: the plan is of the partitioner for TPU, which scatters what that for CPU
    # reduces and gathers again.
    found, planned = _both({"fsdp": 4, "tensor": 2})
    assert _gathered(_weights(found)) == _gathered(planned.step.collectives) > 0


def test_a_plan_counts_parameters_and_the_optimizers_state() -> None:
    model = {**test_axes.MODEL, "num_mtp_modules": 1}
    config = test_axes.configure({"fsdp": -1}, model=model, mtp_weight=0.3)
    plan = plan_train(config, parse_topology("h100:8"))
    assert plan.run is not None
    assert config.model is not None
    assert plan.run.parameters == num_parameters(config.model)
    held = plan.main.memory.owned("parameters")
    norms = 64 * (3 * 2 + 1 + 2 + 3)  # of layers, the model, modules: whole on each
    assert held == 4 * ((num_parameters(config.model) - norms) // 8 + norms)
    assert plan.main.memory.owned("optimizer") == pytest.approx(2 * held, rel=0.01)
    assert any(row.name == "modules" and row.flops for row in plan.main.work)
