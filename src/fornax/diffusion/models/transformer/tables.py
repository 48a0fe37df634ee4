"""Lines of key maps, and readings of config keys, that several families of diffusers share."""

import itertools
from collections.abc import Mapping

from fornax.config.errors import ConfigError
from fornax.diffusion.models.files import Fields
from fornax.diffusion.models.keys import Key
from fornax.diffusion.models.transformer.config import (
    OWN_CLASS,
    MLPConfig,
    NormConfig,
    TransformerConfig,
)

__all__ = [
    "LAYER",
    "RMS",
    "attention_keys",
    "embedder_keys",
    "feed_forward",
    "feed_forward_keys",
    "feed_forward_name",
    "joint_attention_keys",
    "joint_then_parallel_keys",
    "packed_channels",
    "patch_key",
    "qk_norm",
    "qk_norm_name",
    "run_layers",
]

LAYER = NormConfig()
"""A layer norm without weights."""
RMS = NormConfig(kind="rms", scale=True)

_FEED_FORWARD: Mapping[str, tuple[str, str]] = {
    "gelu-approximate": ("plain", "gelu_tanh"),
    "gelu": ("plain", "gelu"),
    "geglu": ("gated", "gelu"),
    "geglu-approximate": ("plain", "gelu_sigmoid"),
    "swiglu": ("gated", "silu"),
    "linear-silu": ("plain", "silu"),
}
"""Their `activation_fn`, and the MLP's kind and activation."""


def feed_forward(name: str, hidden: int) -> MLPConfig:
    """The MLP of their `activation_fn`.

    Raises:
      ConfigError: another name.
    """
    if name not in _FEED_FORWARD:
        raise ConfigError(
            f"activation_fn={name!r} is not supported; use one of {', '.join(_FEED_FORWARD)}"
        )
    kind, activation = _FEED_FORWARD[name]
    return MLPConfig(kind=kind, hidden=hidden, activation=activation)  # pyrefly: ignore[bad-argument-type]


def feed_forward_name(mlp: MLPConfig) -> str:
    """Their `activation_fn` of an MLP.

    Raises:
      ConfigError: an MLP that has no name there.
    """
    for name, pair in _FEED_FORWARD.items():
        if pair == (mlp.kind, mlp.activation):
            return name
    raise ConfigError(
        f"an MLP of kind {mlp.kind!r} with {mlp.activation!r} has no activation_fn in diffusers; "
        f"save it as a {OWN_CLASS}"
    )


def qk_norm(name: str | None, eps: float) -> NormConfig | None:
    """The norm of queries and keys of their `qk_norm`.

    Raises:
      ConfigError: another name.
    """
    norms = {
        None: None,
        "rms_norm": NormConfig(kind="rms", scale=True, eps=eps),
        "layer_norm": NormConfig(scale=True, bias=True, eps=eps),
    }
    if name not in norms:
        raise ConfigError(
            f"qk_norm={name!r} is not supported; use null, 'rms_norm' or 'layer_norm'"
        )
    return norms[name]


def qk_norm_name(norm: NormConfig | None) -> str | None:
    """Their `qk_norm` of a norm."""
    return None if norm is None else f"{norm.kind}_norm"


def patch_key(name: str, config: TransformerConfig, *, unfolded: bool = True) -> Key:
    """The line of the patches' projection; `unfolded` says it is stored as a convolution."""
    return Key("patch", name, patch=config.patch, unfolded=unfolded)


def embedder_keys(path: str, name: str, layers: range | None = None) -> list[Key]:
    """The MLP of an embedded number."""
    return [
        Key(f"{path}/up", f"{name}.linear_1", layers=layers),
        Key(f"{path}/down", f"{name}.linear_2", layers=layers),
    ]


