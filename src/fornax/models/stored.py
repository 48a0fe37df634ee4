"""A model in files, read one parameter and one layer at a time: as floats, or as its own codes."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.typing import ArrayLike

from fornax.gguf import BlockIntegers
from fornax.mesh import Rules, named_sharding
from fornax.models.decoder import Decoder
from fornax.models.families import CodeFormat, Codes, DequantizedTensor, StoredCodes, Tensor
from fornax.models.layout import flat_variables
from fornax.models.placing import Source, put, stacked, write_layer, zeros

__all__ = ["StoredModel"]


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model whose weights are read one parameter, and one layer, at a time."""

    model: Decoder
    """Abstract, until `fill`."""
    dtype: np.dtype
    """Of parameters."""
    mesh: Mesh | None
    rules: Rules
    blocks: Mapping[str, Mapping[int | None, list[Source]]]
    """By path of a parameter and index in its stack (None where it has none): where its values
    are, those of experts in order."""

    def fill(self) -> None:
        """Read the parameters that are still abstract into the model."""
        variables = flat_variables(self.model)
        for path in self.blocks:
            if isinstance(variables[path].get_value(), jax.ShapeDtypeStruct):
                variables[path].set_value(self.read(path))

    def read(self, path: str) -> jax.Array:
        """One parameter, such as layers/attention/q/kernel."""
        place = self._place(self._axes(path))
        (array,) = self._stack(path, lambda sources: (self._put(path, sources),), place)
        return array

    def read_layer(self, path: str, index: int) -> jax.Array:
        """One layer of a stacked parameter, by its index in the stack."""
        return self._put(path, self.blocks[path][index])

    def convert(
        self, path: str, function: Callable[[jax.Array], tuple[jax.Array, ...]]
    ) -> tuple[jax.Array, ...]:
        """What a function makes of a parameter, whose layers never exist together.

        Args:
          path: of the parameter.
          function: of the parameter, or of one layer of a stacked one, to new arrays.

        Returns:
          The function's arrays, those of layers stacked.
        """

        def make(sources: list[Source]) -> tuple[jax.Array, ...]:
            part = self._put(path, sources)
            made = function(part)
            part.delete()
            return made

        return self._stack(path, make, None)

    def code_formats(self) -> dict[str, CodeFormat | str]:
        """How packed products would read the quantized parameters as they are stored.

        Returns:
          By path of a parameter that the files quantize: the format of its codes, one for all
          layers unless they are blocks, or why products cannot take them. A table of embeddings in
          blocks that is the output projection too is there as that, `lm_head/kernel`. Scales are
          not read, zero points and the groups of inputs are where the format depends on them.

        Raises:
          CheckpointError: groups or zero points out of their range.
        """
        found = {
            path: self._code_format(path)
            for path, layers in self.blocks.items()
            if any(
                isinstance(tensor, DequantizedTensor) and tensor.quantized
                for sources in layers.values()
                for tensor, _ in sources
            )
        }
        if _TABLE in found and _OUTPUTS not in self.blocks:
            form = self._format_of(_TABLE)
            if isinstance(form, CodeFormat) and form.kinds:
                found[_OUTPUTS] = form
        return found

    def convert_codes(
        self,
        path: str,
        function: Callable[[Codes], tuple[ArrayLike, ...]],
        axes: Sequence[tuple[str | None, ...]] | None = None,
    ) -> tuple[jax.Array, ...]:
        """What a function makes of a parameter's stored codes, whose layers never exist together.

        Args:
          path: of a parameter that has a format without `kinds` in `code_formats`.
          function: of the codes of one matrix, of a layer of a stacked parameter or of an expert,
            to new arrays.
          axes: logical axes of each array, those of experts among them and those of layers not;
            None leaves arrays where they are.

        Returns:
          The function's arrays, those of layers and, in a layer, those of experts stacked.

        Raises:
          CheckpointError: scales that are not finite.
        """

        def make(sources: list[Source]) -> tuple[jax.Array, ...]:
            made = []
            for codes in _matrices(sources):
                assert isinstance(codes, Codes), f"{path} has blocks"
                made.append(function(codes))
            arrays = made[0]
            if _of_experts(sources):
                # Through the host's memory, where they lie: no program for each number of experts.
                arrays = tuple(np.stack(parts) for parts in zip(*made, strict=True))
            if axes is None:
                return tuple(map(jnp.asarray, arrays))
            places = map(self._place, axes)
            return tuple(jax.device_put(x, own) for x, own in zip(arrays, places, strict=True))

        return self._stack(path, make, None)

    def concatenate_blocks(
        self, path: str, function: Callable[[BlockIntegers], np.ndarray], shape: tuple[int, ...]
    ) -> jax.Array:
        """What a function makes of a parameter's stored blocks, layer behind layer in one array.

        Args:
          path: of a parameter whose format in `code_formats` has `kinds`.
          function: of the blocks of one layer to uint8 with all axes but the first as in `shape`.
          shape: of all layers.

        Raises:
          CheckpointError: scales that are not finite.
        """
        whole, start = jnp.zeros(shape, jnp.uint8), 0
        for _, sources in self._in_order(path):
            (blocks,) = _matrices(sources)
            assert isinstance(blocks, BlockIntegers), f"{path} has no blocks"
            part = function(blocks)
            whole = _write_rows()(whole, part, start)
            start += len(part)
        return whole

    def _in_order(self, path: str) -> list[tuple[int | None, list[Source]]]:
        """The layers of a parameter; of output projections without files those of the table."""
        layers = self.blocks[_TABLE if path == _OUTPUTS and path not in self.blocks else path]
        return sorted(layers.items(), key=lambda layer: layer[0] or 0)

    def _code_format(self, path: str) -> CodeFormat | str:
        sources = [source for layer in self.blocks[path].values() for source in layer]
        experts = _of_experts(sources)
        if not experts and not all(block.slot.num_inputs for _, block in sources):
            return "it is not a matrix of a projection"
        form = self._format_of(path)
        if experts and isinstance(form, CodeFormat) and form.ordered:
            return "its experts have an activation order each"
        return form

    def _format_of(self, path: str) -> CodeFormat | str:
        found = [
            held.format if isinstance(held, StoredCodes) else held
            for _, sources in self._in_order(path)
            for held in (_codes_of(tensor) for tensor, _ in sources)
        ]
        formats = [each for each in found if isinstance(each, CodeFormat)]
        if len(formats) < len(found):
            return next(each for each in found if isinstance(each, str))
        if all(each.kinds for each in formats):
            return formats[0]._replace(kinds=tuple(kind for x in formats for kind in x.kinds))
        if len(set(formats)) > 1:
            return f"its layers have {' and '.join(sorted(map(str, set(formats))))}"
        return formats[0]

    def _put(self, path: str, sources: list[Source]) -> jax.Array:
        """A parameter, or one layer of it, on its devices."""
        axes = self._axes(path)
        dtype = np.dtype(np.float32) if path.endswith("/experts/selection_bias") else self.dtype
        return put(sources, self._place(axes if None in self.blocks[path] else axes[1:]), dtype)

    def _stack(
        self, path: str, make: Callable[[list[Source]], tuple[jax.Array, ...]], place: object
    ) -> tuple[jax.Array, ...]:
        """What is made of a parameter, each layer written into a stack and released."""
        layers = self.blocks[path]
        if None in layers:
            return make(layers[None])
        stacks: list[jax.Array] = []
        for layer, sources in layers.items():
            made = make(sources)
            stacks = stacks or [zeros(len(layers), x, place or stacked(x)) for x in made]
            for number, x in enumerate(made):
                write = write_layer(stacks[number].sharding)
                stacks[number] = write(stacks[number], x, layer)
                x.delete()
        return tuple(stacks)

    def _axes(self, path: str) -> tuple[str | None, ...]:
        return flat_variables(self.model)[path].get_metadata()["axes"]

    def _place(self, axes: tuple[str | None, ...]) -> NamedSharding | SingleDeviceSharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return named_sharding(self.mesh, axes, self.rules)


