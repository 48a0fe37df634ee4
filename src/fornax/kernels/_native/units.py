"""The native units, and the command that compiles one.

Standard library only: the build of a wheel runs this file alone.
"""

from pathlib import Path

SOURCES = Path(__file__).parent
HEADERS = tuple(sorted(path.name for path in SOURCES.glob("*.h")))
UNITS = {
    "attention": ("fornax_attention_forward", "fornax_attention_backward"),
    "paged_attention": (
        "fornax_paged_attention",
        "fornax_paged_write",
        "fornax_paged_write_codes",
    ),
    "linear": ("fornax_linear", "fornax_linear_blocks"),
    "norm": ("fornax_rms_norm", "fornax_add_rms_norm", "fornax_rms_norm_gradient"),
    "convolution": ("fornax_convolution", "fornax_convolution_kernel_gradient"),
    "group_norm": ("fornax_group_norm", "fornax_group_norm_gradient"),
    "layer": (
        "fornax_gated_linear_unit",
        "fornax_gated_linear_unit_gradient",
        "fornax_take_rows",
        "fornax_argmax",
        "fornax_rotary_embedding",
    ),
    "sampling": ("fornax_filter_logits", "fornax_sample_tokens"),
    "matmul": ("fornax_matmul", "fornax_orthogonalize"),
    "float32_matmul": ("fornax_float32_matmul",),
    "few_rows": ("fornax_few_rows",),
    "float32_convolution": (
        "fornax_float32_convolution",
        "fornax_float32_convolution_kernel_gradient",
    ),
    "grouped": ("fornax_grouped_matmul", "fornax_grouped_outer"),
    "packed_experts": ("fornax_packed_grouped_matmul", "fornax_packed_experts"),
    "experts": ("fornax_group_order", "fornax_route", "fornax_fused_experts"),
    "linear_attention": ("fornax_ragged_delta_rule", "fornax_ragged_convolution"),
}
"""Unit, named after its .cc file, to the call targets that it exports."""

FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-w",  # jaxlib's headers warn; ours are compiled with warnings in the tests
)
NATIVE = ("-march=native",)

_V3 = frozenset(("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"))
_V4 = _V3 | frozenset(("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"))
PREBUILT = {
    "avx512_bf16": (
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    "avx512": (("-march=x86-64-v4",), _V4),
    "avx2": (("-march=x86-64-v3",), _V3),
}
"""Instruction sets that a wheel carries libraries for, the widest first: the compiler's flags, and
the features, by their names in /proc/cpuinfo, that a processor must have."""


def instruction_set(features: frozenset[str]) -> str | None:
    """Return the widest prebuilt instruction set that a processor with these features runs."""
    return next((name for name, (_, needed) in PREBUILT.items() if needed <= features), None)


def compile_command(
    cxx: str, unit: str, output: str | Path, *, include: str, march: tuple[str, ...]
) -> list[str]:
    """Return the command that compiles one unit into a shared library.

    Args:
        cxx: The compiler.
        unit: One of `UNITS`.
        output: The library's path.
        include: The folder of XLA's FFI headers, `jax.ffi.include_dir()`.
        march: The flags that choose the instruction set.
    """
    source = str(SOURCES / f"{unit}.cc")
    return [cxx, *FLAGS, *march, f"-I{include}", source, "-o", str(output)]
