"""Time one training step of a mixture of experts: Fornax beside hand-written JAX and PyTorch.

    python benchmarks/moe_step.py                    # both shapes, all contestants installed
    python benchmarks/moe_step.py --shape tiny --rounds 2 --only fornax,jax-blocks

The step is the whole of it: forward, backward, clipping of the global gradient norm to 1, AdamW
with weight decay. All contestants but the dense one train the same Qwen3-MoE, from the same
weights, on the same tokens; no token is dropped and no loss balances the router. Their losses are
compared before anything is timed. `fornax-dense` is Fornax's step of a decoder whose MLPs are as
wide as all experts of a token together: as many multiplications, the router's aside.

`jax-blocks` is plain JAX: tokens sorted by expert, each expert's filled up to whole blocks of rows,
one batched product over the blocks, each with its expert's matrix. `lax.ragged_dot` is not
measured: XLA's CPU backend multiplies all rows with every matrix. `torch-fp32` is transformers
with PyTorch's grouped product, its default; `torch-fp32-loop` its loop over the experts.

Install the extra `parity` for the PyTorch contestants.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import _harness
import _random_llama
import train_step
from train_step import PEAKS, Ready

BLOCK = 64
"""Rows of a block of `jax-blocks`."""
FIRST, LATER = 2e-3, 2e-2
"""How far float32 losses may lie apart: that of the first step, and those of the two after it."""
FIRST_BFLOAT16 = 5e-2
"""The same for contestants in bfloat16, of the first step."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of `_random_llama.SHAPES` and a batch."""

    name: str
    batch: int
    length: int

    @property
    def model(self) -> _random_llama.MoeShape:
        """The model's sizes."""
        found = _random_llama.SHAPES[self.name]
        assert isinstance(found, _random_llama.MoeShape)
        return found

    @property
    def vocabulary(self) -> int:
        """Different tokens."""
        return self.model.vocab

    def flops(self) -> float:
        """Operations of forward and backward: 6 for each token and parameter that it is multiplied
        with, and causal attention's (`train_step.Shape.flops`)."""
        model = self.model
        queries = model.heads * model.head_dim
        each = 6 * model.active + 6 * model.layers * queries * self.length
        return self.batch * self.length * each

    def dense_flops(self) -> float:
        """The same of the dense model: it has no router."""
        router = self.model.layers * self.model.width * self.model.experts
        return self.flops() - 6 * self.batch * self.length * router

    def __str__(self) -> str:
        return f"{self.model}; batch {self.batch} x {self.length}"


SHAPES = {
    "small": Shape("qwen3-moe-20m", 8, 512),
    "large": Shape("qwen3-moe-90m", 8, 256),
    "tiny": Shape("qwen3-moe-tiny", 2, 32),
}


def fornax(shape: Shape, folder: Path, *, compute: Any = "float32") -> Ready:
    """The trainer's own step on the library's own decoder, as `fornax train` runs it."""
    from fornax.models import config_from_hf, load_pretrained, read_config

    path = folder / shape.name
    load = functools.partial(load_pretrained, path, "float32", compute_dtype=compute)
    return train_step.trainer(
        config_from_hf(read_config(path)), shape, compute=compute, pretrained=load
    )


def fornax_dense(shape: Shape, folder: Path) -> Ready:
    """Fornax's step of a model of equal active multiplications without experts."""
    from fornax.models import config_from_hf, read_config

    config = config_from_hf(read_config(folder / shape.name))
    width = shape.model.hidden * shape.model.experts_per_token
    dense = dataclasses.replace(
        config, experts=None, mlp_pattern=("mlp",), intermediate_size=width, family=None
    )
    return train_step.trainer(dense, shape)


