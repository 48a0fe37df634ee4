"""When temporary buffers live, beside the compiler's own simulation of the same programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fornax import profile
from fornax.hlo import parse
from fornax.mesh.compilation import compiled_anew
from fornax.profile.memory import read_memory
from fornax.profile.operations import module_text, read_program
from fornax.profile.schema import HloProto
from fornax.profile.simulation import with_simulation

B, D, L = 32, 64, 3


def layer(x, w):
    return jnp.tanh(x @ w)


def trained(w, x):
    """A loop forward and one backward, whose body is computed again."""

    def loss(w):
        body = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(body, x, w)[0].sum()

    return w - 0.1 * jax.grad(loss)(w)


def branching(w, x):
    """Branches of different sizes inside a loop, one of which hands on what it took."""

    def body(at, x):
        grown = layer(x, w[0])
        return jax.lax.cond(
            at % 2 == 0,
            lambda a, b: jnp.sort(jnp.concatenate([a, b], 1), axis=1)[:, :D],
            lambda a, b: b,
            x,
            grown,
        )

    return jax.lax.fori_loop(0, 4, body, x).sum()


def until(w, x):
    """A loop of a length that is not known, with one inside."""

    def body(carry):
        at, x, still = carry
        x = jax.lax.fori_loop(0, 2, lambda n, x: layer(x, w[n]) + still, x)
        return at + 1, x, still

    return jax.lax.while_loop(lambda c: (c[0] < 5) & (c[1].sum() < 1e6), body, (0, x, x * 2))[1]


def drawn(w, x):
    """Called computations: random bits."""
    key = jax.random.key(0)
    return jax.random.normal(key, x.shape) @ w[0] + jax.random.uniform(key, x.shape)


def updated(w, x):
    """In place, and a result that is an argument's memory."""
    rows = jax.lax.fori_loop(0, L, lambda n, w: w.at[n].set(w[n] @ w[n].T), w)
    return rows, jnp.cumsum(x, axis=0)


def spread(w, x):
    """Exchanges between devices."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))
    return (layer(x, w[0]).T @ x).sum() + jax.lax.sort(x, dimension=0)


pytestmark = pytest.mark.slow
PROGRAMS = (trained, branching, until, drawn, updated, spread)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Of each its HloProto, with the compiler's simulation."""
    folder = tmp_path_factory.mktemp("capture")
    arguments = np.full((L, D, D), 0.01, np.float32), np.ones((B, D), np.float32)
    runs = {each.__name__: jax.jit(each) for each in PROGRAMS}
    with compiled_anew(True):
        for run in runs.values():
            jax.block_until_ready(run(*arguments))
    with profile.capture(folder):
        for run in runs.values():
            jax.block_until_ready(run(*arguments))
    found = {each.name.removeprefix("jit_"): each.proto for each in profile.read(folder).programs}
    assert found.keys() >= runs.keys()
    return found


def stripped(proto: bytes) -> bytes:
    """As jax's compilation cache loads it."""
    message = HloProto.FromString(proto)
    assert message.buffer_assignment.heap_simulator_traces
    del message.buffer_assignment.heap_simulator_traces[:]
    return message.SerializeToString()


def memory_of(proto: bytes):
    program, module, _ = read_program("p", 1, 0, proto, module_text(proto), 1)
    return read_memory(0, program, module)


@pytest.mark.parametrize("name", [each.__name__ for each in PROGRAMS])
def test_the_peak_is_the_compilers_to_the_byte(programs, name):
    theirs, ours = memory_of(programs[name]), memory_of(stripped(programs[name]))
    assert ours.peak.bytes == theirs.peak.bytes
    assert ours.owners == theirs.owners
    held = [sorted(each.bytes for each in memory.peak.buffers) for memory in (ours, theirs)]
    assert held[0] == held[1]


def test_buffers_live_as_long_as_the_compiler_says(programs):
    """Where its events begin and end each buffer of the loops, ours do in the same order."""
    theirs = HloProto.FromString(programs["trained"])
    proto = stripped(programs["trained"])
    ours = HloProto.FromString(with_simulation(proto, parse(module_text(proto))))
    (trace,) = ours.buffer_assignment.heap_simulator_traces
    assert trace.whole_module
    said = theirs.buffer_assignment.heap_simulator_traces[0].events
    assert len(trace.events) == len(said)
    began = [each.buffer_id for each in trace.events if each.kind != 1]
    assert sorted(began) == sorted(each.buffer_id for each in said if each.kind != 1)
    ended = [each.buffer_id for each in trace.events if each.kind == 1]
    assert sorted(ended) == sorted(began)


def test_what_has_a_simulation_or_can_have_none_is_left_as_it_is(programs):
    proto = programs["drawn"]
    module = parse(module_text(proto))
    assert with_simulation(proto, module) is proto
    bare = HloProto.FromString(proto)
    bare.ClearField("buffer_assignment")
    bare = bare.SerializeToString()
    assert with_simulation(bare, module) is bare
    other = stripped(proto)
    assert with_simulation(other, parse(module_text(programs["until"]))) is other
