"""A transformer over the patches of a noisy image or video, by config.

Legend: B batch, X axes of the sample, C channels, T tokens of the sample, S tokens of text,
D width, E width of the embedding, n vectors of modulation.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition, check_widths, require
from fornax.diffusion.models.parts import Dense, Make, constrain_tokens
from fornax.diffusion.models.transformer.attention import Rope
from fornax.diffusion.models.transformer.blocks import (
    Clean,
    Inputs,
    JointBlock,
    ParallelBlock,
    SequentialBlock,
    first_input,
    vectors_ahead,
)
from fornax.diffusion.models.transformer.config import (
    FractionalRopeConfig,
    RopeConfig,
    Run,
    SinCosConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.embedder import Embedder, TextEmbedder, features
from fornax.diffusion.models.transformer.ends import Head, ImageIn, Shared, TextIn
from fornax.diffusion.models.transformer.positions import (
    Rotation,
    fractional_rotations,
    rotations,
    sin_cos_table,
)
from fornax.models import Remat, stack_layers
from fornax.models.remat import rematerialise
from fornax.models.scope import scoped

__all__ = ["Around", "Transformer"]

Around = Callable[[Callable[[jax.Array], jax.Array], jax.Array, Callable[[], jax.Array]], jax.Array]
"""What runs a transformer's blocks, or does not: takes them as one function of the sample's tokens
x_BTD, those tokens, and what gives the input of the first block's attention (`first_input`);
returns the tokens after the blocks."""

_OPTIONAL = {"text_mask_BS", "references", "first_BX"}
"""Fields of a condition that a transformer can do without."""
_BLOCKS = {"sequential": SequentialBlock, "joint": JointBlock, "parallel": ParallelBlock}


class Transformer(nnx.Module):
    """A denoiser: what is predicted of a noisy sample, its time and a condition.

    Attributes:
      config: what it is.
      blocks: for each run its blocks, stacked.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make the parameters.

        Args:
          config: what it is.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the products; None for `dtype`. The embedding of the time is float32.
        """
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.config, self.compute_dtype = config, compute_dtype
        width = config.width
        inputs = {"conv": math.prod(config.patch) * config.channels}
        self.patch = Dense(inputs, {"embed": width}, bias=config.patch_bias, **make)
        self.text = None if config.text is None else TextIn(config.text, width, **make)
        states = config.image_states
        self.image_in = None if states is None else ImageIn(states, width, **make)
        own = all(run.block.own_embedder for run in config.blocks)
        embedding = config.embedding_width
        self.embedder = None if own else Embedder(config.embedder, embedding, **make)
        self.shared = nnx.List([Shared(config, run.block, **make) for run in config.blocks])
        stack = functools.partial(_stack, config, make)
        self.blocks = nnx.List([stack(run) for run in config.blocks])
        self.refine_text = None if config.refine_text is None else stack(config.refine_text)
        self.refine_sample = None if config.refine_sample is None else stack(config.refine_sample)
        refined = config.text if config.refine_embedder else None
        own_embedder = functools.partial(TextEmbedder, width=embedding, **make)
        self.refine_embedder = None if refined is None else own_embedder(refined.width)
        pads = config.pad_multiple is not None
        self.sample_pad = _pad_token(width, dtype) if pads else None
        self.text_pad = _pad_token(width, dtype) if pads else None
        self.table = _stored_table(config, dtype)
        self.head = Head(config, **make)

    @scoped
    def __call__(
        self,
        x_BX: jax.Array,
        time_B: jax.Array,
        condition: Condition = Condition(),  # noqa: B008
        *,
        remat: str | Remat = "none",
        around: Around | None = None,
    ) -> jax.Array:
        """Predict.

        Args:
          x_BX: the noisy sample [B, rows, columns, C], or [B, frames, rows, columns, C].
          time_B: float32, 0 to 1000.
          condition: what the config says it takes.
          remat: what the backward pass computes again of each block (`fornax.models.remat`).
          around: what runs the blocks, such as a cache of steps.

        Returns:
          [B, X, output channels] in the dtype of x.

        Raises:
          ConfigError: a sample whose sizes patches do not divide, or a condition that lacks what
            the config needs, or has more.
        """
        config = self.config
        self._check(x_BX, condition)
        grid = self._grid(x_BX)
        if condition.image_BX is not None:
            x_BX = jnp.concatenate([x_BX, condition.image_BX.astype(x_BX.dtype)], -1)
        if condition.first_BX is not None:
            x_BX = x_BX.at[:, :1].set(condition.first_BX.astype(x_BX.dtype))
        x_BTD = self.patch(_patches(x_BX, config.patch))
        x_BTD = self._add_positions(x_BTD, grid)
        tokens = x_BTD.shape[1]
        references = condition.references or ()
        if references:
            behind = [self.patch(_patches(r.astype(x_BX.dtype), config.patch)) for r in references]
            x_BTD = jnp.concatenate([x_BTD, *behind], 1)
        x_BTD = constrain_tokens(x_BTD, "activation_embed")
        given = features(time_B, condition, config.embedder)
        embedding_BE = self._embed(given)
        text_BSD = mask_BS = None
        if self.text is not None:
            assert condition.text_BSD is not None, "the condition was checked to have text"
            text_BSD, mask_BS = self.text(condition.text_BSD), condition.text_mask_BS
        images_BSD = None
        if self.image_in is not None:
            assert condition.text2_BSD is not None, "the condition was checked to have states"
            images_BSD = self.image_in(condition.text2_BSD)
        text_BSD, mask_BS, slots_B = self._filled_text(text_BSD, mask_BS)
        x_BTD = _filled(x_BTD, self.sample_pad, config.pad_multiple)
        if isinstance(config.positions, FractionalRopeConfig):
            assert condition.sizes_BN is not None, "the condition was checked to have sizes"
            place = (grid, config.patch, condition.sizes_BN, config.width)
            rope_text, rope = None, fractional_rotations(*place, config.positions)
        else:
            grids = tuple(self._grid(reference) for reference in references)
            rope_text, rope = self._ropes(grid, text_BSD, x_BTD, slots_B, grids)
        inputs = Inputs(
            embedding_BE=self._activated(embedding_BE),
            features=given,
            images_BSD=images_BSD,
            clean=self._clean(time_B, condition, grid, x_BTD.shape[1]),
        )
        if self.refine_sample is not None and config.refine_sample is not None:
            with jax.named_scope("refine_sample"):
                own = replace(inputs, rope=rope)
                x_BTD = self._run(self.refine_sample, config.refine_sample, x_BTD, own, grid, remat)
        if self.refine_text is not None and config.refine_text is not None:
            with jax.named_scope("refine_text"):
                own = replace(inputs, rope=rope_text, mask_BT=mask_BS, clean=None)
                if self.refine_embedder is not None:
                    own = replace(own, embedding_BE=self.refine_embedder.of(time_B, condition))
                text_BSD = self._run(
                    self.refine_text, config.refine_text, text_BSD, own, grid, remat
                )

        def blocks(x_BTD: jax.Array) -> jax.Array:
            ropes = rope_text, rope
            return self._run_all(x_BTD, text_BSD, mask_BS, inputs, ropes, grid, remat)

        if around is None:
            x_BTD = blocks(x_BTD)
        else:
            x_BTD = around(blocks, x_BTD, lambda: self._first_input(x_BTD, inputs))
        out_BTC = self.head(x_BTD[:, :tokens], embedding_BE)
        if config.output_scale != 1.0:
            out_BTC = out_BTC * config.output_scale
        return _from_patches(out_BTC, grid, config.patch).astype(x_BX.dtype)

    def _check(self, x_BX: jax.Array, condition: Condition) -> None:
        config = self.config
        embedder = config.embedder
        takes = {
            "text_BSD": config.text is not None,
            "text_mask_BS": config.text is not None,
            "text2_BSD": config.image_states is not None,
            "pooled_BD": embedder.pooled is not None,
            "classes_B": embedder.classes is not None,
            "guidance_B": embedder.guidance_scale is not None,
            "sizes_BN": embedder.sizes or isinstance(config.positions, FractionalRopeConfig),
            "image_BX": config.image_channels > 0,
            "references": config.takes_references,
            "first_BX": config.first_frame,
        }
        names = [name for name, taken in takes.items() if taken]
        needs = [name for name in names if name not in _OPTIONAL]
        who = f"this transformer ({config.class_name})"
        require(condition, names, needs, who)
        states = None if config.text is None else config.text.width
        widths = {
            "text_BSD": states,
            "text2_BSD": config.image_states,
            "pooled_BD": embedder.pooled,
        }
        check_widths(condition, widths, who)
        for each in (x_BX, *(condition.references or ())):
            self._check_sizes(each)
        beside = 0 if condition.image_BX is None else condition.image_BX.shape[-1]
        references = [each.shape[-1] for each in condition.references or ()]
        for given in (x_BX.shape[-1] + beside, *references):
            if given != config.channels:
                raise ConfigError(
                    f"a sample of shape {x_BX.shape} has, with the image it is given, or an image "
                    f"to draw after has, {given} channels and the transformer takes "
                    f"{config.channels}"
                )
        first = condition.first_BX
        if first is not None and first.shape[1:] != (1, *x_BX.shape[2:]):
            raise ConfigError(
                f"the first latents have shape {first.shape}, and those of a sample of shape "
                f"{x_BX.shape} have {(first.shape[0], 1, *x_BX.shape[2:])}"
            )

    def _check_sizes(self, x_BX: jax.Array) -> None:
        sizes, patch = x_BX.shape[1:-1], self.config.patch
        if len(sizes) != len(patch) or any(n % p for n, p in zip(sizes, patch, strict=True)):
            raise ConfigError(
                f"a sample of shape {x_BX.shape} does not divide into patches of {patch}; its "
                f"{len(patch)} axes between batch and channels must be multiples of them"
            )

    def _grid(self, x_BX: jax.Array) -> tuple[int, ...]:
        """Patches along each axis of a sample."""
        return tuple(n // p for n, p in zip(x_BX.shape[1:-1], self.config.patch, strict=True))

    def _activated(self, embedding_BE: jax.Array) -> jax.Array:
        return jax.nn.silu(embedding_BE) if self.config.embedder.activate else embedding_BE

    def _clean(
        self, time_B: jax.Array, condition: Condition, grid: tuple[int, ...], tokens: int
    ) -> Clean | None:
        """What modulates tokens without noise; None where there are none."""
        own = np.arange(tokens)
        clean_T = np.zeros(tokens, bool)
        if condition.first_BX is not None:
            clean_T |= own < math.prod(grid[1:])
        if self.config.clean_references:
            clean_T |= own >= math.prod(grid)
        if not clean_T.any():
            return None
        unguided = replace(condition, guidance_B=None)
        given = features(jnp.zeros_like(time_B), unguided, self.config.embedder)
        return Clean(
            embedding_BE=self._activated(self._embed(given)), tokens_T=jnp.asarray(clean_T)
        )

    def _add_positions(self, x_BTD: jax.Array, grid: tuple[int, ...]) -> jax.Array:
        positions = self.config.positions
        if not isinstance(positions, SinCosConfig):
            return x_BTD
        rows, columns = grid
        if self.table is None or positions.stored is None:
            table = sin_cos_table((rows, columns), self.config.width, positions)
            return x_BTD + jnp.asarray(table, x_BTD.dtype)
        size = positions.stored
        if max(grid) > size:
            raise ConfigError(
                f"a sample of {rows} x {columns} patches is larger than the table of positions, "
                f"{size} x {size}; use a smaller sample"
            )
        top, left = (size - rows) // 2, (size - columns) // 2
        table = self.table[...].reshape(size, size, -1)
        cut = table[top : top + rows, left : left + columns]
        return x_BTD + cut.reshape(rows * columns, -1).astype(x_BTD.dtype)

    def _embed(self, given: Any) -> jax.Array:
        """The embedding for the head, and for blocks that have none of their own."""
        if self.embedder is not None:
            return self.embedder(given)
        first = _first(self.blocks[0].vectors.embedder)  # pyrefly: ignore[missing-attribute]
        with jax.named_scope("embedder"):
            return first(given)

    def _first_input(self, x_BTD: jax.Array, inputs: Inputs) -> jax.Array:
        return first_input(_first(self.blocks[0]), x_BTD, self._with_shared(0, inputs))

    def _filled_text(
        self, text_BSD: jax.Array | None, mask_BS: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        """Text filled up with the learned token, its mask, and tokens in each row with those."""
        multiple = self.config.pad_multiple
        if text_BSD is None or self.text_pad is None or multiple is None:
            return text_BSD, mask_BS, None
        S = text_BSD.shape[1]
        text_BSD = _filled(text_BSD, self.text_pad, multiple)
        if mask_BS is None:
            return text_BSD, None, None
        lengths_B = jnp.sum(mask_BS.astype(jnp.int32), axis=1)
        slots_B = -(-lengths_B // multiple) * multiple
        places_S = jnp.arange(text_BSD.shape[1])
        mask_BS = jnp.pad(mask_BS, ((0, 0), (0, text_BSD.shape[1] - S)))
        pad_D = self.text_pad[...].astype(text_BSD.dtype)
        text_BSD = jnp.where(mask_BS[..., None] > 0, text_BSD, pad_D)
        return text_BSD, (places_S < slots_B[:, None]).astype(jnp.int32), slots_B

    def _ropes(
        self,
        grid: tuple[int, ...],
        text_BSD: jax.Array | None,
        x_BTD: jax.Array,
        slots_B: jax.Array | None,
        references: tuple[tuple[int, ...], ...],
    ) -> tuple[Rope | None, Rope | None]:
        """Rotary embeddings of text and sample, for each row."""
        config = self.config.positions
        if not isinstance(config, RopeConfig):
            return None, None
        S, (B, T) = 0 if text_BSD is None else text_BSD.shape[1], x_BTD.shape[:2]

        def rows(rotation: Rotation) -> Rope:
            cos, sin = (jnp.broadcast_to(part, (B, *part.shape)) for part in rotation)
            return cos, sin

        text, sample = map(rows, rotations(grid, S, T, config, references))
        if config.sample_after_text and slots_B is not None:
            start = sum(config.axes[: config.text_axis]) // 2
            size = config.axes[config.text_axis]
            rates = np.asarray(config.theta ** -(np.arange(0, size, 2) / size), np.float32)
            angles_Br = (config.text_start + slots_B)[:, None].astype(jnp.float32) * rates
            own = jnp.arange(T) < math.prod(grid)  # what fills the tokens up is at zero
            angles_BTr = jnp.where(own[None, :, None], angles_Br[:, None], 0.0)
            part = slice(start, start + size // 2)
            cos, sin = sample
            sample = (
                cos.at[:, :, part].set(jnp.cos(angles_BTr)),
                sin.at[:, :, part].set(jnp.sin(angles_BTr)),
            )
        return text, sample

    def _run_all(
        self,
        x_BTD: jax.Array,
        text_BSD: jax.Array | None,
        mask_BS: jax.Array | None,
        inputs: Inputs,
        ropes: tuple[Rope | None, Rope | None],
        grid: tuple[int, ...],
        remat: str | Remat,
    ) -> jax.Array:
        """The sample's tokens after all runs."""
        T = x_BTD.shape[1]
        rope_text, rope = ropes
        mask_BT = None
        if mask_BS is not None:
            ones_BT = jnp.ones(x_BTD.shape[:2], mask_BS.dtype)
            mask_BT = jnp.concatenate([mask_BS, ones_BT], 1)
        both = False
        for index, run in enumerate(self.config.blocks):
            own = self._with_shared(index, inputs)
            if run.block.kind == "joint":
                assert text_BSD is not None, "a config with joint blocks has text"
                own = replace(own, rope=rope, rope_text=rope_text, mask_BT=mask_BT)
            elif run.tokens == "both":
                if not both:
                    assert text_BSD is not None, "a config whose blocks take both has text"
                    x_BTD, both = jnp.concatenate([text_BSD, x_BTD], 1), True
                own = replace(own, rope=_joined(rope_text, rope), mask_BT=mask_BT)
                own = replace(own, clean=_behind(own.clean, x_BTD.shape[1]))
            else:
                x_BTD, both = x_BTD[:, -T:], False
                own = replace(own, rope=rope, states_BSD=text_BSD, states_mask_BS=mask_BS)
            with jax.named_scope(f"blocks/{index}"):
                if run.block.kind == "joint":
                    carry = (x_BTD, text_BSD)
                    x_BTD, text_BSD = self._run(self.blocks[index], run, carry, own, grid, remat)
                else:
                    x_BTD = self._run(self.blocks[index], run, x_BTD, own, grid, remat)
        return x_BTD[:, -T:]

    def _with_shared(self, index: int, inputs: Inputs) -> Inputs:
        """The inputs with the vectors that a run's blocks have in common."""
        shared, embedding_BE = self.shared[index], inputs.embedding_BE
        assert embedding_BE is not None, "inputs are made with the embedding"
        if shared.sample is not None:
            inputs = replace(inputs, shared_BnD=shared.sample(embedding_BE))
            if inputs.clean is not None:
                own_BnD = shared.sample(inputs.clean.embedding_BE)
                inputs = replace(inputs, clean=replace(inputs.clean, shared_BnD=own_BnD))
        if shared.text is not None:
            inputs = replace(inputs, shared_text_BnD=shared.text(embedding_BE))
        return inputs

    def _run(
        self,
        stack: nnx.Module,
        run: Run,
        carry: Any,
        inputs: Inputs,
        grid: tuple[int, ...],
        remat: str | Remat,
    ) -> Any:
        """Tokens after a run's blocks, as one loop over their stacked parameters."""
        graphdef, modulations, rest = nnx.split(stack, nnx.PathContains("vectors"), ...)
        vectors = vectors_ahead(stack, inputs)  # pyrefly: ignore[bad-argument-type]
        if vectors is not None:  # the loop has no use for them, nor a gradient of zeros
            modulations = jax.lax.stop_gradient(modulations)
        stacked = (modulations, rest, vectors or {})

        def step(state: Any, carry: Any) -> Any:
            *states, vectors = state
            block, own = nnx.merge(graphdef, *states), replace(inputs, **vectors)
            if run.block.kind == "joint":
                return block(*carry, own)
            if run.block.kind == "parallel":
                return block(carry, own)
            return block(carry, own, grid)

        step = rematerialise(step, remat, prevent_cse=run.count == 1)
        return jax.lax.scan(lambda carry, state: (step(state, carry), None), carry, stacked)[0]


