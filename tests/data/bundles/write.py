"""Writes the bundle of the jax that runs it: `python tests/data/bundles/write.py` makes jax-<X>/.

One is kept of each minor version that Fornax supports, and every jax must load them all:
tests/unit/export/test_versions.py. Written again only when the bundle's format changes.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fornax import export
from fornax.export import Spec


def predict(params, ids, length, weight):
    """A recurrent scorer: a gather, a loop, a mask, a reduction, bfloat16, and a top-k."""
    x = params["table"][ids].astype(jnp.float32)

    def step(h, now):
        at, x_t = now
        return jnp.where((at < length)[:, None], jnp.tanh(h @ params["step"] + x_t), h), None

    steps = (jnp.arange(ids.shape[1]), jnp.swapaxes(x, 0, 1))
    h, _ = jax.lax.scan(step, jnp.zeros((ids.shape[0], 4)), steps)
    best, at = jax.lax.top_k(h * weight[:, None], 2)
    return {"score": jax.nn.sigmoid(h.sum(axis=1)), "best": best, "at": at}


def count(params, text, stop):
    """Strings and 64-bit integers: how often a byte is in a text, from an offset."""
    return {"count": jnp.sum(text == 97, axis=1) + params["offset"] + stop}


def main(folder: Path) -> None:
    """Write the bundle below `folder`."""
    rng = np.random.default_rng(0)
    params = {
        "table": jnp.asarray(rng.normal(size=(11, 4)), jnp.bfloat16),
        "step": rng.normal(size=(4, 4)).astype(np.float32),
        "offset": np.int32(7),
    }
    path = folder / f"jax-{jax.__version__}"
    export.save(
        path,
        {"predict": predict, "count": count},
        params,
        inputs={
            "predict": {
                "ids": Spec(("b", "t"), "int32", lengths="length", high=11),
                "weight": Spec(("b",), "float32"),
            },
            "count": {"text": Spec(("b", "n"), "bytes"), "stop": Spec(("b",), "int64")},
        },
        buckets={"b": [1, 4], "t": [8], "n": [16]},
        platforms=("cpu",),
        metadata={"purpose": "every jax must load it"},
        overwrite=True,
    )
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent)
