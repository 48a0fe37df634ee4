"""Saying in words what a plan is, why it is good, and what bounds it."""

from fornax.plan.analytic import Estimate
from fornax.train import TrainConfig

__all__ = ["plan_words", "reason_words"]

_BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "ici": "the links between chips",
    "dcn": "the network between slices or servers",
    "host": "the link to the host",
}
_CLASSES = {
    "attention": "attention",
    "attention_projections": "the attention's projections",
    "mlp": "the MLP",
    "logits_loss": "the output projection and the loss",
    "norms_elementwise": "norms and element-wise work",
    "embedding": "the embedding",
    "optimizer": "the optimizer",
}


def plan_words(config: TrainConfig) -> str:
    """A plan in one line: mesh, micro-batches, what is kept."""
    sizes = config.mesh.axis_sizes()
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
    words = f"{mesh}, batch {config.batch_size}"
    if config.accumulate > 1:
        words += f" in {config.accumulate} micro-batches"
    words += f", remat {config.remat}"
    if config.remat_save:
        words += f", keeping {', '.join(config.remat_save)}"
    if config.remat_offload:
        words += f", on the host {', '.join(config.remat_offload)}"
    return words


def reason_words(estimate: Estimate, total_bytes: int, step_seconds: float) -> str:
    """Why a plan is good and what bounds it."""
    step = estimate.step_seconds
    largest = max(estimate.operations, key=lambda row: row.seconds)
    share = total_bytes / estimate.memory.usable
    rate = estimate.tokens / step_seconds / estimate.topology.num_chips
    sentences = [
        f"{rate:,.0f} tokens/s a chip: bound by {_BOUNDS[estimate.bound]}; "
        f"{largest.seconds / step:.0%} of the step is {_CLASSES[largest.name]}",
        _exchange_words(estimate),
        _keep_words(estimate),
        f"{share:.0%} of the usable memory is taken",
    ]
    return "; ".join(sentence for sentence in sentences if sentence)


def _exchange_words(estimate: Estimate) -> str:
    if not estimate.collectives:
        return "chips exchange nothing"
    hidden = 1 - estimate.exposed_seconds / max(estimate.communication_seconds, 1e-30)
    exposed = estimate.exposed_seconds / estimate.step_seconds
    if exposed < 0.005:
        return "exchanges are hidden behind computation"
    worst = max(estimate.collectives, key=lambda row: row.exposed_seconds)
    return (
        f"exchanges cost {exposed:.0%} of the step ({hidden:.0%} of them hidden), most of it to "
        f"{worst.name} over {', '.join(worst.axes) or 'PCIe'}"
    )


def _keep_words(estimate: Estimate) -> str:
    config = estimate.config
    moved = " and kept values go to the host and back" if config.remat_offload else ""
    again = estimate.repeated_flops / estimate.flops
    if again < 0.005:
        return f"no product is computed twice{moved}"
    return f"{again:.0%} of the arithmetic is done a second time to save memory{moved}"