def _first(stack: nnx.Module) -> Any:
    """The first of the blocks of a stack."""
    graphdef, state = nnx.split(stack)
    return nnx.merge(graphdef, jax.tree.map(lambda stacked: stacked[0], state))


def _pad_token(width: int, dtype: DTypeLike) -> nnx.Param:
    return nnx.Param(jnp.zeros((width,), dtype), axes=("norm",))


def _stored_table(config: TransformerConfig, dtype: DTypeLike) -> nnx.Variable | None:
    """The positions that are part of the files; no parameter, as they are not trained."""
    positions = config.positions
    if not isinstance(positions, SinCosConfig) or positions.stored is None:
        return None
    table = sin_cos_table((positions.stored,) * 2, config.width, positions)
    return nnx.Variable(jnp.asarray(table, dtype), axes=(None, "norm"))


def _stack(config: TransformerConfig, make: Make, run: Run) -> nnx.Module:
    kind = _BLOCKS[run.block.kind]
    dtypes = {"dtype": make["dtype"], "compute_dtype": make["compute_dtype"]}
    return stack_layers(
        lambda rngs: kind(config, run.block, rngs=rngs, **dtypes),  # pyrefly: ignore[bad-argument-type]
        run.count,
        make["rngs"],
    )


def _filled(x_BTD: jax.Array, pad: nnx.Param | None, multiple: int | None) -> jax.Array:
    """Tokens filled up to a multiple."""
    if pad is None or multiple is None:
        return x_BTD
    B, T, D = x_BTD.shape
    more = jnp.broadcast_to(pad[...].astype(x_BTD.dtype), (B, -T % multiple, D))
    return jnp.concatenate([x_BTD, more], 1)


