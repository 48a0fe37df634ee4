"""What the trainer asks of a task: a model, a loss of weighted sums, batches. It owns no loop.

`Task` is the core; `PostTraining` is what tuning a model that exists adds to it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from fornax.data import Hosts
from fornax.mesh import Rules
from fornax.models import Decoder, DecoderConfig
from fornax.quant import FakeQuantizer, QuantConfig, quantize_products

__all__ = [
    "Batch",
    "Batches",
    "Described",
    "EightBits",
    "Hosts",
    "Loss",
    "Means",
    "PostTraining",
    "Samples",
    "Task",
    "in_eight_bits",
]

ModelT = TypeVar("ModelT", bound=nnx.Module)

Batch = Mapping[str, Any]
"""Arrays whose first dimension is rows. Another is length: the one as long as the last of `tokens`,
or, in a batch without `tokens`, the second of exactly two."""


Means = dict[str, tuple[jax.Array, jax.Array]]
"""Name to (float32 sum, float32 weight): what is divided once all sums are added up."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Loss:
    """Sums over a batch, not means: sums of several batches add up, whatever their sizes.

    The objective is `total / weight`. With gradient accumulation the trainer adds the gradients of
    `total` and the weights over all micro-batches, then divides once.
    """

    total: jax.Array
    """float32 scalar: the sum of weighted losses; what is differentiated."""
    weight: jax.Array
    """float32 scalar: the sum of weights (in pretraining: how many tokens are predicted)."""
    metrics: Means
    """Further means to report."""
    maxima: dict[str, jax.Array] = field(default_factory=dict)
    """Further numbers to report (float32), of which the largest over all micro-batches counts."""
    counts: dict[str, jax.Array] = field(default_factory=dict)
    """float32 arrays that are added up over all micro-batches, for `Task.settle`."""


class Batches(Protocol):
    """A stream of this host's rows, whose position can be saved and set."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The stream itself."""
        ...

    def __next__(self) -> dict[str, np.ndarray]:
        """The next rows: arrays `[hosts.size(batch_size), ...]`, those that `hosts.rows` names and
        then rows of padding, whose weight is 0."""
        ...

    def state(self) -> dict[int, dict]:
        """The position, JSON-able, a part per virtual shard this host reads. Hosts that read the
        same shard give the same part."""
        ...

    def restore(self, state: dict[int, dict], *, allow_changes: bool = False) -> None:
        """Go to a position, given the parts of all hosts; `allow_changes` takes up a position of
        another configuration as well as it can."""
        ...

    def close(self) -> None:
        """Stop reading ahead."""
        ...


@runtime_checkable
class Described(Protocol):
    """A stream that says what it is of."""

    def describe(self) -> Mapping[str, Any]:
        """Documents, tokens, packing: JSON-able; see `fornax.data.batches.Batches.describe`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PostTraining(Generic[ModelT]):
    """What a task of post-training asks of the trainer beyond the core."""

    trained: Filter = nnx.Param
    """Which parameters are trained. Every other `nnx.Param` is frozen: it has no gradient and no
    optimizer state, a step neither copies nor replaces it, and no checkpoint holds it. A resumed
    run gets it where it first came from, `pretrained` or `build`."""
    measure: Callable[[ModelT, Batch], Means] | None = None
    """(model, batch) to sums and weights by name, for a loss that depends on means over the whole
    batch: they are added up over its micro-batches first, without gradient or randomness, and the
    loss of each micro-batch finds the means in its batch, as scalars `measured/NAME`."""
    follow: Callable[[int, Callable[[], nnx.Module]], None] | None = None
    """(steps done, model), called before each batch is asked for: a stream that depends on the
    weights, such as one of samples from the model, takes them here. `model()` is the model after
    that step; its arrays are the trainer's own, and gone once its next step starts."""
    observe: Callable[[], Mapping[str, float]] | None = None
    """Numbers, counted on the host, of the rows that were just taken; recorded with their step."""
    steps_per_epoch: float | None = None
    """Steps of one pass over the training rows; None where a pass has no end, or none is known."""
    notes: tuple[str, ...] = ()
    """What there is to say of model and data before the first step, a line each."""


