"""A network's folder as diffusers and transformers write it: config.json and safetensors.

A `Component` says what a class of theirs is here: its config in both directions, the module and the
key map. Loading and saving are the same for all.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from fornax.checkpoint.safetensors_file import DTYPES, FLOATS, StoredTensor, find_tensors
from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.files import replacing_folder
from fornax.config.json_files import read_json_object
from fornax.config.suggest import did_you_mean, first_few
from fornax.diffusion.models.keys import Key, Tensor, parameters, plan
from fornax.mesh import DEFAULT_RULES, Rules, tree_shardings

__all__ = [
    "Component",
    "Fields",
    "create",
    "load",
    "load_part",
    "load_tensors",
    "read_class",
    "read_folder_config",
    "save",
    "write_folder_config",
]

ConfigT = TypeVar("ConfigT")
ModuleT = TypeVar("ModuleT", bound=nnx.Module)
DIFFUSERS_VERSION = "0.36.0"
"""What is written as the version of diffusers that a config was made with."""


@dataclass(frozen=True)
class Component(Generic[ConfigT, ModuleT]):
    """What a class of diffusers or transformers is here."""

    class_name: str
    """As in `_class_name`, or in `architectures` of transformers."""
    read: Callable[["Fields"], ConfigT]
    """Our config of their keys."""
    write: Callable[[ConfigT], dict[str, Any]]
    """Their keys of our config."""
    make: Callable[..., ModuleT]
    """Our module: make(config, rngs=, dtype=, compute_dtype=). It keeps its `config`."""
    keys: Callable[[ConfigT], Sequence[Key]]
    """The key map of a config."""
    stem: str = "diffusion_pytorch_model"
    """Of the files' names."""
    unread: tuple[str, ...] = ()
    """Ends of names of tensors that hold what the config says already, and are left in the file."""
    fixed: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Tensors that mean nothing here, passed over in files and written as these."""
    name: Callable[[str], str] = str
    """The key map's name of a tensor, of one that other files have."""


class Fields:
    """The keys of a config.json, each read once; a key that nobody reads is refused."""

    def __init__(self, values: Mapping[str, Any], where: str):
        """Take the keys, those with a leading underscore apart; `where` names them in errors."""
        self._values = {key: value for key, value in values.items() if not key.startswith("_")}
        self._where = where
        self._read: set[str] = set()

    def take(self, key: str, default: Any) -> Any:
        """The value of a key; the default where there is none."""
        self._read.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """The value of a key.

        Raises:
          ConfigError: where there is none.
        """
        if key not in self._values:
            raise ConfigError(f"{self._where} has no {key}; write it there")
        return self.take(key, None)

    def rest(self) -> dict[str, Any]:
        """All keys that nobody has read yet."""
        found = {key: value for key, value in self._values.items() if key not in self._read}
        self._read.update(found)
        return found

    def ignore(self, *keys: str) -> None:
        """Pass over keys that change nothing of what is computed here."""
        self._read.update(keys)

    def only(self, key: str, value: Any, *others: Any) -> None:
        """Check that a key, if it is there, has one of the values that are supported.

        Raises:
          ConfigError: it has another.
        """
        found = self.take(key, value)
        if found not in (value, *others):
            allowed = " or ".join(map(repr, (value, *others)))
            raise ConfigError(f"{self._where}: {key}={found!r} is not supported; use {allowed}")

    def finish(self) -> None:
        """Check that every key was read.

        Raises:
          ConfigError: a key that is not known, with the nearest that is.
        """
        unknown = [key for key in self._values if key not in self._read]
        if unknown:
            known = f"known keys are {', '.join(sorted(self._read))}"
            raise ConfigError(
                f"{self._where}: {', '.join(unknown)} is not known; "
                f"{did_you_mean(unknown[0], self._read, known)}"
            )


