"""A program that jax's compilation cache loaded runs under the number it was compiled with."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from tests.unit.profile.spaces import MS, Event, space, write

from fornax import profile
from fornax.hlo import analyse, parse
from fornax.profile.schema import HloProto


@pytest.fixture
def proto():
    """Of a real program, and the name of its product."""
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    message = HloProto()
    message.hlo_module.MergeFromString(module.as_serialized_hlo_module_proto())
    operations = analyse(parse(module.to_string()), {"devices": 1}).operations
    product = next(each for each in operations if each.category == "matmul")
    return message.SerializeToString(), product.name


@pytest.mark.parametrize("other", ["jit_other", "jit_step"])
def test_it_is_found_by_its_name(proto, tmp_path, other):
    serialized, operation = proto
    programs = {"jit_step": (32, serialized)}
    if other != "jit_step":
        programs[other] = (30, serialized)  # its number of old is another program's now
    stats = {"hlo_op": operation, "hlo_module": "jit_step", "program_id": 30, "run_id": 1}
    event = Event(operation, MS, MS, {**stats, "device_ordinal": 0})
    write(space({"/host:CPU": {"tf_XLAEigen/1": [event]}}, programs=programs), tmp_path)
    found = profile.read(tmp_path)
    (one,) = found.operations
    assert found.programs[one.program].name == "jit_step"
    assert one.flops == 2 * 8**3


_WORK = """
import sys
import jax, jax.numpy as jnp
from fornax import profile

jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def make(scope, operation):
    def work(x):
        with jax.named_scope(scope):
            return operation(x @ x)
    return jax.jit(work)

def first(): return make("first", jnp.tanh)
def second(): return make("second", lambda x: jnp.sort(x, axis=0))

x = jnp.ones((300, 300))
jax.block_until_ready(first()(x))
jax.clear_caches()
for number in range(5):
    jax.jit(lambda y: y * number + 1)(x)
runs = [second(), first()]
jax.block_until_ready([run(x) for run in runs])
with profile.capture(sys.argv[1]):
    for run in runs:
        for _ in range(3):
            jax.block_until_ready(run(x))
found = profile.read(sys.argv[1])
assert all(operation.program >= 0 for operation in found.operations), found.operations
named = {operation.name: "/".join(operation.scope) for operation in found.operations}
assert next(scope for name, scope in named.items() if "tanh" in name) == "first", named
assert next(scope for name, scope in named.items() if "sort" in name) == "second", named
assert {row.key for row in found.ops(by="module").rows} == {"first", "second"}
"""


@pytest.mark.slow
def test_operations_are_those_of_the_program_that_has_them(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WORK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


_MEMORY = """
import json, sys
import jax, jax.numpy as jnp
from fornax import profile

jax.config.update("jax_enable_compilation_cache", sys.argv[2] != "without")
jax.config.update("jax_compilation_cache_dir", sys.argv[1] + "/cache")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def loss(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0].sum()

step = jax.jit(jax.grad(loss))
arguments = {"w": jnp.ones((3, 96, 96))}, jnp.ones((64, 96))
jax.block_until_ready(step(*arguments))
jax.clear_caches()
with profile.capture(sys.argv[1] + "/" + sys.argv[2]):
    jax.block_until_ready(step(*arguments))
(memory,) = profile.read(sys.argv[1] + "/" + sys.argv[2]).memory
print(json.dumps([dict(memory.owners), memory.peak.bytes, len(memory.course)]))
"""


@pytest.mark.slow
def test_the_memory_of_a_cached_program_is_that_of_one_compiled_anew(tmp_path) -> None:
    """jax loads it without the order in which its buffers live."""
    found = []
    for name in ("without", "first", "second"):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(tmp_path), name], capture_output=True, check=True
        )
        found.append(json.loads(done.stdout))
    for owners, peak, course in found:
        assert course > 10
        assert owners["weights"] == 4 * 3 * 96 * 96
        assert owners["activations"] >= 4 * 3 * 64 * 96
        assert sum(owners.values()) == peak
    assert found[0] == found[1] == found[2]
