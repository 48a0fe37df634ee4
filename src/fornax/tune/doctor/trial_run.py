"""What the checks look at: a trial run of the same config, made ready and never trained.

Each part is made when it is first asked for.

Legend: B rows, T tokens of a row.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax import adapters
from fornax.mesh import make_mesh, use_mesh
from fornax.models import Decoder
from fornax.train import Ledger
from fornax.train.hosts import to_global
from fornax.train.session import Programs, first_state, prepare
from fornax.train.state import TrainState
from fornax.train.task import Batch, Hosts, Loss, Task
from fornax.tune.config import DistillConfig, RLConfig, SFTConfig, TopLogits, TuneConfig
from fornax.tune.data import Encoded, Problems, read_lines
from fornax.tune.policy import Origin
from fornax.tune.rl.components import rollout_engine
from fornax.tune.rl.forward import rows_logprobs

__all__ = ["Rows", "TrialRun", "head", "quick_options", "sequences_of", "small_config", "spans"]


Changes = dict[str, Any]
"""Fields of a config to other values."""

_COMPLETIONS = 16
_RECORDS = 32


def head(config: TuneConfig, file: Path, count: int) -> Path:
    """Write the first `count` records of the run's data to `file`, under their own names."""
    lines = itertools.islice(read_lines(config.data, Problems()), count)
    text = "".join(json.dumps(line.fields, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
    return file


def data_shards(config: TuneConfig) -> int:
    """Devices that rows are divided over."""
    mesh, rules = make_mesh(config.mesh), config.mesh.resolved_rules()
    return math.prod(mesh.shape[axis] for axis in rules["batch"])


def small_config(config: TuneConfig, folder: Path) -> TuneConfig:
    """The run's config with a batch of four rows a device, over few records, in `folder`."""
    changes: Changes = {
        "eval_data": None,
        "eval_share": 0.0,
        "eval": dataclasses.replace(config.eval, every=None),
        "accumulate": 1,
        "virtual_shards": None,
        "epochs": None,
        "steps": config.steps or 1,
        "doctor": False,
    }
    shards = data_shards(config)
    if isinstance(config, RLConfig):
        return dataclasses.replace(config, **changes, **_of_rollouts(config, folder))
    if isinstance(config, DistillConfig):
        changes["on_policy"] = None
        changes["packing"] = "best_fit" if config.packs else "none"
        if isinstance(config.logits, TopLogits):
            if config.teacher is None:  # its logits on disk are of all the data
                return dataclasses.replace(config, **changes, batch_size=4 * shards)
            changes["logits"] = dataclasses.replace(config.logits, path="")
            changes["packing"] = None
    data = head(config, folder / "records.jsonl", max(_RECORDS, 8 * shards))
    return dataclasses.replace(config, **changes, data=str(data), batch_size=4 * shards)


def _of_rollouts(config: RLConfig, folder: Path) -> Changes:
    """Few prompts, each with a whole group; two mini-batches where the run has several."""
    groups = min(max(_COMPLETIONS // config.group_size, 2), max(config.prompts, 2))
    groups += groups % 2
    mini_batches = min(config.mini_batches, 2)
    data = head(config, folder / "records.jsonl", max(_RECORDS, groups))
    engine, _ = rollout_engine(config)  # the run's own, so that its programs serve both
    return {
        "data": str(data),
        "group_size": config.group_size,
        "batch_size": groups * config.group_size // mini_batches,
        "mini_batches": mini_batches,
        "rollout_epochs": min(config.rollout_epochs, 3),
        "asynchronous": None,
        "shuffle": False,
        "rollout": dataclasses.replace(config.rollout, max_num_seqs=engine.max_num_seqs),
    }


Rows = dict[str, np.ndarray]


@dataclass(kw_only=True)
class TrialRun:
    """A trial run. Its arrays are the first state's; nothing here changes them."""

    run: TuneConfig
    """The config of the run that is to start."""
    config: TuneConfig
    """Of the trial."""
    origin: Origin
    make: Callable[[TuneConfig, Origin, Path], Task]
    folder: Path
    """Where the trial run may write."""
    _evaluators: dict[int, tuple[Task, Programs]] = field(default_factory=dict)
    _passes: dict[bool, Callable[..., jax.Array]] = field(default_factory=dict)

    @functools.cached_property
    def task(self) -> Task:
        """The trial run's task."""
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
    def model(self) -> Decoder:
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
          task: another of the same model; None: the trial run's.
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

    def logprobs(self, rows: Batch, *, base: bool = False) -> np.ndarray:
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

        def run(state: nnx.State, rows: Batch) -> jax.Array:
            with use_mesh(parts.mesh, parts.rules):
                model = nnx.merge(graphdef, state)
                model.eval()
                if not base:
                    return rows_logprobs(model, rows).logprobs
                with adapters.disabled(model):
                    return rows_logprobs(model, rows).logprobs

        return jax.jit(run, compiler_options=quick_options())

    @functools.cached_property
    def unit(self) -> int:
        """Rows that divide over all devices and four micro-batches."""
        return 4 * data_shards(self.config)


def quick_options() -> dict[str, int | bool] | None:
    """Options of programs that run once: on a CPU, XLA would optimize them for longer than they
    run."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def _ratio(total: jax.Array, weight: jax.Array) -> float:
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
