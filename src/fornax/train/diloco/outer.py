"""The outer optimizer of DiLoCo: SGD with Nesterov momentum on the slices' mean change.

For a fragment with common parameters theta and a slice's own theta_m, each slice sends
theta - theta_m. With the mean d over the slices that took part, momentum mu and learning rate eta,

    v <- mu v + d        theta <- theta - eta (d + mu v)        theta_m <- a theta_m + (1 - a) theta

(Douillard et al. 2023, arXiv 2311.08105, and 2025, arXiv 2501.18512). All slices compute this by
themselves from the same bytes, so theta and v are the same everywhere, and no slice is needed by
another.

Shapes: S slices, R blocks of a fragment, W bytes of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from fornax.train.diloco.codec import BLOCK, decode, encode, row_bytes
from fornax.train.diloco.config import DilocoConfig
from fornax.train.diloco.fragments import Fragment, make_fragments
from fornax.train.step import StepParts

__all__ = ["OuterOptimizer", "OuterState"]

OuterState = dict[str, list[Any]]
"""`params`: of each fragment the common parameters, float32; `optimizer`: its Optax state."""


@dataclass(frozen=True)
class _Places:
    """Where things lie on a slice's mesh."""

    params: list[NamedSharding]
    fragments: list[list[NamedSharding]]
    rows: NamedSharding
    """Of uint8 [R, W]: over all devices."""
    gathered: NamedSharding
    """Of uint8 [S, R, W]."""