def _behind(clean: Clean | None, tokens: int) -> Clean | None:
    """The sample's tokens without noise, of as many in all; the text's are before them."""
    if clean is None:
        return None
    before = tokens - clean.tokens_T.shape[0]
    return replace(clean, tokens_T=jnp.pad(clean.tokens_T, (before, 0)))


def _joined(first: Rope | None, second: Rope | None) -> Rope | None:
    if first is None or second is None:
        return None
    cos, sin = (jnp.concatenate(pair, 1) for pair in zip(first, second, strict=True))
    return cos, sin


def _patches(x_BX: jax.Array, patch: tuple[int, ...]) -> jax.Array:
    """[B, *grid of places, C] -> [B, T, places of a patch * C], channels last in a patch."""
    B, *sizes, C = x_BX.shape
    split = [part for n, p in zip(sizes, patch, strict=True) for part in (n // p, p)]
    axes = range(1, 2 * len(patch) + 1)
    x = x_BX.reshape(B, *split, C)
    x = x.transpose(0, *axes[::2], *axes[1::2], 2 * len(patch) + 1)
    return x.reshape(B, -1, math.prod(patch) * C)


def _from_patches(x_BTC: jax.Array, grid: tuple[int, ...], patch: tuple[int, ...]) -> jax.Array:
    """The inverse of `_patches`."""
    B, n = x_BTC.shape[0], len(patch)
    x = x_BTC.reshape(B, *grid, *patch, -1)
    axes = [axis for i in range(n) for axis in (1 + i, 1 + n + i)]
    x = x.transpose(0, *axes, 2 * n + 1)
    sizes = (rows * p for rows, p in zip(grid, patch, strict=True))
    return x.reshape(B, *sizes, -1)
