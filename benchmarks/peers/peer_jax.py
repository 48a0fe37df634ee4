"""Contestant: a Llama as one would write it in plain JAX: contiguous cache, jitted steps, argmax.

Two compiled programs: the whole prompt at once, and one token per row. The cache is donated, layers
are scanned, and each step is dispatched before the tokens of the one before it are fetched.

Shapes: B rows, T tokens, S cache slots, D width, K key-value heads, H head width.
"""

import json
import os
from functools import partial
from pathlib import Path

from _protocol import AbsentError, Record, serve


class PlainJax:
    """The model's weights and, for one shape, its two compiled programs."""

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        if precision.startswith("int"):
            raise AbsentError("a plain XLA product of integers is slower than one of float32")
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        import jax
        import jax.numpy as jnp
        from safetensors.numpy import load_file

        self._config = json.loads((model / "config.json").read_text())
        self._dtype = jnp.dtype(precision)
        loaded = load_file(model / "model.safetensors")
        self._weights = jax.tree.map(
            lambda array: jnp.asarray(array, self._dtype), stacked(loaded, self._config)
        )
        self.details = {
            "versions": f"jax {jax.__version__}",
            "weights": precision,
            "cache": precision,
        }

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        import jax
        import jax.numpy as jnp

        c = self._config
        rows, slots = (c["num_hidden_layers"], batch), prompt + new
        shape = (*rows, slots, c["num_key_value_heads"], c["head_dim"])
        self._empty = lambda: (jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype))
        step = jax.jit(partial(forward, c), donate_argnums=1)
        cache = jax.eval_shape(self._empty)
        start = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = [
            step.lower(
                self._weights, cache, jax.ShapeDtypeStruct((batch, length), jnp.int32), start
            ).compile()
            for length in (prompt, 1)
        ]
        self._prefill, self._decode = compiled

    def release(self) -> None:
        pass  # a turn's cache ends with it

    def turn(self, prompts: list[list[int]], new: int, record: Record) -> None:
        import jax.numpy as jnp
        import numpy as np

        length = len(prompts[0])
        tokens, cache = self._prefill(
            self._weights, self._empty(), jnp.asarray(prompts, jnp.int32), jnp.int32(0)
        )
        for step in range(new - 1):
            following, cache = self._decode(
                self._weights, cache, tokens[:, None], jnp.int32(length + step)
            )
            record.step(np.asarray(tokens).tolist())
            tokens = following
        record.step(np.asarray(tokens).tolist())


def stacked(loaded, config):
    """Arrays of a layer stacked over layers; matrices as [in, out]."""
    import numpy as np

    def layers(name: str):
        arrays = (
            loaded[f"model.layers.{number}.{name}.weight"].T
            for number in range(config["num_hidden_layers"])
        )
        return np.stack([np.ascontiguousarray(array) for array in arrays])

    attention = {f"{part}_proj": layers(f"self_attn.{part}_proj") for part in "qkvo"}
    mlp = {f"{part}_proj": layers(f"mlp.{part}_proj") for part in ("gate", "up", "down")}
    norms = {name: layers(name) for name in ("input_layernorm", "post_attention_layernorm")}
    return {
        "embed": loaded["model.embed_tokens.weight"],
        "norm": loaded["model.norm.weight"],
        "head": np.ascontiguousarray(loaded["lm_head.weight"].T),
        "layers": {**attention, **mlp, **norms},
    }


def forward(config, weights, cache, tokens_BT, start):
    """Return (next tokens [B], cache) after tokens at positions start, start + 1, …"""
    import jax
    import jax.numpy as jnp

    b, t = tokens_BT.shape
    n, k, h = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    slots = cache[0].shape[2]
    positions_T = start + jnp.arange(t)
    visible_TS = jnp.arange(slots) <= positions_T[:, None]
    frequencies = config["rope_theta"] ** (-jnp.arange(0, h, 2) / h)
    angles_TH = positions_T[:, None] * frequencies
    sin, cos = jnp.sin(angles_TH)[:, None], jnp.cos(angles_TH)[:, None]

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(x32 * x32, -1, keepdims=True)
        return (x32 * jax.lax.rsqrt(variance + config["rms_norm_eps"])).astype(x.dtype) * scale

    def rotate(x):
        low, high = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)

    def layer(x_BTD, inputs):
        w, keys_BSKH, values_BSKH = inputs
        y = norm(x_BTD, w["input_layernorm"])
        q = rotate((y @ w["q_proj"]).reshape(b, t, n, h)).reshape(b, t, k, n // k, h)
        new_keys = rotate((y @ w["k_proj"]).reshape(b, t, k, h))
        new_values = (y @ w["v_proj"]).reshape(b, t, k, h)
        keys_BSKH = jax.lax.dynamic_update_slice_in_dim(keys_BSKH, new_keys, start, 1)
        values_BSKH = jax.lax.dynamic_update_slice_in_dim(values_BSKH, new_values, start, 1)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, keys_BSKH, preferred_element_type=jnp.float32)
        scores = jnp.where(visible_TS, scores * h**-0.5, -jnp.inf)
        probabilities = jax.nn.softmax(scores, -1).astype(x_BTD.dtype)
        mixed = jnp.einsum("bkgts,bskh->btkgh", probabilities, values_BSKH).reshape(b, t, n * h)
        x_BTD = x_BTD + mixed @ w["o_proj"]
        y = norm(x_BTD, w["post_attention_layernorm"])
        x_BTD = x_BTD + (jax.nn.silu(y @ w["gate_proj"]) * (y @ w["up_proj"])) @ w["down_proj"]
        return x_BTD, (keys_BSKH, values_BSKH)

    x_BTD, cache = jax.lax.scan(layer, weights["embed"][tokens_BT], (weights["layers"], *cache))
    logits_BV = norm(x_BTD[:, -1], weights["norm"]) @ weights["head"]
    return jnp.argmax(logits_BV.astype(jnp.float32), -1).astype(jnp.int32), cache


if __name__ == "__main__":
    serve(PlainJax)
