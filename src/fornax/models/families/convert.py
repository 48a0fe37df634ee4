"""`DecoderConfig` from a Hugging Face config.json and back, with nothing lost unnoticed."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.experts_config import TRAINING_ONLY
from fornax.models.families.family import Family
from fornax.models.families.quantized import QUANTIZATION_KEYS, read_quantization
from fornax.models.families.reader import ConfigReader
from fornax.models.families.table import FAMILIES, family_by_architecture, family_by_name
from fornax.models.families.wrapper import unwrap_config
from fornax.models.rope_config import RopeConfig

__all__ = ["config_from_hf", "config_to_hf", "family_for", "num_modules"]


def config_from_hf(values: Mapping[str, object], *, mtp: bool = False) -> DecoderConfig:
    """The config that a config.json describes.

    Of an architecture with more parts than a decoder (Gemma 3 with vision), it is the decoder's.

    Args:
      values: the parsed file.
      mtp: whether it has the modules that predict further tokens; False leaves them out.

    Raises:
      ConfigError: for an architecture, a format of quantized weights, a key or a value that is not
        supported, by name; modules are asked for and the file has none.
    """
    read_quantization(values)
    values = unwrap_config(values)
    family = family_by_architecture(values.get("architectures"))
    config = replace(_read(family, values), family=family.name)
    if not mtp:
        return config
    modules = num_modules(values)
    if not modules:
        raise ConfigError(
            f"config.json: this {family.architecture} has no modules that predict further tokens "
            "(multi-token prediction); leave out what asks for them"
        )
    return replace(config, num_mtp_modules=modules)


def num_modules(values: Mapping[str, object]) -> int:
    """How many modules that predict further tokens a config.json describes; where files of its
    architecture do not say, as many as they can have.

    Raises:
      ConfigError: more than files of the architecture can hold, or one that is not supported.
    """
    values = unwrap_config(values)
    family = family_by_architecture(values.get("architectures"))
    if family.mtp is None:
        return 0
    given = 1 if family.mtp.key is None else values.get(family.mtp.key) or 0
    most = family.mtp.most
    if not isinstance(given, int) or given < 0 or (most is not None and given > most):
        raise ConfigError(
            f"config.json: {family.mtp.key}={given!r} is not supported; use a number from 0"
            + ("" if most is None else f" to {most}")
        )
    return given


def _read(family: Family, values: Mapping[str, object]) -> DecoderConfig:
    reader = ConfigReader(values)
    for key in QUANTIZATION_KEYS:  # of the weights, see `read_quantization`
        reader.take(key, None)
    config = family.read(reader)
    reader.finish()
    return config


def config_to_hf(config: DecoderConfig) -> dict[str, object]:
    """The config.json of a config, without the dtype.

    Raises:
      ConfigError: when no family (or not the one that `config.family` asks for) can express it,
        naming the fields.
    """
    return _written(family_for(config), config)


def family_for(config: DecoderConfig) -> Family:
    """The family to save a config as: the one it asks for, else the first that can express it.

    Raises:
      ConfigError: when there is none, naming the fields in the way.
    """
    wanted = FAMILIES if config.family is None else (family_by_name(config.family),)
    lost = {family.name: _lost(family, config) for family in wanted}
    for family in wanted:
        if not lost[family.name]:
            return family
    name = min(lost, key=lambda family: len(lost[family]))
    raise ConfigError(
        f"no Hugging Face family can express this model; the nearest, {name}, cannot express "
        f"{', '.join(lost[name])}"
        + ("" if config.family is None else "; leave `family` out to try the others")
    )


def _written(family: Family, config: DecoderConfig) -> dict[str, Any]:
    keys = {"architectures": [family.architecture], "model_type": family.name}
    written = {**keys, **family.write(config)}
    if config.num_mtp_modules and family.mtp is not None and family.mtp.key is not None:
        written[family.mtp.key] = config.num_mtp_modules
    return written


def _lost(family: Family, config: DecoderConfig) -> list[str]:
    """Fields that do not survive being written and read back, with their values."""
    try:
        written = _written(family, config)
        modules = min(num_modules(written), config.num_mtp_modules)
        back = _resolved(replace(_read(family, written), num_mtp_modules=modules))
    except ConfigError as error:
        return [str(error)]
    given = _resolved(config)
    names = [field.name for field in fields(DecoderConfig)]
    differing = [name for name in names if getattr(given, name) != getattr(back, name)]
    return [f"{name}={getattr(given, name)!r}" for name in differing]


def _resolved(config: DecoderConfig) -> DecoderConfig:
    """The config with defaults filled in, and without what does not change the model."""
    layers = config.num_layers
    attention = [config.attention_pattern[i % len(config.attention_pattern)] for i in range(layers)]
    rotates = [
        attention[i] == "linear" or config.rope_pattern[i % len(config.rope_pattern)]
        for i in range(layers)
    ]
    mlps = [kind.mlp for kind in config.layer_kinds()]
    experts = config.experts
    if experts is not None:
        experts = replace(experts, **TRAINING_ONLY)
        if experts.groups_per_token == experts.num_groups:  # all are open
            experts = replace(experts, num_groups=1, groups_per_token=1, group_score="max")
        if not experts.normalize:
            experts = replace(experts, normalize_eps=0.0)
    scalar = config.query_pre_attn_scalar
    if not config.attends:
        config = replace(config, num_heads=1, num_kv_heads=1, head_dim=2, rope=RopeConfig())
        config, scalar = replace(config, max_position_embeddings=1), None
    return replace(
        config,
        context_exchange="auto",
        num_kv_heads=config.kv_heads,
        head_dim=config.head_width,
        # Some files keep the factor on the scores, its power -1/2: equal but for rounding.
        query_pre_attn_scalar=float(f"{config.head_width if scalar is None else scalar:.12g}"),
        local_rope=config.local_rope or (config.rope if "sliding" in attention else None),
        attention_pattern=tuple(attention),
        rope_pattern=tuple(rotates),
        mlp_pattern=tuple(mlps),
        experts=experts,
        intermediate_size=config.intermediate_size if "mlp" in mlps else 1,
        scale_residual_init=True,
        family=None,
    )
