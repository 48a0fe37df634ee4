"""The config.json of released models, at full size: tensors, windows and frequencies agree."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tests.unit.models.test_families import RELEASED

from fornax.models import DecoderConfig, RopeConfig, abstract_decoder, config_from_hf
from fornax.models.families import family_by_name
from fornax.models.layout import plan_layout
from fornax.models.rope import attention_factor, inverse_frequencies

pytestmark = pytest.mark.parity


def _theirs(values: dict[str, Any]) -> Any:
    keys = {key: value for key, value in values.items() if key != "auto_map"}
    return transformers.AutoConfig.for_model(**keys)


@pytest.mark.parametrize("name", RELEASED)
def test_tensors_have_the_same_names_and_shapes(name: str) -> None:
    """Without memory: transformers on its meta device, ours abstract."""
    with torch.device("meta"):
        oracle = transformers.AutoModelForCausalLM.from_config(_theirs(RELEASED[name]))
    assert type(oracle).__name__ in RELEASED[name]["architectures"]
    config = config_from_hf(RELEASED[name])
    layout = plan_layout(abstract_decoder(config), family_by_name(str(config.family)).names)
    found = {tensor.name: tensor.shape for tensor in layout}
    expected = {key: tuple(value.shape) for key, value in oracle.named_parameters()}
    blocks = any(".block_sparse_moe.experts." in key for key in found)
    if any(".experts.0." in key for key in found):
        expected = dict(_each_expert(expected, ("w1", "w3", "w2") if blocks else _PROJECTIONS))
    stored = {key: value for key, value in oracle.named_buffers() if key in oracle.state_dict()}
    expected |= {key: tuple(value.shape) for key, value in stored.items()}
    if blocks:  # what older files call it, and transformers still writes
        expected = {key.replace(".mlp.", ".block_sparse_moe."): v for key, v in expected.items()}
    expected = {_renamed(key): shape for key, shape in expected.items()}
    assert found == expected


def _renamed(key: str) -> str:
    """The name in files of a tensor that Granite's module has under another."""
    for module, stored in _GRANITE.items():
        key = key.replace(module, stored)
    return key


_GRANITE = {
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _each_expert(
    shapes: dict[str, tuple[int, ...]], names: tuple[str, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes as the files have them, where transformers holds all experts in one parameter."""
    for key, shape in shapes.items():
        stem, _, leaf = key.rpartition(".")
        if not stem.endswith(".experts"):
            yield key, shape
            continue
        count, rows, columns = shape
        parts = names[:2] if leaf == "gate_up_proj" else names[2:]
        for expert, part in itertools.product(range(count), parts):
            yield f"{stem}.{expert}.{part}.weight", (rows // len(parts), columns)


@pytest.mark.parametrize("name", RELEASED)
def test_layers_attend_alike(name: str) -> None:
    config, oracle = config_from_hf(RELEASED[name]), _theirs(RELEASED[name])
    kinds = config.layer_kinds()
    windows = [kind.window for kind in kinds]
    linear = [kind.linear for kind in kinds]
    window = getattr(oracle, "sliding_window", None)
    types = getattr(oracle, "layer_types", None)
    if types is None:
        assert windows == [window] * config.num_layers
    else:
        chunk = getattr(oracle, "attention_chunk_size", None)
        sizes = {"sliding_attention": window, "chunked_attention": chunk}
        assert windows == [sizes.get(kind) for kind in types]
        assert [kind.chunked for kind in kinds] == [kind == "chunked_attention" for kind in types]
        assert linear == [kind == "linear_attention" for kind in types]
    rotates = [int(kind.rope != "none" or kind.linear) for kind in kinds]
    every = getattr(oracle, "position_embedding_type", "rope") == "rope"
    default = [int(every or kind.linear) for kind in kinds]
    assert rotates == list(getattr(oracle, "no_rope_layers", None) or default)


@pytest.mark.parametrize(
    "name", [name for name, values in RELEASED.items() if config_from_hf(values).attends]
)
def test_frequencies_agree(name: str) -> None:
    """Within the original context and beyond it, the attention factor included."""
    config, oracle = config_from_hf(RELEASED[name]), _theirs(RELEASED[name])
    if "full_attention" in oracle.rope_parameters:
        ropes = {"full_attention": config.rope, "sliding_attention": config.local_rope}
    else:
        ropes = {None: config.rope}
    for layer_type, rope in ropes.items():
        assert rope is not None
        for length in (100, config.max_position_embeddings):
            expected, factor = _oracle_frequencies(oracle, layer_type, length)
            found = _frequencies(config, rope, length)
            np.testing.assert_allclose(found, expected, rtol=2e-6)
            assert attention_factor(rope, config.max_position_embeddings) == pytest.approx(factor)


def _frequencies(config: DecoderConfig, rope: RopeConfig, length: int) -> np.ndarray:
    width = config.rotated_width(rope, wide=rope is config.rope)
    limit = config.max_position_embeddings
    return np.asarray(inverse_frequencies(rope, width, limit, jnp.int32(length)))


def _oracle_frequencies(
    config: Any, layer_type: str | None, length: int
) -> tuple[np.ndarray, float]:
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        if layer_type and config.model_type == "gemma4_text":  # it differs from layer to layer
            config = config.per_layer_config[layer_type]
        width = int(_head_width(config) * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return (1.0 / parameters["rope_theta"] ** exponents).numpy(), 1.0
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    keys = {"layer_type": layer_type} if layer_type else {}
    found, factor = function(config, torch.device("cpu"), seq_len=length, **keys)
    return found.numpy(), factor


def _head_width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
