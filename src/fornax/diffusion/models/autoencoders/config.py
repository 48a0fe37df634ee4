"""What an autoencoder is."""

from dataclasses import dataclass
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.diffusion.models.parts import Activation

__all__ = [
    "DeepCompressionConfig",
    "Downsampling",
    "KLConfig",
    "LTXAutoencoderConfig",
    "StageBlock",
]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """An autoencoder with a Gaussian over its latents (Rombach et al. 2022).

    What a denoiser is given is (z - mean) * scale / deviation, or with `batch_statistics` the
    patches of z, each channel less its mean over its deviation, both parameters of the model.
    """

    in_channels: int = 3
    out_channels: int = 3
    channels: tuple[int, ...] = (128, 256, 512, 512)
    """Of each level, from the whole image down; each but the first halves it."""
    decoder_channels: tuple[int, ...] | None = None
    """None for the encoder's."""
    layers: int = 2
    """Residual blocks of a level of the encoder; the decoder has one more."""
    latent_channels: int = 4
    norm_groups: int = 32
    activation: Activation = "silu"
    mid_attention: bool = True
    quant_conv: bool = True
    """Whether a 1x1 convolution comes after the encoder."""
    post_quant_conv: bool = True
    """Whether one comes before the decoder."""
    sample_size: int | tuple[int, int] = 512
    """Of what it was trained on; the side of a tile by default."""
    scale: float = 1.0
    shift: float | None = None
    """Mean of all latents; files tell none from zero."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, in place of `shift`."""
    deviation: tuple[float, ...] | None = None
    """Of each channel."""
    force_upcast: bool = False
    """Whether its activations overflow float16, which is then refused as a compute dtype."""
    batch_statistics: bool = False
    patch: tuple[int, int] = (1, 1)
    """Height and width of the patches of z that are one latent place."""
    statistics_eps: float = 1e-4
    """Added to the variance under the root."""
    statistics_momentum: float = 0.1
    """Kept for files: nothing updates the statistics."""

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        decoder = self.decoder_channels or self.channels
        if len(decoder) != len(self.channels):
            raise ConfigError(
                f"decoder_channels={decoder} has {len(decoder)} levels and channels={self.channels}"
                f" has {len(self.channels)}; give as many"
            )
        for width in (*self.channels, *decoder):
            if width % self.norm_groups:
                raise ConfigError(
                    f"{width} channels do not divide into norm_groups={self.norm_groups}; use a "
                    "multiple"
                )
        for name in ("mean", "deviation"):
            values = getattr(self, name)
            if values is not None and len(values) != self.latent_channels:
                raise ConfigError(
                    f"{name} has {len(values)} values for latent_channels={self.latent_channels}; "
                    "give one for each"
                )
        if self.mean is not None and self.shift is not None:
            raise ConfigError(
                f"shift={self.shift} and mean={self.mean} are both means of the latents; give one"
            )
        if self.patch != (1, 1) and not self.batch_statistics:
            raise ConfigError(
                f"patch={self.patch} is of latents with batch_statistics; set it, or use (1, 1)"
            )

    @property
    def class_name(self) -> str:
        """The class of diffusers that has such a config."""
        return "AutoencoderKLFlux2" if self.batch_statistics else "AutoencoderKL"

    @property
    def factor(self) -> int:
        """Pixels of an image's side to one of z's."""
        return 2 ** (len(self.channels) - 1)


StageBlock = Literal["ResBlock", "EfficientViTBlock"]
"""A residual block of two convolutions; linear attention with a gated convolution after it."""


