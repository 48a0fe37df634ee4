"""What an engine keeps on its devices between steps, and the operations that change it.

An operation takes numpy arrays alone and is dispatched without waiting. Where an engine runs in
several processes, each has an executor, and all carry out the same operations in the same order:
those of the process that schedules, which tells the others.

Legend: M samples of the bucket, U changes of a page table.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax import kernels
from fornax.config.errors import EngineError
from fornax.llm import lora
from fornax.llm.config import EngineConfig
from fornax.llm.limits import Limits
from fornax.llm.program_cache import ProgramCache
from fornax.llm.programs import Sizes, describe_arrays, make_programs
from fornax.llm.sampling.masks import full_mask
from fornax.llm.sampling.rejection import Proposals, init_proposals
from fornax.llm.sampling.sampler import Sampled, Scored
from fornax.llm.sampling.state import RowParams, SamplerState, init_sampler_state
from fornax.llm.weights import Weights
from fornax.models import DeltaState, init_pages, init_states

__all__ = ["OPERATIONS", "Executor", "Tell"]

T = TypeVar("T")

Host = np.ndarray | np.integer
"""What the host has: an array, or a number."""
Tell = Callable[..., None]
"""(operation, *arrays): told of each operation before it is carried out."""

OPERATIONS = frozenset(
    {
        "load_row",
        "step",
        "decode",
        "draft",
        "sample",
        "change_tables",
        "copy_pages",
        "copy_states",
        "pool",
        "score",
        "sleep",
        "wake",
    }
)
"""The operations that other processes carry out too."""


class Executor:
    """A model, its cache and its sampler on the device."""

    def __init__(
        self,
        config: EngineConfig,
        weights: Weights,
        limits: Limits,
        programs: ProgramCache,
        state: nnx.State,
        *,
        adapters: bool = False,
        draft: bool = False,
        apart: bool = False,
    ) -> None:
        """Make what is kept on the device, and announce the programs.

        Args:
          weights: the model's.
          state: its arrays, with adapters around them if there are any.
          adapters: whether there are.
          draft: whether it is a draft model's.
          apart: see `Sizes.of`.
        """
        self.tell: Tell | None = None
        self.limits = limits
        self.sizes = Sizes.of(config, weights, limits, draft=draft, apart=apart)
        self._where = weights.placement
        self._model = weights.config
        self._programs = programs
        self._name = "draft" if draft else "model"
        self._leaves, self._tree = jax.tree.flatten(state)
        vocab, rows, places = weights.config.vocab_size, limits.max_num_seqs, config.draft_places
        arrays = describe_arrays(weights, limits, self.sizes, places)
        self.tables = self._put(tuple(jnp.zeros(one.shape, one.dtype) for one in arrays.tables))
        self.hidden = self._put(jnp.zeros(arrays.hidden.shape, arrays.hidden.dtype))
        self.sampler: SamplerState = self._put(init_sampler_state(rows, vocab))
        self._rows = jax.tree.structure(self.sampler.rows)
        self.all_allowed = {size: self._put(full_mask(vocab, size)) for size in self.sizes.samples}
        self.kv: tuple[kernels.Pages, ...] | None = None
        self.states: DeltaState | None = None
        self.wake()
        self.proposals: Proposals | None = None
        """Of a draft model: what it proposed last, for every row."""
        if draft:
            self.proposals = self._put(init_proposals(rows, places, vocab))
        arrays = dataclasses.replace(
            arrays,
            state=_abstract(state),
            kv=_abstract(self.kv or ()),
            states=_abstract(self.states),
        )
        bind = lora.bind if adapters else None
        made = make_programs(config, weights, limits, self.sizes, arrays, draft=draft, bind=bind)
        for key, program in made.items():
            programs.announce((self._name, *key), program.compile)

    def carry_out(self, operation: str, arrays: list[np.ndarray]) -> None:
        """An operation by name, as `tell` sent it.

        Raises:
          EngineError: there is no such operation.
        """
        if operation not in OPERATIONS:
            raise EngineError(
                f"{operation!r} is not an operation of an engine; run one version alike"
            )
        getattr(self, operation)(*arrays)

    def use(self, state: nnx.State) -> None:
        """Continue with other arrays of the same model.

        Raises:
          EngineError: in several processes, of which each would need them.
        """
        if self.tell is not None:
            raise EngineError(
                "an engine over several processes keeps the weights that it began with; run it in "
                "one process to change them"
            )
        leaves, tree = jax.tree.flatten(state)
        assert tree == self._tree, "the state differs in more than its arrays"
        self._leaves = leaves

    def sleep(self) -> None:
        """Give the cache's memory back."""
        self._tell("sleep")
        for array in jax.tree.leaves((self.kv, self.states)):
            array.delete()
        self.kv = self.states = None

    def wake(self) -> None:
        """Make an empty cache if there is none."""
        self._tell("wake")
        if self.kv is None:
            limits, where = self.limits, self._where
            self.kv = init_pages(
                self._model,
                limits.num_pages,
                limits.page_size,
                limits.cache_dtype,
                where.mesh,
                heads=limits.cache_heads,
            )
            slots, dtype = limits.num_state_slots, where.compute_dtype
            self.states = init_states(self._model, slots, dtype, where.mesh)

    def load_row(self, row: Host, *leaves: Host) -> None:
        """Put a row of the sampler's parameters in: the leaves of a `RowParams`."""
        self._tell("load_row", row, *leaves)
        params = cast("RowParams", self._rows.unflatten(leaves))
        load = self._programs.get((self._name, "load row"))
        self.sampler = load(self.sampler, row, params)

    def step(self, bucket: Host, vector: np.ndarray) -> jax.Array | None:
        """The model's part of a step of `bucket` tokens, from its vector; returns the experts that
        they took, [T, L, k], where the engine is asked for them."""
        self._tell("step", bucket, vector)
        program = self._programs.get((self._name, "step", int(bucket)))
        kept = (self.kv, self.states, self.tables, self.hidden)
        self.kv, self.states, self.tables, self.hidden, experts_TLk = program(
            self._leaves, *kept, self.sampler.last_token, vector
        )
        return experts_TLk

    def decode(
        self, bucket: Host, vector: np.ndarray, steps: Host
    ) -> tuple[jax.Array, jax.Array | None]:
        """Steps of which each token is a sequence's last, and the sampling after each, where
        everything is allowed and no log probabilities are wanted.

        Args:
          bucket: tokens of a step.
          vector: the first step's, with room in the page tables for all.
          steps: how many, at most the K that the engine is made for.

        Returns:
          The tokens, int32 [K, T], and the experts, [K, T, L, k], as `step` returns them.
        """
        self._tell("decode", bucket, vector, steps)
        program = self._programs.get((self._name, "decode", int(bucket)))
        kept = (self.kv, self.states, self.tables, self.sampler)
        *kept, tokens_KT, experts_KTLk = program(self._leaves, *kept, vector, steps)
        self.kv, self.states, self.tables, self.sampler = kept
        return tokens_KT, experts_KTLk

    def draft(self, bucket: Host, vector: np.ndarray, ends: np.ndarray) -> jax.Array:
        """What the model's own module proposes after a step of `bucket` tokens, int32 [R, K]; see
        `make_draft`."""
        self._tell("draft", bucket, vector, ends)
        program = self._programs.get((self._name, "draft", int(bucket)))
        self.kv, tokens_RK = program(self._leaves, self.kv, self.tables, self.hidden, vector, ends)
        return tokens_RK

    def sample(
        self,
        vector: np.ndarray,
        mask: np.ndarray | None = None,
        *,
        proposals: Proposals | None = None,
    ) -> Sampled:
        """The sampling of a step.

        Args:
          vector: int32 [5, M].
          mask: allowed-token bitmask, uint32 [M, W]; None allows everything.
          proposals: of a draft model, where there is one.
        """
        self._tell("sample", vector, *(() if mask is None else (mask,)))
        size = vector.shape[1]
        program = self._programs.get((self._name, "sample", size))
        allowed = self.all_allowed[size] if mask is None else mask
        args = (self._leaves, self.hidden, self.sampler, vector, allowed, proposals)
        sampled, self.sampler = program(*args)
        return sampled

    def propose(self, vector: np.ndarray) -> jax.Array:
        """The sampling of a draft model's step: tokens, int32 [M]."""
        program = self._programs.get((self._name, "propose", vector.shape[1]))
        args = (self._leaves, self.hidden, self.sampler, self.proposals, vector)
        tokens, self.sampler, self.proposals = program(*args)
        return tokens

    def change_tables(self, *changes: np.ndarray) -> None:
        """Change page tables: int32 [3, U] for each group."""
        self._tell("change_tables", *changes)
        change = self._programs.get((self._name, "change tables"))
        self.tables = change(self.tables, changes)

    def copy_pages(self, group: Host, vector: np.ndarray) -> None:
        """Copy pages of a group: int32 [2, most], sources and targets."""
        self._tell("copy_pages", group, vector)
        copy = self._programs.get((self._name, "copy pages", int(group)))
        kv = list(self.kv or ())
        kv[int(group)] = copy(kv[int(group)], vector)
        self.kv = tuple(kv)

    def copy_states(self, vector: np.ndarray) -> None:
        """Copy slots of states in all layers: int32 [2, most], sources and targets."""
        self._tell("copy_states", vector)
        self.states = self._programs.get((self._name, "copy states"))(self.states, vector)

    def pool(self, vector: np.ndarray) -> jax.Array:
        """The hidden rows at some places, int32 [most]."""
        self._tell("pool", vector)
        return self._programs.get((self._name, "pool"))(self.hidden, vector)

    def score(self, vector: np.ndarray) -> Scored:
        """Log probabilities of targets: int32 [2, most], places and targets."""
        self._tell("score", vector)
        return self._programs.get((self._name, "score"))(self._leaves, self.hidden, vector)

    def _tell(self, operation: str, *arrays: Host) -> None:
        if self.tell is not None:
            self.tell(operation, *arrays)

    def _put(self, tree: T) -> T:
        return jax.device_put(tree, self._where.everywhere)


def _abstract(tree: T) -> T:
    """The shapes, dtypes and shardings of arrays."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )
