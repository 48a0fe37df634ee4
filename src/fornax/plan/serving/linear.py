"""What linear layers read and compute in an engine's steps on one device, in closed form.

Legend: C tokens of a chunk, H key width, V value width.
"""

from dataclasses import dataclass

from fornax.kernels._delta_rule import CHUNK
from fornax.plan.facts import Work
from fornax.plan.serving.engine import Engine


@dataclass(frozen=True)
class LinearAttention:
    """The rule of all linear layers; their projections count with the weights."""

    layers: int
    key_heads: int
    """Of a device, as the next one."""
    value_heads: int
    key_dim: int
    value_dim: int
    corrects: bool
    """Whether a token corrects what its key finds: gated DeltaNet does, Mamba-2 does not."""
    slowdown: float
    """Of its products, which are in float32, beside those of the compute dtype."""

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state in one layer."""
        return self.value_heads * self.key_dim * self.value_dim

    def decode(self, batch: int) -> Work:
        """Of a step in which each of `batch` sequences has one token: its state is read, looked up
        where it is corrected, read out and written."""
        each = self.layers * batch * self.state_size
        return self._work((6 if self.corrects else 4) * each, 2 * 4 * each)

    def prompt(self, tokens: int) -> Work:
        """Of this many tokens of one prompt, in chunks that read and write the state once each."""
        chunks = self.layers * -(-tokens // CHUNK)
        C, H, V = CHUNK, self.key_dim, self.value_dim
        by_key_head = 2 * C * C * H  # keys with queries
        by_value_head = 2 * C * C * V + 4 * C * H * V
        if self.corrects:  # keys with keys, and the triangular system that they make
            by_key_head += 2 * C * C * H
            inverse = 4 * C**3 * (C.bit_length() - 2)
            by_value_head += inverse + 2 * C * C * (V + H) + 2 * C * H * V
        flops = self.key_heads * by_key_head + self.value_heads * by_value_head
        return self._work(chunks * flops, chunks * 2 * 4 * self.state_size)

    def _work(self, flops: float, size: float) -> Work:
        return Work(kind="attention", flops=flops * self.slowdown, bytes=size)


def linear_of(engine: Engine) -> LinearAttention | None:
    """That of an engine's model; None where no layer is linear."""
    model, size, chip = engine.model.config, engine.devices, engine.topology.chip
    rule = model.linear
    if rule is None:
        return None
    whole = rule.sharded_heads != rule.num_key_heads  # then each device has all key heads
    dtype = engine.weights.placement.compute_dtype.name
    return LinearAttention(
        layers=sum(kind.linear for kind in model.layer_kinds()),
        key_heads=rule.num_key_heads if whole else rule.num_key_heads // size,
        value_heads=rule.num_key_heads * rule.heads_per_key // size,
        key_dim=rule.key_dim,
        value_dim=rule.value_dim,
        corrects=model.gated_delta is not None,
        slowdown=1.0 if chip.platform == "cpu" else chip.peak(dtype) / chip.peak("float32"),
    )
