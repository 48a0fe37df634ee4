"""Options of the TPU compiler for training steps: what runs exchanges beside computation.

libtpu 0.0.42 leaves them off. With them an all-gather of a layer's weights is taken along by the
products and kernels after its start; MaxText's public recipes for TPUs set the same ones.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from fornax.config import environment

__all__ = ["TPU_OPTIONS", "step_options"]

TPU_OPTIONS: Mapping[str, bool] = dict.fromkeys(
    (
        "xla_enable_async_all_gather",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
    ),
    True,
)


def step_options(mesh: Mesh) -> dict[str, bool]:
    """Compiler options of a step on a mesh; none elsewhere than on several TPUs.

    What `LIBTPU_INIT_ARGS` says of an option stays.
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "tpu":
        return {}
    given = environment.compiler_flags().get("LIBTPU_INIT_ARGS", "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in given}
    return {name: value for name, value in TPU_OPTIONS.items() if name not in named}