@dataclass(frozen=True, kw_only=True)
class Samples(Generic[ModelT]):
    """What a run shows of its model while it trains, such as images that it draws."""

    every: int
    """Steps between two calls, with one after the last step."""
    show: Callable[[int, ModelT], None]
    """(steps done, model), called in every process; the model has the parameters that evaluation
    takes, the averaged ones where the optimizer keeps an average. It writes its own files."""


@dataclass(frozen=True, kw_only=True)
class EightBits:
    """Which products a task multiplies in 8 bits."""

    config: QuantConfig
    """With a scheme."""
    model: DecoderConfig
    length: int
    """Tokens of a row."""


@dataclass(frozen=True, kw_only=True)
class Task(Generic[ModelT]):
    """A training task, as a record of functions; `dataclasses.replace` changes one of them."""

    build: Callable[[nnx.Rngs], ModelT]
    """A model with fresh weights. Every parameter names its logical axes: `nnx.Param(value,
    axes=("embed", "mlp"))`."""
    loss: Callable[[ModelT, Batch, jax.Array], Loss]
    """(model, batch, random key) to the loss of the batch. Traced by `jax.jit`, over the global
    batch or a micro-batch of it."""
    batches: Callable[[str, Hosts], Batches]
    """(split, hosts) to a stream; splits are `train` and `eval`."""
    settle: Callable[[ModelT, Loss], None] | None = None
    """(model, loss of the whole batch), called once a step, traced: it may change the model's
    arrays that are no `nnx.Param` by what the batch did. A step that is skipped changes none."""
    evaluate: Callable[[ModelT, Batch], Loss] | None = None
    """(model, batch) to sums that add up over the evaluation; None: `loss` without randomness."""
    summarise: Callable[[dict[str, float]], dict[str, float]] = dict
    """Evaluation means (`loss` and the metrics) to what is reported, e.g. with perplexity."""
    pretrained: Callable[[jax.sharding.Mesh, Rules], ModelT] | None = None
    """(mesh, rules) to a model with weights to start from, instead of `build`'s."""
    optimizer: Callable[..., optax.GradientTransformation] | None = None
    """A factory that takes `optim.optimizer`'s place, called with the schedule as `learning_rate`
    (and with `mask` and `views` where it names them: `fornax.optim.user`). The state of what it
    makes is beside the parameters that its paths or shapes match."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Numbers of batches, from 0, as ranges (start, stop), that the training stream passes over by
    itself: a skip list counts them too."""
    unit: str = "tokens"
    """What `Loss.weight` counts: the name of the throughput."""
    flops_per_unit: float | None = None
    """Floating-point operations of a training step for each unit; None: utilisation is not
    reported."""
    quantizer: FakeQuantizer | None = None
    """Quantization-aware training of a `models.Decoder`: losses see its weights rounded, and the
    gradients at the rounded weights change the float ones. None: losses see what is trained."""
    eight_bits: EightBits | None = None
    """What `in_eight_bits` made of it; None: products are in the model's own dtype."""
    samples: Samples[ModelT] | None = None
    """What is shown of the model while it trains; None: nothing."""
    post: PostTraining[ModelT] = field(default_factory=PostTraining)
    """What post-training adds: frozen parameters, streams that depend on the weights."""


def in_eight_bits(
    task: Task[Any], config: QuantConfig, model: DecoderConfig, length: int
) -> Task[Any]:
    """A task whose losses multiply codes (`quant.quantize_products`) where `config` has a scheme.

    Args:
      task: of a decoder; its loss's random key also gives the bits of stochastic rounding.
      config: what is multiplied so.
      model: the decoder's.
      length: tokens of a row.
    """
    if config.scheme is None:
        return task
    evaluate, measure = task.evaluate, task.post.measure

    def coded(decoder: Decoder, key: jax.Array | None = None) -> Decoder:
        return quantize_products(decoder, config, key)

    return replace(
        task,
        loss=lambda decoder, batch, key: task.loss(coded(decoder, key), batch, key),
        evaluate=evaluate and (lambda decoder, batch: evaluate(coded(decoder), batch)),
        eight_bits=EightBits(config=config, model=model, length=length),
        post=replace(
            task.post,
            measure=measure and (lambda decoder, batch: measure(coded(decoder), batch)),
        ),
    )
