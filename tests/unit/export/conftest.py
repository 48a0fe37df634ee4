"""One tiny bundle of two functions, sealed once for all tests that only read it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import export
from fornax.export import Spec

VOCABULARY = 11


def predict(params, ids, weight, lengths):
    """Mean embedding of each row's own tokens, a score, and every token doubled in length."""
    x_BTD = params["embed"]["table"][ids]
    own_BT = jnp.arange(ids.shape[1]) < lengths[:, None]
    mean_BD = jnp.where(own_BT[..., None], x_BTD, 0).sum(1) / jnp.maximum(lengths, 1)[:, None]
    score_B = jnp.tanh(mean_BD @ params["out"]) * weight
    return {"score": score_B, "twice": jnp.repeat(jnp.where(own_BT, ids, 0), 2, axis=1)}


def letters(params, text, lengths):
    """How many bytes of each string, by its own length, are the letter `a`."""
    own_BN = jnp.arange(text.shape[1]) < lengths[:, None]
    return {"count": jnp.sum(own_BN & (text == params["letter"]), axis=1)}


PARAMS = {
    "embed": {"table": np.linspace(-1, 1, VOCABULARY * 4, dtype=np.float32).reshape(-1, 4)},
    "out": np.array([0.5, -1.0, 2.0, 0.25], np.float32),
    "letter": np.uint8(ord("a")),
    "unused": np.ones(3, np.float32),
}
INPUTS = {
    "predict": {
        "ids": Spec(("b", "t"), "int32", lengths="lengths", low=0, high=VOCABULARY),
        "weight": Spec(("b",), "float32"),
    },
    "letters": {"text": Spec(("b", "n"), "bytes", lengths="lengths")},
}
BUCKETS = {"b": [1, 4], "t": [4, 8], "n": [6]}


@pytest.fixture(scope="session")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle; do not write to it."""
    path = tmp_path_factory.mktemp("bundle") / "tiny"
    functions = {"predict": predict, "letters": letters}
    export.save(path, functions, PARAMS, inputs=INPUTS, buckets=BUCKETS, metadata={"note": "tiny"})
    return path


@pytest.fixture(scope="session")
def loaded(sealed: Path) -> export.Loaded:
    """The bundle, loaded on the first device."""
    return export.load(sealed)


@pytest.fixture
def copy(sealed: Path, tmp_path: Path) -> Path:
    """A copy of the bundle to damage."""
    return Path(shutil.copytree(sealed, tmp_path / "copy"))


@pytest.fixture(scope="session")
def original() -> Callable[..., dict[str, jax.Array]]:
    """The function that `predict` of the bundle was made of, compiled by jax."""
    return jax.jit(predict)