_TABLE, _OUTPUTS = "embed/embedding", "lm_head/kernel"


@functools.cache
def _write_rows() -> Any:
    """A compiled, in-place write of rows into an array, from a row on."""
    return jax.jit(
        lambda whole, part, start: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0),
        donate_argnums=0,
    )


def _of_experts(sources: list[Source]) -> bool:
    """Whether a parameter, or a layer of it, is a matrix for each expert."""
    slot = sources[0][1].slot
    return slot.expert is not None or slot.of_all_experts


def _matrices(sources: list[Source]) -> Iterator[Codes | BlockIntegers]:
    """The codes that a parameter, or a layer of it, takes: of one matrix, or of each expert's."""
    for tensor, block in sources:
        held, slot = _codes_of(tensor), block.slot
        assert isinstance(held, StoredCodes), f"{slot.path} has no codes"
        if not slot.of_all_experts:
            yield _cut(held.read(), block.cut)
            continue
        # Of a tensor of all experts the axis of outputs is cut, the first of an expert's codes.
        taken = slice(block.start, block.stop, block.step)
        for expert in range(slot.shape[0]):
            yield _cut(held.read(expert), lambda each, taken=taken: each[taken])


def _cut(
    codes: Codes | BlockIntegers, cut: Callable[[np.ndarray], np.ndarray]
) -> Codes | BlockIntegers:
    if isinstance(codes, Codes):
        zeros = None if codes.zeros is None else cut(codes.zeros)
        return Codes(cut(codes.values), cut(codes.scales), zeros, codes.order)
    return codes._make(each if each is None else cut(each) for each in codes)


def _codes_of(tensor: Tensor) -> StoredCodes | str:
    if isinstance(tensor, DequantizedTensor):
        return tensor.codes()
    return "not all its layers are quantized"
