"""The DiT of diffusers as a careful user writes it in plain JAX: one scan, one jitted step.

Legend: B batch, T tokens, D width, N heads, H head width, L layers, C channels of a patch.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = Any


def params_of(state: Mapping[str, Any]) -> Params:
    """Parameters by short names, from the arrays of Fornax's module: equal weights for all."""
    block = state["blocks"][0]
    attention, vectors = block["attention"], block["vectors"]
    time = vectors["embedder"]["time"]
    layers = {
        **{f"{n}_w": attention[n]["kernel"] for n in ("q", "k", "v", "out")},
        **{f"{n}_b": attention[n]["bias"] for n in ("q", "k", "v", "out")},
        **{f"{n}_w": block["mlp"][n]["kernel"] for n in ("up", "down")},
        **{f"{n}_b": block["mlp"][n]["bias"] for n in ("up", "down")},
        "time1_w": time["up"]["kernel"],
        "time1_b": time["up"]["bias"],
        "time2_w": time["down"]["kernel"],
        "time2_b": time["down"]["bias"],
        "classes": vectors["embedder"]["classes"]["table"],
        "ada_w": vectors["projection"]["linear"]["kernel"],
        "ada_b": vectors["projection"]["linear"]["bias"],
    }
    head = state["head"]
    return {
        "layers": layers,
        "patch_w": state["patch"]["kernel"],
        "patch_b": state["patch"]["bias"],
        "ada_w": head["modulation"]["linear"]["kernel"],
        "ada_b": head["modulation"]["linear"]["bias"],
        "out_w": head["out"]["kernel"],
        "out_b": head["out"]["bias"],
    }


def norm(x: jax.Array, eps: float) -> jax.Array:
    """Layer norm without weights, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)


def time_features(time_B: jax.Array, width: int = 256) -> jax.Array:
    """Cosines and sines of the time, as diffusers' `Timesteps(width, True, 1)`."""
    half = width // 2
    frequencies = jnp.exp(-np.log(10_000) / (half - 1) * jnp.arange(half))
    angles = time_B[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def apply(
    params: Params, positions_TD: jax.Array, x_BHWC: jax.Array, time_B: Any, classes_B: Any
) -> jax.Array:
    """The DiT's output for latents, in the dtype of the parameters."""
    B, rows, columns, channels = x_BHWC.shape
    dtype = params["patch_w"].dtype
    x = x_BHWC.reshape(B, rows // 2, 2, columns // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(B, -1, 4 * channels).astype(dtype) @ params["patch_w"] + params["patch_b"]
    x = x + positions_TD.astype(dtype)
    features = time_features(time_B).astype(dtype)

    def embed(p: Params) -> jax.Array:
        hidden = jax.nn.silu(features @ p["time1_w"] + p["time1_b"])
        return jax.nn.silu(hidden @ p["time2_w"] + p["time2_b"] + p["classes"][classes_B])

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        vectors = jnp.einsum("bd,dne->nbe", embed(p), p["ada_w"]) + p["ada_b"][:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors[:, :, None]
        h = norm(x, 1e-6) * (1 + scale1) + shift1
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[f"{n}_w"]) + p[f"{n}_b"] for n in "qkv")
        o = jax.nn.dot_product_attention(q, k, v)
        x = x + gate1 * (jnp.einsum("btnh,nhd->btd", o, p["out_w"]) + p["out_b"])
        h = norm(x, 1e-5) * (1 + scale2) + shift2
        h = jax.nn.gelu(h @ p["up_w"] + p["up_b"])
        return x + gate2 * (h @ p["down_w"] + p["down_b"]), None

    x = jax.lax.scan(block, x, params["layers"])[0]
    first = jax.tree.map(lambda stacked: stacked[0], params["layers"])
    vectors = jnp.einsum("bd,dne->nbe", embed(first), params["ada_w"]) + params["ada_b"][:, None]
    shift, scale = vectors[:, :, None]
    x = (norm(x, 1e-6) * (1 + scale) + shift) @ params["out_w"] + params["out_b"]
    x = x.reshape(B, rows // 2, columns // 2, 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(B, rows, columns, channels).astype(x_BHWC.dtype)


def train_step(
    positions_TD: jax.Array, settings: Mapping[str, float], compute: str, state: Any, batch: Any
) -> tuple[Any, jax.Array]:
    """Forward, backward, clipping to a norm of 1 and AdamW, written out."""
    params, mu, nu, count = state
    sigma = batch["sigma"][:, None, None, None]
    x = (1 - sigma) * batch["images"] + sigma * batch["noise"]

    def loss(params: Params) -> jax.Array:
        narrow = jax.tree.map(lambda p: p.astype(compute), params)
        found = apply(narrow, positions_TD, x, 1000 * batch["sigma"], batch["classes"])
        return jnp.mean((found - (batch["noise"] - batch["images"])) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    length = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    shrink = jnp.minimum(1.0, settings["clip"] / length)
    count = count + 1
    b1, b2 = settings["b1"], settings["b2"]

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        g = g * shrink
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        unit = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + settings["eps"])
        return p - settings["rate"] * (unit + settings["decay"] * p), m, v

    new = jax.tree.map(update, params, mu, nu, grads)
    picked = [jax.tree.map(lambda _, n, i=i: n[i], params, new) for i in range(3)]
    return (*picked, count), value


def sample(
    params: Params, positions_TD: jax.Array, levels: np.ndarray, scale: float, x: Any, classes: Any
) -> jax.Array:
    """Euler steps along the flow under guidance, one scan."""
    both = jnp.concatenate([classes, jnp.full_like(classes, 1000)])

    def step(x: jax.Array, pair: Any) -> tuple[jax.Array, None]:
        sigma, after = pair
        time = jnp.full((2 * len(x),), 1000 * sigma)
        with_, without = jnp.split(
            apply(params, positions_TD, jnp.concatenate([x, x]), time, both), 2
        )
        return x + (after - sigma) * (without + scale * (with_ - without)), None

    pairs = (jnp.asarray(levels[:-1], jnp.float32), jnp.asarray(levels[1:], jnp.float32))
    return jax.lax.scan(step, x, pairs)[0]
