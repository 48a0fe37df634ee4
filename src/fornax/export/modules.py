"""What a function takes first, taken apart into named arrays and put together again while traced.

NNX modules, Linen variables, Qwix's quantized weights and any pytree of arrays become one flat
table, `layers/0/kernel` to array, which is what a bundle stores. flax is looked at only where the
caller has imported it.
"""

import dataclasses
import fnmatch
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from fornax.config.errors import BundleError
from fornax.config.suggest import first_few
from fornax.export.dtypes import Shaped
from fornax.mesh import path_name

__all__ = ["Parts", "take_apart", "weight_axes"]

_STATIC = (bool, int, float, complex)
_ONLY = "params"
"""The name of the only array, where the parameters are one array and nothing else."""

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Parameters as named arrays, and the way back."""

    params: dict[str, Shaped]
    """Arrays by path, in the order of the pytree."""
    axes: dict[str, Axes]
    """Axes of those arrays whose own metadata name them, one or None a dimension."""
    rebuild: Callable[[Mapping[str, Shaped]], object]
    """From arrays (or tracers) by path to what the functions take first."""
    changed: Callable[[object, Mapping[str, Shaped]], list[str]]
    """(what was rebuilt, the arrays it was rebuilt from) to the paths that a call has changed."""

    def bind(self, function: Callable[..., object], name: str) -> Callable[..., object]:
        """`function(params, **inputs)` as a function of the flat table.

        Raises, when called:
          BundleError: the function changed its module's state, which a bundle does not keep.
        """

        @functools.wraps(function)
        def bound(params: Mapping[str, Shaped], **inputs: object) -> object:
            whole = self.rebuild(params)
            outputs = function(whole, **inputs)
            changed = self.changed(whole, params)
            if changed:
                raise BundleError(
                    f"function {name!r} changes {first_few(sorted(changed))} of its module, and a "
                    "bundle keeps no state between calls; call `model.eval()` before saving, or "
                    "return the new value as an output"
                )
            return outputs

        return bound


def take_apart(params: object, *, abstract: bool = False) -> Parts:
    """Name every array of `params`.

    Args:
      params: an `nnx.Module`, Linen variables (boxed or not), or any pytree, with NNX modules
        anywhere in it. Python numbers stay in the function as constants. PRNG keys are held as
        their uint32 data.
      abstract: whether shapes may stand for arrays.

    Raises:
      BundleError: a leaf that is not an array, or two arrays with one name.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_node)
    builders: list[_Leaf | _Module] = []
    arrays: dict[str, Shaped] = {}
    axes: dict[str, Axes] = {}
    for path, leaf in found:
        name = _name(path)
        builder = (_Module if _is_module(leaf) else _Leaf)(name, leaf, abstract)
        for key, value in builder.arrays.items():
            if key in arrays:
                raise BundleError(
                    f"two parameters are named {key!r}; rename one of the keys that spell it"
                )
            arrays[key] = value
        axes.update(builder.axes)
        builders.append(builder)

    def rebuild(flat: Mapping[str, Shaped]) -> object:
        return jax.tree.unflatten(treedef, [builder.rebuild(flat) for builder in builders])

    def changed(whole: object, flat: Mapping[str, Shaped]) -> list[str]:
        leaves = jax.tree.leaves(whole, is_leaf=_is_node)
        pairs = zip(builders, leaves, strict=True)
        return [name for builder, leaf in pairs for name in builder.changed(leaf, flat)]

    return Parts(params=arrays, axes=axes, rebuild=rebuild, changed=changed)