@dataclass(frozen=True, kw_only=True)
class DeepCompressionConfig:
    """An autoencoder whose changes of size have shortcuts without parameters (Chen et al. 2024).

    Tuples hold one entry for each stage, from the whole image down.
    """

    in_channels: int = 3
    latent_channels: int = 32
    head_dim: int = 32
    encoder_blocks: tuple[StageBlock, ...] = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    decoder_blocks: tuple[StageBlock, ...] = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    encoder_channels: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    decoder_channels: tuple[int, ...] = (128, 256, 512, 512, 1024, 1024)
    encoder_layers: tuple[int, ...] = (2, 2, 2, 3, 3, 3)
    """Blocks of a stage; 0 in the first for none at the image's own size."""
    decoder_layers: tuple[int, ...] = (3, 3, 3, 3, 3, 3)
    encoder_scales: tuple[tuple[int, ...], ...] = ((), (), (), (5,), (5,), (5,))
    """Windows of the convolutions of queries, keys and values that attention sees beside them."""
    decoder_scales: tuple[tuple[int, ...], ...] = ((), (), (), (5,), (5,), (5,))
    downsample: Literal["conv", "pixel_unshuffle"] = "pixel_unshuffle"
    upsample: Literal["interpolate", "pixel_shuffle"] = "pixel_shuffle"
    decoder_activations: tuple[Activation, ...] = ("silu",) * 6
    encoder_out_shortcut: bool = True
    decoder_in_shortcut: bool = True
    out_activation: Activation = "relu"
    """Before the decoder's last convolution."""
    scale: float = 1.0
    """What z is multiplied with for a denoiser."""

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        stages = len(self.encoder_channels)
        for name in _BY_STAGE:
            if len(getattr(self, name)) != stages:
                raise ConfigError(
                    f"{name}={getattr(self, name)} has {len(getattr(self, name))} entries for "
                    f"{stages} stages of encoder_channels={self.encoder_channels}; give one each"
                )
        for side in ("encoder", "decoder"):
            layers, widths = getattr(self, f"{side}_layers"), getattr(self, f"{side}_channels")
            if min(layers[1:]) < 1 or min(layers) < 0:
                raise ConfigError(
                    f"{side}_layers={layers} has a stage without a block after the first, which "
                    "would not change the size; use 1 or more"
                )
            if widths[-1] % self.latent_channels:
                raise ConfigError(
                    f"{side}_channels={widths} ends in {widths[-1]}, no multiple of latent_channels"
                    f"={self.latent_channels}; use one"
                )
            blocks = getattr(self, f"{side}_blocks")
            for block, width in zip(blocks, widths, strict=True):
                if block == "EfficientViTBlock" and width % self.head_dim:
                    raise ConfigError(
                        f"{width} channels do not divide into heads of head_dim={self.head_dim}; "
                        "use a multiple"
                    )

    @property
    def class_name(self) -> str:
        """The class of diffusers that has such a config."""
        return "AutoencoderDC"

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of the patches of z that are one latent place."""
        return 1, 1

    @property
    def factor(self) -> int:
        """Pixels of an image's side to one of the latents'."""
        return 2 ** (len(self.encoder_channels) - 1)


_BY_STAGE = (
    "encoder_blocks",
    "decoder_blocks",
    "decoder_channels",
    "encoder_layers",
    "decoder_layers",
    "encoder_scales",
    "decoder_scales",
    "decoder_activations",
)


Downsampling = Literal["conv", "spatial", "temporal", "spatiotemporal"]
"""A convolution with a stride; or places as channels: of a frame, of pairs of frames, or both."""


@dataclass(frozen=True, kw_only=True)
class LTXAutoencoderConfig:
    """An autoencoder of videos (HaCohen et al. 2024); the defaults are those of LTX-Video 0.9.

    Tuples of levels go from the whole video down, the decoder's too; those of layers have one entry
    more, for the middle.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 128
    channels: tuple[int, ...] = (128, 256, 512, 512)
    """Of the encoder: of each level, and with `widening` in "resize" one more, of the middle."""
    layers: tuple[int, ...] = (4, 3, 3, 3, 4)
    """Residual blocks."""
    downsamples: tuple[Downsampling | None, ...] = ("conv", "conv", "conv", None)
    """How the levels of the encoder end; None for no change of size."""
    widening: Literal["block", "resize"] = "block"
    """What makes more channels at the end of a level: a residual block, or the change of size."""
    decoder_channels: tuple[int, ...] = (128, 256, 512, 512)
    decoder_layers: tuple[int, ...] = (4, 3, 3, 3, 4)
    upsamples: tuple[bool, ...] = (True, True, True, False)
    """Which levels of the decoder begin with frames, height and width doubled."""
    upsample_residual: tuple[bool, ...] = (False, False, False, False)
    """Which of those have a shortcut without parameters (Chen et al. 2024)."""
    upsample_factor: tuple[int, ...] = (1, 1, 1, 1)
    """What those divide channels by."""
    timed: bool = False
    """Whether the decoder takes a time, and takes noise away."""
    causal: bool = True
    """Whether frames of the encoder see none after them."""
    decoder_causal: bool = False
    patch: int = 4
    """Pixels of the side of a patch that is one place for the network."""
    shortcut_eps: float = 1e-6
    """Of the norms of shortcuts."""
    scale: float = 1.0
    """Factor on z as a denoiser sees it, after mean and deviation."""

    def __post_init__(self) -> None:
        levels, ups = len(self.downsamples), len(self.decoder_channels)
        lengths = {
            "channels": (self.channels, levels + (self.widening == "resize")),
            "layers": (self.layers, levels + 1),
            "decoder_layers": (self.decoder_layers, ups + 1),
            "upsamples": (self.upsamples, ups),
            "upsample_residual": (self.upsample_residual, ups),
            "upsample_factor": (self.upsample_factor, ups),
        }
        for name, (values, wanted) in lengths.items():
            if len(values) != wanted:
                raise ConfigError(
                    f"{name}={values} has {len(values)} entries, and the levels need {wanted}"
                )
        up = 2 ** sum(self.upsamples)
        down = (self.factor // self.patch, self.frame_factor)
        if down != (up, up):
            raise ConfigError(
                f"the encoder makes sides {down[0]} and frames {down[1]} times smaller, and the "
                f"decoder both {up} times larger; correct downsamples or upsamples"
            )
        before = self.decoder_channels[-1]
        for width, by in zip(self.decoder_channels[::-1], self.upsample_factor[::-1], strict=True):
            if width != before and (by != 1 or self.timed):
                raise ConfigError(
                    f"decoder_channels={self.decoder_channels} change from {before} to {width} "
                    "where upsample_factor or the time's embedding takes them as they are; let "
                    "each level begin with what the one before leaves"
                )
            before = width // by

    @property
    def class_name(self) -> str:
        """The class of diffusers."""
        return "AutoencoderKLLTXVideo"

    @property
    def factor(self) -> int:
        """Pixels of a video's side to one of z's."""
        return self.patch * 2 ** sum(d in ("conv", "spatial", "spatiotemporal") for d in self.ends)

    @property
    def frame_factor(self) -> int:
        """k of the 1 + k n frames that become 1 + n of z."""
        return 2 ** sum(d in ("conv", "temporal", "spatiotemporal") for d in self.ends)

    @property
    def ends(self) -> tuple[Downsampling, ...]:
        """The changes of size of the encoder."""
        return tuple(kind for kind in self.downsamples if kind is not None)
