"""The training step of a denoiser, traced as the run does it."""

from collections.abc import Callable, Mapping

from fornax.config import from_mapping, to_mapping
from fornax.diffusion.config import DiffusionConfig
from fornax.plan.artifact import Artifact
from fornax.plan.compile.parent import compile_programs
from fornax.plan.compile.request import Job, Lowering, Request
from fornax.plan.compile.train import program_arguments
from fornax.plan.denoiser import planned_batch, planned_task
from fornax.plan.topology import Topology
from fornax.train import Ledger
from fornax.train.session import prepare

_BUILDER = "fornax.plan.compile.diffusion:build"
_IRRELEVANT = (
    *("checkpoint", "eval", "log", "processes", "profile", "sample", "save_every", "seed"),
)
"""Parts of a run's config that do not change its programs."""


def compile_diffusion(config: DiffusionConfig, topology: Topology) -> Artifact:
    """Compile the step of `fornax diffusion train`.

    Args:
      config: the run; of its data only the shapes count.
      topology: for which chips; TPUs, or a CPU with virtual devices.

    Raises:
      OutOfMemoryError: it does not fit.
      ShardingError, ConfigError: the run could not be laid out over the chips.
      MissingCompilerError: libtpu is not installed.
      CompileError: the compiler refuses the program, dies or takes too long.
    """
    (found,) = compile_programs(diffusion_request(config), topology)
    return found


def diffusion_request(config: DiffusionConfig) -> Request:
    """What the child is asked for."""
    mapping = {name: x for name, x in to_mapping(config).items() if name not in _IRRELEVANT}
    mapping["sample"] = {"every": None, "guidance": 1}
    return Request(
        builder=_BUILDER, arguments={"config": mapping}, programs=("train_step",), options={}
    )


def build(job: Job) -> Mapping[str, Callable[[], Lowering]]:
    """`train_step` of the run in `job.arguments["config"]`."""
    config = from_mapping(DiffusionConfig, dict(job.arguments["config"]))
    programs = prepare(config, planned_task(config), Ledger(), job.devices)
    rows = programs.hosts.size(config.batch_size)
    batch = programs.shapes_of(planned_batch(config, rows))

    def lowering() -> Lowering:
        return Lowering(
            lowered=programs.lower_step(batch),
            mesh=programs.parts.mesh,
            arguments=program_arguments(programs, batch),
        )

    return {"train_step": lowering}
