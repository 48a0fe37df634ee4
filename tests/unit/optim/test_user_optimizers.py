"""Optimizers by name: their keys checked, their state laid beside the parameters."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax.config import ConfigError, dump_yaml, from_arguments, from_mapping, from_yaml
from fornax.mesh import MeshConfig
from fornax.optim import SGD, AdamW, Constant, Group, OptimConfig, UserOptimizer, build
from fornax.train import Ledger, Loss, Task
from fornax.train.config import TrainerConfig
from fornax.train.session import first_state, prepare

SOURCE = '''
import jax, jax.numpy as jnp, optax

def make(learning_rate, momentum=0.9, *, nesterov: bool = False):
    return optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)

def needs(learning_rate, warmth):
    return optax.sgd(learning_rate * warmth)

def decays(learning_rate, weight_decay, mask):
    return optax.adamw(learning_rate, weight_decay=weight_decay, mask=mask)

def broken(learning_rate):
    return optax.stateless(lambda updates, params: updates["no such path"])

def wrong(learning_rate):
    return 3

def odd(learning_rate):
    """State of its own: lists, dicts below and above the paths, other shapes."""
    def init(params):
        leaves = jax.tree.leaves(params)
        return {
            "moments": jax.tree.map(jnp.zeros_like, params),
            "by_leaf": jax.tree.map(lambda p: {"mu": jnp.zeros_like(p)}, params),
            "list": [jnp.zeros_like(leaf) for leaf in leaves],
            "rows": jax.tree.map(lambda p: jnp.zeros((p.size // 2, 2)), params),
            "table": jnp.zeros((3, 7)),
            "count": jnp.zeros([], jnp.int32),
        }
    def update(updates, state, params=None):
        moments = jax.tree.map(lambda m, g: 0.5 * m + g, state["moments"], updates)
        step = jax.tree.map(lambda m: -learning_rate(state["count"]) * m, moments)
        return step, {**state, "moments": moments, "count": state["count"] + 1}
    return optax.GradientTransformation(init, update)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "my_optim.py"
    path.write_text(SOURCE)
    return path


def optim(optimizer, **more):
    given = {"learning_rate": 0.1, "schedule": {"type": "constant"}, "clip": [], **more}
    return from_mapping(OptimConfig, {"optimizer": optimizer, **given})


PARAMS = {"w": np.ones((8, 4), np.float32), "norm": {"scale": np.ones(8, np.float32)}}


def run(config, transform=None):
    params = jax.tree.map(jnp.asarray, PARAMS)
    built = build(config, total_steps=3, params=params)
    transform = built.transform if transform is None else transform
    state = transform.init(params)
    for call in range(3):
        grads = jax.tree.map(lambda p, call=call: 0.3 * p + call, params)
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_file_of_ones_own_is_called_with_the_keys_beside_type(file):
    config = optim({"type": f"{file}:make", "momentum": 0.5, "nesterov": True})
    same(run(config), run(config, optax.sgd(0.1, momentum=0.5, nesterov=True)))


def test_any_optimizer_of_optax_is_one(file):
    config = optim({"type": "optax:adabelief", "b1": 0.7})
    same(run(config), run(config, optax.adabelief(0.1, b1=0.7)))


def test_the_mask_of_decay_is_handed_to_a_factory_that_takes_it(file):
    config = optim({"type": f"{file}:decays", "weight_decay": 0.3})
    mask = {"w": True, "norm": {"scale": False}}
    same(run(config), run(config, optax.adamw(0.1, weight_decay=0.3, mask=mask)))


def test_it_works_inside_a_group_with_its_own_rate(file):
    mine = UserOptimizer(type=f"{file}:make", options={"momentum": 0.0})
    group = Group(pattern="scale", optimizer=mine, learning_rate_factor=0.5)
    config = OptimConfig(
        optimizer=SGD(momentum=None),
        groups=(group,),
        learning_rate=0.1,
        schedule=Constant(),
        clip=(),
    )
    got, plain = run(config), run(config, optax.sgd(0.1))
    np.testing.assert_allclose(got["w"], plain["w"], rtol=1e-6)
    half = run(config, optax.sgd(0.05))
    np.testing.assert_allclose(got["norm"]["scale"], half["norm"]["scale"], rtol=1e-6)


def test_a_config_goes_through_yaml_and_the_command_line(file):
    told = {"type": f"{file}:make", "momentum": 0.5, "betas": [1, 2], "deep": {"a": None}}
    config = optim(told)
    again = from_yaml(OptimConfig, dump_yaml(config))
    assert again == config
    assert hash(again) == hash(config)
    assert again.optimizer.options == {"momentum": 0.5, "betas": [1, 2], "deep": {"a": None}}
    words = ["--optimizer.type", f"{file}:make", "--optimizer.momentum=0.25"]
    words += ["--optimizer.nesterov", "--optimizer.betas", "[3, 4]"]
    flags = from_arguments(OptimConfig, words, program="x")
    assert flags.optimizer.options == {"momentum": 0.25, "nesterov": True, "betas": [3, 4]}


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("make", {"momentun": 1}, "takes no momentun; did you mean momentum?"),
        ("make", {"learning_rate": 1}, "optim.learning_rate and optim.schedule give"),
        ("needs", {}, "needs warmth"),
        ("mak", {}, "has no function mak; did you mean make"),
        ("wrong", {}, "returned a int; it returns an optax.GradientTransformation"),
        ("broken", {}, r"broken raises KeyError at .*my_optim.py:14"),
        ("make", {"momentum": "much"}, "make raises TypeError"),
    ],
)
def test_what_does_not_fit_is_one_sentence(file, name, keys, told):
    with pytest.raises(ConfigError, match=told):
        run(optim({"type": f"{file}:{name}", **keys}))


def test_patterns_of_decay_that_nothing_would_read_are_refused(file):
    with pytest.raises(ConfigError, match=r"takes no mask, so optim.decay and optim.no_decay"):
        run(optim({"type": f"{file}:make"}, no_decay=["w"]))


def test_an_unknown_name_is_still_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"one of adamw, .*FILE.py:NAME; did you mean adamw"):
        optim({"type": "adamv"})
    with pytest.raises(ConfigError, match=r"there is no file nowhere.py"):
        run(optim({"type": "nowhere.py:make"}))


def test_state_lies_beside_what_its_path_or_shape_matches(file):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"w": PartitionSpec("fsdp", "tensor"), "norm": {"scale": PartitionSpec("fsdp")}}
    where = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    built = build(optim({"type": f"{file}:odd"}), total_steps=2, params=PARAMS)
    found = jax.tree.map(lambda s: s.spec, built.state_shardings(where))
    assert found["moments"] == specs
    assert found["by_leaf"]["w"]["mu"] == specs["w"]
    assert found["list"] == [specs["norm"]["scale"], specs["w"]]
    assert found["rows"]["w"] == PartitionSpec(("fsdp", "tensor"), None)
    assert found["table"] == found["count"] == PartitionSpec()
    assert list(built.replicated(where)) == ["['table']"]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = jax.random.normal(rngs.params(), (8, 4), jnp.float32)
        self.w = nnx.Param(init, axes=("embed", "mlp"))


def squared(model, batch, key):
    del key
    loss = jnp.sum((batch["x"] @ model.w[...]) ** 2)
    return Loss(total=loss, weight=jnp.float32(batch["x"].shape[0]), metrics={})


def task(**more):
    return Task(build=Model, loss=squared, batches=lambda split, hosts: None, **more)


def factory(learning_rate, views):
    assert set(views) == {"w"}
    return optax.chain(optax.trace(decay=0.5), optax.scale_by_learning_rate(learning_rate))


def train(devices, mesh, **more):
    chain = OptimConfig(learning_rate=0.01, schedule=Constant(), clip=())
    config = TrainerConfig(batch_size=8, steps=4, optim=chain, mesh=mesh, **more)
    programs = prepare(config, task(optimizer=factory), Ledger(), devices)
    state = first_state(config, programs)
    for step in range(4):
        rows = np.random.default_rng(step).normal(size=(8, 8)).astype(np.float32)
        state, _ = programs.step(state, {"x": rows})
    return programs, jax.device_get(state.params)


def test_a_task_brings_its_optimizer_and_trains_alike_on_eight_devices():
    _, one = train(jax.devices()[:1], MeshConfig(fsdp=1, data=1))
    programs, many = train(jax.devices(), MeshConfig(data=2, fsdp=2, tensor=2))
    same(many, one)
    [trace] = [x for x in jax.tree.leaves(programs.abstract.optimizer) if x.ndim]
    assert trace.sharding == programs.abstract.params["w"].sharding
    assert programs.warnings == ()


def test_a_task_and_a_config_that_both_bring_one_are_refused():
    chain = OptimConfig(optimizer=AdamW(b1=0.5))
    config = TrainerConfig(batch_size=8, steps=4, optim=chain)
    with pytest.raises(ConfigError, match=r"optim.optimizer is adamw, and the task brings"):
        prepare(config, task(optimizer=factory), Ledger(), jax.devices()[:1])


def test_what_matches_no_parameter_is_told_once(file):
    chain = optim({"type": f"{file}:odd"})
    config = TrainerConfig(batch_size=8, steps=4, optim=chain, mesh=MeshConfig(data=1, fsdp=8))
    [line] = prepare(config, task(), Ledger(), jax.devices()).warnings
    assert "matches no parameter by path or shape: 1 arrays, 0.0 MiB" in line
    assert "['table']" in line
    alone = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=1))
    assert prepare(alone, task(), Ledger(), jax.devices()[:1]).warnings == ()
