"""An operation of your own with two implementations, measured here, and one more for attention.

python examples/52_own_kernel.py

The fastest is chosen from then on; `fornax kernels tune --imports own_kernel` measures such calls
in a run, where this file is `own_kernel.py` on PYTHONPATH.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fornax import kernels


@dataclass(frozen=True)
class ScanCall:
    """One call: what implementations look at when they decline, and the key of what is measured."""

    platform: str
    rows: int
    length: int


def blocks(x_RT: jax.Array, width: int = 64) -> jax.Array:
    """A running sum of each row, in blocks: a product with a triangle in each, and their totals."""
    R, T = x_RT.shape
    x_RBW = x_RT.reshape(R, T // width, width)
    inside_RBW = x_RBW @ jnp.triu(jnp.ones((width, width), x_RT.dtype))
    totals_RB = inside_RBW[..., -1]
    return (inside_RBW + (jnp.cumsum(totals_RB, 1) - totals_RB)[..., None]).reshape(R, T)


def declines(call: ScanCall) -> str | None:
    """Why `blocks` cannot run a call; None where it can."""
    return f"{call.length} is not a multiple of 64" if call.length % 64 else None


def benchmark(call: ScanCall, run):
    """What is timed: one run on made-up inputs of the call's shapes."""
    x_RT, step = jnp.ones((call.rows, call.length)), jax.jit(run)
    return lambda: step(x_RT)


running_sum = kernels.register(
    kernels.Operation(
        "running_sum",
        (
            kernels.Implementation("blocks", blocks, declines),
            kernels.Implementation("xla", lambda x_RT: jnp.cumsum(x_RT, 1), lambda call: None),
        ),
        benchmark,
        call=ScanCall,
    )
)


def run(rows: int, length: int) -> None:
    """Measure a call, run it by every implementation that can, and compare."""
    call = ScanCall("cpu", rows, length)
    x_RT = jax.random.normal(jax.random.key(0), (rows, length))
    with kernels.autotuning():
        chosen = running_sum.choose(call)
    for each in running_sum.candidates(call):
        assert jnp.allclose(each.run(x_RT), jnp.cumsum(x_RT, 1), atol=1e-3), each.name
    print(f"{rows} x {length}: {running_sum.choice(call)}; chosen: {chosen.name}")


def one_row_at_a_time(inputs):
    """Attention row by row: less memory for scores, more time."""
    by_name = {one.name: one for one in kernels.attention_operation.implementations}
    arrays = (inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH)

    def row(arrays):
        q, k, v = (array[None] for array in arrays)
        return by_name["xla"].run(replace(inputs, q_BTNH=q, k_BSKH=k, v_BSKH=v))[0]

    return jax.lax.map(row, arrays)


def plain(call: kernels.AttentionCall) -> str | None:
    """Why it cannot run a call."""
    return "it knows neither positions nor documents" if call.positions or call.segments else None


if __name__ == "__main__":
    run(64, 4096)
    run(64, 1000)
    kernels.attention_operation.add(
        kernels.Implementation("rows", one_row_at_a_time, plain), before="native"
    )
    q = jax.random.normal(jax.random.key(1), (3, 8, 2, 16))
    with kernels.recording_calls() as calls:
        found = kernels.attention(q, q, q, scale=0.25)
    plainly = kernels.attention(q, q, q, scale=0.25, implementation="xla")
    assert jnp.allclose(found, plainly, atol=1e-5)
    print(*(str(choice) for choice in calls.values()))
