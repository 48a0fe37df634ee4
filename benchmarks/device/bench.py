"""One GPU: `make device-bench`. Training MFU, decode's share of the memory bandwidth, and peers.

Peaks are measured in the same run: a product of two bfloat16 matrices, and a copy of device memory.
A peer takes part where it is installed: torch's attention beside ours (forward and backward), and
transformers' greedy decoding beside the engine's. Times are medians of turns after a warm-up, each
ended by waiting for the device. `DEVICE=cpu` runs tiny sizes, to see that the script works.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import _harness
from fornax import kernels
from fornax.llm import LLM, SamplingParams
from fornax.mesh import DtypePolicy
from fornax.models import DecoderConfig, create_decoder, flops_per_token
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import first_state, prepare

ON_GPU = os.environ.get("DEVICE", "gpu") == "gpu"
TRAINED = (
    DecoderConfig(
        vocab_size=32_768,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        max_position_embeddings=4096,
    )
    if ON_GPU
    else DecoderConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2
    )
)
SERVED = (
    DecoderConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        max_position_embeddings=4096,
    )
    if ON_GPU
    else TRAINED
)
"""Llama 3.1 8B's shape."""
BATCH, LENGTH = (8, 4096) if ON_GPU else (2, 64)
ATTENTION = (4, 4096, 16, 128) if ON_GPU else (1, 1024, 2, 16)
DECODES = [(1, 512), (32, 512), (128, 512)] if ON_GPU else [(1, 8), (2, 8)]
NEW = 64 if ON_GPU else 4

Row = tuple[str, str, str]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = jax.local_devices()[0]
    if ON_GPU and device.platform != "gpu":
        sys.exit(f"DEVICE=gpu and jax has {jax.devices()}; install jax[cuda13], or DEVICE=cpu")
    flops, bandwidth = peak_flops(), peak_bandwidth()
    rows: list[Row] = [
        ("bfloat16 product", f"{flops / 1e12:.3g} TFLOP/s", "measured peak"),
        ("copy of device memory", f"{bandwidth / 1e9:.4g} GB/s", "measured peak"),
        *training(flops),
        *attention(flops),
        *decoding(bandwidth),
    ]
    text = report(device.device_kind, rows)
    print(text)
    kind = device.device_kind.lower().replace(" ", "_")
    if ON_GPU:
        print(_harness.write_results("device_bench", text, device=kind))


def median_seconds(work: Callable[[], Any], turns: int = 10) -> float:
    """The median of turns after a warm-up, each waited for."""
    jax.block_until_ready(work())
    taken = []
    for _ in range(turns):
        start = time.perf_counter()
        jax.block_until_ready(work())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak_flops() -> float:
    size = 8192 if ON_GPU else 256
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / median_seconds(lambda: product(a, b))


def peak_bandwidth() -> float:
    x = jax.random.normal(jax.random.key(0), (2**30 if ON_GPU else 2**20,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: copy(x))


def training(peak: float) -> list[Row]:
    """A packed step in bfloat16 with AdamW on rows of two documents."""
    config = TrainConfig(
        model=TRAINED,
        batch_size=BATCH,
        seq_len=LENGTH,
        steps=100,
        remat="save_attention",
        dtypes=DtypePolicy(compute="bfloat16"),
    )
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), jax.devices()[:1])
    said: list[str] = []
    programs.log = said.append
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH, LENGTH)).astype(np.int32)
    half = np.arange(LENGTH // 2, dtype=np.int32)
    rows = {
        "tokens": tokens,
        "targets": tokens,
        "segment_ids": np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(BATCH, 0).astype(np.int32),
        "positions": np.tile(half, (BATCH, 2)),
        "loss_weights": np.ones((BATCH, LENGTH), np.float32),
    }
    held = [first_state(config, programs)]

    def step() -> Any:
        held[0], metrics = programs.step(held[0], rows)
        return metrics

    seconds = median_seconds(step)
    rate = BATCH * LENGTH / seconds
    mfu = rate * flops_per_token(TRAINED, LENGTH) / peak
    return [
        (
            "training, packed rows",
            f"{seconds * 1e3:.4g} ms, {rate:,.0f} tokens/s",
            f"MFU {mfu:.1%}",
        ),
        *(("", line, "") for line in said),
    ]


def attention(peak: float) -> list[Row]:
    """Causal attention forward and backward: each of our implementations, and torch's."""
    B, T, N, H = ATTENTION
    q, k, v = (jax.random.normal(jax.random.key(i), ATTENTION, jnp.bfloat16) for i in range(3))
    flops = 3.5 * 2 * 2 * B * N * T * T * H / 2  # half is masked; backward is two and a half
    found: list[Row] = []
    for name in ("cudnn", "blockwise", "xla"):
        if name == "cudnn" and not ON_GPU:
            continue

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, name: str = name) -> jax.Array:
            o = kernels.attention(q, k, v, scale=H**-0.5, implementation=name)
            return jnp.sum(o.astype(jnp.float32))

        grad = jax.jit(jax.grad(loss, (0, 1, 2)))
        seconds = median_seconds(lambda grad=grad: grad(q, k, v))
        share = f"{flops / seconds / peak:.1%} of the peak"
        found.append((f"attention, {name}", f"{seconds * 1e3:.4g} ms", share))
    if ON_GPU and importlib.util.find_spec("torch"):
        seconds = torch_attention()
        share = f"{flops / seconds / peak:.1%} of the peak"
        found.append(("attention, torch SDPA", f"{seconds * 1e3:.4g} ms", share))
    return found


