"""One Optax transformation per optimizer config, for the parameters it is given."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import optax

from fornax.config import ConfigError, load_name
from fornax.optim.config import (
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdamW8bit,
    AdaptiveClip,
    Clip,
    Lion,
    Muon,
    NormClip,
    Optimizer,
    RMSProp,
    Shampoo,
    UserOptimizer,
    ValueClip,
)
from fornax.optim.eight_bit import scale_by_adam8bit
from fornax.optim.muon import scale_by_muon
from fornax.optim.schedules import ScheduleFn
from fornax.optim.shampoo import scale_by_shampoo
from fornax.optim.soap import scale_by_soap
from fornax.optim.transforms import clip_by_global_norm, per_matrix
from fornax.optim.tree import at_paths
from fornax.optim.user import TaskOptimizer, call_factory
from fornax.optim.views import View

__all__ = ["Parameters", "make_clip", "make_optimizer", "split_off_fallback"]


@dataclass(frozen=True)
class Parameters:
    """What optimizers know of the parameters: their views and which of them decay, by path."""

    views: Mapping[str, View]
    decayed: Mapping[str, bool]
    decay_is_named: bool = False
    """Whether the config says which parameters decay."""

    @property
    def mask(self) -> Callable[[object], object]:
        """Optax's weight-decay mask."""
        return at_paths(self.decayed)

    def require_clear(self, what: str, path: str) -> None:
        """Refuse a parameter of which nobody knows where its matrices are."""
        view = self.views[path]
        if view.unclear:
            raise ConfigError(
                f"{what} cannot tell the matrices in parameter {path}: {view.unclear}; pass "
                "`axes` that name stacked dimensions 'layers' or 'expert' (None for any other), "
                "or give the parameter another optimizer with a group"
            )


def split_off_fallback(
    optimizer: Optimizer | TaskOptimizer, view: View
) -> tuple[Optimizer | TaskOptimizer, float]:
    """The optimizer that really updates a parameter, and its learning-rate factor.

    Muon, SOAP and Shampoo hand what is not a hidden weight matrix to their fallback.
    """
    if isinstance(optimizer, Muon | SOAP | Shampoo) and not view.is_hidden_matrix:
        return optimizer.fallback, optimizer.fallback_learning_rate_factor
    return optimizer, 1.0


def make_optimizer(
    config: Optimizer | TaskOptimizer,
    schedule: ScheduleFn,
    params: Parameters,
    paths: tuple[str, ...],
) -> optax.GradientTransformation:
    """The Optax transformation of `config` for the parameters at `paths`."""
    match config:
        case AdamW():
            return optax.adamw(
                schedule,
                b1=config.b1,
                b2=config.b2,
                eps=config.eps,
                mu_dtype=config.mu_dtype,
                weight_decay=config.weight_decay,
                mask=params.mask,
                nesterov=config.nesterov,
            )
        case AdamW8bit():
            own = {path: params.views[path] for path in paths}
            scale = scale_by_adam8bit(own, b1=config.b1, b2=config.b2, eps=config.eps)
            return _by_matrix(scale, config, schedule, params, paths)
        case Lion():
            return optax.lion(
                schedule,
                b1=config.b1,
                b2=config.b2,
                mu_dtype=config.mu_dtype,
                weight_decay=config.weight_decay,
                mask=params.mask,
            )
        case Adafactor():
            return _adafactor(config, schedule, params, paths)
        case Muon():
            return _muon(config, schedule, params, paths)
        case SOAP():
            return _soap(config, schedule, params, paths)
        case Shampoo():
            return _shampoo(config, schedule, params, paths)
        case UserOptimizer() | TaskOptimizer():
            return _of_the_user(config, schedule, params)
        case SGD():
            sgd = optax.sgd(schedule, momentum=config.momentum, nesterov=config.nesterov)
            return _after_decay(config.weight_decay, params, sgd)
        case RMSProp():
            rmsprop = optax.rmsprop(
                schedule,
                decay=config.decay,
                eps=config.eps,
                centered=config.centered,
                momentum=config.momentum,
                nesterov=config.nesterov,
            )
            return _after_decay(config.weight_decay, params, rmsprop)


