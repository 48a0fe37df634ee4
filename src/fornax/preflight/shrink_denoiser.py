"""A diffusion config small enough for virtual CPU devices, of the same structure.

Every kind of block, condition and position stays; the numbers of them and their widths shrink.

Legend: D model width, N heads, H head width.
"""

import dataclasses
import math
from typing import Any

from fornax.diffusion.config import DiffusionConfig, DiT, ModelConfig, Transformer
from fornax.diffusion.data import EncodedConfig, ImageData, ImagesConfig, LettersConfig
from fornax.diffusion.models.transformer import BlockConfig, RopeConfig, Run, TransformerConfig
from fornax.diffusion.models.transformer.config import SinCosConfig
from fornax.diffusion.models.unet import UNetConfig
from fornax.diffusion.prompts import WordsConfig
from fornax.mesh import ProcessConfig
from fornax.preflight.shrink import (
    Pieces,
    Shrunk,
    meshes_of,
    pieces_on,
    settled_optim,
    smallest_multiple,
)
from fornax.train import EvalConfig, ProfileConfig

__all__ = ["example_shape", "shrink_denoiser"]

_HEAD = 16
_TEXT = 32
"""Width of whatever conditions."""
_TOKENS = 8
"""Of a text."""
_PATCHES = 4
"""Along each axis of an image; a video has half as many frames of them."""
_GROUPS = 4
_TIME_IDS = 6
"""Numbers of SDXL's `sizes`."""
_ROWS = 8


def shrink_denoiser(config: DiffusionConfig, quick: bool) -> Shrunk[DiffusionConfig]:
    """Shrink a config.

    Sizes of the mesh become 2 each, and the axis that takes what is left takes what is left of
    eight devices. Of equal blocks in a row two stay, one where `quick`.

    Args:
      config: the user's.
      quick: keep one block of each kind.
    """
    axes, meshes = meshes_of(config, lambda axis, devices: devices)
    pieces = pieces_on(config, meshes)
    depth = 1 if quick else 2
    model, share = _model(config.model, pieces, depth)
    accumulate = min(config.accumulate, 2)
    data: Any = config.data
    if isinstance(data, EncodedConfig):
        data = dataclasses.replace(
            data,
            path="",
            shape=(*_grid(model, data), data.shape[-1]),
            text_length=data.text_length and _TOKENS,
            text_width=data.text_width and _text_width(model),
            pooled_width=data.pooled_width and _TEXT,
            holdout=0,
        )
    text = config.text
    if isinstance(text, WordsConfig):
        length = min(text.length, _TOKENS)
        text = dataclasses.replace(text, width=_text_width(model), length=length)
    small = dataclasses.replace(
        config,
        model=model,
        data=data,
        text=text,
        batch_size=smallest_multiple(_ROWS, pieces("batch") * accumulate),
        accumulate=accumulate,
        mesh=meshes[0],
        optim=settled_optim(config.optim, share),
        eval=EvalConfig(),
        processes=ProcessConfig(),
        profile=ProfileConfig(),
        sample=dataclasses.replace(config.sample, every=None),
    )
    return Shrunk(config=small, axes=axes, meshes=meshes)


def _model(model: ModelConfig, pieces: Pieces, depth: int) -> tuple[ModelConfig, float]:
    """The small model, and its width as a share of the old one."""
    if isinstance(model, DiT):
        N = _heads(model.num_heads, pieces)
        D = N * _HEAD
        hidden = smallest_multiple(round(D * model.mlp_ratio), _width(pieces))
        small = dataclasses.replace(
            model,
            num_layers=min(model.num_layers, depth),
            num_heads=N,
            head_dim=_HEAD,
            mlp_ratio=hidden / D,
        )
        return small, D / (model.num_heads * model.head_dim)
    if isinstance(model, Transformer):
        small = _transformer(model.config, pieces, depth)
        found = dataclasses.replace(model, config=small)
        return found, small.width / model.config.width
    small = _unet(model.config, pieces)
    share = small.channels[0] / model.config.channels[0]
    return dataclasses.replace(model, config=small), share


def _width(pieces: Pieces) -> int:
    """What every width is a multiple of."""
    names = ("embed", "mlp", "norm", "vocab", "activation_embed", "activation_mlp")
    return math.lcm(_HEAD, pieces(*names))


def _heads(old: int, pieces: Pieces) -> int:
    """The least heads, two where there are several, that divide and make a width that does."""
    heads = smallest_multiple(min(old, 2), pieces("heads", "activation_heads"))
    while heads * _HEAD % _width(pieces):
        heads += 1
    return heads


