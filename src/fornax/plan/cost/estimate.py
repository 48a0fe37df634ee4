"""A training step by closed forms: its facts, and the time they take."""

from dataclasses import dataclass

from fornax.plan.closed_form import EVEN, step_facts
from fornax.plan.cost.summary import report_facts
from fornax.plan.facts import Memory, ProgramReport
from fornax.plan.topology import Topology
from fornax.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a config would need and take on a topology, without compiling it."""

    config: TrainConfig
    topology: Topology
    step: ProgramReport
    repeated_flops: float
    """Of a chip's FLOPs those that the remat policy executes a second time."""

    @property
    def memory(self) -> Memory:
        """Of a chip, at the step's peak."""
        return self.step.memory

    @property
    def step_seconds(self) -> float:
        """The prediction."""
        return self.step.step_seconds

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all chips."""
        return self.config.batch_size * self.config.seq_len


def estimate(config: TrainConfig, topology: Topology, *, expert_load: float = EVEN) -> Estimate:
    """What a training step of `config` would need and take on `topology`.

    Args:
      config: of the run.
      topology: the chips.
      expert_load: rows of the busiest device over the mean, where devices divide experts.

    Raises:
      ConfigError: for a model that is not given, slices that the mesh does not
        name, a remat policy that is not known here.
      ShardingError: when model, batch or length do not divide over the mesh.
    """
    facts = step_facts(config, topology, expert_load)
    step = report_facts("train_step", facts, topology)
    return Estimate(
        config=config, topology=topology, step=step, repeated_flops=facts.repeated_flops
    )
