"""What the checks look at: a small run, made ready and never trained; each part when first asked.

Legend: B rows, T tokens of a row.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax import adapters
from fornax.mesh import use_mesh
from fornax.models import token_logprobs
from fornax.train import Ledger
from fornax.train.hosts import to_global
from fornax.train.session import Programs, first_state, prepare
from fornax.train.state import TrainState
from fornax.train.task import Hosts, Loss, Task
from fornax.tune.config import SFTConfig, TuneConfig
from fornax.tune.data import Encoded
from fornax.tune.doctor.small import data_shards
from fornax.tune.policy import Origin

__all__ = ["Patient", "Rows", "quick_options", "sequences_of", "spans"]

Rows = dict[str, np.ndarray]


@dataclass(kw_only=True)
class Patient:
    """A small run. Its arrays are the first state's; nothing here changes them."""

    run: TuneConfig
    """The config of the run that is to start."""
    config: TuneConfig
    """Of the small one."""
    origin: Origin
    make: Callable[[TuneConfig, Origin, Path], Task]
    folder: Path
    """Where the small run may write."""
    _evaluators: dict[int, tuple[Task, Programs]] = field(default_factory=dict)
    _passes: dict[bool, Callable[..., jax.Array]] = field(default_factory=dict)

    @functools.cached_property
    def task(self) -> Task:
        """The small run's task."""
        return self.make(self.config, self.origin, self.folder)

    @functools.cached_property
    def programs(self) -> Programs:
        """The trainer's programs of it."""
        return prepare(self.config, self.task, Ledger())

    @functools.cached_property
    def state(self) -> TrainState:
        """Before the first step; the frozen parameters go into `programs`."""
        return first_state(self.config, self.programs)

    @property
    def model(self) -> Any:
        """The model before the first step."""
        state = self.state
        return self.programs.model(state)

    @functools.cached_property
    def rows(self) -> Rows:
        """The first batch, as the trainer would get it."""
        stream = self.task.batches("train", Hosts())
        rows = dict(next(iter(stream)))
        stream.close()
        return rows

    @property
    def tolerance(self) -> float:
        """How far numbers may lie apart that differ by rounding alone, in nats of a token."""
        exact = self.config.dtypes.compute == "float32" and jax.default_backend() == "cpu"
        layers = self.origin.model_config.num_layers
        return 1e-5 * max(1.0, layers / 4) if exact else 0.05

    @property
    def noisy(self) -> bool:
        """Whether the training loss draws random numbers."""
        config = self.config
        dropout = config.lora is not None and config.lora.dropout > 0
        return dropout or (isinstance(config, SFTConfig) and config.neftune_alpha is not None)

    def evaluate(self, rows: Rows, task: Task | None = None) -> dict[str, float]:
        """Means and maxima of a task's own training loss over rows, without randomness.

        Args:
          rows: a batch.
          task: another of the same model; None: the small run's.
        """
        state = self.state
        loss: Loss = jax.device_get(self._evaluator(task or self.task).evaluate(state, rows))
        means = {name: _ratio(*pair) for name, pair in loss.metrics.items()}
        return {
            **means,
            **{name: float(x) for name, x in loss.maxima.items()},
            "loss": _ratio(loss.total, loss.weight),
        }

    def _evaluator(self, task: Task) -> Programs:
        """Programs whose evaluation is the training loss."""
        if id(task) not in self._evaluators:
            loss = task if self.noisy else replace(task, evaluate=None)
            parts = replace(self.programs.parts, task=loss)
            made = replace(self.programs, parts=parts, _compiled={})
            self._evaluators[id(task)] = (task, made)
        return self._evaluators[id(task)][1]

    def logprobs(self, rows: Mapping[str, Any], *, base: bool = False) -> np.ndarray:
        """float32 log-probs of the targets [B, T]; of the model without adapters, if `base`."""
        names = ("tokens", "targets", "positions", "segment_ids")
        wanted = {name: np.asarray(rows[name]) for name in names}
        found = self._logprobs(base)(
            nnx.state(self.model), to_global(wanted, self.programs.shapes_of(wanted))
        )
        return np.asarray(jax.device_get(found))

    def _logprobs(self, base: bool) -> Callable[..., jax.Array]:
        if base not in self._passes:
            self._passes[base] = self._make_pass(base)
        return self._passes[base]

    def _make_pass(self, base: bool) -> Callable[..., jax.Array]:
        graphdef = nnx.graphdef(self.model)
        parts = self.programs.parts

        def run(state: Any, rows: Mapping[str, Any]) -> jax.Array:
            with use_mesh(parts.mesh, parts.rules):
                model = nnx.merge(graphdef, state)
                model.eval()
                if not base:
                    return _token_logprobs(model, rows)
                with adapters.disabled(model):
                    return _token_logprobs(model, rows)

        return jax.jit(run, compiler_options=quick_options())

    @functools.cached_property
    def unit(self) -> int:
        """Rows that divide over all devices and four micro-batches."""
        return 4 * data_shards(self.config)


def quick_options() -> dict[str, Any] | None:
    """Options of programs that run once: on a CPU, XLA would optimize them for longer than they
    run."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _token_logprobs(model: Any, rows: Mapping[str, Any]) -> jax.Array:
    return token_logprobs(
        model,
        rows["tokens"],
        rows["targets"],
        positions_BT=rows["positions"],
        segment_ids_BT=rows["segment_ids"],
    ).logprobs


def _ratio(total: Any, weight: Any) -> float:
    return float(total) / float(weight) if float(weight) else 0.0


def sequences_of(rows: Mapping[str, np.ndarray], mask: str = "loss_weights") -> list[Encoded]:
    """The sequences that rows [..., T] hold, with what of each is learned, as the loss sees it.

    A sequence ends where the segment changes or the positions start again.
    """
    flat = {name: rows[name].reshape(-1, rows[name].shape[-1]) for name in (*_NAMES, mask)}
    return [found for row in range(len(flat["tokens"])) for found in _of_row(flat, mask, row)]


_NAMES = ("tokens", "targets", "segment_ids", "positions")


def _of_row(rows: Mapping[str, np.ndarray], mask: str, row: int) -> Iterator[Encoded]:
    for slots in spans(rows["segment_ids"][row], rows["positions"][row]):
        tokens, weights = rows["tokens"][row, slots], rows[mask][row, slots]
        learned = np.concatenate([[False], weights > 0])
        tokens = np.append(tokens, rows["targets"][row, slots][-1:])
        if not learned[-1]:
            tokens, learned = tokens[:-1], learned[:-1]
        first = np.flatnonzero(learned)
        prompt = int(first[0]) if len(first) else len(learned)
        yield Encoded(tokens=tokens.astype(np.int32), mask=learned, prompt=prompt)


def spans(segments_T: np.ndarray, positions_T: np.ndarray) -> list[slice]:
    """Where the sequences of one row lie."""
    changes = (np.diff(segments_T) != 0) | (np.diff(positions_T) != 1)
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(segments_T)]
    pairs = itertools.pairwise(edges)
    return [slice(a, b) for a, b in pairs if segments_T[a] > 0]
