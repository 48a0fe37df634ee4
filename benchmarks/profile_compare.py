"""How often `fornax profile compare` is right: `python benchmarks/profile_compare.py`.

A small training step in plain JAX is captured again and again, each time in a process of its own.
Twenty comparisons of the step with itself, and twenty with a step that has more work in it: 5 % of
the processor time that the step alone takes, planted as products, as elementwise work or as a loop
of small products. A comparison of the step with itself is a false alarm if it names an operation
or fails; planted work is found if what it adds is named with its line.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _harness

ROUNDS = 20
STEPS = 60
SHARE = 0.05
KINDS = ("products", "elementwise", "loop")
VOCABULARY, WIDTH, HIDDEN, LAYERS, LENGTH, ROWS = 256, 128, 512, 2, 64, 8
WARM_UP = 3
ALONE = "alone"


def planted(kind: str, units: int, x_BTD):
    """`units` of work that nothing else of the step needs."""
    import jax
    import jax.numpy as jnp

    with jax.named_scope("planted"):
        if kind == "elementwise":
            y = x_BTD[0]
            for _ in range(units):
                y = jnp.sin(y) * 1.01
            return y.sum()
        w_DD = jnp.outer(x_BTD[0, 0], x_BTD[1, 0])

        def unit(_, y):
            return jnp.tanh(y @ w_DD)

        if kind == "loop":
            return jax.lax.fori_loop(0, units, unit, w_DD).sum()
        y = w_DD
        for _ in range(units):
            y = unit(0, y)
        return y.sum()


def make_step(kind: str, units: int):
    """A training step (state, tokens) -> (state, loss) with Adam, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def weights(*shape: int):
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def layer(p, x):
        with jax.named_scope("attention"):
            h = norm(x)
            scores = jnp.einsum("btd,bsd->bts", h @ p["q"], h @ p["k"]) * WIDTH**-0.5
            scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
            x += jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), h @ p["v"]) @ p["o"]
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def loss(params, tokens_BT):
        x = params["embed"][tokens_BT]
        for p in params["layers"]:
            x = layer(p, x)
        logits = norm(x) @ params["embed"].T
        scores = jax.nn.log_softmax(logits[:, :-1])
        mean = -jnp.take_along_axis(scores, tokens_BT[:, 1:, None], -1).mean()
        extra = planted(kind, units, jax.lax.stop_gradient(x)) if units else 0.0
        return mean + 1e-20 * extra

    def step(state, tokens_BT):
        params, first, second = state
        value, grads = jax.value_and_grad(loss)(params, tokens_BT)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second
        )
        return (params, first, second), value

    square, wide = (WIDTH, WIDTH), (WIDTH, HIDDEN)
    shapes = {"q": square, "k": square, "v": square, "o": square, "up": wide, "down": wide[::-1]}
    params = {
        "embed": weights(VOCABULARY, WIDTH),
        "layers": [{name: weights(*s) for name, s in shapes.items()} for _ in range(LAYERS)],
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    tokens_BT = jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH)), jnp.int32)
    state = (params, zeros, jax.tree.map(jnp.zeros_like, params))
    return jax.jit(step, donate_argnums=0), state, tokens_BT


def work(kind: str, units: int, steps: int, out: Path | None, cache: Path) -> None:
    """The process of one capture; prints the processor time of each step, in seconds."""
    import jax

    from fornax import profile

    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    step, state, tokens = make_step(kind, units)
    for _ in range(WARM_UP):
        state, _ = step(state, tokens)
    jax.block_until_ready(state)
    spent = []

    def run() -> None:
        nonlocal state
        for number in range(steps):
            begun = time.process_time()
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, value = step(state, tokens)
                value.block_until_ready()
            spent.append(time.process_time() - begun)

    if out is None:
        run()
    else:
        with profile.capture(out):
            run()
    print(json.dumps(spent))


