"""What a transformer that denoises is: every choice of architecture as a field, none as a name.

Legend: B batch, T tokens of the sample, S tokens of text, D width, F hidden width of an MLP.
"""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import Activation, activation

__all__ = [
    "OWN_CLASS",
    "BlockConfig",
    "CrossConfig",
    "EmbedderConfig",
    "FractionalRopeConfig",
    "HeadConfig",
    "MLPConfig",
    "NormConfig",
    "RopeConfig",
    "Run",
    "SinCosConfig",
    "TextConfig",
    "TransformerConfig",
]

OWN_CLASS = "FornaxTransformer"
"""Class name of transformers that no class of diffusers can express."""


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """A norm of the last axis."""

    kind: Literal["layer", "rms"] = "layer"
    scale: bool = False
    """Whether it has a weight."""
    bias: bool = False
    """Whether it has a bias; a layer norm may."""
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check the bias."""
        if self.kind == "rms" and self.bias:
            raise ConfigError("norm.bias=True is not of an RMS norm; use kind 'layer'")


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The MLP of a block."""

    kind: Literal["plain", "gated", "convolution"] = "plain"
    """down(activation(up)); down(activation(gate) * up); or the gated one with a convolution of
    3 x 3 of each channel before the gate (Sana, Xie et al. 2024)."""
    hidden: int
    """F."""
    activation: Activation = "gelu_tanh"
    bias: bool = True
    down_bias: bool = True

    def __post_init__(self) -> None:
        """Check width and activation."""
        _positive("mlp.hidden", self.hidden)
        activation(self.activation)


