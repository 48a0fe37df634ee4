"""Adapters: several in one batch against merged weights, PEFT's files, loading and unloading.

Legend: B sequences, T tokens, V vocabulary.
"""

import dataclasses
import functools
import json
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tests.cases import one_in

from fornax import kernels
from fornax.config.errors import CheckpointError, EngineError
from fornax.llm.adapters import Adapters
from fornax.llm.config import EngineConfig
from fornax.llm.lora import LoRAStack, LoRAWeight, bind
from fornax.llm.weights import load_weights
from fornax.models import DecoderConfig, ExpertsConfig, create_decoder, init_cache
from fornax.models.families import family_by_name
from fornax.models.layout import plan_layout

RANK = 4


def config_of(family):
    experts = ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=24)
    return DecoderConfig(
        experts=experts if family.endswith("moe") else None,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        family=family,
        qk_norm="head" if family == "qwen3_moe" else "none",
        tie_embeddings=False,
    )


@functools.cache
def model_of(family):
    return create_decoder(config_of(family), seed=1)


def layout_of(family):
    return plan_layout(model_of(family), family_by_name(family).names)


def write_adapter(folder, family, *, seed, rank=RANK, alpha=8, modules=None, **config):
    """An adapter of all projections of all layers, or of some modules, as PEFT saves it."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for tensor in layout_of(family):
        name = tensor.name.removesuffix(".weight")
        if not name.endswith("_proj") or (modules is not None and name not in modules):
            continue
        outputs, inputs = tensor.shape
        start = f"base_model.model.{name}"
        tensors[f"{start}.lora_A.weight"] = rng.normal(size=(rank, inputs)).astype(np.float32)
        up = 0.05 * rng.normal(size=(outputs, rank))
        tensors[f"{start}.lora_B.weight"] = up.astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return tensors


def merged(family, tensors, scale):
    """The model whose stored weights are W + scale B A, computed in float64."""
    model = nnx.clone(model_of(family))
    for tensor in layout_of(family):
        start = f"base_model.model.{tensor.name.removesuffix('.weight')}"
        if f"{start}.lora_A.weight" not in tensors:
            continue
        down, up = (tensors[f"{start}.lora_{part}.weight"].astype(np.float64) for part in "AB")
        delta = scale * up @ down
        for block in tensor.blocks:
            owners = block.slot.path.split("/")[:-1]
            kernel = functools.reduce(getattr, owners, model).kernel
            change = block.slot.from_stored(delta[block.start : block.stop])
            value = np.array(kernel.get_value())
            expert = () if block.slot.expert is None else (block.slot.expert,)
            value[(block.slot.layer, *expert)] += change
            kernel.set_value(jnp.asarray(value))
    return model


def logits_of(model, tokens_BT):
    return np.asarray(_logits(*nnx.split(model), tokens_BT))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef, state, tokens_BT):
    model = nnx.merge(graphdef, state)
    cache = init_cache(model.config, *tokens_BT.shape, jnp.float32)
    return model(tokens_BT, cache=cache)[0]


@pytest.mark.parametrize("family", one_in(3, ["llama", "phi3", "qwen3_moe"]))
def test_each_sequence_of_a_batch_has_its_own_adapter(family, tmp_path):
    first = write_adapter(tmp_path / "a", family, seed=1, alpha=8)
    second = write_adapter(tmp_path / "b", family, seed=2, rank=2, alpha=3, use_rslora=True)
    weights = load_weights(model_of(family), EngineConfig(dtype="float32"))
    adapters = Adapters(weights, slots=2, rank=RANK)
    for name in "ab":
        adapters.add(adapters.read(name, tmp_path / name))
    assert adapters.place("ab")
    tokens_BT = np.random.default_rng(0).integers(0, 64, (3, 6))
    slots = [adapters.slot("a"), -1, adapters.slot("b")]
    state = bind(adapters.attach(weights.state), jnp.repeat(jnp.array(slots), 6))
    found = logits_of(weights.merge(state), tokens_BT)
    expected = [
        merged(family, first, 8 / RANK),
        model_of(family),
        merged(family, second, 3 / np.sqrt(2)),
    ]
    plain = logits_of(model_of(family), tokens_BT)
    for row, model in enumerate(expected):
        wanted = logits_of(model, tokens_BT)[row]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=1e-4)
        if row != 1:
            assert np.abs(wanted - plain[row]).max() > 0.01


@pytest.mark.parametrize("packed", [False, True])
def test_product_equals_merged_weights_in_float64(packed):
    rng = np.random.default_rng(3)
    kernel = rng.normal(size=(2, 24, 3, 10)).astype(np.float32)
    down = rng.normal(size=(2, 24, 3 * RANK)).astype(np.float32)
    up = rng.normal(size=(2, 3 * RANK, 30)).astype(np.float32)
    base = kernels.pack(jnp.asarray(kernel), inputs=1, precision="float32", stacked=True)
    stack = LoRAWeight(
        base=base if packed else jnp.asarray(kernel),
        stack=LoRAStack(jnp.asarray(down), jnp.asarray(up)),
        adapters_T=jnp.array([2, -1, 0, 0, 1]),
        layer=None,
        rank=RANK,
    )
    x = rng.normal(size=(5, 24)).astype(np.float32)
    run = jax.jit(lambda x, weight, layer: kernels.linear(x, weight.at(layer), inputs=1))
    for layer in (0, 1):
        y = run(x, stack, layer)
        for token, slot in enumerate([2, -1, 0, 0, 1]):
            whole = kernel[layer].reshape(24, 30).astype(np.float64)
            if slot >= 0:
                part = slice(slot * RANK, (slot + 1) * RANK)
                whole = whole + down[layer][:, part].astype(np.float64) @ up[layer][part]
            expected = (x[token].astype(np.float64) @ whole).reshape(3, 10)
            np.testing.assert_allclose(y[token], expected, rtol=1e-5, atol=1e-4)


def adapters_of(slots=2, rank=RANK):
    weights = load_weights(model_of("llama"), EngineConfig(dtype="float32"))
    return weights, Adapters(weights, slots=slots, rank=rank)


def test_more_adapters_than_slots_take_turns(tmp_path):
    _, adapters = adapters_of(slots=2)
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, "llama", seed=seed, modules=None)
        adapters.add(adapters.read(name, tmp_path / name))
    assert adapters.place(["a"])
    assert adapters.place(["b"])
    assert not adapters.place(["a"])
    assert adapters.place(["c"])  # in place of b, used longest ago
    assert {adapters.slot("a"), adapters.slot("c")} == {0, 1}
    assert not adapters.place(["a", "c"])
    with pytest.raises(EngineError, match="max_loras"):
        adapters.place(["a", "b", "c"])


def test_an_unloaded_adapter_leaves_nothing_behind(tmp_path):
    weights, adapters = adapters_of(slots=1)
    write_adapter(tmp_path / "whole", "llama", seed=1)
    one = "model.layers.1.mlp.up_proj"
    part = write_adapter(tmp_path / "part", "llama", seed=2, modules=[one])
    adapters.add(adapters.read("x", tmp_path / "whole"))
    before = adapters.salt("x")
    adapters.place(["x"])
    adapters.remove("x")
    assert adapters.paths == {}
    with pytest.raises(EngineError, match="no adapter 'x'"):
        adapters.place(["x"])
    adapters.add(adapters.read("x", tmp_path / "part"))
    assert adapters.salt("x") != before
    adapters.place(["x"])
    tokens_BT = np.arange(8)[None]
    state = bind(adapters.attach(weights.state), jnp.zeros(8, jnp.int32))
    wanted = logits_of(merged("llama", part, 8 / RANK), tokens_BT)
    np.testing.assert_allclose(
        logits_of(weights.merge(state), tokens_BT), wanted, rtol=1e-4, atol=1e-4
    )


def test_names_are_read_while_another_thread_loads_and_unloads(tmp_path):
    """The server lists models in its thread, the engine's thread changes them."""
    write_adapter(tmp_path / "a", "llama", seed=1)
    _, adapters = adapters_of()
    one = adapters.read("a", tmp_path / "a")
    many = [dataclasses.replace(one, name=f"a{n}") for n in range(500)]
    for each in many:
        adapters.add(each)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for each in many[:50]:
                adapters.remove(each.name)
                adapters.add(each)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(5000):
            names = list(adapters.paths.items())
            assert len(names) in (499, 500)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_loading_does_not_compile_the_step_anew(tmp_path):
    weights, adapters = adapters_of(slots=1)
    write_adapter(tmp_path / "a", "llama", seed=1)
    traced = []

    @jax.jit
    def step(state, ids, tokens):
        traced.append(ids)
        return _logits(weights.graphdef, bind(state, ids), tokens)

    tokens, none = np.arange(8)[None], np.full(8, -1, np.int32)
    without = step(adapters.attach(weights.state), none, tokens)
    adapters.add(adapters.read("a", tmp_path / "a"))
    adapters.place(["a"])
    with_it = step(adapters.attach(weights.state), np.zeros(8, np.int32), tokens)
    again = step(adapters.attach(weights.state), none, tokens)
    assert len(traced) == 1
    assert np.array_equal(without, again)
    assert not np.array_equal(without, with_it)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
        ({"monteclora_config": {"buffer_size": 150}}, "monteclora_config"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(config, message, tmp_path):
    write_adapter(tmp_path / "a", "llama", seed=1, **config)
    _, adapters = adapters_of()
    with pytest.raises(EngineError, match=message):
        adapters.read("a", tmp_path / "a")


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    _, adapters = adapters_of(rank=2)
    write_adapter(tmp_path / "wide", "llama", seed=1)
    with pytest.raises(EngineError, match=r"rank 4.*max_lora_rank is 2"):
        adapters.read("x", tmp_path / "wide")
    write_adapter(tmp_path / "other", "phi3", seed=1, rank=2)
    with pytest.raises(EngineError, match=r"is not a projection of this model"):
        adapters.read("x", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        adapters.read("x", tmp_path / "missing")
    head = {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 32), np.float32)}
    save_file(head, tmp_path / "other" / "adapter_model.safetensors")
    with pytest.raises(EngineError, match="lm_head"):
        adapters.read("x", tmp_path / "other")


def test_alpha_may_differ_between_modules(tmp_path):
    tensors = write_adapter(
        tmp_path / "a", "llama", seed=1, alpha=8, alpha_pattern={"up_proj": 2, "o_proj": 16}
    )
    _, adapters = adapters_of()
    pairs = adapters.read("a", tmp_path / "a").pairs
    start = "base_model.model.model.layers.1"
    for path, name, alpha in [
        ("layers/mlp/up/kernel", "mlp.up_proj", 2),
        ("layers/attention/o/kernel", "self_attn.o_proj", 16),
        ("layers/mlp/down/kernel", "mlp.down_proj", 8),
    ]:
        up = tensors[f"{start}.{name}.lora_B.weight"]
        np.testing.assert_allclose(pairs[path, (1,)].up_RN, up.T * alpha / RANK, rtol=1e-6)
