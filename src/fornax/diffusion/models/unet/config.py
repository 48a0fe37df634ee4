"""What a U-Net is: its levels, what is in each, and what its time embedding takes in."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import Activation

__all__ = ["ClassEmbedding", "ControlNetConfig", "LevelAttention", "UNetConfig"]

LevelAttention = Literal["none", "cross", "self"]
"""After each residual block of a level: nothing; transformer blocks that attend to the image and to
the text; attention within the image alone."""

ClassEmbedding = Literal["none", "table", "timestep", "identity", "projection", "linear"]
"""What `Condition.classes_B` becomes before it is added to the time embedding: a row of a table;
the time embedding of another time, such as a level of noise; itself; an MLP or a linear layer of
it."""


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """A U-Net of residual blocks with attention (Rombach et al. 2022; Podell et al. 2023).

    Tuples hold one entry for each level, from the largest image down; `up_attention` and
    `up_transformer_layers` from the smallest image up, in the order in which they run.
    """

    in_channels: int = 4
    """Of the input, with those of `Condition.image_BX`."""
    out_channels: int = 4
    sample_size: int | tuple[int, int] | None = None
    """Height and width of what it was trained on; nothing is computed from it."""
    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers: tuple[int, ...] = (2, 2, 2, 2)
    """Residual blocks on the way down; one more on the way up."""
    down_attention: tuple[LevelAttention, ...] = ("cross", "cross", "cross", "none")
    mid_attention: LevelAttention | None = "cross"
    """None for no middle block; with "none" it is a single residual block."""
    up_attention: tuple[LevelAttention, ...] = ("none", "cross", "cross", "cross")
    heads: tuple[int, ...] = (8, 8, 8, 8)
    text_dims: tuple[int, ...] = (1280, 1280, 1280, 1280)
    """Width of the text states that a level attends to."""
    transformer_layers: tuple[tuple[int, ...], ...] = ((1, 1),) * 4
    """Transformer blocks after each residual block of a level; the middle has as many as the last
    level's first."""
    up_transformer_layers: tuple[tuple[int, ...], ...] = ((1, 1, 1),) * 4
    only_cross_attention: tuple[bool, ...] = (False, False, False, False)
    """Whether a level's transformer blocks attend to the text twice instead of to the image."""
    linear_projection: bool = False
    """Whether files hold a transformer's outer projections as matrices, not as 1x1 convolutions."""
    upcast_attention: bool = False
    """Whether queries and keys meet in float32 whatever the compute dtype is."""
    activation: Activation = "silu"
    norm_groups: int = 32
    norm_eps: float = 1e-5
    scale_shift: bool = False
    """Whether the time embedding scales and shifts the second norm, rather than being added."""
    mid_scale: float = 1.0
    """What the middle block's sums of branch and input are divided by."""
    downsample_padding: int = 1
    """1 for a pixel on all sides; 0 for one after the last row and column."""
    center_input: bool = False
    """Whether the input is mapped from 0..1 to -1..1 first."""
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    flip_sin_to_cos: bool = True
    freq_shift: float = 0.0
    time_dim: int = 1280
    """Width of the time embedding."""
    time_activation: Activation | None = None
    """Applied to the sum of all embeddings."""
    time_post_activation: Activation | None = None
    """Applied to the embedding of the time alone."""
    time_condition_dim: int | None = None
    """Width of what is projected and added to the sines and cosines of the time, such as the
    embedding of a guidance scale in models distilled to few steps (Luo et al. 2023)."""
    class_embedding: ClassEmbedding = "none"
    classes: int | None = None
    """Rows of the table."""
    class_concat: bool = False
    """Whether the class embedding is beside the time's, rather than being added."""
    projection_dim: int | None = None
    """Width of what `class_embedding` projects, or of the pooled text with the sizes' sines."""
    size_dim: int | None = None
    """Width of the sines and cosines of one number of `Condition.sizes_BN`, which with
    `Condition.pooled_BD` are projected and added to the time embedding (SDXL); None for neither."""
    text_input_dim: int | None = None
    """Width of the text states before a projection to `text_dims`; None for no projection."""

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        levels = len(self.channels)
        for name in _BY_LEVEL:
            if len(getattr(self, name)) != levels:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has {len(getattr(self, name))} entries for "
                    f"{levels} levels of channels={self.channels}; give one for each level"
                )
        for width, heads in zip(self.channels, self.heads, strict=True):
            if width % heads or width % self.norm_groups:
                raise ConfigError(
                    f"{width} channels do not divide into {heads} heads and {self.norm_groups} "
                    "groups of the norm; use channels that are a multiple of both"
                )
        for layers, blocks, ups in zip(
            self.layers, self.transformer_layers, reversed(self.up_transformer_layers), strict=True
        ):
            if len(blocks) != layers or len(ups) != layers + 1:
                raise ConfigError(
                    f"transformer_layers={self.transformer_layers} and up_transformer_layers="
                    f"{self.up_transformer_layers} must give a number for each of {layers} "
                    f"residual blocks down and {layers + 1} up"
                )
        if self.text_input_dim is not None and len(set(self.text_dims)) > 1:
            raise ConfigError(
                f"text_input_dim={self.text_input_dim} projects text to one width and the levels "
                f"attend to several, text_dims={self.text_dims}; use one"
            )
        needs = {"table": "classes", "projection": "projection_dim", "linear": "projection_dim"}
        missing = needs.get(self.class_embedding)
        if missing is None and self.size_dim is not None:
            missing = "projection_dim"
        if missing is not None and getattr(self, missing) is None:
            raise ConfigError(
                f"class_embedding={self.class_embedding!r} with size_dim={self.size_dim} needs "
                f"{missing}; give it"
            )

    @property
    def embedding_dim(self) -> int:
        """Width of what residual blocks take in."""
        return self.time_dim * (2 if self.class_concat else 1)

    @property
    def class_name(self) -> str:
        """The class of diffusers that has such a config."""
        return "UNet2DConditionModel" if self.takes_text else "UNet2DModel"

    @property
    def takes_text(self) -> bool:
        """Whether any level attends to text."""
        return "cross" in (*self.down_attention, self.mid_attention, *self.up_attention)


_BY_LEVEL = (
    "layers",
    "down_attention",
    "up_attention",
    "heads",
    "text_dims",
    "transformer_layers",
    "up_transformer_layers",
    "only_cross_attention",
)


@dataclass(frozen=True, kw_only=True)
class ControlNetConfig:
    """A copy of a U-Net's way down that reads an image, and adds to what the U-Net passes across
    (Zhang et al. 2023)."""

    unet: UNetConfig = UNetConfig()
    """The U-Net whose way down and middle it copies; what lies on the way up is not looked at."""
    image_channels: int = 3
    image_order: Literal["rgb", "bgr"] = "rgb"
    """Order in which it reads the channels of the image, which is given as RGB."""
    image_widths: tuple[int, ...] = (16, 32, 96, 256)
    """Channels of the convolutions that bring the image to the latents' size: each but the first
    halves it."""
    pool: bool = False
    """Whether residuals are averaged over the image."""

    @property
    def class_name(self) -> str:
        """The class of diffusers that has such a config."""
        return "ControlNetModel"
