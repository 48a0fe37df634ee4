"""What an estimate says: memory by owner, work by class of operation, collectives, seconds.

All figures are of one chip and one training step unless the name says otherwise. Bytes are whole
numbers, times seconds. Everything here is predicted from closed forms; nothing was compiled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["CollectiveEstimate", "Estimate", "MemoryEstimate", "OperationEstimate"]

Bound = Literal["compute", "memory", "ici", "dcn", "host"]
"""What a step waits for: arithmetic, device memory, the links inside a slice or node, the network
between them, the link to the host."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of a chip's memory by owner."""

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    """Gradients alive at the peak, the accumulated sums among them."""
    activations: int
    """What the forward pass keeps for the backward pass, as the remat policy has it."""
    temporaries: int
    """Whatever else is alive at the peak; `parts` names it."""
    other: int
    """Counters, metrics, the program's code."""
    host: int
    """Bytes kept in the host's memory for this chip (offloaded activations)."""
    parts: Mapping[str, int]
    """The figures above taken apart, by name; the largest are worth showing."""
    moment: str
    """Where in the step the peak is: `backward`, `loss` or `update`."""
    usable: int
    """What the compiler lets a program use."""

    @property
    def total(self) -> int:
        """All of a chip's memory that the step needs."""
        return (
            self.parameters
            + self.optimizer
            + self.batch
            + self.gradients
            + self.activations
            + self.temporaries
            + self.other
        )

    @property
    def fits(self) -> bool:
        """Whether that is no more than is usable."""
        return self.total <= self.usable


@dataclass(frozen=True, kw_only=True)
class OperationEstimate:
    """A class of operations, all of a step's together: one row of the roofline."""

    name: str
    """`attention`, `attention_projections`, `mlp`, `logits_loss`, `norms_elementwise`,
    `embedding` or `optimizer`."""
    flops: float
    """Executed, recomputation included."""
    bytes: int
    """Read from and written to device memory."""
    seconds: float
    bound: Literal["compute", "memory"]

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class CollectiveEstimate:
    """One kind of exchange between chips, all of a step's together."""

    name: str
    """What for, such as `gather layer weights (forward)`."""
    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "host-transfer"]
    axes: tuple[str, ...]
    """Mesh axes that the group spans."""
    group_size: int
    bytes: int
    """Of the whole gathered or reduced array in a group, once."""
    count: int
    """Times a step."""
    dtype: str
    link: Literal["ici", "dcn", "host"]
    """`ici`: inside a slice or a node (NVLink); `dcn`: the network between them; `host`: PCIe."""
    seconds: float
    """Of all of them, one after the other."""
    exposed_seconds: float
    """Of those, how many computation does not hide."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a config would need and take on a topology, without compiling it."""

    config: TrainConfig
    topology: Topology
    mesh: Mapping[str, int]
    """Mesh axes to sizes, -1 resolved."""
    memory: MemoryEstimate
    operations: tuple[OperationEstimate, ...]
    collectives: tuple[CollectiveEstimate, ...]
    model_flops: float
    """Of a chip's share of a step, counted by `fornax.models.flops_per_token`."""
    repeated_flops: float
    """Of the executed FLOPs those that the remat policy does a second time."""
    compute_seconds: float
    """All operations, without any exchange."""
    communication_seconds: float
    """All exchanges, as if nothing hid them."""
    exposed_seconds: float
    """The part of the exchanges that computation does not hide."""
    step_seconds: float
    """The prediction."""
    optimistic_seconds: float
    """With every exchange hidden as far as can be."""
    pessimistic_seconds: float
    """With none hidden."""
    bound: Bound
    notes: tuple[str, ...]
    """Assumptions that matter here, in words."""

    @property
    def flops(self) -> float:
        """Executed FLOPs of a chip, recomputation included."""
        return sum(operation.flops for operation in self.operations)

    @property
    def bytes(self) -> int:
        """Bytes read from and written to a chip's memory."""
        return sum(operation.bytes for operation in self.operations)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all chips."""
        return self.config.batch_size * self.config.seq_len

    @property
    def tokens_per_second_per_chip(self) -> float:
        """Throughput."""
        return self.tokens / self.step_seconds / self.topology.num_chips

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: model FLOP/s over the chip's peak in the compute dtype."""
        peak = self.topology.chip.peak_flops[self.config.dtypes.compute]
        return self.model_flops / self.step_seconds / peak