def jax_blocks(shape: Shape, folder: Path) -> Ready:
    """What a careful user writes in plain JAX: dropless, sorted tokens, padded blocks."""
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    s = shape.model
    L, D, N, K, H = s.layers, s.width, s.heads, s.kv_heads, s.head_dim
    E, k, B, T = s.experts, s.experts_per_token, shape.batch, shape.length
    blocks = B * T * k // BLOCK + E  # none of the experts' last blocks need be full
    found = load_file(folder / shape.name / "model.safetensors")

    def of_layer(number: int) -> dict[str, jax.Array]:
        def get(name: str) -> np.ndarray:
            return found[f"model.layers.{number}.{name}.weight"]

        def experts(part: str) -> np.ndarray:
            return np.stack([get(f"mlp.experts.{e}.{part}_proj").T for e in range(E)])

        matrices = {part: get(f"self_attn.{part}_proj").T for part in "qkvo"}
        norms = {part: get(f"self_attn.{part}_norm") for part in "qk"}
        return {
            **{name: jnp.asarray(matrix) for name, matrix in matrices.items()},
            **{f"norm_{name}": jnp.asarray(scale) for name, scale in norms.items()},
            "norm1": jnp.asarray(get("input_layernorm")),
            "norm2": jnp.asarray(get("post_attention_layernorm")),
            "router": jnp.asarray(get("mlp.gate").T),
            **{part: jnp.asarray(experts(part)) for part in ("gate", "up", "down")},
        }

    params = {
        "embed": jnp.asarray(found["model.embed_tokens.weight"]),
        "head": jnp.asarray(found["lm_head.weight"].T),
        "norm": jnp.asarray(found["model.norm.weight"]),
        "layers": [of_layer(number) for number in range(L)],
    }
    rotate, norm, cross_entropy = train_step.jax_parts(T, H, eps=1e-5)

    def experts(x: jax.Array, p: Any) -> jax.Array:
        """Of tokens [M, D]."""
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), k)
        weights = weights / jnp.sum(weights, -1, keepdims=True)
        chosen = chosen.reshape(-1)
        counts = jnp.bincount(chosen, length=E)
        filled = -(-counts // BLOCK) * BLOCK
        order = jnp.argsort(chosen)
        inside = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))  # place when sorted
        shift = (jnp.cumsum(filled) - filled) - (jnp.cumsum(counts) - counts)
        slot = inside + shift[chosen]
        owner = jnp.searchsorted(jnp.cumsum(filled) // BLOCK, jnp.arange(blocks), side="right")
        owner = jnp.minimum(owner, E - 1)
        rows = jnp.zeros((blocks * BLOCK, D)).at[slot].set(jnp.repeat(x, k, 0), unique_indices=True)
        rows = rows.reshape(blocks, BLOCK, D)
        gate = jnp.einsum("nbd,ndf->nbf", rows, p["gate"][owner])
        up = jnp.einsum("nbd,ndf->nbf", rows, p["up"][owner])
        y = jnp.einsum("nbf,nfd->nbd", jax.nn.silu(gate) * up, p["down"][owner])
        y = y.reshape(-1, D)[slot].reshape(-1, k, D)
        return jnp.sum(y * weights[..., None], 1)

    def layer(x: jax.Array, p: Any) -> jax.Array:
        h = norm(x, p["norm1"])
        q, key, v = (
            (h @ p[n]).reshape(B, T, heads, H) for n, heads in (("q", N), ("k", K), ("v", K))
        )
        q, key = rotate(norm(q, p["norm_q"])), rotate(norm(key, p["norm_k"]))
        o = jax.nn.dot_product_attention(q, key, v, is_causal=True)
        x = x + o.reshape(B, T, N * H) @ p["o"]
        return x + experts(norm(x, p["norm2"]).reshape(-1, D), p).reshape(x.shape)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = params["embed"][batch[:, :-1]]
        for p in params["layers"]:
            x = layer(x, p)
        return cross_entropy(norm(x, params["norm"]) @ params["head"], batch)

    return train_step.jax_adamw(loss, params, shape)


def pytorch(shape: Shape, folder: Path, *, dtype: str, experts: str = "grouped_mm") -> Ready:
    """The Qwen3-MoE of transformers with PyTorch's fused AdamW."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / shape.name,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        experts_implementation=experts,
        use_cache=False,
    )
    return train_step.torch_adamw(model, shape, compiled=False)


CONTESTANTS: dict[str, Callable[[Shape, Path], Ready]] = {
    "fornax": fornax,
    "fornax-bf16": functools.partial(fornax, compute="bfloat16"),
    "fornax-dense": fornax_dense,
    "jax-blocks": jax_blocks,
    "torch-fp32": functools.partial(pytorch, dtype="float32"),
    "torch-fp32-loop": functools.partial(pytorch, dtype="float32", experts="eager"),
    "torch-bf16": functools.partial(pytorch, dtype="bfloat16"),
}


def check_losses(results: Mapping[str, _harness.Result]) -> None:
    """See that all contestants train the same model.

    Raises:
        FailedError: losses of one lie too far from Fornax's.
    """
    wanted = results["fornax"].details["losses"]
    for name, result in results.items():
        if result.absent is not None or name in PEAKS or name == "fornax-dense":
            continue
        found = result.details["losses"]
        first, later = (FIRST_BFLOAT16, np.inf) if "bf16" in name else (FIRST, LATER)
        apart = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
        if apart[0] > first or max(apart[1:]) > later:
            raise _harness.FailedError(
                f"the losses of {name}, {found}, are not those of fornax, {wanted}: it trains "
                "another model, and its times compare nothing"
            )


def main() -> None:
    """Run the benchmark, or one contestant of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: small, large")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        shape = SHAPES[args.shape[0]]
        if args.worker in PEAKS:
            _harness.serve(lambda: PEAKS[args.worker](shape))
        else:
            _harness.serve(lambda: CONTESTANTS[args.worker](shape, args.folder))
        return
    wanted = args.only.split(",") if args.only else list(CONTESTANTS)
    unknown = sorted(set(wanted) - set(CONTESTANTS))
    if unknown or "fornax" not in wanted:
        parser.error(f"--only takes fornax and any of {', '.join(CONTESTANTS)}; not {unknown}")
    parts = []
    for name in args.shape or ["small", "large"]:
        shape = SHAPES[name]
        _random_llama.make(shape.name, args.folder)
        command = [sys.executable, __file__, "--folder", str(args.folder), "--shape", name]
        commands = {
            contestant: [*command, "--worker", contestant] for contestant in (*wanted, *PEAKS)
        }
        results = _harness.contest(commands, rounds=args.rounds, check=check_losses)
        flops = {"fornax-dense": shape.dense_flops()}
        parts.append(train_step.report(shape, results, flops))
        print(parts[-1], flush=True)
    if not args.no_results:
        head = [
            "# One training step of a mixture of experts",
            "`python benchmarks/moe_step.py`: forward, backward, clipping, AdamW; float32 unless "
            "named otherwise, one set of weights, no token dropped. Contestants take turns; ratios "
            "are medians within rounds. Processor time is the least of all turns, and what other "
            "work on the machine disturbs least. `fornax-dense` has as many active "
            "multiplications and no experts.",
            _harness.machine()
            + ". "
            + _harness.versions("jax", "jaxlib", "flax", "optax", "torch", "transformers")
            + ".",
        ]
        print(_harness.write_results("moe_step", "\n\n".join([*head, *parts])))


if __name__ == "__main__":
    main()