@dataclass(frozen=True, kw_only=True)
class CrossConfig:
    """Attention from the sample's tokens to the text's states, after that among themselves."""

    num_heads: int
    head_dim: int
    norm: NormConfig | None = None
    """Before it; None for none."""
    qk_norm: NormConfig | None = None
    across_heads: bool = False
    """See `BlockConfig`."""
    bias: bool = True
    """Of the projections of queries, keys and values."""
    out_bias: bool = True
    images: bool = False
    """Whether it attends to an image's states too, by keys and values of their own, and adds what
    it finds (Wan 2.1, Wan Team 2025)."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One block, of those that are alike.

    `sequential`: attention of the tokens among themselves, then to the text, then the MLP (DiT,
    Peebles and Xie 2023). `joint`: sample and text have weights of their own and attend as one
    sequence (MMDiT, Esser et al. 2024). `parallel`: attention and MLP take the same input
    (ViT-22B, Dehghani et al. 2023).
    """

    kind: Literal["sequential", "joint", "parallel"] = "sequential"
    modulation: Literal["own", "table", "shared", "none"] = "own"
    """Where scales, shifts and gates come from: a projection of the conditioning embedding in each
    block (adaLN-Zero); one projection for all blocks plus a table in each (adaLN-single, PixArt);
    one projection for all blocks of a run and stream (FLUX.2); nowhere."""
    modulation_bias: bool = True
    scales: bool = True
    """Whether norms are scaled; without, modulation is gates alone (HunyuanVideo's refiner)."""
    shifts: bool = True
    """Whether norms are shifted as well as scaled."""
    gate: Literal["linear", "tanh"] = "linear"
    """What the gates of branches pass through."""
    own_embedder: bool = False
    """Whether each block embeds time and class with weights of its own (diffusers' DiT)."""
    norm: NormConfig = NormConfig()
    """Before attention."""
    mlp_norm: NormConfig = NormConfig()
    """Before the MLP."""
    post_norm: NormConfig | None = None
    """Of each branch's output, before its gate; None for none."""
    attention: Literal["softmax", "linear"] = "softmax"
    """`linear` is relu(q) (relu(k)^T v), divided by relu(q) sum relu(k) (Katharopoulos et al.
    2020)."""
    qk_norm: NormConfig | None = None
    """Of queries and keys of each head; None for none."""
    across_heads: bool = False
    """Whether that norm is over all heads together."""
    bias: bool = True
    """Of the projections of queries, keys and values."""
    out_bias: bool = True
    cross: CrossConfig | None = None
    mlp: MLPConfig
    second_attention: bool = False
    """Whether the sample attends to itself alone as well (joint blocks of SD 3.5 medium)."""
    text_ends: bool = False
    """Whether the text is only attended to, and not wanted any more (a last joint block)."""

    def __post_init__(self) -> None:
        """Check that the choices go together."""
        if self.kind != "joint" and (self.second_attention or self.text_ends):
            raise ConfigError(
                f"second_attention and text_ends are of joint blocks, and kind is {self.kind!r}"
            )
        if self.kind != "sequential" and self.cross is not None:
            raise ConfigError(f"cross is of sequential blocks, and kind is {self.kind!r}")
        if not self.scales and (self.shifts or self.kind != "sequential"):
            raise ConfigError(
                "scales=False is of sequential blocks without shifts; set shifts to False too"
            )
        if self.kind == "joint" and self.attention == "linear":
            raise ConfigError("attention='linear' is not of joint blocks; use 'softmax'")
        if self.kind != "sequential" and (self.mlp.kind == "convolution" or self.post_norm):
            raise ConfigError(
                "an MLP with a convolution and post_norm are of sequential blocks, and kind is "
                f"{self.kind!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Equal blocks one after another, which run as one loop."""

    block: BlockConfig
    count: int
    tokens: Literal["sample", "both"] = "sample"
    """Whose tokens sequential and parallel blocks are of: the sample's, or text and sample in one
    sequence."""

    def __post_init__(self) -> None:
        """Check the count."""
        _positive("blocks.count", self.count)
        if self.block.kind == "joint" and self.tokens != "sample":
            raise ConfigError("joint blocks keep text and sample apart; set tokens to 'sample'")


@dataclass(frozen=True, kw_only=True)
class SinCosConfig:
    """A table of sines and cosines of rows and columns, added to the patches (Vaswani et al. 2017).

    Patch i of n counts as i / n * base / scale.
    """

    type: Literal["sincos"] = "sincos"
    base: int
    """Patches along an axis at which positions are whole numbers."""
    scale: float = 1.0
    stored: int | None = None
    """Patches along an axis of a table that is stored with the weights and of which the middle is
    cut (SD3); None to make the table for each size."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embeddings of several axes (Su et al. 2021); pairs are neighbouring elements.

    An axis of d dimensions has frequencies theta^(-2 i / d), and each token a position on each.
    """

    type: Literal["rope"] = "rope"
    axes: tuple[int, ...]
    """Dimensions of each axis; their sum is the head's."""
    theta: float = 10_000.0
    sample_axes: tuple[int, ...]
    """For each axis of the sample's grid (rows and columns, of a video frames first), which of
    `axes` it is."""
    centred: bool = False
    """Whether rows and columns count from the middle, -ceil(n / 2) first (Qwen-Image)."""
    limits: tuple[int, ...] | None = None
    """Positions on each axis that there are; None for any."""
    text: Literal["zero", "all", "axis", "sample_axes"] = "zero"
    """Positions of text: zero on all axes; counted on all axes, from half the longer side of the
    sample; counted on `text_axis`; counted on each of `sample_axes`, from zero (Ovis-Image)."""
    text_axis: int = 0
    text_start: int = 0
    """Position of the first token, where it is counted on `text_axis`."""
    sample_after_text: bool = False
    """Whether the sample's position on `text_axis` is the one after the text's last (Z-Image)."""
    reference_axis: int | None = None
    """Axis on which images that the sample is drawn after are told apart from it; None where the
    model takes none."""
    reference_step: int = 1
    """From the sample, at 0, to the first such image, and from each to the next."""

    def __post_init__(self) -> None:
        """Check that no other axis is the references'.

        Raises:
          ConfigError: an axis that there is not, or one of rows, columns or frames.
        """
        axis = self.reference_axis
        if axis is not None and (axis in self.sample_axes or not 0 <= axis < len(self.axes)):
            raise ConfigError(
                f"positions.reference_axis={axis} must be one of the {len(self.axes)} axes, and "
                f"none of sample_axes={self.sample_axes}, on which images count themselves"
            )


@dataclass(frozen=True, kw_only=True)
class FractionalRopeConfig:
    """Rotary embeddings of all heads together, of where a patch is in seconds and pixels
    (LTX-Video, HaCohen et al. 2024).

    A patch at s of a span has the position 2 s - 1, frequencies pi / 2 theta^(i / (d - 1)) with
    i < d, so many for each axis as the model's width allows; axes alternate in its pairs, and the
    first pairs, those that are left over, do not turn. `Condition.sizes_BN` says how far apart
    neighbouring places of the sample are along each axis.
    """

    type: Literal["fractional"] = "fractional"
    spans: tuple[float, ...]
    """What counts as one along each axis of the sample's grid, in the unit of the condition."""
    theta: float = 10_000.0


@dataclass(frozen=True, kw_only=True)
class EmbedderConfig:
    """The embedding that modulates: a sum of those of time, class, text and others.

    Times are 0 to 1000 for every model, as schedulers of diffusers count them. They are embedded
    as offset + scale * time.
    """

    channels: int = 256
    """Of the sines and cosines."""
    hidden: int | None = None
    """Of the MLP after them; None for its width."""
    width: int | None = None
    """Of the embedding; None for the model's."""
    time_scale: float = 1.0
    time_offset: float = 0.0
    frequency_shift: float = 0.0
    """See `timestep_embedding`."""
    bias: bool = True
    activate: bool = True
    """Whether blocks project silu of the embedding, or itself."""
    classes: int | None = None
    """Classes; one row more stands for none. None for no classes."""
    pooled: int | None = None
    """Width of the text's one vector; None where it is not taken."""
    guidance_scale: float | None = None
    """Factor on a guidance that is embedded too; None where none is."""
    sizes: bool = False
    """Whether height, width and aspect ratio are embedded (PixArt)."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How the states of a text encoder come in."""

    width: int
    """Of the states."""
    projection: Literal["none", "linear", "mlp"] = "linear"
    """To the model's width: none, which needs that width; linear; or an MLP with gelu_tanh."""
    bias: bool = True
    norm_before: NormConfig | None = None
    norm_after: NormConfig | None = None


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The last norm, and its modulation, before the projection to patches."""

    modulation: Literal["own", "table"] = "own"
    """A projection of the embedding, or a table plus the embedding (PixArt)."""
    modulation_bias: bool = True
    shifts: bool = True
    norm: NormConfig = NormConfig()
    bias: bool = True
    """Of the projection."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A transformer over patches of a noisy sample.

    The sample is [B, *grid, channels], with one axis of `patch` for each of the grid's.
    """

    class_name: str = OWN_CLASS
    """The class of diffusers in whose files it is read and written."""
    channels: int
    """Of the sample, with those of an image that it is given beside."""
    image_channels: int = 0
    """Of the image, such as the mask and masked latents of inpainting; 0 where none is taken."""
    out_channels: int | None = None
    """Of the output; None for `channels`."""
    patch: tuple[int, ...] = (2, 2)
    """Places of a patch along each axis of the grid."""
    patch_bias: bool = True
    sample_size: int | None = None
    """Rows and columns of the samples that it was trained on, where that is known."""
    num_heads: int
    head_dim: int
    blocks: tuple[Run, ...]
    positions: SinCosConfig | RopeConfig | FractionalRopeConfig | None
    embedder: EmbedderConfig = EmbedderConfig()
    text: TextConfig | None = None
    image_states: int | None = None
    """Width of an image encoder's states, to which blocks attend as they say; None for none."""
    refine_text: Run | None = None
    """Blocks of the text's tokens alone, before `blocks`."""
    refine_embedder: bool = False
    """Whether those are modulated by an embedding of their own, of the time and of the mean of the
    text's states (HunyuanVideo, Kong et al. 2024)."""
    refine_sample: Run | None = None
    """Blocks of the sample's tokens alone, before `blocks`."""
    clean_references: bool = False
    """Whether tokens of images to draw after are modulated as of time 0 (Qwen-Image-Edit 2511)."""
    first_frame: bool = False
    """Whether a video's first latents can be given; they are modulated as of time 0, and without
    guidance (Wan 2.2's 5B model)."""
    pad_multiple: int | None = None
    """Fill the tokens of sample and of text up to multiples with a learned token (Z-Image)."""
    head: HeadConfig = HeadConfig()
    output_scale: float = 1.0
    """Factor on the output: -1 where files predict data minus noise."""

    def __post_init__(self) -> None:
        """Check what does not depend on one part alone.

        Raises:
          ConfigError: sizes below one, heads and rope that do not fit, text that no block reads.
        """
        sizes = {"channels": self.channels, "num_heads": self.num_heads, "head_dim": self.head_dim}
        for name, size in (*sizes.items(), *(("patch", size) for size in self.patch)):
            _positive(name, size)
        if len(self.patch) not in (2, 3):
            raise ConfigError(f"patch={self.patch} must have two axes for images, three for videos")
        if not self.blocks:
            raise ConfigError("blocks is empty; give at least one run of blocks")
        if isinstance(self.positions, RopeConfig) and sum(self.positions.axes) != self.head_dim:
            raise ConfigError(
                f"positions.axes={self.positions.axes} sum to {sum(self.positions.axes)}, and "
                f"head_dim is {self.head_dim}; they must be equal"
            )
        if isinstance(self.positions, FractionalRopeConfig):
            if len(self.positions.spans) != len(self.patch) or min(self.positions.spans) <= 0:
                raise ConfigError(
                    f"positions.spans={self.positions.spans} must be a positive number for each of "
                    f"the {len(self.patch)} axes of patch={self.patch}"
                )
            if self.embedder.sizes:
                raise ConfigError(
                    "embedder.sizes and fractional positions both read the condition's sizes_BN; "
                    "set embedder.sizes to False"
                )
        if isinstance(self.positions, SinCosConfig) and self.width % 4:
            raise ConfigError(
                f"num_heads * head_dim = {self.width} is not a multiple of 4, which a table of "
                "sines and cosines of rows and columns needs"
            )
        self._check_clean()
        reads = any(run.block.cross is not None and run.block.cross.images for run in self.blocks)
        if reads != (self.image_states is not None):
            raise ConfigError(
                f"image_states={self.image_states}, and cross.images of the blocks is {reads}; "
                "give the width of an image's states where a block attends to them, and only there"
            )
        if self.reads_text and self.text is None:
            raise ConfigError("a block reads text and `text` is None; say how wide its states are")
        if self.text is not None and not self.reads_text:
            raise ConfigError(
                "`text` is given and no block reads it; leave it None, or add `cross`"
            )
        if self.text is not None and self.text.projection == "none" and not self.reads_width:
            raise ConfigError(
                f"text.width={self.text.width} is not the model's {self.width} and "
                "text.projection is 'none'; use 'linear' or 'mlp'"
            )

    def _check_clean(self) -> None:
        if self.clean_references and not self.takes_references:
            raise ConfigError(
                "clean_references is of a model that draws after images; set "
                "positions.reference_axis"
            )
        if self.first_frame and (len(self.patch) != 3 or self.patch[0] != 1):
            raise ConfigError(
                f"first_frame is of videos whose patches have one frame, and patch={self.patch}"
            )
        if self.takes_references and self.pad_multiple is not None:
            raise ConfigError(
                "pad_multiple does not go with positions.reference_axis: what fills the sample up "
                "would stand between it and the images that it is drawn after"
            )

    @property
    def takes_references(self) -> bool:
        """Whether the sample can be drawn after images."""
        positions = self.positions
        return isinstance(positions, RopeConfig) and positions.reference_axis is not None

    @property
    def width(self) -> int:
        """D."""
        return self.num_heads * self.head_dim

    @property
    def outputs(self) -> int:
        """Channels of the output."""
        return self.channels if self.out_channels is None else self.out_channels

    @property
    def embedding_width(self) -> int:
        """Of the embedding that modulates."""
        return self.width if self.embedder.width is None else self.embedder.width

    @property
    def reads_text(self) -> bool:
        """Whether there is a block that takes the text in."""
        return any(
            run.block.kind == "joint" or run.tokens == "both" or run.block.cross is not None
            for run in self.blocks
        )

    @property
    def reads_width(self) -> bool:
        """Whether the text's states can be taken as they are."""
        joins = any(run.block.kind == "joint" or run.tokens == "both" for run in self.blocks)
        return self.text is not None and (not joins or self.text.width == self.width)

    @property
    def text_width(self) -> int:
        """Of the text's states as blocks see them."""
        if self.text is None or self.text.projection != "none":
            return self.width
        return self.text.width

    @property
    def num_layers(self) -> int:
        """Blocks in all, without those that refine."""
        return sum(run.count for run in self.blocks)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")
