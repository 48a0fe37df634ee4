"""What a user may say about training a diffusion model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.config.suggest import did_you_mean
from fornax.diffusion.data import EncodedConfig, ImageData, ImagesConfig
from fornax.diffusion.guidance import check_guidance
from fornax.diffusion.methods import Denoise, Method
from fornax.diffusion.models.parts import Activation
from fornax.diffusion.models.transformer import (
    DiTConfig,
    FractionalRopeConfig,
    TransformerConfig,
)
from fornax.diffusion.models.unet import UNetConfig, conditions
from fornax.diffusion.objectives import Objective
from fornax.diffusion.prompts import TextConfig, WordsConfig
from fornax.diffusion.samplers import SAMPLERS
from fornax.mesh import check_use
from fornax.optim import EMA, AdamW, OptimConfig
from fornax.train import TrainerConfig

__all__ = [
    "DiT",
    "DiffusionConfig",
    "DiffusionTuneConfig",
    "EncodeConfig",
    "Inputs",
    "PriorConfig",
    "RunConfig",
    "SampleConfig",
    "Transformer",
]


@dataclass(frozen=True)
class Inputs:
    """What a network of the data receives."""

    channels: int
    """Of the examples."""
    classes: int | None
    """Labels, where captions are labels."""
    pooled: int | None
    """Width of the caption's vector."""
    text: int | None
    """Width of its words' states."""
    videos: bool
    """Whether examples are videos."""


@dataclass(frozen=True, kw_only=True)
class DiT:
    """A transformer over patches, modulated by time and caption (Peebles and Xie 2023), in few
    numbers; channels and widths of the text follow from the data."""

    type: Literal["dit"] = "dit"
    num_layers: int = 12
    num_heads: int = 6
    head_dim: int = 64
    """Width of a head; the model's is num_heads * head_dim."""
    patch: int = 2
    """Pixels (or latents) of a patch along rows and columns."""
    frame_patch: int = 1
    """Of videos, frames of a patch."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLPs over the model's."""
    gated: bool = False
    """Whether MLPs are gated (SwiGLU has `activation` silu)."""
    activation: Activation = "gelu_tanh"
    positions: Literal["rope", "sincos"] = "rope"
    """Rotations of queries and keys, or tables of the patches' scale."""
    qk_norm: bool = True
    """RMS norm of queries and keys."""
    text: Literal["pooled", "cross", "joint"] = "pooled"
    """How a caption comes in: as one vector that modulates; its words besides, attended to; or its
    words besides in one sequence with the patches."""

    def network(self, data: Inputs) -> TransformerConfig:
        """The whole config.

        Raises:
          ConfigError: a number that nothing in the data is for.
        """
        if data.text is None and self.text != "pooled":
            raise ConfigError(
                f"model.text={self.text} attends to the words of captions, and the data has none "
                "(text is null, or labels); set model.text to pooled, or text.type to words"
            )
        if not data.videos and self.frame_patch != 1:
            raise ConfigError(
                f"model.frame_patch={self.frame_patch} is of videos, and the data has images; "
                "leave it out, or set data.frames"
            )
        words: Any = {}
        if self.text != "pooled":
            words = {"text_width": data.text, "text": self.text}
        return DiTConfig(
            channels=data.channels,
            patch=self.patch,
            frame_patch=self.frame_patch if data.videos else None,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            mlp_ratio=self.mlp_ratio,
            gated=self.gated,
            activation=self.activation,
            positions=self.positions,
            qk_norm=self.qk_norm,
            classes=data.classes,
            pooled=data.pooled,
            **words,
        ).transformer()


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Any transformer of `fornax.diffusion.models`, said whole."""

    type: Literal["transformer"] = "transformer"
    config: TransformerConfig

    def network(self, data: Inputs) -> TransformerConfig:
        """The config, checked against the data.

        Raises:
          ConfigError: it is of other channels, classes or texts.
        """
        said = self.config
        found = {
            "channels": (said.channels, data.channels),
            "embedder.classes": (said.embedder.classes, data.classes),
        }
        if data.pooled is not None and said.embedder.pooled is not None:
            found["embedder.pooled"] = (said.embedder.pooled, data.pooled)
        if said.text is not None:
            if data.text is None:
                raise ConfigError(
                    "model.config.text reads states of a text, and the data has none; set it to "
                    "null, or text to words"
                )
            found["text.width"] = (said.text.width, data.text)
        _compare(found)
        return said


@dataclass(frozen=True, kw_only=True)
class UNet:
    """A U-Net of `fornax.diffusion.models`, said whole."""

    type: Literal["unet"] = "unet"
    config: UNetConfig

    def network(self, data: Inputs) -> UNetConfig:
        """The config, checked against the data; a text's vector is checked where it is used.

        Raises:
          ConfigError: it is of other channels or classes.
        """
        said = self.config
        _compare(
            {
                "in_channels": (said.in_channels, data.channels),
                "classes": (said.classes, data.classes),
            }
        )
        return said


def _compare(found: Mapping[str, tuple[int | None, int | None]]) -> None:
    """Refuse the first key that has another value than the data."""
    for name, (given, wanted) in found.items():
        if given != wanted:
            has, to = ("none", "null") if wanted is None else (wanted, "that")
            raise ConfigError(
                f"model.config.{name} is {given}, and the data has {has}; set it to {to}"
            )


ModelConfig = DiT | Transformer | UNet


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How images are drawn: while the run trains, and by what loads it afterwards."""

    every: int | None = 500
    """Steps between two grids of images or videos in the run's `images/`, with one at the end; null
    draws none."""
    prompts: tuple[str, ...] = ()
    """What is drawn; empty takes captions of the data."""
    count: int = 16
    """Images of a grid; prompts are repeated up to it."""
    steps: int = 20
    """Of the sampler."""
    sampler: str = "dpm++2m"
    """One of `fornax.diffusion.SAMPLERS`."""
    guidance: float = 3.0
    """Scale of classifier-free guidance; 1 is the caption alone."""
    rescale: float = 0.0
    """Share of the output that is scaled back to the deviation without guidance."""
    seed: int = 0
    """Of the noise; image b of any grid starts from the same."""

    def __post_init__(self) -> None:
        """Check names and numbers."""
        if self.sampler not in SAMPLERS:
            raise ConfigError(
                f"sample.sampler={self.sampler} is not known; "
                f"{did_you_mean(self.sampler, SAMPLERS)}"
            )
        for name in ("every", "count", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"sample.{name}={value} must be 1 or more")
        check_guidance("sample.guidance", self.guidance)
        if not 0 <= self.rescale <= 1:
            raise ConfigError(f"sample.rescale={self.rescale:g} is a share, in [0, 1]")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"sample.seed={self.seed} must lie in [0, 2**32)")