def start(folder: Path, name: str | None, kind: str, units: int, steps: int = STEPS) -> float:
    """Run one process; return the lower quartile of its steps' processor time, in seconds."""
    command = [sys.executable, __file__, "--work", kind, "--units", str(units)]
    command += ["--steps", str(steps), "--cache", str(folder / "cache")]
    if name == ALONE:
        command.append("--alone")
    elif name:
        command += ["--out", str(folder / name)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise _harness.FailedError(done.stderr[-2000:])
    spent = sorted(json.loads(done.stdout.splitlines()[-1]))
    return spent[len(spent) // 4]


def alone(kind: str, units: int) -> None:
    """The process that runs planted work by itself; prints as `work` does."""
    import jax
    import jax.numpy as jnp

    x_BTD = jnp.linspace(-1, 1, ROWS * LENGTH * WIDTH).reshape(ROWS, LENGTH, WIDTH)
    run = jax.jit(lambda x: planted(kind, units, x)).lower(x_BTD).compile()
    spent = []
    for _ in range(4 * STEPS):
        begun = time.process_time()
        run(x_BTD).block_until_ready()
        spent.append(time.process_time() - begun)
    print(json.dumps(spent))


def units_of(folder: Path, kind: str, plain: float) -> tuple[int, float]:
    """How many units take `SHARE` of a step's processor time, and what they take."""
    few, many = 16, 80
    spent = [start(folder, ALONE, kind, units) for units in (few, many)]
    each = (spent[1] - spent[0]) / (many - few)
    units = max(1, round(SHARE * plain / each))
    return units, units * each / plain


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, help="keep the captures here")
    parser.add_argument("--work", choices=(*KINDS, "none"))
    parser.add_argument("--units", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--cache", type=Path)
    args = parser.parse_args()
    if args.alone:
        alone(args.work, args.units)
        return 0
    if args.work:
        work(args.work, args.units, args.steps, args.out, args.cache)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        return measure(args.folder or Path(scratch), args.rounds)


def measure(folder: Path, rounds: int) -> int:
    from fornax import profile
    from fornax.profile.compare import compare

    plain = min(start(folder, None, "none", 0) for _ in range(3))
    planned = {kind: units_of(folder, kind, plain) for kind in KINDS}
    for kind, (units, share) in planned.items():
        print(f"{kind}: {units} units, {share:.1%} of {plain * 1e3:.1f} ms", file=sys.stderr)
    start(folder, "plain-0", "none", 0)
    alarms, found, steps, shares = 0, collections.Counter(), [], []
    for number in range(rounds):
        kind = KINDS[number % len(KINDS)]
        start(folder, f"planted-{number}", kind, planned[kind][0])
        start(folder, f"plain-{number + 1}", "none", 0)
        before = profile.read(folder / f"plain-{number}")
        itself = compare(before, profile.read(folder / f"plain-{number + 1}"))
        alarms += bool(itself.slower or itself.failed)
        steps.append(itself.step.value)
        after = compare(before, profile.read(folder / f"planted-{number}"))
        named = [one for one in after.slower if f"{Path(__file__).name}:" in one.source]
        named = [one for one in named if "planted" in one.key]
        found[kind] += bool(named)
        shares.append((kind, sum(one.share for one in named), after.step))
        print(
            f"{number}: itself {itself.step} {[one.key for one in itself.slower]}; {kind} "
            f"{after.step} {[(one.key, f'{one.share:.1%}') for one in after.slower]}",
            file=sys.stderr,
            flush=True,
        )
    rows = [
        ["the step with itself: alarms", f"{alarms} of {rounds}"],
        ["planted work named", f"{sum(found.values())} of {rounds}"],
        *([f"of it {kind}", f"{found[kind]}"] for kind in KINDS),
        ["step after over before, same program", f"{min(steps):.3f} to {max(steps):.3f}"],
        *(
            [
                f"planted {kind}",
                f"{units} units, {share:.1%} of the step's processor time; named with "
                + " ".join(f"{one:.1%}" for of, one, _ in shares if of == kind),
            ]
            for kind, (units, share) in planned.items()
        ),
    ]
    text = "\n".join(
        [
            "# Comparing captures: false alarms and planted work",
            "",
            _harness.machine(),
            _harness.versions("jax", "jaxlib"),
            "",
            f"{STEPS} steps a capture, one process each; a step takes {plain * 1e3:.1f} ms of "
            "processor time.",
            "",
            _harness.table(["", ""], rows),
        ]
    )
    print(text)
    print(_harness.write_results("profile_compare", text))
    return 0 if alarms <= rounds / 20 and sum(found.values()) >= 0.9 * rounds else 1


if __name__ == "__main__":
    sys.exit(main())