def attention_keys(
    path: str, name: str, layers: range | None, *, out: str = ".to_out.0"
) -> list[Key]:
    """Projections and norms of an attention by itself; `out` is the end of its output's name."""
    return [
        Key(f"{path}/q", f"{name}.to_q", layers=layers),
        Key(f"{path}/k", f"{name}.to_k", layers=layers),
        Key(f"{path}/v", f"{name}.to_v", layers=layers),
        Key(f"{path}/q_norm", f"{name}.norm_q", layers=layers),
        Key(f"{path}/k_norm", f"{name}.norm_k", layers=layers),
        Key(f"{path}/out", f"{name}{out}", layers=layers),
    ]


def joint_attention_keys(path: str, name: str, layers: range) -> list[Key]:
    """Those of a joint block, of the sample and of the text."""
    return [
        *attention_keys(f"{path}/sample/attention", name, layers),
        Key(f"{path}/text/attention/q", f"{name}.add_q_proj", layers=layers),
        Key(f"{path}/text/attention/k", f"{name}.add_k_proj", layers=layers),
        Key(f"{path}/text/attention/v", f"{name}.add_v_proj", layers=layers),
        Key(f"{path}/text/attention/q_norm", f"{name}.norm_added_q", layers=layers),
        Key(f"{path}/text/attention/k_norm", f"{name}.norm_added_k", layers=layers),
        Key(f"{path}/text/attention/out", f"{name}.to_add_out", layers=layers),
    ]


def run_layers(config: TransformerConfig) -> list[range]:
    """The numbers of each run's blocks, those of one list after another."""
    starts = list(itertools.accumulate((run.count for run in config.blocks), initial=0))
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def feed_forward_keys(path: str, name: str, layers: range) -> list[Key]:
    """The MLP of a `FeedForward`; of a gated one the first projection is up, then gate."""
    return [
        Key(f"{path}/up", f"{name}.net.0.proj", layers=layers),
        Key(f"{path}/gate", f"{name}.net.0.proj", layers=layers),
        Key(f"{path}/down", f"{name}.net.2", layers=layers),
    ]


def packed_channels(fields: Fields, out: int | None) -> tuple[int, int | None]:
    """Channels of a place in and out, of files that count those of 2 x 2 packed ones; `out` is what
    these have out where they do not say.

    Raises:
      ConfigError: no multiple of four.
    """
    given = {"in_channels": fields.take("in_channels", 64)}
    given["out_channels"] = fields.take("out_channels", out)
    for name, channels in given.items():
        if channels is not None and channels % 4:
            raise ConfigError(f"{name}={channels} is not of 2 x 2 places; use a multiple of 4")
    packed, out = given.values()
    return packed // 4, None if out is None else out // 4


def joint_then_parallel_keys(config: TransformerConfig) -> list[Key]:
    """Blocks of Flux's kind, each with a modulation of its own: a run of joint ones, then a run of
    parallel ones."""
    joint, parallel = (range(run.count) for run in config.blocks)
    double, lone = "transformer_blocks.{}", "single_transformer_blocks.{}"
    sample, text = f"{double}.norm1.linear", f"{double}.norm1_context.linear"
    return [
        Key("blocks/0/sample/vectors/projection/linear", sample, layers=joint),
        Key("blocks/0/text/vectors/projection/linear", text, layers=joint),
        *joint_attention_keys("blocks/0", f"{double}.attn", joint),
        *feed_forward_keys("blocks/0/sample/mlp", f"{double}.ff", joint),
        *feed_forward_keys("blocks/0/text/mlp", f"{double}.ff_context", joint),
        Key("blocks/1/vectors/projection/linear", f"{lone}.norm.linear", layers=parallel),
        *attention_keys("blocks/1/attention", f"{lone}.attn", parallel)[:-1],
        Key("blocks/1/mlp/up", f"{lone}.proj_mlp", layers=parallel),
        Key("blocks/1/mlp/gate", f"{lone}.proj_mlp", layers=parallel),
        Key("blocks/1/attention/out", f"{lone}.proj_out", layers=parallel, axis=1),
        Key("blocks/1/mlp/down", f"{lone}.proj_out", layers=parallel, axis=1),
    ]