def _after_decay(
    weight_decay: float, params: Parameters, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    if weight_decay == 0:
        return optimizer
    return optax.chain(optax.add_decayed_weights(weight_decay, params.mask), optimizer)


def _adafactor(
    config: Adafactor, schedule: ScheduleFn, params: Parameters, paths: tuple[str, ...]
) -> optax.GradientTransformation:
    for path in paths:
        params.require_clear("adafactor", path)

    def make(path: str) -> optax.GradientTransformation:
        decays = config.weight_decay_rate > 0 and params.decayed[path]
        return optax.adafactor(
            schedule,
            min_dim_size_to_factor=config.min_dim_size_to_factor,
            decay_rate=config.decay_rate,
            multiply_by_parameter_scale=config.multiply_by_parameter_scale,
            clipping_threshold=config.clipping_threshold,
            momentum=config.momentum,
            weight_decay_rate=config.weight_decay_rate if decays else None,
            eps=config.eps,
        )

    return per_matrix(make, params.views)


def _muon(
    config: Muon, schedule: ScheduleFn, params: Parameters, paths: tuple[str, ...]
) -> optax.GradientTransformation:
    scale = scale_by_muon(config, params.views)
    return _by_matrix(scale, config, schedule, params, paths)


def _soap(
    config: SOAP, schedule: ScheduleFn, params: Parameters, paths: tuple[str, ...]
) -> optax.GradientTransformation:
    scale = scale_by_soap(
        params.views,
        b1=config.b1,
        b2=config.b2,
        shampoo_beta=config.shampoo_beta,
        eps=config.eps,
        precondition_frequency=config.precondition_frequency,
        max_precondition_dim=config.max_precondition_dim,
    )
    return _by_matrix(scale, config, schedule, params, paths)


def _shampoo(
    config: Shampoo, schedule: ScheduleFn, params: Parameters, paths: tuple[str, ...]
) -> optax.GradientTransformation:
    scale = scale_by_shampoo(
        {path: params.views[path] for path in paths},
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        matrix_eps=config.matrix_eps,
        block_size=config.block_size,
        root_interval=config.root_interval,
        start_step=config.start_step,
        grafting=config.grafting,
    )
    return _by_matrix(scale, config, schedule, params, paths)


def _by_matrix(
    scale: optax.GradientTransformation,
    config: AdamW8bit | Muon | SOAP | Shampoo,
    schedule: ScheduleFn,
    params: Parameters,
    paths: tuple[str, ...],
) -> optax.GradientTransformation:
    """`scale` with weight decay and rate; raises for a parameter that is not clearly a matrix."""
    for path in paths:
        params.require_clear(config.type, path)
    decay = optax.add_decayed_weights(config.weight_decay, params.mask)
    return optax.chain(
        scale,
        decay if config.weight_decay else optax.identity(),  # XLA would multiply by 0 and add
        optax.scale_by_learning_rate(schedule),
    )


def _of_the_user(
    config: UserOptimizer | TaskOptimizer, schedule: ScheduleFn, params: Parameters
) -> optax.GradientTransformation:
    offered = {"learning_rate": schedule, "mask": params.mask, "views": params.views}
    if isinstance(config, TaskOptimizer):
        factory, options = config.make, {}
    else:
        factory, options = load_name(config.type), config.options
    needed = ("learning_rate", "mask") if params.decay_is_named else ("learning_rate",)
    return call_factory(config.type, factory, options, offered, needed)


def make_clip(config: Clip, params: Parameters) -> optax.GradientTransformation:
    """The Optax transformation of one clipping."""
    match config:
        case NormClip():
            return clip_by_global_norm(config.max_norm)
        case ValueClip():
            return optax.clip(config.max_value)
        case AdaptiveClip():
            for path in params.views:
                params.require_clear("adaptive clipping", path)
            clip = optax.adaptive_grad_clip(config.clipping, config.eps)
            return per_matrix(lambda _: clip, params.views)