class OuterOptimizer:
    """The outer step of a slice, for one tree of parameters; it keeps compiled programs only."""

    def __init__(self, config: DilocoConfig, parts: StepParts, params: object) -> None:
        """Lay out the fragments.

        Args:
          config: what the user said.
          parts: of the inner step: the model, its mesh, and where its parameters are.
          params: the trained parameters, or their shapes, nested dicts.

        Raises:
          ConfigError: for more fragments than there are layers.
        """
        self.config = config
        leaves, self._structure = jax.tree.flatten(params)
        self.fragments = make_fragments(
            [leaf.shape for leaf in leaves], _stacked(parts.model.params), config.num_fragments
        )
        self._transform = optax.sgd(
            config.outer_learning_rate, momentum=config.outer_momentum, nesterov=True
        )
        self._devices = parts.mesh.size
        self._places = _places(parts, self.fragments)
        self._compiled: dict[tuple[str, int], Any] = {}

    def init(self, params: object) -> OuterState:
        """The state before the first exchange: the parameters as they are, no momentum."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract())
        return jax.jit(self._fresh, out_shardings=shardings)(jax.tree.leaves(params))

    def abstract(self) -> OuterState:
        """The state's ShapeDtypeStructs, with shardings."""
        found: OuterState = {"params": [], "optimizer": []}
        for fragment, places in zip(self.fragments, self._places.fragments, strict=True):
            params = [
                jax.ShapeDtypeStruct(part.shape, jnp.float32, sharding=place)
                for part, place in zip(fragment.parts, places, strict=True)
            ]
            state = jax.eval_shape(self._transform.init, params)
            found["params"].append(params)
            found["optimizer"].append(
                optax.tree.map_params(
                    self._transform.init,
                    lambda leaf, param: jax.ShapeDtypeStruct(
                        leaf.shape, leaf.dtype, sharding=param.sharding
                    ),
                    state,
                    params,
                )
            )
        return found

    def common(self, outer: OuterState, params: object) -> Any:
        """The common parameters, in arrays of their own, as the tree `params`."""

        def put(theta: list[list[jax.Array]], leaves: list[jax.Array]) -> list[jax.Array]:
            for fragment, values in zip(self.fragments, theta, strict=True):
                leaves = fragment.put(leaves, [jnp.copy(value) for value in values])
            return leaves

        put_all = jax.jit(put, out_shardings=self._places.params)
        leaves = put_all(outer["params"], jax.tree.leaves(params))
        return jax.tree.unflatten(self._structure, leaves)

    def rows(self, number: int) -> int:
        """R: blocks of a fragment, the same number on each device."""
        blocks = -(-self.fragments[number].size // BLOCK)
        return -(-blocks // self._devices) * self._devices

    def row_shape(self, number: int) -> tuple[int, int]:
        """(R, W) of a fragment."""
        return self.rows(number), row_bytes(self.config.exchange_dtype)

    @property
    def gathered(self) -> NamedSharding:
        """Where the contributions of all slices lie, uint8 [S, R, W]: R over all devices."""
        return self._places.gathered

    def contribution(self, outer: OuterState, params: object, number: int) -> jax.Array:
        """What this slice sends of fragment `number`: uint8 [R, W], R over all devices."""
        return self._program("contribution", number)(
            outer["params"][number], jax.tree.leaves(params)
        )

    def apply(
        self,
        outer: OuterState,
        params: object,
        number: int,
        gathered: jax.Array,
        weights: jax.Array,
        alpha: float,
    ) -> tuple[OuterState, Any]:
        """The outer step of fragment `number`; `outer` and `params` are given up.

        Args:
          outer: the state.
          params: this slice's parameters.
          number: which fragment.
          gathered: uint8 [S, R, W], what each slice sent; anything that decodes to finite numbers
            for one that sent nothing.
          weights: float32 [S]: 1 for the slices that took part, 0 for the others.
          alpha: the share of this slice's own parameters in what it continues with.

        Returns:
          The state and this slice's parameters, after it.
        """
        theta, state, leaves = self._program("apply", number)(
            outer["params"][number],
            outer["optimizer"][number],
            jax.tree.leaves(params),
            gathered,
            weights,
            jnp.float32(alpha),
        )
        changed = {key: list(values) for key, values in outer.items()}
        changed["params"][number], changed["optimizer"][number] = theta, state
        return changed, jax.tree.unflatten(self._structure, leaves)

    def _fresh(self, leaves: Sequence[jax.Array]) -> OuterState:
        params = [
            [jnp.array(value, jnp.float32, copy=True) for value in fragment.take(leaves)]
            for fragment in self.fragments
        ]
        return {"params": params, "optimizer": [self._transform.init(each) for each in params]}

    def _program(self, name: str, number: int) -> Any:
        """Compiled once for each fragment, and each number of slices."""
        if (name, number) not in self._compiled:
            fragment, places = self.fragments[number], self._places
            if name == "contribution":
                run = partial(self._contribution, fragment, self.rows(number) * BLOCK)
                program = jax.jit(run, out_shardings=places.rows)
            else:
                state = jax.tree.map(
                    lambda leaf: leaf.sharding, self.abstract()["optimizer"][number]
                )
                program = jax.jit(
                    partial(self._apply, fragment),
                    donate_argnums=(0, 1, 2),
                    out_shardings=(places.fragments[number], state, places.params),
                )
            self._compiled[name, number] = program
        return self._compiled[name, number]

    def _contribution(
        self, fragment: Fragment, size: int, theta: list[jax.Array], leaves: list[jax.Array]
    ) -> jax.Array:
        own = fragment.take(leaves)
        change = [x - y.astype(jnp.float32) for x, y in zip(theta, own, strict=True)]
        return encode(fragment.flat(change, size), self.config.exchange_dtype)

    def _apply(
        self,
        fragment: Fragment,
        theta: list[jax.Array],
        state: Any,
        leaves: list[jax.Array],
        gathered_SRW: jax.Array,
        weights_S: jax.Array,
        alpha: jax.Array,
    ) -> tuple[list[jax.Array], Any, list[jax.Array]]:
        change_SN = decode(gathered_SRW, self.config.exchange_dtype)
        total = weights_S[0] * change_SN[0]
        for slice_ in range(1, change_SN.shape[0]):
            total = total + weights_S[slice_] * change_SN[slice_]
        mean = fragment.shaped(total / jnp.sum(weights_S))
        updates, state = self._transform.update(mean, state, theta)
        new: Any = optax.apply_updates(theta, updates)
        own = [
            alpha * y.astype(jnp.float32) + (1 - alpha) * x
            for x, y in zip(new, fragment.take(leaves), strict=True)
        ]
        return new, state, fragment.put(leaves, own)


def _stacked(params: nnx.State) -> list[bool]:
    """Which parameters have a first dimension of layers, in the order of their nested dicts."""

    def one(variable: Any) -> Any:
        axes = variable.get_metadata().get("axes") or ()
        return variable.replace(tuple(axes[:1]) == ("layers",))

    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    marks: Mapping[str, Any] = nnx.to_pure_dict(jax.tree.map(one, params, is_leaf=is_variable))
    return jax.tree.leaves(marks)


def _places(parts: StepParts, fragments: Sequence[Fragment]) -> _Places:
    params: list[NamedSharding] = jax.tree.leaves(parts.param_shardings)
    mesh = parts.mesh

    def of(part: Any) -> NamedSharding:
        place = params[part.leaf]
        if part.layers is None:
            return place
        return NamedSharding(mesh, PartitionSpec(None, *place.spec[1:]))

    every = tuple(mesh.axis_names)
    return _Places(
        params=params,
        fragments=[[of(part) for part in fragment.parts] for fragment in fragments],
        rows=NamedSharding(mesh, PartitionSpec(every)),
        gathered=NamedSharding(mesh, PartitionSpec(None, every)),
    )
