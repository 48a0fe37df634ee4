"""Which parallelism each part of Fornax has: one table for code, errors and documentation.

Which kernels run on which device is a table of its own: the implementations of `fornax.kernels`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from fornax.config.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from fornax.mesh.mesh import MeshConfig

__all__ = [
    "ACROSS",
    "MESH_AXES",
    "USES",
    "AxisSupport",
    "CrossingSupport",
    "across_table",
    "axes_table",
    "check_processes",
    "check_use",
    "processes_table",
]

USES = (
    "train",
    "train in 8 bits",
    "tune",
    "plan",
    "plan tune",
    "preflight",
    "serve",
    "train diffusion",
    "plan diffusion",
    "serve diffusion",
)
"""What divides arrays over a mesh, with what it is built of: commands, training with
`quant.scheme`, and what denoisers are trained, planned and served with."""

_DECODERS = ("train", "train in 8 bits", "tune", "plan", "preflight")
_TRAINER = (*_DECODERS, "plan tune", "train diffusion", "plan diffusion")


class AxisSupport(NamedTuple):
    """One axis of the mesh."""

    divides: str
    """What it divides."""
    uses: tuple[str, ...]
    """Which of `USES` can give it a size above 1."""
    instead: str = ""
    """What to do where one cannot."""


_AXES: Mapping[str, AxisSupport] = {
    "slice": AxisSupport(
        "the batch, between slices: TPU slices, nodes, processes; or layers, by `mesh.across`",
        _TRAINER,
        "give its devices to mesh.data",
    ),
    "data": AxisSupport(
        "the batch; parameters are on every device", (*_TRAINER, "serve diffusion")
    ),
    "stage": AxisSupport(
        "layers, into the stages of a pipeline; the batch, and all else as `fsdp` does",
        ("train", "plan", "preflight"),
        "give its devices to mesh.fsdp",
    ),
    "fsdp": AxisSupport(
        "the batch, parameters and optimizer state", (*_TRAINER, "serve diffusion")
    ),
    "expert": AxisSupport(
        "experts; the batch, and all else as `fsdp` does",
        _DECODERS,
        "give its devices to mesh.fsdp",
    ),
    "context": AxisSupport("the length of rows", _TRAINER, "give its devices to mesh.tensor"),
    "tensor": AxisSupport(
        "heads, widths and vocabulary",
        (*_DECODERS, "serve", "train diffusion", "serve diffusion"),
        "give its devices to mesh.fsdp",
    ),
}

MESH_AXES = tuple(_AXES)
"""Mesh axes from the slowest link to the fastest."""


class CrossingSupport(NamedTuple):
    """What the axis `slice`, the only one that crosses between slices, may divide."""

    divides: str
    """What each slice has a part of."""
    crosses: str
    """What the network between slices carries."""
    uses: tuple[str, ...]
    """Which of `USES` can have it."""
    rules: Mapping[str, tuple[str, ...]]
    """Logical axes whose mesh axes differ from the default table."""
    instead: str = ""
    """What to do where one cannot."""


ACROSS: Mapping[str, CrossingSupport] = {
    "data": CrossingSupport(
        "the batch; parameters are in every slice",
        "gradients, once a micro-batch",
        (*_TRAINER, "serve diffusion"),
        {},
    ),
    "stage": CrossingSupport(
        "layers, `slice` x `stage` stages of a pipeline; the batch outside them",
        "what stages pass on; gradients of embeddings, final norm and output projection; with "
        "`pipeline.repeats`, parts of the layers",
        ("train", "plan", "preflight"),
        {"layers": ("slice", "stage")},
        "set mesh.across to data",
    ),
}
"""Values of `mesh.across`."""


def check_use(mesh: "MeshConfig", use: str) -> None:
    """Refuse an axis larger than 1, or one across slices, that a command cannot have.

    Args:
      mesh: axis sizes, -1 for what is left, and what crosses slices.
      use: one of `USES`.

    Raises:
      ConfigError: naming the axis, and what to do instead.
    """
    sizes = mesh.axis_sizes()
    for axis, support in _AXES.items():
        if sizes[axis] != 1 and use not in support.uses:
            raise ConfigError(
                f"mesh.{axis}={sizes[axis]}: the axis {axis!r} ({support.divides}) is not "
                f"supported yet ({use}); {support.instead}"
            )
    crossing = ACROSS[mesh.across]
    if use not in crossing.uses:
        raise ConfigError(
            f"mesh.across={mesh.across}: stages across slices are not supported yet ({use}); "
            f"{crossing.instead}"
        )


def axes_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: axis, what it divides, then yes or no for each use."""
    return [
        (f"`{axis}`", each.divides, *("yes" if use in each.uses else "no" for use in USES))
        for axis, each in _AXES.items()
    ]


def across_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: `mesh.across`, what slices divide, what crosses, uses."""
    return [
        (
            f"`{across}`",
            each.divides,
            each.crosses,
            *("yes" if use in each.uses else "no" for use in USES),
        )
        for across, each in ACROSS.items()
    ]


_PROCESSES: Mapping[str, str] = {
    "pretraining": "",
    "supervised fine-tuning": "",
    "preference optimization": "",
    "KTO": "",
    "training of reward models": "",
    "distillation": "",
    "on-policy distillation": "",
    "on-policy distillation without samplers": "start one process on a host, over all its "
    "devices, or give it samplers: `fornax launch --hosts 2 --samplers 2 -- tune distill`",
    "reinforcement learning": "",
    "reinforcement learning without samplers": "start one process on a host, over all its "
    "devices, or give it samplers: `fornax launch --hosts 2 --samplers 2 -- tune grpo`",
    "serving a language model": "",
    "serving adapters": "start one process on a host, or merge the adapter into the model",
    "speculation with a draft model": "take `ngram`, or start one process on a host",
    "serving bundles": "",
    "serving bundles on chosen devices": "leave --devices out: a mesh takes the devices of all "
    "processes, and a replica one of process 0",
    "serving a language model beside bundles": "serve it by `fornax launch --hosts 2 -- serve DIR "
    "--tensor-parallel-size 2`, or start one process on a host",
    "the doctor": "run `fornax tune doctor` with the same flags on one host",
}
"""What runs in any number of processes (an empty text), or in one, and what to do there."""


def check_processes(work: str, count: int) -> None:
    """Refuse work that runs in one process in a run of `count`.

    Raises:
      ClusterError: naming the work, and what to do instead.
    """
    instead = _PROCESSES[work]
    if instead and count > 1:
        raise ClusterError(f"{work} runs in one process, and this run has {count}; {instead}")


def processes_table() -> list[tuple[str, ...]]:
    """Rows of the documentation's table: the work, then in how many processes it runs."""
    return [
        (work[0].upper() + work[1:], f"one: {instead}" if instead else "any number")
        for work, instead in _PROCESSES.items()
    ]
