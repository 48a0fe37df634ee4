"""A teacher: a frozen decoder on devices of its own, which is asked about rows of tokens.

It runs outside the student's step, so that neither knows the other's shape or mesh: what passes
between them is the teacher's final hidden states, not its logits, which the student's loss makes
piece by piece.

Legend: B rows, T tokens of a row, E teacher width, V vocabulary, K top tokens.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.config.errors import ConfigError
from fornax.mesh import Rules, named_sharding, use_mesh
from fornax.models import Decoder
from fornax.train.hosts import abstract_batch, find_hosts, to_global
from fornax.train.task import Hosts

__all__ = ["Teacher"]

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
        self.config = decoder.config
        self._mesh, self._rules, self._hosts = mesh, rules, hosts
        self._graphdef, self._state = nnx.split(decoder)
        rows = named_sharding(mesh, ("batch",), rules)  # whole rows: `_own` puts none together
        everywhere = named_sharding(mesh, (), rules)
        self._hidden = jax.jit(self._compute_hidden, out_shardings=rows)
        self._top = jax.jit(
            self._compute_top, static_argnames=("k", "words"), out_shardings=everywhere
        )

    def output_weights(self) -> jax.Array:
        """The projection to the vocabulary, [E, V]."""
        return nnx.merge(self._graphdef, self._state).output_weights()

    def hidden(self, rows: Mapping[str, np.ndarray]) -> Any:
        """Final hidden states [B, T, E] of this process's rows.

        Args:
          rows: tokens, positions, segment_ids int32 [B, T].
        """
        return self._own(self._hidden(self._state, self._batch(rows)))

    def top(
        self, rows: Mapping[str, np.ndarray], k: int, *, temperature: float, words: int
    ) -> dict[str, np.ndarray]:
        """The k likeliest next tokens after each, for the rows of all processes.

        Every process calls it with its own rows; all get the whole batch's.

        Args:
          rows: tokens, positions, segment_ids int32, loss_weights float32 [B, T]; example int32
            [B].
          k: how many.
          temperature: divides the logits.
          words: outputs that are tokens; those beyond only fill the teacher's table.

        Returns:
          ids int32, logprobs float32 [B, T, K], and the rows' example and loss_weights.
        """
        batch = self._batch(rows, (*_INPUTS, "example", "loss_weights"))
        return jax.device_get(self._top(self._state, batch, temperature, k=k, words=words))

    def _compute_hidden(self, state: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        with use_mesh(self._mesh, self._rules):
            decoder = nnx.merge(self._graphdef, state)
            return decoder.hidden(
                batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True
            )

    def _compute_top(
        self,
        state: Any,
        batch: Mapping[str, jax.Array],
        temperature: jax.Array,
        *,
        k: int,
        words: int,
    ) -> dict[str, jax.Array]:
        x_BTE = self._compute_hidden(state, batch)
        decoder = nnx.merge(self._graphdef, state)

        def of_row(x_TE: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, V] of one row at a time
            logits_TV = decoder.logits(x_TE[None])[0, :, :words]
            logps_TV = jax.nn.log_softmax(logits_TV / temperature)
            logps_TK, ids_TK = jax.lax.top_k(logps_TV, k)
            return ids_TK.astype(jnp.int32), logps_TK

        ids_BTK, logps_BTK = jax.lax.map(of_row, x_BTE)
        given = {name: batch[name] for name in ("example", "loss_weights")}
        return {"ids": ids_BTK, "logprobs": logps_BTK, **given}

    def _batch(
        self, rows: Mapping[str, np.ndarray], names: tuple[str, ...] = _INPUTS
    ) -> dict[str, Any]:
        inputs = {name: rows[name] for name in names}
        size = len(rows["tokens"]) * self._hosts.count
        if find_hosts(size, self._mesh, self._rules) != self._hosts:
            raise ConfigError(
                "teacher_mesh divides rows between processes otherwise than mesh; give both the "
                "same slice, data, fsdp and expert axes"
            )
        return to_global(inputs, abstract_batch(inputs, self._hosts, self._mesh, self._rules))

    def _own(self, x: jax.Array) -> Any:
        """This process's rows of a global array."""
        if jax.process_count() == 1:
            if jax.default_backend() == "cpu" and self._mesh.size > 1:
                # Programs in flight side by side on virtual devices can wait for each other.
                jax.block_until_ready(x)
            return x
        shards = {s.index[0].start or 0: s.data for s in x.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
