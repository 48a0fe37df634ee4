"""The models of the model-server benchmark: plain JAX functions, seeded weights, seeded requests.

Every contestant hosts these functions with these weights and buckets, so this file runs in any of
their environments: it needs numpy, and jax where a function is traced.

Shapes: B rows, T tokens, D width, N heads, H head width.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]

WIDTH, LAYERS, HEADS, MLP, VOCABULARY, TOKENS = 384, 12, 12, 1536, 30522, 128
"""The encoder: the size that sentence embeddings are usually made with."""
FIELDS, ROWS_A_TABLE, EMBED, DENSE = 26, 10_000, 16, 13
"""The recommender: categorical fields, rows and width of each table, numbers beside them."""
CANDIDATES = 16
"""Rows of one request to the recommender: the candidates to score for one user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A function to host: `fn(params, **inputs) -> dict`, as every contestant is given it."""

    name: str
    fn: Callable[..., dict[str, Any]]
    make_params: Callable[[np.random.Generator], dict[str, np.ndarray]]
    make_inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    """One request's inputs, by name; dimension 0 is the rows."""
    inputs: dict[str, tuple[str, tuple[int | str, ...]]]
    """Name to dtype and shape; strings are the dimensions that vary."""
    output: str
    buckets: dict[str, tuple[int, ...]]
    rows: int = 1
    """Rows of a request."""
    ragged: str = ""
    """The input whose second dimension differs from row to row; `fn` takes `lengths` for it."""

    def params(self) -> dict[str, np.ndarray]:
        return self.make_params(np.random.default_rng(0))

    def requests(self, count: int) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(1)
        return [self.make_inputs(rng) for _ in range(count)]


def bucket(sizes: tuple[int, ...], size: int) -> int:
    """Return the smallest of the ascending `sizes` that holds `size`."""
    return next(s for s in sizes if s >= size)


def assemble(model: Model, requests: list[Arrays]) -> dict[str, np.ndarray]:
    """Stack requests into the smallest bucket, as `fn` takes them: padded, lengths filled in."""
    rows = sum(len(next(iter(request.values()))) for request in requests)
    b = bucket(model.buckets["b"], rows)
    made: dict[str, np.ndarray] = {}
    for name, (dtype, shape) in model.inputs.items():
        if name == model.ragged:
            made |= _ragged(model, [request[name] for request in requests], b)
            continue
        out = np.zeros((b, *(int(size) for size in shape[1:])), dtype)
        np.concatenate([request[name] for request in requests], out=out[:rows])
        made[name] = out
    return made


def _ragged(model: Model, arrays: list[np.ndarray], b: int) -> dict[str, np.ndarray]:
    t = bucket(model.buckets["t"], max(array.shape[1] for array in arrays))
    out, lengths = np.zeros((b, t), np.int32), np.zeros(b, np.int32)
    row = 0
    for array in arrays:
        end = row + array.shape[0]
        out[row:end, : array.shape[1]] = array
        lengths[row:end] = array.shape[1]
        row = end
    return {model.ragged: out, "lengths": lengths}


