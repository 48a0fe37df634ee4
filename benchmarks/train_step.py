"""Time one training step: Fornax beside hand-written JAX and transformers + PyTorch.

    python benchmarks/train_step.py                 # both shapes, all contestants installed
    python benchmarks/train_step.py --shape small --rounds 5 --only fornax,jax-scan

The step is the whole of it: forward, backward, clipping of the global gradient norm to 1, AdamW
with weight decay. All contestants compute the same Llama decoder (RMS norm, rotary embedding,
SwiGLU, untied output) on the same tokens; fp32 unless named otherwise. PyTorch's bf16 has weights
and moments in bfloat16; its autocast, and Fornax's bf16, keep them in float32 and multiply in
bfloat16. All run with huge pages where Linux gives them to those that ask, as `fornax train` does.

Install the extra `parity` for the PyTorch contestants; `torch.compile` needs a C++ compiler.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

import _harness
from fornax.config import environment
from fornax.config.allocation import training_memory

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from fornax.mesh import Rules
    from fornax.models import Decoder, DecoderConfig

LEARNING_RATE, BETA1, BETA2, EPS, DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0

Turn = Callable[[], Any]
Ready = tuple[Turn, dict[str, Any]]


class Step(Protocol):
    """What the step of a contest is made for."""

    @property
    def vocabulary(self) -> int:
        """Different tokens."""
        ...

    @property
    def batch(self) -> int:
        """Rows."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    def flops(self) -> float:
        """Operations of forward and backward."""
        ...


@dataclass(frozen=True)
class Shape:
    """A decoder and a batch."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    def parameters(self) -> int:
        """All parameters but the norms'."""
        layer = 4 * self.width**2 + 3 * self.width * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.width

    def flops(self) -> float:
        """Operations of forward and backward: 6 for each token and multiplied parameter, and causal
        attention's 12 * T / 2 for each token, layer and unit of width (Kaplan et al. 2020, 2.1)."""
        tokens = self.batch * self.length
        multiplied = self.parameters() - self.vocabulary * self.width
        return tokens * (6 * multiplied + 6 * self.layers * self.width * self.length)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, vocabulary {self.vocabulary}, "
            f"batch {self.batch} x {self.length} ({self.parameters() / 1e6:.0f}M parameters)"
        )


SHAPES = {
    "small": Shape(8, 512, 1536, 8, 8192, 8, 256),
    "large": Shape(6, 1024, 2816, 16, 16384, 4, 512),
    "tiny": Shape(2, 64, 128, 4, 256, 2, 64),
}


def tokens(shape: Step) -> np.ndarray:
    """Return the batch every contestant trains on, [B, T + 1]."""
    rng = np.random.default_rng(0)
    return rng.integers(0, shape.vocabulary, (shape.batch, shape.length + 1)).astype(np.int32)


def fornax(shape: Shape, *, compute: Literal["float32", "bfloat16"] = "float32") -> Ready:
    """The trainer's own step on the library's own decoder, as `fornax train` runs it."""
    from fornax.models import DecoderConfig

    model = DecoderConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        max_position_embeddings=shape.length,
        tie_embeddings=False,
    )
    return trainer(model, shape, compute=compute)


