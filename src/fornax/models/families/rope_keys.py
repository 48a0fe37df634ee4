"""Rotary embeddings in config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from dataclasses import asdict, replace
from typing import Any

from fornax.config.errors import ConfigError
from fornax.models.families.reader import ConfigReader
from fornax.models.rope_config import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

__all__ = [
    "read_rope",
    "read_rope_mapping",
    "read_two_ropes",
    "write_rope",
    "write_rope_mapping",
    "write_two_ropes",
]

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def read_rope(
    reader: ConfigReader,
    max_positions: int,
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    fraction: float = 1.0,
    interleaved: bool = False,
    aliases: dict[str, str] | None = None,
    ignored: tuple[str, ...] = (),
    original: int | None = None,
) -> RopeConfig:
    """The model's rotary embedding, from either style of keys.

    Args:
      reader: the file.
      max_positions: its `max_position_embeddings`.
      theta: the family's default base.
      partial: whether the family can rotate a part of each head.
      fraction: the family's default for that part.
      interleaved: see `RopeConfig`.
      aliases: other names of scaling types in this family.
      ignored: keys that change nothing where only text is read.
      original: the original context length where the family keeps it beside `rope_scaling`.

    Raises:
      ConfigError: for a scaling, or a key of one, that is not supported.
    """
    found = reader.take("rope_parameters", None) or {}
    found = dict(reader.nested("rope_parameters", found)._values)
    scaling = reader.take("rope_scaling", None)
    if scaling is not None:
        found = {**found, **reader.nested("rope_scaling", scaling)._values}
    found = {key: value for key, value in found.items() if key not in ignored}
    found.setdefault("rope_theta", reader.take("rope_theta", theta))
    given = reader.take("partial_rotary_factor", None)
    found.setdefault("partial_rotary_factor", fraction if given is None else given)
    kind = found.get("rope_type", found.get("type"))
    if aliases and kind in aliases:
        found["rope_type"] = aliases[kind]
    if original is not None and found.get("rope_type", found.get("type", "default")) != "default":
        found["original_max_position_embeddings"] = original
    rope = read_rope_mapping(reader.nested("rope_scaling", found), max_positions, partial=partial)
    return replace(rope, interleaved=interleaved)


def read_two_ropes(
    reader: ConfigReader,
    max_positions: int,
    *,
    theta: float,
    local_theta: float,
    turning: float | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """The rope of full layers and that of sliding ones.

    The newer `rope_parameters` has a mapping for each; in older files `rope_theta` and
    `rope_scaling` are those of the full layers.

    Args:
      reader: the file.
      max_positions: its `max_position_embeddings`.
      theta: the base of full layers where the file has none.
      local_theta: that of sliding layers.
      turning: the share of pairs that turn in full layers of a file without `rope_parameters`, in
        a family that has the "proportional" type; None in others.

    Raises:
      ConfigError: for a scaling, or a key of one, that is not supported.
    """
    given = reader.take("rope_parameters", None)
    if given is None:
        rope = read_rope(reader, max_positions, theta=theta)
        return replace(rope, turning=turning or 1.0), RopeConfig(theta=local_theta)
    found = reader.nested("rope_parameters", given)
    reader.expect("rope_scaling", None)
    reader.take("rope_theta", None)
    ropes = []
    for key, base in (("full_attention", theta), ("sliding_attention", local_theta)):
        mapping = found.nested(key, {"rope_theta": base, **(found.take(key, None) or {})})
        ropes.append(read_rope_mapping(mapping, max_positions, turning=turning is not None))
    found.finish()
    return ropes[0], ropes[1]


def read_rope_mapping(
    reader: ConfigReader, max_positions: int, *, partial: bool = False, turning: bool = False
) -> RopeConfig:
    """A rotary embedding from one flat mapping (the newer `rope_parameters`).

    Args:
      reader: the mapping.
      max_positions: the file's `max_position_embeddings`.
      partial: whether the family can rotate a part of each head.
      turning: whether it has the "proportional" type, where a part of the pairs turns.

    Raises:
      ConfigError: for a scaling, or a key of one, that is not supported.
    """
    theta = reader.take("rope_theta")
    fraction = reader.take("partial_rotary_factor", 1.0)
    if turning and reader.take("rope_type", None) == "proportional":
        factor = reader.take("factor", 1.0)
        reader.finish()
        scaling = None if factor == 1 else LinearScaling(factor=factor)
        return RopeConfig(theta=theta, turning=fraction, scaling=scaling)
    if fraction != 1.0 and not partial:
        raise ConfigError(
            f"{reader.source}: partial_rotary_factor={fraction} is not supported for this "
            "architecture, which rotates whole heads"
        )
    old_name = reader.take("type", "default")
    kind = reader.take("rope_type", old_name)
    if kind not in _TYPES:
        raise ConfigError(
            f"{reader.source}: rope_type={kind!r} is not supported; use one of {', '.join(_TYPES)}"
        )
    if kind == "default":
        reader.expect("factor", None, 1, 1.0)
        reader.take("original_max_position_embeddings", None)
    scaling = None if kind == "default" else _read_scaling(reader, kind, max_positions)
    reader.finish()
    return RopeConfig(theta=theta, fraction=fraction, scaling=scaling)


def _read_scaling(reader: ConfigReader, kind: str, max_positions: int) -> RopeScaling:
    if kind == "linear":
        return LinearScaling(factor=reader.take("factor"))
    if kind == "dynamic":
        return DynamicNTKScaling(factor=reader.take("factor"))
    original = reader.take("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return Llama3Scaling(
            factor=reader.take("factor"),
            low_freq_factor=reader.take("low_freq_factor"),
            high_freq_factor=reader.take("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    factor, attention = reader.take("factor", None), reader.take("attention_factor", None)
    if kind == "longrope":
        return LongRopeScaling(
            short_factor=tuple(reader.take("short_factor")),
            long_factor=tuple(reader.take("long_factor")),
            original_max_position_embeddings=original,
            factor=factor,
            attention_factor=attention,
        )
    return YarnScaling(
        factor=max_positions / original if factor is None else factor,
        original_max_position_embeddings=original,
        beta_fast=reader.take("beta_fast", None) or 32.0,
        beta_slow=reader.take("beta_slow", None) or 1.0,
        attention_factor=attention,
        mscale=reader.take("mscale", None),
        mscale_all_dim=reader.take("mscale_all_dim", None),
        truncate=reader.take("truncate", True),
    )


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and, when partial, `partial_rotary_factor`."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": _write_scaling(rope.scaling)}
    if rope.fraction != 1.0:
        keys["partial_rotary_factor"] = rope.fraction
    return keys


def write_two_ropes(rope: RopeConfig, local: RopeConfig) -> dict[str, Any]:
    """The inverse of `read_two_ropes`, in the newer style."""

    ropes = {"full_attention": rope, "sliding_attention": local}
    return {"rope_parameters": {kind: write_rope_mapping(own) for kind, own in ropes.items()}}


def write_rope_mapping(rope: RopeConfig) -> dict[str, Any]:
    """The inverse of `read_rope_mapping`."""
    if rope.turning != 1.0:
        keys = {"rope_type": "proportional", "partial_rotary_factor": rope.turning}
        factor = {"factor": rope.scaling.factor} if isinstance(rope.scaling, LinearScaling) else {}
        return {"rope_theta": rope.theta, **keys, **factor}
    scaling = _write_scaling(rope.scaling) or {"rope_type": "default"}
    partial = {"partial_rotary_factor": rope.fraction} if rope.fraction != 1.0 else {}
    return {"rope_theta": rope.theta, **scaling, **partial}


def _write_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    fields = {key: value for key, value in asdict(scaling).items() if value is not None}
    kind = fields.pop("type")
    lists = {key: list(v) if isinstance(v, tuple) else v for key, v in fields.items()}
    return {"rope_type": kind, **lists}