def read_folder_config(folder: str | Path) -> dict[str, Any]:
    """The parsed config.json of a component's folder.

    Raises:
      CheckpointError: there is none, or it is not a JSON object.
    """
    return read_json_object(
        Path(folder) / "config.json",
        "give a component's folder with config.json and safetensors files",
    )


def read_class(folder: str | Path) -> str:
    """The class that a component's folder is of.

    Raises:
      CheckpointError: config.json is missing or names none.
    """
    values = read_folder_config(folder)
    name = values.get("_class_name") or (values.get("architectures") or [None])[0]
    if not isinstance(name, str):
        raise CheckpointError(
            f"{Path(folder) / 'config.json'} names neither _class_name nor architectures; it is "
            "not a component of diffusers or transformers"
        )
    return name


def write_folder_config(component: Component[ConfigT, ModuleT], config: ConfigT) -> dict[str, Any]:
    """What is written as config.json."""
    values = component.write(config)
    if component.stem == "model":
        return {"architectures": [component.class_name], **values}
    head = {"_class_name": component.class_name, "_diffusers_version": DIFFUSERS_VERSION}
    return {**head, **values}


def create(
    component: Component[ConfigT, ModuleT],
    config: ConfigT,
    *,
    seed: int | jax.Array = 0,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> ModuleT:
    """A module with freshly drawn parameters, made in one compiled call.

    With a mesh each device makes its own part only; the values do not depend on the mesh.

    Args:
      component: what to make.
      config: its config.
      seed: an integer or a PRNG key.
      dtype: of the parameters.
      compute_dtype: of the products; None for `dtype`.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      ShardingError: a parameter does not divide over the mesh.
    """
    compute_dtype = dtype if compute_dtype is None else compute_dtype

    def draw(key: jax.Array) -> Any:
        rngs = nnx.Rngs(params=key)
        return nnx.state(
            component.make(config, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        )

    graphdef, state = nnx.split(_abstract(component, config, dtype, compute_dtype))
    places = None if mesh is None else tree_shardings(state, mesh, rules)
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    return nnx.merge(graphdef, jax.jit(draw, out_shardings=places)(key))


def _abstract(
    component: Component[ConfigT, ModuleT],
    config: ConfigT,
    dtype: DTypeLike,
    compute_dtype: DTypeLike,
) -> ModuleT:
    return nnx.eval_shape(
        lambda: component.make(
            config, rngs=nnx.Rngs(params=0), dtype=dtype, compute_dtype=compute_dtype
        )
    )


def load(
    component: Component[ConfigT, ModuleT],
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> ModuleT:
    """A module with the config and weights of a folder.

    Names and shapes are checked before anything is read. Peak memory is the model's plus one
    parameter.

    Args:
      component: what the folder is of.
      folder: with config.json and one safetensors file, or several with an index.
      dtype: of the parameters; None for what each is stored as.
      compute_dtype: of the products; None for `dtype`, or what most values are stored as.
      mesh: where the parameters will live; None for the default device.
      rules: logical axes to mesh axes.

    Raises:
      ConfigError: a key of config.json that is not known, or a value that is not supported.
      CheckpointError: a file or tensor that is missing, unknown, or of another shape.
      ShardingError: a parameter does not divide over the mesh.
    """
    folder = Path(folder)
    fields = Fields(read_folder_config(folder), str(folder / "config.json"))
    if component.stem == "model":
        fields.ignore("architectures")
    config = component.read(fields)
    fields.finish()
    stored = _find(component, folder)
    options = {"dtype": dtype, "compute_dtype": compute_dtype, "mesh": mesh, "rules": rules}
    return load_tensors(component, config, stored, folder, **options)


def load_part(
    component: Component[ConfigT, ModuleT],
    folder: str | Path,
    key: str | None,
    name: Callable[[str], str | None],
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
) -> ModuleT:
    """A module that is a part of what a folder is of.

    Args:
      component: what the part is.
      folder: as of `load`, and so are the dtypes and what is raised.
      key: of config.json, with the part's own keys; None where they are among the others.
      name: the key map's name of a tensor, None for those of other parts.
      dtype: of the parameters.
      compute_dtype: of the products.
    """
    folder = Path(folder)
    values = read_folder_config(folder)
    fields = Fields(values if key is None else values.get(key) or {}, f"{folder / 'config.json'}")
    config = component.read(fields)
    if key is not None:
        fields.finish()
    named = {
        own: tensor
        for each, tensor in find_tensors(folder, DTYPES, stem=component.stem).items()
        if not each.endswith(component.unread) and (own := name(each)) is not None
    }
    return load_tensors(component, config, named, folder, dtype=dtype, compute_dtype=compute_dtype)


def load_tensors(
    component: Component[ConfigT, ModuleT],
    config: ConfigT,
    stored: Mapping[str, StoredTensor],
    where: Path,
    *,
    keys: Sequence[Key] | None = None,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> ModuleT:
    """A module with a config and stored weights.

    Args:
      component: what the weights are of.
      config: its config.
      stored: every tensor by name.
      where: what errors call their place.
      keys: the key map; None for the component's own.
      dtype: as of `load`, and so are the others and what is raised.
      compute_dtype: likewise.
      mesh: likewise.
      rules: likewise.
    """
    if compute_dtype is None:
        compute_dtype = _usual_dtype(stored.values()) if dtype is None else dtype
    module = _abstract(component, config, dtype or jnp.float32, compute_dtype)
    tensors = plan(module, component.keys(config) if keys is None else keys)
    _check(where, tensors, stored)
    graphdef, state = nnx.split(module)
    places = {} if mesh is None else _flat(tree_shardings(state, mesh, rules))
    sources: dict[str, list[tuple[int | None, Tensor, int]]] = {}
    for tensor in tensors:
        for number, slot in enumerate(tensor.slots):
            sources.setdefault(slot.path, []).append((slot.layer, tensor, number))
    flat = nnx.to_flat_state(state)
    filled = []
    for path, variable in flat:
        name = "/".join(map(str, path))
        place = places[name].get_value() if name in places else None
        array = _read(sources[name], stored, variable.get_value().shape, dtype)
        filled.append((path, variable.replace(jax.device_put(array, place))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def check_dtype(name: str, tensor: StoredTensor) -> None:
    """Refuse integers where there should be weights.

    Raises:
      CheckpointError: with the name of the tensor.
    """
    if tensor.dtype not in FLOATS.values():
        raise CheckpointError(
            f"{tensor.file}: {name} is stored as {tensor.dtype.name}; weights are read as "
            f"{', '.join(dtype.name for dtype in FLOATS.values())}: save it as one of these"
        )


def _find(component: Component, folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder by the key map's names, without those that are not read."""
    found: dict[str, StoredTensor] = {}
    for own, tensor in find_tensors(folder, DTYPES, stem=component.stem).items():
        if own.endswith(component.unread) or own in component.fixed:
            continue
        check_dtype(own, tensor)
        name = component.name(own)
        other = found.setdefault(name, tensor)
        if other is not tensor and not np.array_equal(other.view(), tensor.view()):
            raise CheckpointError(
                f"{folder}: {other.name} and {own} are one parameter, and differ; keep one of them"
            )
    return found


def _flat(state: Any) -> dict[str, Any]:
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _usual_dtype(stored: Iterable[StoredTensor]) -> np.dtype:
    sizes: dict[np.dtype, int] = {}
    for tensor in stored:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + int(np.prod(tensor.shape))
    return max(sizes, key=lambda dtype: sizes[dtype])


def _check(
    folder: Path,
    tensors: Sequence[Tensor],
    stored: Mapping[str, StoredTensor],
) -> None:
    """Compare what the files hold with what the config needs."""
    said, use = "config.json", "give the config.json that these weights were saved with"
    if not folder.is_dir():
        said, use = "its config", "take a whole file of that model, or give config= of this one"
    names = {tensor.name for tensor in tensors}
    missing = [name for name in names if name not in stored]
    unknown = [name for name in stored if name not in names]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"lacks {first_few(sorted(missing))}")
        if unknown:
            parts.append(f"holds {first_few(sorted(unknown))}, which {said} has no place for")
        raise CheckpointError(f"{folder} {' and '.join(parts)}; {use}")
    for tensor in tensors:
        found = stored[tensor.name].shape
        if found != tensor.shape:
            raise CheckpointError(
                f"{folder}: {tensor.name} is {found}, and {said} makes it {tensor.shape}; {use}"
            )


def _read(
    sources: list[tuple[int | None, Tensor, int]],
    stored: Mapping[str, StoredTensor],
    shape: tuple[int, ...],
    dtype: DTypeLike | None,
) -> np.ndarray:
    """One parameter, its layers one after another."""
    dtypes = {stored[tensor.name].dtype for _, tensor, _ in sources}
    chosen = np.dtype(dtype) if dtype is not None else max(dtypes, key=lambda each: each.itemsize)
    array = np.empty(shape, chosen)
    for layer, tensor, number in sources:
        array[... if layer is None else layer] = tensor.parts(stored[tensor.name].view())[number]
    return array


def save(
    component: Component[ConfigT, ModuleT],
    module: nnx.Module,
    folder: str | Path,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 10 * 10**9,
) -> None:
    """Write config.json and safetensors of a module, whole or not at all.

    Args:
      component: what the module is of.
      module: with `config`; all its parameters addressable from this process.
      folder: to make.
      overwrite: replace a component's folder that is there already.
      max_shard_bytes: size above which the weights go into several files with an index.

    Raises:
      ConfigError: the module has parameters that the files' format has no place for.
      CheckpointError: the folder exists, or cannot be written.
    """
    target = Path(folder).resolve()
    _check_target(target, overwrite)
    config = module.config  # pyrefly: ignore[missing-attribute]
    tensors = plan(module, component.keys(config))
    values = {path: variable.get_value() for path, variable in parameters(module).items()}
    for path, value in values.items():
        if not value.is_fully_addressable:
            raise CheckpointError(
                f"{path} is spread over other processes; save a checkpoint and convert it in one "
                "process"
            )
    try:
        with replacing_folder(target) as work:
            written = write_folder_config(component, config)
            _write_json(work / "config.json", written)
            _write_weights(work, component, tensors, values, max_shard_bytes)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed there"
        ) from error


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another path, or overwrite it")
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"{target} is not a component's folder (it has no config.json), and overwriting would "
            "delete it; give another path"
        )


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_weights(
    folder: Path,
    component: Component,
    tensors: Sequence[Tensor],
    values: Mapping[str, jax.Array],
    limit: int,
) -> None:
    shards = _shards(tensors, values, limit)
    stem = component.stem
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}.safetensors"
        if len(shards) > 1:
            name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {tensor.name: _whole(tensor, values) for tensor in shard}
        arrays |= component.fixed if number == len(shards) else {}
        save_file(arrays, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(arrays, name))
        total += sum(array.nbytes for array in arrays.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / f"{stem}.safetensors.index.json", index)


def _whole(tensor: Tensor, values: Mapping[str, jax.Array]) -> np.ndarray:
    return tensor.whole(
        [
            np.asarray(values[slot.path] if slot.layer is None else values[slot.path][slot.layer])
            for slot in tensor.slots
        ]
    )


def _shards(
    tensors: Sequence[Tensor], values: Mapping[str, jax.Array], limit: int
) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = []
    size = limit + 1
    for tensor in tensors:
        width = values[tensor.slots[0].path].dtype.itemsize
        bytes_ = int(np.prod(tensor.shape)) * width
        if size + bytes_ > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += bytes_
    return shards