def trainer(
    model: "DecoderConfig",
    shape: Step,
    *,
    compute: Literal["float32", "bfloat16"] = "float32",
    pretrained: "Callable[[Mesh, Rules], Decoder] | None" = None,
) -> Ready:
    """The trainer's own step, as `fornax train` runs it, of a decoder with these weights or random
    ones."""
    import jax

    from fornax.mesh import DtypePolicy
    from fornax.models import Decoder
    from fornax.optim import AdamW, Constant, OptimConfig
    from fornax.train.config import TrainConfig
    from fornax.train.goodput import Ledger
    from fornax.train.session import first_state, prepare
    from fornax.train.task import Task
    from fornax.train.tasks import next_token_loss

    dtypes = DtypePolicy(compute=compute)
    task = Task(
        build=lambda rngs: Decoder(model, rngs=rngs, compute_dtype=dtypes.compute_dtype),
        loss=lambda decoder, batch, key: next_token_loss(decoder, batch, remat=TrainConfig.remat),
        batches=_no_batches,
        pretrained=pretrained,
    )
    optim = OptimConfig(
        optimizer=AdamW(b1=BETA1, b2=BETA2, eps=EPS, weight_decay=DECAY),
        learning_rate=LEARNING_RATE,
        schedule=Constant(),
    )
    config = TrainConfig(
        model=model, optim=optim, dtypes=dtypes, batch_size=shape.batch, steps=1000
    )
    programs = prepare(config, task, Ledger())
    state = first_state(config, programs)
    rows = _rows(shape)
    losses = []

    def turn() -> None:
        nonlocal state
        state, metrics = programs.step(state, rows)
        losses.append(jax.block_until_ready(metrics)["loss"])

    return _warm(turn, losses)


def _no_batches(split: str, hosts: Any) -> Any:
    raise LookupError(f"the benchmark makes its own batch, not split {split!r} for {hosts}")


def _rows(shape: Step) -> dict[str, np.ndarray]:
    batch = tokens(shape)
    whole = np.ones((shape.batch, shape.length), np.int32)
    return {
        "tokens": batch[:, :-1],
        "targets": batch[:, 1:],
        "loss_weights": whole.astype(np.float32),
        "segment_ids": whole,
        "positions": np.arange(shape.length, dtype=np.int32)[None] * whole,
    }


def _warm(turn: Turn, losses: list[Any]) -> Ready:
    """Take three turns, and report the losses so that contestants can be seen to do the same."""
    for _ in range(3):
        turn()
    return turn, {"losses": [round(float(loss), 3) for loss in losses]}


def hand_written_jax(shape: Shape, *, scan: bool) -> Ready:
    """What a careful user writes in plain JAX: no framework, one jitted step, buffers donated."""
    import jax
    import jax.numpy as jnp

    L, D, F, N, V = shape.layers, shape.width, shape.hidden, shape.heads, shape.vocabulary
    B, T, H = shape.batch, shape.length, shape.width // shape.heads

    def init(key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 16))

        def normal(*size: int) -> jax.Array:
            return 0.02 * jax.random.normal(next(keys), size)

        layer = {
            "q": normal(L, D, D),
            "k": normal(L, D, D),
            "v": normal(L, D, D),
            "o": normal(L, D, D),
            "gate": normal(L, D, F),
            "up": normal(L, D, F),
            "down": normal(L, F, D),
            "norm1": jnp.ones((L, D)),
            "norm2": jnp.ones((L, D)),
        }
        if not scan:  # one array per layer spares the unrolled program its slices
            layer = [{name: a[i] for name, a in layer.items()} for i in range(L)]
        return {
            "embed": normal(V, D),
            "head": normal(D, V),
            "norm": jnp.ones(D),
            "layers": layer,
        }

    rotate, norm, cross_entropy = jax_parts(T, H, eps=1e-6)

    def layer(x: jax.Array, p: Any) -> jax.Array:
        h = norm(x, p["norm1"])
        q, k, v = ((h @ p[name]).reshape(B, T, N, H) for name in ("q", "k", "v"))
        o = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + o.reshape(B, T, D) @ p["o"]
        h = norm(x, p["norm2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = params["embed"][batch[:, :-1]]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = layer(x, p)
        return cross_entropy(norm(x, params["norm"]) @ params["head"], batch)

    params = jax.jit(init)(jax.random.key(0))
    return jax_adamw(loss, params, shape)


def jax_parts(length: int, head_width: int, *, eps: float) -> tuple[Any, Any, Any]:
    """Rotation of queries or keys [B, T, N, H], RMS norm, and mean cross entropy, in plain JAX."""
    import jax
    import jax.numpy as jnp

    half = head_width // 2
    angle = np.arange(length)[:, None] / 10_000 ** (np.arange(half) / half)
    cos = jnp.asarray(np.cos(angle), jnp.float32)[None, :, None]
    sin = jnp.asarray(np.sin(angle), jnp.float32)[None, :, None]

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale

    def cross_entropy(logits: jax.Array, batch: jax.Array) -> jax.Array:
        target = jnp.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - target)

    return rotate, norm, cross_entropy


def jax_adamw(loss: Callable[[Any, "jax.Array"], "jax.Array"], params: Any, shape: Step) -> Ready:
    """The jitted step of a loss in plain JAX: clipping and AdamW written out, buffers donated."""
    import jax
    import jax.numpy as jnp

    def step(params: Any, mu: Any, nu: Any, count: jax.Array, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        length = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        shrink = jnp.minimum(1.0, CLIP / length)
        count = count + 1

        def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
            g = g * shrink
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            unit = m / (1 - BETA1**count) / (jnp.sqrt(v / (1 - BETA2**count)) + EPS)
            return p - LEARNING_RATE * (unit + DECAY * p), m, v

        new = jax.tree.map(update, params, mu, nu, grads)
        picked = [jax.tree.map(lambda _, n, i=i: n[i], params, new) for i in range(3)]
        return (*picked, count, value)

    state = (params, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)), jnp.zeros(()))
    batch = jnp.asarray(tokens(shape))
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    losses = []

    def turn() -> None:
        nonlocal state
        *state, value = jitted(*state, batch)
        losses.append(jax.block_until_ready((state, value))[1])

    return _warm(turn, losses)