def _transformer(old: TransformerConfig, pieces: Pieces, depth: int) -> TransformerConfig:
    N = _heads(old.num_heads, pieces)
    D = N * _HEAD
    positions = old.positions
    if isinstance(positions, RopeConfig):
        positions = dataclasses.replace(positions, axes=_rope_axes(positions.axes))
    elif isinstance(positions, SinCosConfig) and positions.stored is not None:
        positions = dataclasses.replace(positions, stored=2 * _PATCHES)
    embedder = old.embedder
    embedder = dataclasses.replace(
        embedder,
        channels=_TEXT,
        hidden=embedder.hidden and _width(pieces),
        width=embedder.width and _width(pieces),
        pooled=embedder.pooled and _TEXT,
    )
    text = old.text
    if text is not None:
        joins = any(run.block.kind == "joint" or run.tokens == "both" for run in old.blocks)
        raw = text.projection == "none" and joins
        text = dataclasses.replace(text, width=D if raw else _TEXT)

    def run(said: Run | None) -> Run | None:
        if said is None:
            return None
        block = _block(said.block, old, pieces, N)
        return dataclasses.replace(said, block=block, count=min(said.count, depth))

    return dataclasses.replace(
        old,
        num_heads=N,
        head_dim=_HEAD,
        blocks=tuple(found for found in map(run, old.blocks) if found),
        positions=positions,
        embedder=embedder,
        text=text,
        image_states=old.image_states and _TEXT,
        refine_text=run(old.refine_text),
        refine_sample=run(old.refine_sample),
    )


def _block(block: BlockConfig, old: TransformerConfig, pieces: Pieces, heads: int) -> BlockConfig:
    D = heads * _HEAD
    hidden = smallest_multiple(round(min(block.mlp.hidden / old.width, 4) * D), _width(pieces))
    cross = block.cross
    if cross is not None:
        same = (cross.num_heads, cross.head_dim) == (old.num_heads, old.head_dim)
        other = heads if same else _heads(cross.num_heads, pieces)
        cross = dataclasses.replace(cross, num_heads=other, head_dim=_HEAD)
    mlp = dataclasses.replace(block.mlp, hidden=hidden)
    return dataclasses.replace(block, mlp=mlp, cross=cross)


def _rope_axes(old: tuple[int, ...]) -> tuple[int, ...]:
    """Even dimensions of each axis, in the old proportions; their sum is a head's."""
    pairs = [max(1, round(axis * _HEAD / sum(old) / 2)) if axis else 0 for axis in old]
    while sum(pairs) != _HEAD // 2:
        largest = pairs.index(max(pairs))
        pairs[largest] += 1 if sum(pairs) < _HEAD // 2 else -1
    return tuple(2 * n for n in pairs)


def _unet(old: UNetConfig, pieces: Pieces) -> UNetConfig:
    """A U-Net of as many levels, with one residual block each on the way down."""
    unit = math.lcm(_width(pieces), 2 * pieces("heads", "activation_heads"))
    channels = tuple(
        unit * min(4, max(1, round(width / old.channels[0]))) for width in old.channels
    )
    heads = tuple(
        smallest_multiple(min(n, 2), pieces("heads", "activation_heads")) for n in old.heads
    )
    sizes = old.size_dim and _TEXT // 4
    projection = old.projection_dim and _TEXT + (_TIME_IDS * sizes if sizes else 0)
    return dataclasses.replace(
        old,
        channels=channels,
        heads=heads,
        layers=(1,) * len(channels),
        transformer_layers=tuple((min(n[0], 2),) for n in old.transformer_layers),
        up_transformer_layers=tuple((min(n[0], 2),) * 2 for n in old.up_transformer_layers),
        text_dims=(_TEXT,) * len(channels),
        text_input_dim=old.text_input_dim and _TEXT,
        norm_groups=min(old.norm_groups, _GROUPS),
        time_dim=2 * _width(pieces),
        time_condition_dim=old.time_condition_dim and _TEXT,
        projection_dim=projection,
        size_dim=sizes,
    )


def _text_width(model: ModelConfig) -> int:
    """Of the states of a text, as the model takes them in."""
    whole = model.config if isinstance(model, Transformer) else None
    return whole.text.width if whole is not None and whole.text is not None else _TEXT


def _has_frames(data: ImageData) -> bool:
    return isinstance(data, ImagesConfig) and bool(data.frames)


def _grid(model: ModelConfig, data: ImageData) -> tuple[int, ...]:
    """Places of an example: a few patches along each axis."""
    if isinstance(model, DiT):
        videos = len(data.shape) == 4 if isinstance(data, EncodedConfig) else _has_frames(data)
        frames = (_PATCHES // 2 * model.frame_patch,) if videos else ()
        return (*frames, *(_PATCHES * model.patch,) * 2)
    if isinstance(model, Transformer):
        frames, patch = model.config.patch[:-2], model.config.patch[-2:]
        return (*(_PATCHES // 2 * n for n in frames), *(_PATCHES * n for n in patch))
    return (_PATCHES * 2 ** (len(model.config.channels) - 1),) * 2


def example_shape(config: DiffusionConfig) -> tuple[int, ...]:
    """Places and channels of a small config's examples: of encoded ones the config's."""
    data = config.data
    if isinstance(data, EncodedConfig):
        return data.shape
    if isinstance(data, LettersConfig):
        return (*_grid(config.model, data), 3 if data.colour else 1)
    return (*_grid(config.model, data), data.channels)
