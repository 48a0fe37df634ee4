"""A teacher on devices of its own, and rows sampled from the student.

The teacher runs outside the student's step, on a mesh of its own. Its final hidden states [B, T, E]
are part of the student's batch; the student's loss computes its logits a chunk at a time.

Legend: B rows, T tokens of a row, E teacher width, V vocabulary, K top tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.config.errors import ConfigError, DataError
from fornax.mesh import Rules, named_sharding, use_mesh
from fornax.models import Decoder
from fornax.train.hosts import abstract_batch, find_hosts, to_global
from fornax.train.task import Batches, Hosts
from fornax.tune.config import OnPolicy
from fornax.tune.data import (
    Encoded,
    ExtendedStream,
    Loaded,
    LoaderOptions,
    RowStream,
    bucket,
    buckets_up_to,
    pad_rows,
)
from fornax.tune.rollout import Completion, SampleSettings, sample_seed

__all__ = ["OnPolicyStream", "Teacher", "numbered_rows"]


_INPUTS = ("tokens", "positions", "segment_ids")


class Teacher:
    """A frozen decoder laid out on a mesh."""

    def __init__(self, decoder: Decoder, *, mesh: Mesh, rules: Rules, hosts: Hosts):
        """Keep the decoder; nothing is computed.

        Args:
          decoder: laid out on `mesh`.
          mesh: its devices.
          rules: logical axes to mesh axes.
          hosts: which rows this process brings to a batch.

        Raises:
          ConfigError: when the mesh gives this process other rows than the student's.
        """
        self._mesh, self._rules, self._hosts = mesh, rules, hosts
        self._graphdef, self._state = nnx.split(decoder)
        rows = named_sharding(mesh, ("batch",), rules)  # whole rows: `_own` puts none together
        everywhere = named_sharding(mesh, (), rules)
        self._hidden = jax.jit(self._compute_hidden, out_shardings=rows)
        self._top = jax.jit(
            self._compute_top, static_argnames=("k", "vocabulary"), out_shardings=everywhere
        )

    def output_weights(self) -> jax.Array:
        """The projection to the vocabulary, [E, V]."""
        return nnx.merge(self._graphdef, self._state).output_weights()

    def hidden(self, rows: Mapping[str, np.ndarray]) -> jax.Array | np.ndarray:
        """Final hidden states [B, T, E] of this process's rows.

        Args:
          rows: tokens, positions, segment_ids int32 [B, T].
        """
        return self._own(self._hidden(self._state, self._batch(rows)))

    def top(
        self, rows: Mapping[str, np.ndarray], k: int, *, temperature: float, vocabulary: int
    ) -> dict[str, np.ndarray]:
        """The k likeliest next tokens after each, for the rows of all processes.

        Every process calls it with its own rows; all get the whole batch's.

        Args:
          rows: tokens, positions, segment_ids int32, loss_weights float32 [B, T]; example int32
            [B].
          k: how many.
          temperature: divides the logits.
          vocabulary: outputs that are tokens; those beyond only fill the teacher's table.

        Returns:
          ids int32, logprobs float32 [B, T, K], and the rows' example and loss_weights.
        """
        batch = self._batch(rows, (*_INPUTS, "example", "loss_weights"))
        return jax.device_get(
            self._top(self._state, batch, temperature, k=k, vocabulary=vocabulary)
        )

    def _compute_hidden(self, state: nnx.State, batch: Mapping[str, jax.Array]) -> jax.Array:
        with use_mesh(self._mesh, self._rules):
            decoder = nnx.merge(self._graphdef, state)
            return decoder.hidden(
                batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True
            )

    def _compute_top(
        self,
        state: nnx.State,
        batch: Mapping[str, jax.Array],
        temperature: jax.Array,
        *,
        k: int,
        vocabulary: int,
    ) -> dict[str, jax.Array]:
        x_BTE = self._compute_hidden(state, batch)
        decoder = nnx.merge(self._graphdef, state)

        def of_row(x_TE: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, V] of one row at a time
            logits_TV = decoder.logits(x_TE[None])[0, :, :vocabulary]
            logps_TV = jax.nn.log_softmax(logits_TV / temperature)
            logps_TK, ids_TK = jax.lax.top_k(logps_TV, k)
            return ids_TK.astype(jnp.int32), logps_TK

        ids_BTK, logps_BTK = jax.lax.map(of_row, x_BTE)
        given = {name: batch[name] for name in ("example", "loss_weights")}
        return {"ids": ids_BTK, "logprobs": logps_BTK, **given}

    def _batch(
        self, rows: Mapping[str, np.ndarray], names: tuple[str, ...] = _INPUTS
    ) -> dict[str, jax.Array]:
        inputs = {name: rows[name] for name in names}
        found = find_hosts(self._mesh, self._rules)
        if (found.index, found.count) != (self._hosts.index, self._hosts.count):
            raise ConfigError(
                "teacher_mesh divides rows between processes otherwise than mesh; give both the "
                "same slice, data, fsdp and expert axes"
            )
        return to_global(inputs, abstract_batch(inputs, self._hosts, self._mesh, self._rules))

    def _own(self, x: jax.Array) -> jax.Array | np.ndarray:
        """This process's rows of a global array."""
        if jax.process_count() == 1:
            if jax.default_backend() == "cpu" and self._mesh.size > 1:
                # Programs in flight side by side on virtual devices can wait for each other.
                jax.block_until_ready(x)
            return x
        shards = {s.index[0].start or 0: s.data for s in x.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


Rows = dict[str, np.ndarray]


def numbered_rows(loaded: Loaded[Encoded], options: LoaderOptions, max_length: int) -> RowStream:
    """A row for each example, padded, with its number `example` int32 [B] (-1 for padding)."""

    def collate(index: np.ndarray, length: int) -> Rows:
        chosen = [None if i < 0 else loaded.items[i] for i in index.tolist()]
        return pad_rows(chosen, length) | {"example": index.astype(np.int32)}

    lengths = [item.length for item in loaded.items]
    return RowStream(lengths, collate, options, buckets_up_to(max_length))


class Draws(Protocol):
    """What a stream uses of a `Sampler`."""

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `Sampler`."""

    def close(self) -> None:
        """See `Sampler`."""


class OnPolicyStream(ExtendedStream):
    """A stream that in a share of the steps has the student answer the prompts of its rows.

    Which steps those are and what is drawn follow from the seed, the step and the weights: a run
    that is resumed draws what it would have drawn, and so does one of more hosts.
    """

    def __init__(
        self,
        inner: Batches,
        items: Sequence[Encoded],
        config: OnPolicy,
        *,
        max_length: int,
        seed: int,
        hosts: Hosts,
        student: Draws,
    ):
        """Read from `inner`, rows of `numbered_rows`.

        Args:
          inner: the data's rows, of all hosts together.
          items: the examples that their numbers are of.
          config: share, length and temperature.
          max_length: tokens of a row at most.
          seed: of the run.
          hosts: which rows this host gives.
          student: draws as the student is now; all hosts ask it the same.

        Raises:
          DataError: when an example has no prompt to answer.
        """
        without = sum(item.prompt < 2 for item in items)
        if without:
            raise DataError(
                f"on_policy has the student answer prompts, and {without} of {len(items)} examples "
                "have none: give prompts with completions, or chats; plain text is for training "
                "without on_policy"
            )
        super().__init__(inner, self._maybe_drawn)
        self._items, self._config = items, config
        self._max_length, self._seed = max_length, seed
        self._hosts, self._student = hosts, student
        self._buckets = buckets_up_to(max_length)
        self.step = 0
        """Steps done before the next rows."""
        self.drawn = False
        """Whether the last rows were drawn."""

    def _maybe_drawn(self, rows: Rows) -> Rows:
        """The data's rows, or the same prompts with the student's completions."""
        coin = np.random.default_rng([self._seed, self.step, 1]).random()
        self.drawn = bool(coin < self._config.share)
        numbers = rows["example"].tolist()
        if self.drawn:
            made = self._draw(numbers)
            longest = max(item.length for item in made if item is not None)
            return self._own(made, numbers, bucket(longest, self._buckets))
        made = [None if n < 0 else self._items[n] for n in numbers]
        return self._own(made, numbers, rows["tokens"].shape[1])

    def state(self) -> dict[int, dict[str, Any]]:
        """The position, which is the same on all hosts; the first one gives it."""
        return super().state() if self._hosts.index == 0 else {}

    def close(self) -> None:
        """End the student's sampler, too."""
        super().close()
        self._student.close()

    def _own(self, made: Sequence[Encoded | None], numbers: Sequence[int], length: int) -> Rows:
        """This host's rows of a batch."""
        rows = self._hosts.rows(len(made))
        padding = self._hosts.size(len(made)) - len(rows)
        own = [*made[rows.start : rows.stop], *[None] * padding]
        example = [*numbers[rows.start : rows.stop], *[-1] * padding]
        return pad_rows(own, length) | {"example": np.array(example, np.int32)}

    def _draw(self, numbers: Sequence[int]) -> list[Encoded | None]:
        """The prompts of examples with the student's answers; None for padding."""
        config = self._config
        prompts = [self._prompt(n) for n in numbers if n >= 0]
        settings = SampleSettings(max_tokens=config.max_tokens, temperature=config.temperature)
        seeds = [sample_seed(self._seed, self.step, place) for place in range(len(prompts))]
        groups = self._student.sample([p.tolist() for p in prompts], settings, seeds)
        answered = iter(zip(prompts, groups, strict=True))
        return [None if n < 0 else _answer(*next(answered), self._max_length) for n in numbers]

    def _prompt(self, number: int) -> np.ndarray:
        """The end of an example's prompt that leaves room for a completion."""
        item = self._items[number]
        room = max(1, self._max_length - self._config.max_tokens)
        return item.tokens[max(0, item.prompt - room) : item.prompt]


def _answer(prompt: np.ndarray, group: Sequence[Completion], max_length: int) -> Encoded:
    tokens = np.concatenate([prompt, group[0].tokens])[:max_length].astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Encoded(tokens=tokens, mask=mask, prompt=len(prompt))