def weight_axes(
    arrays: Mapping[str, Shaped], named: Mapping[str, Axes], given: Mapping[str, Axes]
) -> dict[str, Axes]:
    """The axes of each array that has some.

    Args:
      arrays: by path.
      named: what the parameters' own metadata say.
      given: by path or pattern (`layers/*/kernel`), over `named`; a later pattern over earlier.

    Raises:
      BundleError: a pattern that matches nothing, or axes that are not one a dimension.
    """
    found = dict(named)
    for pattern, axes in given.items():
        matched = [name for name in arrays if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise BundleError(
                f"axes names {pattern!r}, which no parameter matches; they are "
                f"{first_few(sorted(arrays))}"
            )
        found |= dict.fromkeys(matched, tuple(axes))
    for name, axes in found.items():
        if len(axes) != len(arrays[name].shape):
            raise BundleError(
                f"parameter {name!r} of shape {tuple(arrays[name].shape)} has the axes {axes}; "
                "name one, or None, a dimension"
            )
    return found


class _Leaf:
    """One array, number, key, or array in a box that names its axes."""

    def __init__(self, name: str, leaf: Any, abstract: bool):
        self._name = name
        self._box = leaf if _is_box(leaf) else None
        value = leaf.unbox(apply_constraint=False) if self._box is not None else leaf
        self._static = value if type(value) in _STATIC else None
        self._key = _key_kind(value)
        self.arrays: dict[str, Shaped] = {}
        self.axes: dict[str, Axes] = {}
        if self._static is not None:
            return
        self.arrays[name] = _array(name, value, self._key, abstract)
        if self._box is not None:
            self.axes[name] = _one_name(self._box.names)

    def rebuild(self, flat: Mapping[str, Any]) -> object:
        if self._static is not None:
            return self._static
        value = flat[self._name]
        if self._key is not None:
            value = jax.random.wrap_key_data(value, impl=self._key)
        return value if self._box is None else self._box.replace_boxed(value)

    def changed(self, leaf: object, flat: Mapping[str, object]) -> list[str]:
        del leaf, flat  # pytrees of arrays are not changed by who reads them
        return []


class _Module:
    """An NNX module: its state, variables that are shared held once.

    Its random state is not a parameter: drawing from it changes it, which is refused.
    """

    def __init__(self, prefix: str, module: object, abstract: bool):
        from flax import nnx

        self._prefix = prefix
        self._graph, self._random, state = nnx.split(module, nnx.RngState, ...)
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(state)
        self._names = [_join(prefix, _name(path)) for path, _ in leaves]
        pairs = list(zip(self._names, (leaf for _, leaf in leaves), strict=True))
        self.arrays = {name: _array(name, leaf, None, abstract) for name, leaf in pairs}
        self.axes = {}
        for path, variable in nnx.to_flat_state(state):
            named = variable.get_metadata()
            axes = named.get("axes") or named.get("out_sharding") or named.get("sharding_names")
            name = _join(prefix, "/".join(map(str, path)))
            if axes and name in self.arrays:
                self.axes[name] = _one_name(axes)

    def rebuild(self, flat: Mapping[str, Shaped]) -> object:
        from flax import nnx

        state = jax.tree.unflatten(self._treedef, [flat[name] for name in self._names])
        random = jax.tree.map(lambda x: x, self._random)  # variables of this trace
        return nnx.merge(self._graph, random, state)

    def changed(self, leaf: object, flat: Mapping[str, object]) -> list[str]:
        from flax import nnx

        before = dict(self._by_name(self._random)) | {name: flat[name] for name in self._names}
        after = dict(self._by_name(nnx.state(leaf)))
        return [n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)]

    def _by_name(self, state: object) -> list[tuple[str, object]]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return [(_join(self._prefix, _name(path)), leaf) for path, leaf in leaves]


def _is_node(node: object) -> bool:
    return _is_module(node) or _is_box(node)


def _is_module(node: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Module)


def _is_box(node: object) -> bool:
    """Whether it is Linen's box of an array with the names of its axes."""
    meta = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(node, meta.Partitioned)


def _one_name(axes: Iterable[Any]) -> Axes:
    """One axis a dimension: of several mesh axes for one dimension there is no logical name."""
    found = []
    for entry in axes:
        if isinstance(entry, tuple | list):
            if len(entry) > 1:
                raise BundleError(
                    f"a parameter lays one dimension over the mesh axes {tuple(entry)}; name a "
                    "logical axis there, and give the mesh axes to `load(rules=...)`"
                )
            entry = entry[0] if entry else None
        found.append(entry)
    return tuple(found)


def _key_kind(value: Any) -> object:
    """The implementation of a typed PRNG key, else None."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(value)
    return None


def _array(name: str, value: Any, kind: object, abstract: bool) -> Shaped:
    if kind is not None:
        value = (jax.eval_shape if abstract else lambda f, x: f(x))(jax.random.key_data, value)
    elif _key_kind(value) is not None:
        raise BundleError(
            f"parameter {name!r} is a random key in a variable of a module; keep keys in nnx.Rngs, "
            "or their jax.random.key_data in the variable"
        )
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if abstract and isinstance(value, jax.ShapeDtypeStruct):
        return value
    if not isinstance(value, jax.Array | np.ndarray) or value.dtype == object:
        raise BundleError(
            f"parameter {name!r} is a {type(value).__name__}; parameters are arrays, numbers and "
            "containers of them: keep anything else in the function"
        )
    return value


def _join(prefix: str, name: str) -> str:
    return name if prefix == _ONLY else f"{prefix}/{name}"


def _name(path: tuple[object, ...]) -> str:
    """A JAX key path as `layers/0/kernel`."""
    return path_name(path) or _ONLY
