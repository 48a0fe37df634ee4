"""Time training and sampling of diffusion models: Fornax beside diffusers and hand-written JAX.

    python benchmarks/diffusion.py                  # every shape and contestant that is installed
    python benchmarks/diffusion.py --quick          # a small DiT, two rounds, no results file
    python benchmarks/diffusion.py --shape dit-30m --rounds 5 --only fornax,jax

A training step is the whole of it: forward, backward, clipping of the global gradient norm to 1,
AdamW. Sampling is four Euler steps along the flow under guidance. Contestants compute the same
network of diffusers with the same weights on the same latents (32 x 32 x 4); the losses of their
first steps and what they draw must agree. bf16 keeps weights and moments in float32 and multiplies
in bfloat16 (autocast, in PyTorch); where sampling is in bf16 the weights are too. The peak is that
of square products of matrices, the better of two libraries, timed in turn with the contestants.

Needs torch and diffusers (extra `parity`) for their contestants, and a C++ compiler to compile.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import _harness
from fornax.config import environment
from fornax.config.allocation import training_memory

RATE, BETA1, BETA2, EPS, DECAY, CLIP = 3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0
STEPS, SCALE, SIDE, CHANNELS, CLASSES = 4, 4.0, 32, 4, 1000
SQUARE = 2048
"""Side of the matrices whose product measures the peak."""
AGREE = 2e-3
"""Largest relative difference of a loss, and of what is drawn, between float32 contestants."""

Ready = tuple[Callable[[], Any], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A network of diffusers and its batches."""

    class_name: str
    config: Mapping[str, Any]
    trained: int
    """Rows of a training step."""
    drawn: int
    """Rows of sampling, which guidance doubles."""

    @property
    def is_dit(self) -> bool:
        """Whether it is a transformer conditioned on classes, else a U-Net on text."""
        return self.class_name == "DiTTransformer2DModel"


def dit(layers: int, heads: int, trained: int, drawn: int) -> Shape:
    """A DiT with heads of 64."""
    config = {
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": 64,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "sample_size": SIDE,
        "patch_size": 2,
        "norm_type": "ada_norm_zero",
        "num_embeds_ada_norm": CLASSES,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-5,
    }
    return Shape("DiTTransformer2DModel", config, trained, drawn)


def unet(widths: tuple[int, ...], trained: int, drawn: int) -> Shape:
    """A U-Net of Stable Diffusion with these widths."""
    config = {
        "sample_size": SIDE,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "block_out_channels": list(widths),
        "down_block_types": ["CrossAttnDownBlock2D"] * (len(widths) - 1) + ["DownBlock2D"],
        "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (len(widths) - 1),
        "layers_per_block": 2,
        "cross_attention_dim": 256,
        "attention_head_dim": 8,
    }
    return Shape("UNet2DConditionModel", config, trained, drawn)


SHAPES = {
    "dit-30m": dit(10, 6, 8, 2),
    "dit-150m": dit(12, 12, 2, 1),
    "unet-30m": unet((96, 192, 320), 4, 2),
    "unet-150m": unet((192, 384, 768), 2, 1),
    "quick": dit(2, 2, 2, 2),
}


def batch_of(rows: int) -> dict[str, np.ndarray]:
    """What every contestant trains on or draws from, channels last."""
    random = np.random.default_rng(0)
    size = (rows, SIDE, SIDE, CHANNELS)
    return {
        "images": random.normal(size=size).astype(np.float32),
        "noise": random.normal(size=size).astype(np.float32),
        "sigma": random.uniform(0.05, 0.95, rows).astype(np.float32),
        "classes": random.integers(0, CLASSES, rows).astype(np.int32),
        "text": random.normal(size=(rows, 16, 256)).astype(np.float32),
    }


def levels() -> np.ndarray:
    """Noise levels of sampling, the last 0."""
    return np.linspace(1, 0, STEPS + 1)


