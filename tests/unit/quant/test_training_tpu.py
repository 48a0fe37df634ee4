"""Training in 8 bits on TPU chips: what the TPU compiler multiplies and gathers."""

import importlib.util
import re
from collections import Counter

import pytest

from fornax.config import from_mapping
from fornax.plan.compile import compile_train
from fornax.plan.topology import parse_topology
from fornax.train import TrainConfig

_RUN = {
    "batch_size": 8,
    "seq_len": 1024,
    "dtypes": {"compute": "bfloat16"},
    "model": {
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
    },
}


@pytest.mark.tpu
@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)
def test_all_products_of_weights_multiply_codes_and_weights_are_gathered_as_codes() -> None:
    config = from_mapping(TrainConfig, {**_RUN, "quant": {"scheme": "int8"}})
    (artifact,) = compile_train(
        config, parse_topology("v6e:2x2"), programs=("train_step",), cache=False
    )
    text = artifact.hlo
    dtypes = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    products = [
        tuple(dtypes[name] for name in re.findall(r"%([\w.\-]+)", operands))
        for operands in re.findall(r" (?:convolution|dot)\(([^)]*)\)", text)
    ]
    found = Counter(pair == ("s8", "s8") for pair in products)
    assert found[True] == 7 * 3, Counter(products)
    # One layer's q, k, v, o, gate, up and down; whatever else is gathered has no such shape.
    weights = r"1024,[48],128|8,128,1024|1024,4096|4096,1024"
    gathered = re.findall(rf"= \(?(\w+)\[(?:{weights})\]\S* all-gather", text)
    assert set(gathered) == {"s8"}