def torch_attention() -> float:
    import torch

    B, T, N, H = ATTENTION
    arrays = [
        torch.randn(B, N, T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]

    def work() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)
        torch.autograd.grad(out.sum(), arrays)
        torch.cuda.synchronize()

    return median_seconds(work)


def decoding(bandwidth: float) -> list[Row]:
    """Greedy decoding: bytes of weights and cache that each step must read over its time."""
    model = create_decoder(SERVED, seed=0, dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    most = max(batch for batch, _ in DECODES)
    llm = LLM(model, dtype="bfloat16", max_num_seqs=most, max_model_len=1024 if ON_GPU else 32)
    read = _weights(SERVED) * 2
    of_token = 2 * SERVED.num_layers * SERVED.kv_heads * SERVED.head_width * 2
    found = []
    for batch, prompt in DECODES:
        seconds = _step_seconds(llm, batch, prompt)
        share = (read + batch * (prompt + NEW / 2) * of_token) / seconds / bandwidth
        rate = f"{seconds * 1e3:.4g} ms per step, {batch / seconds:,.0f} tokens/s"
        found.append((f"decode, {batch} x {prompt}", rate, f"{share:.1%} of the bandwidth"))
    if ON_GPU and all(map(importlib.util.find_spec, ("torch", "transformers"))):
        del llm, model
        found += transformers_decoding(read, of_token, bandwidth)
    return found


def _weights(config: DecoderConfig) -> int:
    """Numbers that a step reads: all but the embedding table."""
    from fornax.models import num_parameters

    return num_parameters(config) - config.vocab_size * config.hidden_size


def _step_seconds(llm: LLM, batch: int, prompt: int) -> float:
    """The time between tokens: a long generation less a short one, so that prompts drop out."""
    rng = np.random.default_rng(0)

    def taken(tokens: int) -> float:
        prompts = rng.integers(0, 256, (batch, prompt)).tolist()  # new ones: nothing is reused
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        return time.perf_counter() - start

    taken(2)
    turns = [taken(1 + NEW) - taken(1) for _ in range(3)]
    return max(statistics.median(turns) / NEW, 1e-9)


def transformers_decoding(read: int, of_token: int, bandwidth: float) -> list[Row]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SERVED.vocab_size,
        hidden_size=SERVED.hidden_size,
        intermediate_size=SERVED.intermediate_size,
        num_hidden_layers=SERVED.num_layers,
        num_attention_heads=SERVED.num_heads,
        num_key_value_heads=SERVED.kv_heads,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    found = []
    for batch, prompt in DECODES:
        ids = torch.randint(0, 256, (batch, prompt), device="cuda")

        def taken(tokens: int, ids: Any = ids) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )
            torch.cuda.synchronize()
            return time.perf_counter() - start

        taken(2)
        seconds = max((taken(1 + NEW) - taken(1)) / NEW, 1e-9)
        share = (read + batch * (prompt + NEW / 2) * of_token) / seconds / bandwidth
        rate = f"{seconds * 1e3:.4g} ms per step, {batch / seconds:,.0f} tokens/s"
        name = f"decode, {batch} x {prompt}, transformers"
        found.append((name, rate, f"{share:.1%} of the bandwidth"))
    return found


def report(kind: str, rows: list[Row]) -> str:
    lines = ["# One device", "", f"{kind}; jax {jax.__version__}. `make device-bench`.", ""]
    lines += ["| what | measured | share |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    main()
