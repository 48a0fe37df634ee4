"""The plan of programs that the TPU compiler made, or refused for their memory."""

import functools
import math
from collections.abc import Sequence

from fornax.models import DecoderConfig, abstract_decoder
from fornax.plan.analytic import estimate
from fornax.plan.artifact import Artifact
from fornax.plan.compile import OutOfMemoryError, compile_train
from fornax.plan.compile.progress import Progress, choose
from fornax.plan.cost import predict
from fornax.plan.hlo import analyse, parse
from fornax.plan.report.compiled import program_of_artifact
from fornax.plan.report.findings import LogicalAxes
from fornax.plan.report.predicted import program_of_estimate
from fornax.plan.report.program import ProgramReport
from fornax.plan.report.refused import refused_program
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["compiled_programs", "logical_axes"]


def compiled_programs(
    config: TrainConfig,
    topology: Topology,
    programs: Sequence[str],
    progress: Progress | None = None,
) -> list[ProgramReport]:
    """The programs of a training run as the compiler made them.

    A program that does not fit is reported too; those after it are not compiled.

    Raises:
      MissingCompilerError: when libtpu is not installed.
      CompileError: when the compiler refuses a program for another reason than memory.
      ShardingError, ConfigError: when the run could not be laid out over the chips.
    """
    watched = Watched(progress or choose(topology.name))
    refused = []
    try:
        artifacts = compile_train(config, topology, programs=programs, progress=watched)
    except OutOfMemoryError as error:
        refused = [_refused(config, topology, error)]
        before = tuple(programs)[: tuple(programs).index(error.program)]
        artifacts = (
            compile_train(config, topology, programs=before, progress=watched) if before else []
        )
    found = [_report(config, topology, one, fresh=one.program in watched.seen) for one in artifacts]
    return [*found, *refused]


class Watched:
    """A progress that remembers which programs were worked on: the rest came from the cache."""

    def __init__(self, shown: Progress) -> None:
        """Show what `shown` shows."""
        self.seen: set[str] = set()
        self._shown = shown

    def phase(self, what: str) -> None:
        """Remember the program, and show the phase."""
        self.seen.add(what.partition(":")[0])
        self._shown.phase(what)

    def tick(self) -> None:
        """Show that time passes."""
        self._shown.tick()

    def close(self) -> None:
        """Finish what is shown."""
        self._shown.close()


def _report(
    config: TrainConfig, topology: Topology, artifact: Artifact, *, fresh: bool
) -> ProgramReport:
    facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
    return program_of_artifact(
        artifact,
        facts,
        predict(artifact, facts, topology),
        topology,
        rules=config.mesh.resolved_rules(),
        logical=logical_axes(config.model) if config.model else {},
        residual=_residual(config, artifact),
        cached=not fresh,
    )


def _residual(config: TrainConfig, artifact: Artifact) -> int:
    """Elements of a micro-batch's residual stream that one shard of the batch holds."""
    if config.model is None:
        return 0
    rules = config.mesh.resolved_rules()
    shards = math.prod(artifact.mesh[axis] for axis in (*rules["batch"], *rules["length"]))
    micro = config.accumulate if artifact.program == "train_step" else 1
    tokens = config.batch_size * config.seq_len // micro // shards
    return tokens * config.model.hidden_size


def _refused(config: TrainConfig, topology: Topology, error: OutOfMemoryError) -> ProgramReport:
    """What is known of a program that does not fit: the program itself, or the compiler's words."""
    if error.artifact is not None:
        return _report(config, topology, error.artifact, fresh=True)
    return refused_program(program_of_estimate(estimate(config, topology)), error, topology)


@functools.cache
def logical_axes(model: DecoderConfig) -> LogicalAxes:
    """Each parameter's path to the logical axes of its dimensions."""
    import jax
    from flax import nnx

    from fornax.mesh import path_name

    state = nnx.state(abstract_decoder(model), nnx.Param)
    leaves = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )[0]
    return {path_name(path): leaf.get_metadata()["axes"] for path, leaf in leaves}