def pytorch(shape: Shape, *, dtype: str, compiled: bool, autocast: bool = False) -> Ready:
    """The Llama model of transformers with PyTorch's fused AdamW, its weights and the optimizer's
    state in one dtype; with `autocast` its products in bfloat16 whatever that is."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model = model.to(getattr(torch, dtype))
    return torch_adamw(model, shape, compiled=compiled, autocast=autocast)


def torch_adamw(model: Any, shape: Step, *, compiled: bool, autocast: bool = False) -> Ready:
    """The step of a model of transformers with PyTorch's fused AdamW."""
    import torch

    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=(BETA1, BETA2),
        eps=EPS,
        weight_decay=DECAY,
        fused=True,
    )
    forward = torch.compile(model) if compiled else model
    batch = torch.from_numpy(tokens(shape)).long()
    losses = []

    def turn() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = forward(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, shape.vocabulary), batch[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())

    return _warm(turn, losses)


def jax_peak(shape: Step) -> Ready:
    """The step's work as plain square float32 products in JAX."""
    import jax
    import jax.numpy as jnp

    a, b = (jnp.asarray(m) for m in _square())
    multiply = jax.jit(lambda a, b: a @ b)

    def turn() -> None:
        for _ in range(_repeats(shape)):
            multiply(a, b).block_until_ready()

    turn()
    return turn, {}


def torch_peak(shape: Step, *, dtype: str) -> Ready:
    """The step's work as plain square products in PyTorch."""
    import torch

    a, b = (torch.from_numpy(m).to(getattr(torch, dtype)) for m in _square())

    def turn() -> None:
        for _ in range(_repeats(shape)):
            a @ b

    turn()
    return turn, {}


_SIDE = 2048


def _square() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, _SIDE, _SIDE)).astype(np.float32)
    return a, b


def _repeats(shape: Step) -> int:
    """Products that take about a tenth of a step's operations."""
    return max(1, round(shape.flops() / 10 / (2 * _SIDE**3)))


CONTESTANTS: dict[str, Callable[[Shape], Ready]] = {
    "fornax": fornax,
    "fornax-bf16": lambda s: fornax(s, compute="bfloat16"),
    "jax-unrolled": lambda s: hand_written_jax(s, scan=False),
    "jax-scan": lambda s: hand_written_jax(s, scan=True),
    "torch-fp32": lambda s: pytorch(s, dtype="float32", compiled=False),
    "torch-fp32-compiled": lambda s: pytorch(s, dtype="float32", compiled=True),
    "torch-autocast": lambda s: pytorch(s, dtype="float32", compiled=False, autocast=True),
    "torch-autocast-compiled": lambda s: pytorch(s, dtype="float32", compiled=True, autocast=True),
    "torch-bf16": lambda s: pytorch(s, dtype="bfloat16", compiled=False),
    "torch-bf16-compiled": lambda s: pytorch(s, dtype="bfloat16", compiled=True),
}