def _optim() -> OptimConfig:
    return OptimConfig(
        optimizer=AdamW(weight_decay=0.0, b2=0.99),
        learning_rate=3e-4,
        ema=EMA(decay=0.9995, warmup=True),
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainerConfig):
    """What every run that trains a denoiser on images or videos says."""

    harmless: ClassVar[tuple[str, ...]] = ("sample", "data.threads", "data.verify", "encode.cache")

    data: ImageData = field(default_factory=ImagesConfig)
    """The images or videos and their captions."""
    caption_dropout: float = 0.1
    """Share of captions that are left empty in training, which guidance needs."""
    stratified: bool = True
    """Spread the noise levels of a batch evenly over their density."""
    optim: OptimConfig = field(default_factory=_optim)
    """Optimizer, schedule, clipping, and the average that is evaluated and sampled."""
    remat: Literal["none", "full", "dots", "save_attention"] = "dots"
    """What the backward pass computes again of each block instead of keeping: nothing; all but the
    block's input; all but the products; all but attention."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Images that are drawn."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        super().__post_init__()
        check_use(self.mesh, "train diffusion")
        if not 0 <= self.caption_dropout <= 1:
            raise ConfigError(
                f"caption_dropout={self.caption_dropout:g} is a share, in [0, 1]; 0.1 is usual"
            )


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(RunConfig):
    """A run of `fornax diffusion train`: a denoiser from scratch."""

    model: ModelConfig = field(default_factory=DiT)
    """The denoiser."""
    text: TextConfig | None = field(default_factory=WordsConfig)
    """How captions become conditions; null: captions are not read."""
    objective: Objective = field(default_factory=Objective)
    """What is predicted, at which noise levels, with which weight."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        super().__post_init__()
        self._check_guidance()
        if isinstance(self.data, EncodedConfig) and (self.text or self.sample.every is not None):
            raise ConfigError(
                "data.type=encoded has texts and latents that were encoded before, and there is no "
                "decoder to show samples with; set text and sample.every to null, and "
                "sample.guidance to 1"
            )

    @property
    def has_text(self) -> bool:
        """Whether the network is conditioned on captions."""
        return self.text is not None

    def _check_guidance(self) -> None:
        """Refuse guidance by an empty caption that is never trained on; a model that is tuned
        knows it from before."""
        if self.sample.guidance == 1 or (self.has_text and self.caption_dropout > 0):
            return
        why = "caption_dropout is 0" if self.has_text else "text is null"
        raise ConfigError(
            f"sample.guidance={self.sample.guidance:g} compares with the empty caption, and {why}; "
            "set sample.guidance to 1" + (", or raise caption_dropout" if self.has_text else "")
        )


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """How images and captions become what a pipeline's denoiser takes, once, before training."""

    cache: str = ""
    """Folder of latents and states of texts, which runs may share; empty takes the run's
    `encoded/`."""
    latents: Literal["sample", "mean"] = "sample"
    """Draw latents again at each step of the distribution that the autoencoder gives, or take its
    mean."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the autoencoder and the text encoders; null as they are stored."""
    tile: int | None = None
    """Pixels of the side of the tiles in which the autoencoder encodes what is larger, which bounds
    its memory and changes latents a little; null encodes the whole."""
    guidance: float | None = None
    """The guidance passed in training to a network that takes it (Flux-dev); null is 1."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.tile is not None and self.tile < 1:
            raise ConfigError(
                f"encode.tile={self.tile} must be 1 or more pixels, such as 512; null encodes the "
                "whole"
            )
        check_guidance("encode.guidance", self.guidance)


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """Prior preservation of DreamBooth (Ruiz et al. 2023, section 3.2): as many images of the class
    as of the subject are learnt beside."""

    path: str
    """A folder of images of the class, such as some that the model drew (`fornax diffusion
    sample`)."""
    prompt: str
    """What is in them, such as "a photo of a dog"."""
    weight: float = 1.0
    """Of their loss."""

    def __post_init__(self) -> None:
        """Check that there is something to learn."""
        if not self.path or not self.prompt:
            raise ConfigError(
                f"prior.path={self.path!r}, prior.prompt={self.prompt!r}; name a folder of images "
                "and what is in them"
            )
        if not 0 < self.weight < math.inf:
            raise ConfigError(
                f"prior.weight={self.weight:g} must be above 0 and finite; leave prior null for "
                "none"
            )


@dataclass(frozen=True, kw_only=True)
class DiffusionTuneConfig(RunConfig):
    """A run of `fornax diffusion tune`: a trained denoiser, on other images."""

    model: str = ""
    """A folder that diffusers saved, or the run directory of the model to start from."""
    component: str = ""
    """Of a folder with two networks (Wan 2.2) the one to train: transformer, of times with more
    noise than its boundary, or transformer_2; the other stays as it is."""
    method: Method = field(default_factory=Denoise)
    """What is learnt: the images, or of the model itself fewer steps, or preferences."""
    lora: LoRA | None = None
    """Train adapters instead of all parameters, or null."""
    objective: Objective | None = None
    """Null keeps that of the model; of a folder of diffusers what its scheduler says."""
    prior: PriorConfig | None = None
    """Images of the class to learn beside those of the subject, or null."""
    encode: EncodeConfig = field(default_factory=EncodeConfig)
    """Of a folder of diffusers: how its encoders are used."""

    def __post_init__(self) -> None:
        """Check numbers and combinations."""
        super().__post_init__()
        if self.prior is not None and not isinstance(self.data, ImagesConfig):
            raise ConfigError(
                f"prior is for data of images, and data.type={self.data.type}; set data.type "  # pyrefly: ignore[missing-attribute]
                "to images, or leave prior null"
            )
        if self.lora is not None and not isinstance(self.method, Denoise):
            raise ConfigError(
                f"method.type={self.method.type} trains all parameters; leave lora null, or set "
                "method.type to denoise"
            )


def takes(config: Any) -> tuple[str, ...]:
    """Fields of `Condition` that a denoiser of this config reads."""
    if isinstance(config, UNetConfig):
        return (*conditions(config), *(("text_mask_BS",) if config.takes_text else ()))
    found = {
        "classes_B": config.embedder.classes is not None,
        "pooled_BD": config.embedder.pooled is not None,
        "text_BSD": config.text is not None,
        "sizes_BN": config.embedder.sizes or isinstance(config.positions, FractionalRopeConfig),
        "text_mask_BS": config.text is not None,
        "guidance_B": config.embedder.guidance_scale is not None,
        "text2_BSD": config.image_states is not None,
        "image_BX": config.image_channels > 0,
        "first_BX": config.first_frame,
    }
    return tuple(name for name, there in found.items() if there)
