"""What linear layers read and compute in an engine's steps on one device, in closed form.

Legend: C tokens of a chunk, H key width, V value width.
"""

from dataclasses import dataclass

from fornax.kernels._delta_rule import CHUNK
from fornax.plan.facts import Work
from fornax.plan.serving.engine import Engine


@dataclass(frozen=True)
class LinearAttention:
    """The gated delta rule of all linear layers; their projections count with the weights."""

    layers: int
    key_heads: int
    """Of a device, as the next one."""
    value_heads: int
    key_dim: int
    value_dim: int
    slowdown: float
    """Of its products, which are in float32, beside those of the compute dtype."""

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state in one layer."""
        return self.value_heads * self.key_dim * self.value_dim

    def decode(self, batch: int) -> Work:
        """Of a step in which each of `batch` sequences has one token: its state is read, looked up,
        corrected, read out and written."""
        each = self.layers * batch * self.state_size
        return self._work(6 * each, 2 * 4 * each)

    def prompt(self, tokens: int) -> Work:
        """Of so many tokens of one prompt, in chunks that read and write the state once each."""
        chunks = self.layers * -(-tokens // CHUNK)
        C, H, V = CHUNK, self.key_dim, self.value_dim
        by_key_head = 4 * C * C * H  # keys with keys, keys with queries
        inverse = 4 * C**3 * (C.bit_length() - 2)
        by_value_head = inverse + 2 * C * C * (2 * V + H) + 6 * C * H * V
        flops = self.key_heads * by_key_head + self.value_heads * by_value_head
        return self._work(chunks * flops, chunks * 2 * 4 * self.state_size)

    def _work(self, flops: float, size: float) -> Work:
        return Work(kind="attention", flops=flops * self.slowdown, bytes=size)


def linear_of(engine: Engine) -> LinearAttention | None:
    """That of an engine's model; None where no layer is linear."""
    model, size, chip = engine.model.config, engine.devices, engine.topology.chip
    delta = model.gated_delta
    if delta is None:
        return None
    dtype = engine.weights.placement.compute_dtype.name
    return LinearAttention(
        layers=sum(kind.linear for kind in model.layer_kinds()),
        key_heads=delta.num_key_heads // size,
        value_heads=delta.num_value_heads // size,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        slowdown=1.0 if chip.platform == "cpu" else chip.peak(dtype) / chip.peak("float32"),
    )
