"""Every plan that could run: mesh shapes, micro-batches, what is kept for the backward pass.

Only whole divisions are made: heads, widths, vocabulary and length by their axes, rows by the axes
of the batch. Tensor and context parallelism stay inside a slice (a TPU's torus, a server's GPUs);
slices are data parallel.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from fornax.mesh import MeshConfig
from fornax.models import DecoderConfig
from fornax.plan.topology import Topology
from fornax.train import TrainConfig

__all__ = ["KEEPS", "Keep", "batch_sizes", "meshes", "micro_batches", "rematted"]

_MOST_TENSOR = 64
_MOST_CONTEXT = 64
_TOKENS_FOR_CONTEXT = 1024
"""Below this many tokens a device of a row, dividing the length gains nothing."""
_LONG = 32768
"""Tokens of a row from which dividing it is tried though there are rows for every device."""
_MOST_MICRO_BATCHES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keep:
    """One choice of what stays for the backward pass."""

    remat: str
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


_QKV = ("query", "key", "value")
KEEPS: tuple[Keep, ...] = (
    Keep(remat="none"),
    Keep(remat="dots"),
    Keep(remat="dots_no_batch"),
    Keep(remat="names", save=("layer_input", "attention", "attention_out", "mlp_gate", "mlp_up")),
    Keep(remat="names", save=("layer_input", *_QKV, "attention", "attention_out", "mlp_gate")),
    Keep(remat="names", save=("layer_input", *_QKV, "attention", "attention_out")),
    Keep(remat="save_attention"),
    Keep(remat="names", save=("layer_input", "attention")),
    Keep(remat="full"),
    Keep(
        remat="names",
        offload=("layer_input", *_QKV, "attention", "attention_out", "mlp_gate", "mlp_up"),
    ),
    Keep(remat="names", offload=("layer_input", *_QKV, "attention", "attention_out")),
    Keep(remat="names", offload=("layer_input", "attention")),
    Keep(remat="names", save=("attention",), offload=("layer_input",)),
    Keep(remat="names", offload=("layer_input",)),
)
"""From the least recomputation to the most, then those that use the host's memory."""


def rematted(config: TrainConfig, topology: Topology) -> Iterator[TrainConfig]:
    """`config` with each choice of what is kept; the host's memory only where there is another."""
    for keep in KEEPS:
        if keep.offload and topology.chip.platform == "cpu":
            continue
        yield dataclasses.replace(
            config,
            remat=keep.remat,  # pyrefly: ignore[bad-argument-type]
            remat_save=keep.save,
            remat_offload=keep.offload,
        )


def meshes(
    config: TrainConfig, batch_size: int, model: DecoderConfig, topology: Topology
) -> Iterator[MeshConfig]:
    """Mesh shapes that use every device, the least divided first.

    A row's length is divided only where it is long, or rows are fewer than devices.
    """
    slices = topology.slices if topology.chip.platform == "tpu" else 1
    inside = topology.num_devices // slices
    close = topology.shape[-1] if topology.chip.platform == "gpu" else inside
    rules = config.mesh.resolved_rules()
    tensors = [
        size
        for size in _divisors(min(close, inside))
        if size <= _MOST_TENSOR and (size == 1 or _splits(model, size)) and inside % size == 0
    ]
    divided = config.seq_len >= _LONG or batch_size < topology.num_devices
    contexts = [
        size
        for size in _divisors(inside)
        if size == 1
        or (
            divided
            and size <= _MOST_CONTEXT
            and config.seq_len % size == 0
            and config.seq_len // size >= _TOKENS_FOR_CONTEXT
            and rules["length"] == ("context",)
        )
    ]
    for tensor, context in itertools.product(tensors, contexts):
        rest, remainder = divmod(inside, tensor * context)
        if remainder or tensor * context > close:
            continue
        for data in _divisors(rest):
            yield MeshConfig(
                slice=slices,
                data=data,
                fsdp=rest // data,
                context=context,
                tensor=tensor,
                rules=config.mesh.rules,
            )


def _splits(model: DecoderConfig, tensor: int) -> bool:
    """Whether heads (of keys too), widths and vocabulary divide over tensor shards."""
    sizes = (model.num_heads, model.kv_heads, model.intermediate_size, model.vocab_size)
    return all(size % tensor == 0 for size in sizes)


def micro_batches(batch_size: int, mesh: MeshConfig) -> Sequence[int]:
    """Numbers of micro-batches that leave every device whole rows; none when rows are too few."""
    shards = mesh.slice * mesh.data * mesh.fsdp
    rows, remainder = divmod(batch_size, shards)
    if remainder or rows == 0:
        return ()
    return [count for count in _divisors(rows) if count <= _MOST_MICRO_BATCHES]


def batch_sizes(config: TrainConfig, *, anything: bool) -> Sequence[int]:
    """The config's own batch size, or that and others around it."""
    if not anything:
        return (config.batch_size,)
    sizes = {config.batch_size * 2**power for power in range(4)}
    halves = (config.batch_size // 2**power for power in (1, 2))
    sizes |= {size for size in halves if size and config.batch_size % size == 0}
    return sorted(sizes)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
