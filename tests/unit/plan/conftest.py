"""Plans made up for tests of how they are shown, long names and odd figures included."""

import pytest

from fornax.plan.facts import (
    Advice,
    Buffer,
    ClassOfWork,
    CollectiveTime,
    Compilation,
    Finding,
    Hardware,
    Memory,
    MemoryPart,
    Money,
    Option,
    Plan,
    ProgramReport,
    Run,
    Speed,
)

GIB = 1 << 30
LONG = (
    "jit(step)/transpose(jvp(Decoder))/while/body/checkpoint/rematted_computation/"
    "bthd,dhm->btm/dot_general"
)


def memory(*, usable: int = 95 * GIB) -> Memory:
    """Forty-odd GiB."""
    sizes = {
        "parameters": 2 * GIB,
        "optimizer": 4 * GIB,
        "gradients": 2 * GIB,
        "activations": 30 * GIB,
        "temporaries": 5 * GIB,
        "batch": 1 << 20,
        "other": 12345,
    }
    return Memory(
        parts=tuple(MemoryPart(owner=owner, bytes=size) for owner, size in sizes.items()),
        usable=usable,
        host=3 * GIB,
        buffers=tuple(
            Buffer(
                name=LONG,
                owner="activations",
                shape="bf16[32,8,8192,4096]",
                bytes=(9 - n) * GIB,
                unpadded_bytes=(9 - n) * GIB // (2 if n == 1 else 1),
                source="/somewhere/site-packages/fornax/models/layers.py:210 (Attention.__call__)",
            )
            for n in range(6)
        ),
    )


def program(name: str = "train_step", *, usable: int = 95 * GIB) -> ProgramReport:
    """A training step with everything that there is to show."""
    return ProgramReport(
        name=name,
        memory=memory(usable=usable),
        flops=3.5e15,
        bytes=4.2e12,
        step_seconds=12.5,
        compute_seconds=11.0,
        exposed_seconds=1.5,
        optimistic_seconds=11.0,
        pessimistic_seconds=19.25,
        bound="compute",
        work=(
            ClassOfWork(name="matmul", flops=3.0e15, bytes=2e12, seconds=8.0, bound="compute"),
            ClassOfWork(name="attention", flops=5e14, bytes=3e11, seconds=2.0, bound="compute"),
            ClassOfWork(name="elementwise", flops=2e12, bytes=1.5e12, seconds=0.8, bound="memory"),
            ClassOfWork(name="copy", flops=0.0, bytes=4e11, seconds=0.2, bound="memory"),
        ),
        collectives=(
            CollectiveTime(
                kind="all-gather", axes=("fsdp",), link="ici", bytes=436_207_616, count=64,
                seconds=3.0, exposed_seconds=0.5, what="layers/mlp/up/kernel",
                source="src/fornax/models/layers.py:88 (MLP.__call__)",
            ),
            CollectiveTime(
                kind="all-gather", axes=("fsdp",), link="ici", bytes=33_554_432, count=32,
                seconds=1.0, exposed_seconds=0.0, what="layers/attention/q/kernel",
            ),
            CollectiveTime(
                kind="all-to-all", axes=("fsdp", "tensor"), link="dcn", bytes=1 << 28, count=1,
                seconds=1.0, exposed_seconds=1.0, what=LONG,
            ),
        ),
        findings=(
            Finding(
                kind="replicated", what="params/embedding bfloat16[262208, 5376] is whole over "
                "tensor", bytes=2 * GIB, fix="add tensor to mesh.rules.vocab, now []",
            ),
            Finding(
                kind="collective", what="all-to-all over fsdp x tensor of " + LONG, bytes=1 << 28,
                seconds=1.0, source="src/fornax/models/layers.py:88 (MLP.__call__)",
                fix="look at mesh.rules.activation_mlp, now ['tensor']",
            ),
        ),
        compilation=Compilation(
            lower_seconds=4.2, compile_seconds=33.8, code_bytes=30 << 20, hlo_bytes=4 << 20,
            cached=True, versions={"libtpu": "0.0.51", "jax": "0.10.2"},
        ),
        notes=("the trip count of while.7 is not known; its body counts once",),
    )  # fmt: skip


def plan(*, fits: bool = True, name: str = "llama3-8b") -> Plan:
    """A whole plan."""
    usable = 95 * GIB if fits else 31 * GIB
    return Plan(
        name=name,
        origin="compiled",
        how="Compiled by the TPU compiler; times are predicted from the program and the hardware "
        "table.",
        hardware=Hardware(
            topology="v5p:4x4x4", chip="v5p", platform="tpu", chips=64, devices=64, hosts=16,
            slices=1, peak_flops=459e12, peak_dtype="bfloat16", memory_bandwidth=2765e9,
            memory_bytes=96 * GIB, sources={"peak_flops": "Google Cloud, TPU v5p"},
        ),
        programs=(program(usable=usable), program("eval_step", usable=usable)),
        run=Run(
            parameters=8_030_261_248, batch_size=512, seq_len=8192, accumulate=2, steps=100_000,
            remat="save_attention", params_dtype="float32", compute_dtype="bfloat16",
            mesh={"fsdp": 64}, model_flops=2.4e17,
        ),
        speed=Speed(
            step_seconds=12.5, mfu=0.513, hfu=0.61, tokens_per_second_per_chip=5243.0,
            tokens_per_day=2.9e10, bound="compute",
        ),
        money=Money(
            currency="EUR", per_chip_hour=3.5, per_day=5376.0, per_billion_tokens=185.5,
            whole_run=77_777.0, days=14.5,
        ),
        advice=() if fits else (
            Advice(change="recompute more (full)", flags="--remat full", total_bytes=28 * GIB,
                   step_seconds=13.4),
            Advice(change="accumulate over 4 micro-batches", flags="--accumulate 4",
                   total_bytes=25 * GIB, step_seconds=13.9),
        ),
        options=(
            Option(changes="mesh: {fsdp: 32, tensor: 2}", reason="less is gathered; bound by "
                   "arithmetic", total_bytes=40 * GIB, step_seconds=11.9,
                   tokens_per_second_per_chip=5500.0, compiled=True),
        ),
        searched="412 plans considered, 390 left out by estimate, 3 compiled.",
    )  # fmt: skip


@pytest.fixture
def make_plan():
    """Makes a plan: `fits`, `name`."""
    return plan