def make_weights(shape: Shape, folder: Path) -> None:
    """Write random weights as diffusers has them; the last layer, zero at first, is drawn too."""
    import jax
    from flax import nnx

    from fornax.diffusion.models.components import COMPONENTS, save_component
    from fornax.diffusion.models.files import Fields

    component = COMPONENTS[shape.class_name]
    config = component.read(Fields(shape.config, "the benchmark's config"))
    module = component.make(config, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 10_000))

    def drawn(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2 or bool((leaf != 0).any()):
            return leaf
        return 0.02 * jax.random.normal(next(keys), leaf.shape, leaf.dtype)

    nnx.update(module, jax.tree.map(drawn, nnx.state(module, nnx.Param)))
    save_component(module, folder)


def condition_of(shape: Shape, batch: Mapping[str, Any]) -> Any:
    """A batch's condition as Fornax has it."""
    from fornax.diffusion.models import Condition

    if shape.is_dit:
        return Condition(classes_B=batch["classes"])
    return Condition(text_BSD=batch["text"])


def fornax_train(shape: Shape, folder: Path, compute: str) -> Ready:
    """The trainer's own step, as `fornax diffusion train` runs it."""
    import jax
    import jax.numpy as jnp

    from fornax.config import from_mapping
    from fornax.diffusion.config import DiffusionConfig
    from fornax.diffusion.models.components import load_component
    from fornax.diffusion.objectives import Objective
    from fornax.diffusion.predictions import Point
    from fornax.train import Ledger, Loss, Task, TrainerConfig
    from fornax.train.session import first_state, prepare

    objective = Objective(density="uniform")

    def build(rngs: Any) -> Any:
        del rngs
        return load_component(folder, compute_dtype=jnp.dtype(compute))

    def loss(model: Any, batch: Any, key: jax.Array) -> Loss:
        del key
        sigma = batch["sigma"]
        point = Point(1000 * sigma, 1 - sigma, sigma)
        x = objective.noised(batch["images"], batch["noise"], point)
        condition = condition_of(shape, batch)
        output = model(x, point.t, condition, remat=DiffusionConfig.remat)
        losses = objective.losses(output, batch["images"], batch["noise"], point)
        return Loss(total=losses.sum(), weight=jnp.float32(shape.trained), metrics={})

    config = from_mapping(
        TrainerConfig,
        {
            "batch_size": shape.trained,
            "dtypes": {"compute": compute},
            "optim": {
                "optimizer": {
                    "type": "adamw",
                    "b1": BETA1,
                    "b2": BETA2,
                    "eps": EPS,
                    "weight_decay": DECAY,
                },
                "learning_rate": RATE,
                "schedule": {"type": "constant"},
            },
        },
    )
    programs = prepare(config, Task(build=build, loss=loss, batches=_no_batches), Ledger())
    state = first_state(config, programs)
    rows, losses = batch_of(shape.trained), []
    del rows["text" if shape.is_dit else "classes"]

    def turn() -> None:
        nonlocal state
        state, metrics = programs.step(state, rows)
        losses.append(float(jax.block_until_ready(metrics)["loss"]))

    return _warm(turn, losses)


def _no_batches(split: str, hosts: Any) -> Any:
    raise LookupError(f"the benchmark makes its own batch, not split {split!r} for {hosts}")


def fornax_sample(shape: Shape, folder: Path, compute: str) -> Ready:
    """One scan over the sampler's table, as `fornax diffusion sample` runs it."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from fornax.diffusion import SAMPLERS, flow, guided, noised, sample
    from fornax.diffusion.models.components import load_component

    dtype = jnp.dtype(compute)
    model = load_component(folder, dtype=dtype, compute_dtype=dtype)
    graph, state = nnx.split(model)
    batch = batch_of(shape.drawn)
    empty = {"classes": np.full_like(batch["classes"], CLASSES), "text": 0 * batch["text"]}
    schedule = flow(STEPS)

    @jax.jit
    def run(state: Any, noise: jax.Array, condition: Any, empty: Any) -> jax.Array:
        network = nnx.merge(graph, state)

        def call(x: jax.Array, point: Any, condition: Any) -> jax.Array:
            return network(x, jnp.broadcast_to(point.t, x.shape[:1]), condition)

        start = noised(schedule, noise)
        table = SAMPLERS["euler"](schedule)
        return sample(guided(call, condition, empty, SCALE), start, table, prediction="flow")

    arguments = (state, batch["noise"], condition_of(shape, batch), condition_of(shape, empty))
    return _drawing(lambda: np.asarray(run(*arguments)))


def jax_positions(shape: Shape) -> Any:
    """The table of positions of the DiT."""
    from fornax.diffusion.models.transformer.config import SinCosConfig
    from fornax.diffusion.models.transformer.positions import sin_cos_table

    width = shape.config["num_attention_heads"] * shape.config["attention_head_dim"]
    return sin_cos_table((SIDE // 2,) * 2, width, SinCosConfig(base=SIDE // 2))


def _jax_params(folder: Path) -> Any:
    from flax import nnx

    import _diffusion_jax
    from fornax.diffusion.models.components import load_component

    state = nnx.state(load_component(folder), nnx.Param)
    return _diffusion_jax.params_of(nnx.to_pure_dict(state))


def jax_train(shape: Shape, folder: Path, compute: str) -> Ready:
    """A hand-written step; see `_diffusion_jax`."""
    import jax
    import jax.numpy as jnp

    import _diffusion_jax

    if not shape.is_dit:
        raise ImportError("only the DiT is written by hand")
    settings = {"rate": RATE, "b1": BETA1, "b2": BETA2, "eps": EPS, "decay": DECAY, "clip": CLIP}
    positions = jnp.asarray(jax_positions(shape))
    step = jax.jit(
        lambda state, batch: _diffusion_jax.train_step(positions, settings, compute, state, batch),
        donate_argnums=0,
    )
    params = _jax_params(folder)
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    state = (params, *zeros, jnp.zeros(()))
    batch = {name: jnp.asarray(x) for name, x in batch_of(shape.trained).items()}
    losses: list[float] = []

    def turn() -> None:
        nonlocal state
        state, value = step(state, batch)
        losses.append(float(jax.block_until_ready((state, value))[1]))

    return _warm(turn, losses)


def jax_sample(shape: Shape, folder: Path, compute: str) -> Ready:
    """A hand-written scan over Euler's steps."""
    import jax
    import jax.numpy as jnp

    import _diffusion_jax

    if not shape.is_dit:
        raise ImportError("only the DiT is written by hand")
    positions, batch = jnp.asarray(jax_positions(shape)), batch_of(shape.drawn)
    params = jax.tree.map(lambda p: p.astype(compute), _jax_params(folder))
    run = jax.jit(
        lambda params, x, classes: _diffusion_jax.sample(
            params, positions, levels(), SCALE, x, classes
        )
    )
    return _drawing(lambda: np.asarray(run(params, batch["noise"], batch["classes"])))


def _torch_model(shape: Shape, folder: Path) -> Any:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    return getattr(diffusers, shape.class_name).from_pretrained(folder).eval()


def _torch_call(shape: Shape, model: Any, x: Any, time: Any, batch: Mapping[str, Any]) -> Any:
    if shape.is_dit:
        return model(x, timestep=time, class_labels=batch["classes"], return_dict=False)[0]
    return model(x, time, batch["text"], return_dict=False)[0]


def _torch_batch(rows: int) -> dict[str, Any]:
    import torch

    found = {name: torch.from_numpy(x) for name, x in batch_of(rows).items()}
    first = {name: found[name].permute(0, 3, 1, 2).contiguous() for name in ("images", "noise")}
    return {**found, **first, "classes": found["classes"].long()}


def torch_train(shape: Shape, folder: Path, compute: str, *, compiled: bool) -> Ready:
    """Diffusers' model with PyTorch's fused AdamW; bf16 by autocast."""
    import torch

    model = _torch_model(shape, folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True
    )
    call = torch.compile(model) if compiled else model
    batch, losses = _torch_batch(shape.trained), []
    sigma = batch["sigma"][:, None, None, None]
    x = (1 - sigma) * batch["images"] + sigma * batch["noise"]

    def turn() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16"):
            found = _torch_call(shape, call, x, 1000 * batch["sigma"], batch)
        wanted = batch["noise"] - batch["images"]
        loss = torch.nn.functional.mse_loss(found.float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())

    return _warm(turn, losses)


def torch_sample(shape: Shape, folder: Path, compute: str, *, compiled: bool) -> Ready:
    """Euler's steps in a loop of Python, as diffusers' pipelines have it."""
    import torch

    dtype = getattr(torch, compute)
    model = _torch_model(shape, folder).to(dtype)
    call = torch.compile(model) if compiled else model
    batch = _torch_batch(shape.drawn)
    both = {
        "classes": torch.cat([batch["classes"], torch.full_like(batch["classes"], CLASSES)]),
        "text": torch.cat([batch["text"], 0 * batch["text"]]).to(dtype),
    }

    @torch.no_grad()
    def draw() -> np.ndarray:
        x = batch["noise"]
        for sigma, after in zip(levels()[:-1], levels()[1:], strict=True):
            time = torch.full((2 * len(x),), 1000 * float(sigma))
            found = _torch_call(shape, call, torch.cat([x, x]).to(dtype), time, both).float()
            with_, without = found.chunk(2)
            x = x + float(after - sigma) * (without + SCALE * (with_ - without))
        return x.permute(0, 2, 3, 1).numpy()

    return _drawing(draw)


def jax_peak(shape: Shape, folder: Path, compute: str) -> Ready:
    """A product of square matrices, as Fornax's layers multiply."""
    import jax
    import jax.numpy as jnp

    from fornax import kernels

    del shape, folder
    a = jnp.asarray(np.random.default_rng(0).normal(size=(SQUARE, SQUARE)), compute)
    run = jax.jit(lambda a: kernels.linear(a, a))
    return _square(lambda: run(a).block_until_ready())


def torch_peak(shape: Shape, folder: Path, compute: str) -> Ready:
    """A product of square matrices in PyTorch."""
    import torch

    del shape, folder
    a = torch.from_numpy(np.random.default_rng(0).normal(size=(SQUARE, SQUARE)))
    a = a.to(getattr(torch, compute))
    return _square(lambda: a @ a)


def _square(multiply: Callable[[], Any]) -> Ready:
    multiply()
    return multiply, {}


def flops_of(shape: Shape, folder: Path, task: str) -> float:
    """Operations of a turn's products and convolutions; backward has twice those of forward."""
    import jax.numpy as jnp

    from fornax.diffusion.cost import traced_flops
    from fornax.diffusion.models.components import load_component

    model = load_component(folder)
    rows = shape.trained if task == "train" else 2 * shape.drawn
    batch = batch_of(rows)
    condition = condition_of(shape, batch)
    forward = traced_flops(lambda x: model(x, jnp.ones(rows), condition), batch["images"])
    return (3 if task == "train" else STEPS) * forward


def _warm(turn: Callable[[], None], losses: list[float]) -> Ready:
    """Take two turns, and report the losses."""
    for _ in range(2):
        turn()
    return turn, {"same": [round(loss, 5) for loss in losses]}


def _drawing(draw: Callable[[], np.ndarray]) -> Ready:
    """Draw once, and report numbers of what is drawn."""
    found = draw()
    return draw, {"same": [round(float(v), 4) for v in (found.std(), *found.ravel()[:3])]}


Contestant = Callable[[Shape, Path], Ready]
PEAK = "products-"
"""How the names of those begin that measure the peak."""
PAIRS = 100
"""Million parameters from which contestants meet Fornax one by one, so that they fit in memory."""


def contestants() -> dict[str, dict[str, Contestant]]:
    """Task to contestant to what makes it ready."""
    found: dict[str, dict[str, Contestant]] = {}
    ours = {"train": (fornax_train, jax_train), "sample": (fornax_sample, jax_sample)}
    theirs = {"train": torch_train, "sample": torch_sample}
    for task in ("train", "sample"):
        table: dict[str, Contestant] = {}
        for compute, short in (("float32", ""), ("bfloat16", "-bf16")):
            for name, make in zip(("fornax", "jax"), ours[task], strict=True):
                table[name + short] = lambda s, f, m=make, c=compute: m(s, f, c)
            for compiled, how in ((False, ""), (True, "-compiled")):
                table[f"torch{short}{how}"] = lambda s, f, m=theirs[task], c=compute, k=compiled: m(
                    s, f, c, compiled=k
                )
            for name, make in (("jax", jax_peak), ("torch", torch_peak)):
                table[f"{PEAK}{name}{short}"] = lambda s, f, m=make, c=compute: m(s, f, c)
        found[task] = table
    return found


def is_bf16(name: str) -> bool:
    """Whether a contestant computes in bf16."""
    return "bf16" in name


def own_of(name: str) -> str:
    """Fornax's contestant in the same precision."""
    return "fornax-bf16" if is_bf16(name) else "fornax"


def check(results: Mapping[str, _harness.Result]) -> None:
    """Refuse to time contestants in float32 that do not compute the same; leave out what PyTorch's
    compiler makes of a network that PyTorch itself computes like Fornax."""
    for name, result in results.items():
        if result.absent is None and not is_bf16(name) and not name.startswith(PEAK):
            wanted = results["fornax"].details["same"]
            apart = np.abs(np.subtract(result.details["same"], wanted)).max()
            if apart <= AGREE * np.abs(wanted).max():
                continue
            if name.endswith("-compiled"):
                result.absent = f"computes {result.details['same']}, the others {wanted}"
            else:
                raise _harness.FailedError(
                    f"{name} computes {result.details['same']} and fornax {wanted}"
                )


def groups(wanted: Sequence[str], *, pairs: bool) -> list[list[str]]:
    """Contestants that take turns, with what measures their peak: all of a precision, or Fornax and
    one other."""
    found = []
    for bf16 in (False, True):
        some = [name for name in wanted if is_bf16(name) == bf16]
        peaks = [name for name in some if name.startswith(PEAK)]
        own = [name for name in some if name == own_of(name)]
        others = [name for name in some if name not in (*peaks, *own)]
        if own and pairs and others:
            found += [[*own, other, *peaks] for other in others]
        elif own:
            found.append([*own, *others, *peaks])
    return found


def environment_of(threads: int | None) -> dict[str, str]:
    """What holds a worker to so many threads."""
    names = ("NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {} if threads is None else dict.fromkeys(names, str(threads))


def report(task: str, contests: Sequence[Mapping[str, _harness.Result]], flops: float) -> str:
    """A table of one shape and task; each contestant's ratios are to Fornax's turns beside it."""
    rows = {}
    for results in contests:
        for name, result in results.items():
            if result.absent is not None:
                rows[name] = [name, f"not run: {result.absent}", *[""] * 5]
            elif not name.startswith(PEAK) and name not in rows:
                alike, speed = results[own_of(name)], flops / result.cpu_s()
                rows[name] = [
                    name,
                    f"{1e3 * result.median_s():.0f}",
                    f"{1e3 * result.cpu_s():.0f}",
                    f"{_harness.ratio(results, name, own_of(name)):.2f}",
                    f"{result.cpu_s() / alike.cpu_s():.2f}",
                    f"{speed / 1e9:.0f}" + _of_peak(speed, results, is_bf16(name)),
                    f"{result.turns[-1].peak_bytes / 2**20:,.0f}",
                ]
    head = [
        "",
        "median ms",
        "processor ms",
        "time / Fornax's",
        "processor / Fornax's",
        "GFLOP a processor second, of peak",
        "peak MiB",
    ]
    what = "training step" if task == "train" else f"sampling, {STEPS} steps under guidance"
    return f"### {what}: {flops / 1e9:.0f} GFLOP\n\n{_harness.table(head, rows.values())}"


def _of_peak(speed: float, results: Mapping[str, _harness.Result], bf16: bool) -> str:
    """A speed in processor time as a share of the fastest products' in this precision."""
    least = [
        result.cpu_s()
        for name, result in results.items()
        if name.startswith(PEAK) and is_bf16(name) == bf16 and result.absent is None
    ]
    return f", {speed * min(least) / (2 * SQUARE**3):.0%}" if least else ""


def main() -> None:
    """Run the benchmark, or one contestant of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all but quick")
    parser.add_argument(
        "--task", choices=("train", "sample"), action="append", help="default: both"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, help="of each contestant; default: all cores")
    parser.add_argument("--only", help="contestants, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a small DiT, two rounds, no file")
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    table = contestants()
    if args.worker:
        make = table[args.task[0]][args.worker]
        training = args.task[0] == "train"  # steps follow one another, samples may not
        _harness.serve(lambda: make(SHAPES[args.shape[0]], args.folder), in_a_row=training)
        return
    environment.become(training_memory())
    wanted = args.only.split(",") if args.only else list(table["train"])
    unknown = sorted(set(wanted) - set(table["train"]))
    if unknown or any(own_of(one) not in wanted for one in wanted):
        parser.error(
            f"--only takes any of {', '.join(table['train'])}, with fornax beside those in float32 "
            f"and fornax-bf16 beside those in bf16; not {args.only}"
        )
    shapes = ["quick"] if args.quick else args.shape or [name for name in SHAPES if name != "quick"]
    parts = []
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            make_weights(SHAPES[name], Path(folder))
            count = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 4e6
            rows = f"batch {SHAPES[name].trained}, {SHAPES[name].drawn} drawn"
            parts.append(f"## {name}: {count:.0f}M parameters, {rows}")
            for task in args.task or ("train", "sample"):
                flops = flops_of(SHAPES[name], Path(folder), task)
                commands = {
                    one: [
                        *(sys.executable, __file__, "--shape", name, "--task", task),
                        *("--folder", folder, "--worker", one),
                    ]
                    for one in wanted
                }
                rounds = 2 if args.quick else args.rounds
                contests = [
                    _harness.contest(
                        {one: commands[one] for one in some},
                        rounds=rounds,
                        warmups=0,
                        env=environment_of(args.threads),
                        check=check,
                    )
                    for some in groups(wanted, pairs=count > PAIRS)
                ]
                parts.append(report(task, contests, flops))
                print(parts[-1], flush=True)
    if not (args.no_results or args.quick):
        head = [
            "# Training and sampling of diffusion models",
            "`python benchmarks/diffusion.py`: latents of 32 x 32 x 4; a training step is forward, "
            "backward, clipping and AdamW. Contestants take turns, a training step off the clock "
            "before each that is timed; ratios are medians within rounds, beside Fornax in the "
            "same precision. Processor time is the least of all turns, and what other work on the "
            "machine disturbs least; speeds are those of products and convolutions in it, beside "
            f"square products of {SQUARE}.",
            _harness.machine()
            + f"; {args.threads or 'all'} threads a contestant. "
            + _harness.versions("jax", "jaxlib", "flax", "optax", "torch", "diffusers")
            + ".",
        ]
        print(_harness.write_results("diffusion", "\n\n".join([*head, *parts])))


if __name__ == "__main__":
    main()
