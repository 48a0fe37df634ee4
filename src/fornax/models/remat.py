"""What the backward pass finds saved of each layer, and what it computes again.

Activations of a layer carry names (`kernels.checkpoint_name`); a policy says which of
them, or which kinds of products, are kept on the device, and which wait in the host's memory.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from fornax.config.errors import ConfigError
from fornax.kernels import LINEAR_OUTPUT, keeping_bits
from fornax.models.config import DecoderConfig

__all__ = [
    "REMAT_NAMES",
    "REMAT_POLICIES",
    "Remat",
    "RematPolicy",
    "check_remat",
    "keep_unchosen",
    "keep_uncut",
    "rematerialise",
]

RematPolicy = Literal["none", "full", "dots", "dots_no_batch", "save_attention", "names"]
"""What the backward pass finds saved: everything; only each layer's input; the results of matrix
products, attention among them; those without a batch dimension; the inputs and outputs of
attention; the activations named one by one."""

REMAT_POLICIES: tuple[str, ...] = get_args(RematPolicy)

REMAT_NAMES: tuple[str, ...] = (
    "layer_input",
    "query",
    "key",
    "value",
    "attention",
    "attention_out",
    "mlp_gate",
    "mlp_up",
    "expert_down",
    "mlp_down",
)
"""A layer's activations, in the order they are made: its input [B, T, D]; what attention takes,
after norms and rotation; what it returns, with the softmax's log-sum-exp; its output projection;
the MLP's two inner projections [B, T, F]; of experts, the output of each for each of its tokens
[B T k, D]; the MLP's output projection, or the experts' weighted sum."""

_OF_ATTENTION = ("query", "key", "value", "attention")


@dataclass(frozen=True, kw_only=True)
class Remat:
    """A policy, with its names where it is `names`."""

    policy: RematPolicy = "none"
    save: tuple[str, ...] = ()
    """Activations kept on the device."""
    offload: tuple[str, ...] = ()
    """Activations kept in the host's memory between the passes."""

    def __post_init__(self) -> None:
        """Check the names."""
        if self.policy not in REMAT_POLICIES:
            raise ConfigError(
                f"remat={self.policy!r} is not known; use one of {', '.join(REMAT_POLICIES)}"
            )
        named = (*self.save, *self.offload)
        for name in named:
            if name not in REMAT_NAMES:
                raise ConfigError(
                    f"remat_save and remat_offload take names of activations and {name!r} is none; "
                    f"use {', '.join(REMAT_NAMES)}"
                )
            if named.count(name) > 1:
                raise ConfigError(
                    f"{name!r} is in both or twice in remat_save and remat_offload; an activation "
                    "is kept in one place"
                )
        if named and self.policy != "names":
            raise ConfigError(
                f"remat={self.policy!r} keeps what it keeps; set remat to 'names' for remat_save "
                "and remat_offload to count"
            )
        if not named and self.policy == "names":
            raise ConfigError(
                "remat='names' keeps nothing without remat_save and remat_offload; name "
                f"activations ({', '.join(REMAT_NAMES)}), or set remat to 'full'"
            )


def check_remat(remat: str | Remat, config: DecoderConfig) -> None:
    """Refuse names that none of a model's activations has.

    Raises:
      ConfigError: with the name to use instead.
    """
    named = () if isinstance(remat, str) else (*remat.save, *remat.offload)
    if "expert_down" in named and config.experts is None:
        raise ConfigError(
            "remat_save or remat_offload names expert_down and the model has no experts; name "
            "mlp_down for the output of an MLP"
        )


def rematerialise(
    layer: Callable, remat: str | Remat, *, prevent_cse: bool = False, stages: bool = False
) -> Callable:
    """`layer` whose backward pass finds saved only what `remat` says.

    Args:
      layer: a function of arrays whose activations carry the names of `REMAT_NAMES`.
      remat: a policy, or the name of one that needs no names.
      prevent_cse: whether the compiler must be kept from finding the second computation equal to
        the first; not needed where the passes are loops of their own.
      stages: whether `vmap` runs over it for pipeline stages, the first batch dimension of its
        products then.

    Raises:
      ConfigError: for an unknown policy.
    """
    remat = Remat(policy=remat) if isinstance(remat, str) else remat  # pyrefly: ignore[bad-argument-type]
    if remat.policy == "none":
        return layer
    policy = _of_a_stage(_policy(remat)) if stages else _policy(remat)

    @functools.wraps(layer)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with keeping_bits():
            return layer(*args, **kwargs)

    return jax.checkpoint(kept, policy=policy, prevent_cse=prevent_cse)


def keep_uncut(layer: Callable) -> Callable:
    """`layer` whose backward pass cuts its parameters from the stack again, and finds all else."""
    return jax.checkpoint(layer, policy=_is_no_cut, prevent_cse=False)


def keep_unchosen(layer: Callable) -> Callable:
    """`layer` whose backward pass chooses its parameters again, and finds what it computes.

    A weight that is chosen, converted or laid out again is recognised by the operation alone, so
    activations are converted and laid out again too."""
    return jax.checkpoint(layer, policy=_is_computed, prevent_cse=False)


_UNCOMPUTED = (
    jax.lax.slice_p,
    jax.lax.squeeze_p,
    jax.lax.select_n_p,
    jax.lax.convert_element_type_p,
    jax.lax.reshape_p,
    jax.lax.transpose_p,
    jax.lax.broadcast_in_dim_p,
)


def _is_computed(primitive: object, *_: object, **__: object) -> bool:
    return primitive not in _UNCOMPUTED


def _of_a_stage(policy: Callable[..., Any]) -> Callable[..., Any]:
    """`policy` of what one stage computes, given what all stages do."""

    def of_all(primitive: object, *arrays: Any, **params: Any) -> Any:
        if primitive is jax.lax.dot_general_p:
            sums, (left, right) = params["dimension_numbers"]
            params = {**params, "dimension_numbers": (sums, (left[1:], right[1:]))}
        return policy(primitive, *arrays, **params)

    return of_all


def _is_no_cut(primitive: object, *_: object, **__: object) -> bool:
    return primitive not in (jax.lax.slice_p, jax.lax.squeeze_p)


def _products(saveable: Callable[..., bool]) -> Callable[..., object]:
    """`saveable`, but of `kernels.linear` the results in place of the wider sums, and of
    `kernels.convolution` those with the bias added."""

    def sums(primitive: Any, *arrays: Any, **params: Any) -> bool:
        if not saveable(primitive, *arrays, **params):
            return False
        if primitive is jax.lax.conv_general_dilated_p:
            return False
        _, batch = params["dimension_numbers"]
        wider = params["preferred_element_type"] not in (None, arrays[0].dtype)
        return bool(batch[0]) or not wider

    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(sums, policies.save_only_these_names(LINEAR_OUTPUT))


def _policy(remat: Remat) -> Any:
    policies = jax.checkpoint_policies
    match remat.policy:
        case "full":
            return policies.nothing_saveable
        case "dots":
            names = policies.save_only_these_names(*_OF_ATTENTION)
            return policies.save_from_both_policies(_products(policies.dots_saveable), names)
        case "dots_no_batch":
            return _products(policies.dots_with_no_batch_dims_saveable)
        case "save_attention":
            return policies.save_only_these_names(*_OF_ATTENTION)
        case "names" if not remat.offload:
            return policies.save_only_these_names(*remat.save)
        case "names":
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(remat.save),
                names_which_can_be_offloaded=list(remat.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