def jitted(model: Model) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """Return the function compiled at every bucket: what a peer that runs Python calls."""
    import jax

    compiled = jax.jit(model.fn)
    params = jax.device_put(model.params())
    sample = model.requests(1)[0]
    for dims in itertools.product(*model.buckets.values()):
        sizes = dict(zip(model.buckets, dims, strict=True))
        row = {}
        for name, array in sample.items():
            shape = (sizes[n] if isinstance(n, str) else n for n in model.inputs[name][1][1:])
            row[name] = np.zeros((1, *shape), array.dtype)
        compiled(params, **assemble(model, [row] * sizes["b"]))[model.output].block_until_ready()

    def run(inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(compiled(params, **inputs)[model.output])

    return run


def _dense(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)


def _mlp_params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = (64, 256, 256, 10)
    params = {}
    for layer, (n, m) in enumerate(itertools.pairwise(sizes)):
        params[f"w{layer}"] = _dense(rng, n, m)
        params[f"b{layer}"] = 0.1 * rng.standard_normal(m).astype(np.float32)
    return params


def mlp(params: Any, *, x: Any) -> dict[str, Any]:
    """Two hidden layers of 256 over 64 features; probabilities of 10 classes."""
    import jax

    x = jax.nn.relu(x @ params["w0"] + params["b0"])
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    return {"scores": jax.nn.softmax(x @ params["w2"] + params["b2"])}


def _recommender_params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = (FIELDS * EMBED + EMBED, 512, 256, 1)
    params = {"tables": rng.standard_normal((FIELDS, ROWS_A_TABLE, EMBED), dtype=np.float32)}
    params["dense"] = _dense(rng, DENSE, EMBED)
    for layer, (n, m) in enumerate(itertools.pairwise(sizes)):
        params[f"w{layer}"] = _dense(rng, n, m)
        params[f"b{layer}"] = 0.1 * rng.standard_normal(m).astype(np.float32)
    return params


def recommender(params: Any, *, dense: Any, ids: Any) -> dict[str, Any]:
    """Embed 26 categorical fields, join them with the numbers, score with three layers."""
    import jax
    import jax.numpy as jnp

    embedded = params["tables"].reshape(FIELDS * ROWS_A_TABLE, EMBED)
    offsets = ROWS_A_TABLE * np.arange(FIELDS, dtype=np.int32)
    x = embedded[ids + offsets].reshape(ids.shape[0], FIELDS * EMBED)
    x = jnp.concatenate([x, jax.nn.relu(dense @ params["dense"])], axis=1)
    x = jax.nn.relu(x @ params["w0"] + params["b0"])
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    return {"score": jax.nn.sigmoid(x @ params["w2"] + params["b2"])[:, 0]}


def _encoder_params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    params = {
        "tokens": 0.5 * rng.standard_normal((VOCABULARY, WIDTH), dtype=np.float32),
        "positions": 0.1 * rng.standard_normal((TOKENS, WIDTH), dtype=np.float32),
    }
    for name in ("embed", *(f"{n}.{part}" for n in range(LAYERS) for part in ("first", "second"))):
        params[f"{name}.scale"] = 1 + 0.1 * rng.standard_normal(WIDTH).astype(np.float32)
        params[f"{name}.shift"] = 0.1 * rng.standard_normal(WIDTH).astype(np.float32)
    for n in range(LAYERS):
        for part, size in (("qkv", 3 * WIDTH), ("o", WIDTH)):
            params[f"{n}.{part}"] = _dense(rng, WIDTH, size)
            params[f"{n}.{part}.b"] = 0.1 * rng.standard_normal(size).astype(np.float32)
        params[f"{n}.up"], params[f"{n}.down"] = _dense(rng, WIDTH, MLP), _dense(rng, MLP, WIDTH)
        params[f"{n}.up.b"] = 0.1 * rng.standard_normal(MLP).astype(np.float32)
        params[f"{n}.down.b"] = 0.1 * rng.standard_normal(WIDTH).astype(np.float32)
    return params


def encoder(params: Any, *, ids: Any, lengths: Any) -> dict[str, Any]:
    """Embed sentences: a post-norm transformer encoder, mean over each row's own tokens."""
    import jax
    import jax.numpy as jnp

    b, t = ids.shape
    heads = (b, t, HEADS, WIDTH // HEADS)
    mask_BT = jnp.arange(t) < lengths[:, None]
    bias_B11T = jnp.where(mask_BT, 0.0, -1e9)[:, None, None, :]

    def norm(x: Any, name: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        spread = jnp.square(x - mean).mean(-1, keepdims=True)
        scaled = (x - mean) * jax.lax.rsqrt(spread + 1e-12)
        return scaled * params[f"{name}.scale"] + params[f"{name}.shift"]

    x_BTD = norm(params["tokens"][ids] + params["positions"][jnp.arange(t)], "embed")
    for n in range(LAYERS):
        qkv = x_BTD @ params[f"{n}.qkv"] + params[f"{n}.qkv.b"]
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * (WIDTH // HEADS) ** -0.5 + bias_B11T
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v).reshape(b, t, WIDTH)
        x_BTD = norm(x_BTD + mixed @ params[f"{n}.o"] + params[f"{n}.o.b"], f"{n}.first")
        up = x_BTD @ params[f"{n}.up"] + params[f"{n}.up.b"]
        up = 0.5 * up * (1 + jax.lax.erf(up * np.float32(np.sqrt(0.5))))
        x_BTD = norm(x_BTD + up @ params[f"{n}.down"] + params[f"{n}.down.b"], f"{n}.second")
    sums_BD = jnp.where(mask_BT[:, :, None], x_BTD, 0).sum(1)
    mean_BD = sums_BD / jnp.maximum(lengths, 1)[:, None]
    length_B1 = jnp.sqrt(jnp.square(mean_BD).sum(-1, keepdims=True) + 1e-12)
    return {"embedding": mean_BD / length_B1}


def _sentence(rng: np.random.Generator) -> dict[str, np.ndarray]:
    size = int(np.clip(np.exp(rng.normal(np.log(24), 0.7)), 4, TOKENS))
    return {"ids": rng.integers(VOCABULARY, size=(1, size), dtype=np.int32)}


def _candidates(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "dense": rng.standard_normal((CANDIDATES, DENSE), dtype=np.float32),
        "ids": rng.integers(ROWS_A_TABLE, size=(CANDIDATES, FIELDS), dtype=np.int32),
    }


MODELS = {
    model.name: model
    for model in (
        Model(
            name="mlp",
            fn=mlp,
            make_params=_mlp_params,
            make_inputs=lambda rng: {"x": rng.standard_normal((1, 64), dtype=np.float32)},
            inputs={"x": ("float32", ("b", 64))},
            output="scores",
            buckets={"b": (1, 2, 4, 8, 16, 32, 64)},
        ),
        Model(
            name="recommender",
            fn=recommender,
            make_params=_recommender_params,
            make_inputs=_candidates,
            inputs={"dense": ("float32", ("b", DENSE)), "ids": ("int32", ("b", FIELDS))},
            output="score",
            buckets={"b": (16, 32, 64, 128, 256, 512, 1024)},
            rows=CANDIDATES,
        ),
        Model(
            name="encoder",
            fn=encoder,
            make_params=_encoder_params,
            make_inputs=_sentence,
            inputs={"ids": ("int32", ("b", "t"))},
            output="embedding",
            buckets={"b": (1, 4, 8), "t": (16, 24, 32, 48, 64, 96, 128)},
            ragged="ids",
        ),
    )
}
