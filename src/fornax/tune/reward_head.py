"""A scalar head on a decoder: the score of a sequence, read at its last token.

Legend: N sequences, T tokens of a row, D model width.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from fornax.mesh import Rules
from fornax.models import Remat
from fornax.tune.configs.reward_model import RewardModelConfig
from fornax.tune.policy import Origin, Policy
from fornax.tune.policy import policy as policy_of

__all__ = ["HeadParam", "scored", "scores"]


class HeadParam(nnx.Param):
    """The parameter of a scalar head."""


def scored(config: RewardModelConfig, origin: Origin) -> Policy:
    """The model that `config` trains: a policy with a `reward_head` [D].

    Raises:
      ConfigError: when a pattern of `config.lora` matches no module.
    """
    policy = policy_of(config, origin)
    width = origin.model_config.hidden_size

    def with_head(decoder: Any, rngs: nnx.Rngs) -> Any:
        # Scores of about unit size: the final norm's output has D entries of about that.
        head = jax.random.normal(rngs.params(), (width,), jnp.float32) / (width + 1) ** 0.5
        decoder.reward_head = HeadParam(head, axes=("embed",))
        return decoder

    def build(rngs: nnx.Rngs) -> Any:
        return with_head(policy.build(rngs), rngs)

    def pretrained(mesh: Mesh, rules: Rules) -> Any:
        return with_head(policy.pretrained(mesh, rules), nnx.Rngs(config.seed))

    # A score asks no word: the output projection would get no gradient.
    body = nnx.All(policy.trained, nnx.Not(nnx.PathContains("lm_head")))
    of_body = policy.trained_parameters
    if config.lora is None and not origin.model_config.tie_embeddings:
        of_body -= width * origin.model_config.vocab_size
    if config.train_head_only:
        body, of_body = nnx.Nothing(), 0
    return dataclasses.replace(
        policy,
        build=build,
        pretrained=pretrained,
        trained=nnx.Any(body, HeadParam),
        parameters=policy.parameters + width,
        trained_parameters=width + of_body,
    )


def scores(model: Any, batch: Mapping[str, Any], *, remat: str | Remat = "none") -> jax.Array:
    """The score of each sequence, read at its last token that is no padding.

    Args:
      model: a decoder with a `reward_head` [D].
      batch: tokens, positions, segment_ids int32 [..., T]; segment 0 is padding.
      remat: what the backward pass computes again.

    Returns:
      float32 [...].
    """
    shape = batch["tokens"].shape[:-1]

    def flat(name: str) -> jax.Array:
        return batch[name].reshape(-1, batch[name].shape[-1])

    segment_ids_NT = flat("segment_ids")
    x_NTD = model.hidden(
        flat("tokens"), flat("positions"), segment_ids_NT, consecutive=True, remat=remat
    )
    places_T = jnp.arange(segment_ids_NT.shape[-1])
    last_N = jnp.max(jnp.where(segment_ids_NT > 0, places_T, 0), axis=-1)
    x_ND = jnp.take_along_axis(x_NTD, last_N[:, None, None], axis=1)[:, 0]
    head_D = model.reward_head.get_value().astype(jnp.float32)
    return (x_ND.astype(jnp.float32) @ head_D).reshape(shape)
