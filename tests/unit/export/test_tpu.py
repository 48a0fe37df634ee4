"""A bundle's program for TPUs compiles with the TPU's own compiler, on a machine without one."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax import export
from fornax.config.environment import tpu_compiler

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, the TPU compiler, is not installed",
    ),
]


def test_the_tpus_program_compiles(sealed, monkeypatch):
    for name, value in tpu_compiler("v5litepod-4").items():
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    one = NamedSharding(Mesh(np.array(topology.devices)[:1], ("x",)), PartitionSpec())
    bundle = export.open_bundle(sealed)
    function = bundle.manifest.functions["predict"]
    dims = {"b": 4, "t": 8}
    weights = [bundle.manifest.weights[name] for name in function.weights]
    arguments = [
        *((w.shape, w.dtype) for w in weights),
        *((spec.sizes(dims), spec.dtype) for spec in function.signature.arguments),
    ]
    call = jax.jit(bundle.exported("predict", "tpu").call)
    compiled = call.lower(
        *(jax.ShapeDtypeStruct(shape, dtype, sharding=one) for shape, dtype in arguments)
    ).compile()
    assert compiled.memory_analysis().generated_code_size_in_bytes > 0