PEAKS: dict[str, Callable[[Step], Ready]] = {
    "matmul peak: jax fp32": jax_peak,
    "matmul peak: torch fp32": lambda s: torch_peak(s, dtype="float32"),
    "matmul peak: torch bf16": lambda s: torch_peak(s, dtype="bfloat16"),
}


def report(shape: Step, results: dict[str, _harness.Result], flops: dict[str, float]) -> str:
    """Return the results of one shape as a table.

    Args:
        flops: operations of a step, of those contestants whose step is not that of the shape.
    """
    peak = max(
        shape_flops / result.best_s()
        for name, result in results.items()
        if name in PEAKS and "fp32" in name and result.turns
        for shape_flops in [_repeats(shape) * 2.0 * _SIDE**3]
    )
    rows = []
    for name, result in results.items():
        if result.absent is not None:
            rows.append([name, f"not run: {result.absent}", "", "", "", "", "", "", ""])
            continue
        is_step = name not in PEAKS
        work = flops.get(name, shape.flops()) if is_step else _repeats(shape) * 2.0 * _SIDE**3
        rows.append(
            [
                name,
                f"{1e3 * result.median_s():.0f}" if is_step else "",
                f"{1e3 * result.best_s():.0f}" if is_step else "",
                f"{1e3 * result.cpu_s():.0f}" if is_step else "",
                f"{_harness.ratio(results, name, 'fornax'):.2f}" if is_step else "",
                f"{result.cpu_s() / results['fornax'].cpu_s():.2f}" if is_step else "",
                f"{work / result.best_s() / 1e9:.0f}",
                f"{100 * work / result.best_s() / peak:.0f}%",
                ", ".join(str(loss) for loss in result.details.get("losses", [])),
            ]
        )
    header = [
        "",
        "median ms",
        "best ms",
        "processor ms",
        "time / Fornax's",
        "processor / Fornax's",
        "GFLOP/s at best",
        "of fp32 peak",
        "first losses",
    ]
    limit = f"At the float32 peak a step takes {1e3 * shape.flops() / peak:.0f} ms."
    return f"## {shape}\n\n{limit}\n\n" + _harness.table(header, rows)


def main() -> None:
    """Run the benchmark, or one contestant of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: small, large")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        shape = SHAPES[args.shape[0]]
        _harness.serve(lambda: {**CONTESTANTS, **PEAKS}[args.worker](shape))
        return
    environment.become(training_memory())
    wanted = args.only.split(",") if args.only else list(CONTESTANTS)
    unknown = sorted(set(wanted) - set(CONTESTANTS))
    if unknown or "fornax" not in wanted:
        parser.error(f"--only takes fornax and any of {', '.join(CONTESTANTS)}; not {unknown}")
    parts = []
    for name in args.shape or ["small", "large"]:
        commands = {
            contestant: [sys.executable, __file__, "--shape", name, "--worker", contestant]
            for contestant in (*wanted, *PEAKS)
        }
        results = _harness.contest(commands, rounds=args.rounds)
        parts.append(report(SHAPES[name], results, {}))
        print(parts[-1], flush=True)
    if not args.no_results:
        head = [
            "# One training step",
            "`python benchmarks/train_step.py`: forward, backward, clipping, AdamW; float32 unless "
            "named otherwise. Contestants take turns; ratios are medians within rounds. "
            "Processor time is the least of all turns, and what other work on the machine disturbs "
            "least.",
            _harness.machine()
            + ". "
            + _harness.versions("jax", "jaxlib", "flax", "optax", "torch", "transformers")
            + ".",
        ]
        print(_harness.write_results("train_step", "\n\n".join([*head, *parts])))


if __name__ == "__main__":
    main()
