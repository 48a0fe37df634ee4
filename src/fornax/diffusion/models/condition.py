"""What a denoising network is conditioned on beside the time, as one pytree for all families.

Legend: B batch, S text tokens, D width of the text encoder's states, N numbers, X axes of an image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import jax

from fornax.config.errors import ConfigError

__all__ = ["Condition", "check_widths", "require"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Condition:
    """The inputs of a denoiser beside its noisy sample and time; None where it has none.

    All fields are arrays with a leading batch axis, so that requests and examples batch, shard and
    split along it, with `jax.tree.map`.
    """

    text_BSD: jax.Array | None = None
    """States of the text encoder."""
    text_mask_BS: jax.Array | None = None
    """int32, 1 for a token and 0 for padding; None for no padding."""
    text2_BSD: jax.Array | None = None
    """States of a second text encoder, where a family takes two, or of an image encoder."""
    text2_mask_BS: jax.Array | None = None
    """Its tokens."""
    pooled_BD: jax.Array | None = None
    """One vector for the whole text."""
    classes_B: jax.Array | None = None
    """int32 class; the number of classes stands for no class."""
    sizes_BN: jax.Array | None = None
    """float32 sizes in pixels: SDXL's six time ids (original height and width, top and left of the
    crop, target height and width), PixArt's height, width and aspect ratio; LTX-Video's seconds
    from one frame of latents to the next, and pixels from one row and one column to the next."""
    guidance_B: jax.Array | None = None
    """float32 guidance that the network was distilled with, as the user gives it."""
    adapter_B: jax.Array | None = None
    """int32 number of the adapter, from 1, of a denoiser with several; 0 for none."""
    image_BX: jax.Array | None = None
    """Channels appended to the sample's: the mask and masked latents of inpainting, the first frame
    of a video."""
    references: tuple[jax.Array, ...] | None = None
    """Latents of images to draw after, each [B, h, w, C] of a size of its own: their tokens are
    attended to behind the sample's."""
    first_BX: jax.Array | None = None
    """Latents [B, 1, h, w, C] without noise that replace a video's first."""
    control: tuple[jax.Array, ...] | None = None
    """Residuals of a ControlNet, in the order of the blocks that they are added to."""


def require(condition: Condition, takes: Sequence[str], needs: Sequence[str], who: str) -> None:
    """Check that a condition has what a network needs and nothing that it does not take.

    Args:
      condition: the condition.
      takes: names of fields that the network reads.
      needs: those of them that it cannot do without.
      who: the network, in words.

    Raises:
      ConfigError: a field is missing, or would be ignored.
    """
    given = [one.name for one in fields(condition) if getattr(condition, one.name) is not None]
    missing = [name for name in needs if name not in given]
    if missing:
        raise ConfigError(
            f"{who} needs {', '.join(missing)} of its condition, and it has "
            f"{', '.join(given) or 'nothing'}; pass Condition({missing[0]}=...)"
        )
    ignored = [name for name in given if name not in takes]
    if ignored:
        raise ConfigError(
            f"{who} does not take {', '.join(ignored)}; it takes {', '.join(takes) or 'nothing'}: "
            "leave the others None"
        )


def check_widths(condition: Condition, widths: Mapping[str, int | None], who: str) -> None:
    """Check that states are of the encoders that a network was trained with.

    Args:
      condition: the condition.
      widths: names of fields, and their last axis; None for a field that the network does not read.
      who: the network, in words.

    Raises:
      ConfigError: a field of another width.
    """
    for name, width in widths.items():
        given = getattr(condition, name)
        if width is not None and given is not None and given.shape[-1] != width:
            raise ConfigError(
                f"{who} reads {name} of width {width}, and they have {given.shape[-1]}; take the "
                "text and image encoders, or the states, of its own model"
            )
