"""What an engine holds on each device, by what it is for: the one account of engine and planner.

Everything follows from shapes, so it is known before anything is made.
"""

from dataclasses import dataclass

from fornax.llm.adapters import describe_adapters
from fornax.llm.config import EngineConfig
from fornax.llm.devices import DeviceSpec
from fornax.llm.limits import Limits, draft_limits, limits_without_cache, resolve_limits
from fornax.llm.programs import Sizes, describe_arrays
from fornax.llm.weights import Weights, local_bytes
from fornax.models import DecoderConfig

__all__ = ["Account", "account_of", "fit_limits", "guessed_temporaries"]

_LIVE_LOGITS = 9
"""Copies of the logits in float32 that choosing tokens has alive, by what XLA makes of it."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Bytes on one device."""

    weights: int
    adapters: int
    draft_weights: int
    sampler: int
    """Sampler state, hidden states, masks, page tables and proposals, the draft model's too."""
    states: int
    """Of linear layers, the draft model's too: a slot for each sequence that can run, with
    speculation one for each token that may be taken back beside it, and those kept for prefix
    reuse."""
    temporaries: int
    """Of the largest step or choice of tokens, a guess; not held between steps."""
    cache: int
    draft_cache: int

    @property
    def without_cache(self) -> int:
        """All that must find room beside the caches."""
        weights = self.weights + self.adapters + self.draft_weights
        return weights + self.sampler + self.states + self.temporaries

    @property
    def held(self) -> int:
        """What stays allocated while the engine is awake and idle."""
        return self.without_cache - self.temporaries + self.cache + self.draft_cache


def fit_limits(
    config: EngineConfig,
    weights: Weights,
    target: DeviceSpec,
    *,
    draft: Weights | None = None,
    cached: DecoderConfig | None = None,
) -> Limits:
    """The limits of an engine whose cache takes what all else leaves.

    Args:
      weights: the model's, as arrays or as shapes.
      cached: the model whose pages the cache holds, where that is not the engine's own.

    Raises:
      ConfigError: limits beyond the model or against each other.
      EngineError: no memory for the cache.
    """
    small = None if draft is None else draft.config
    empty = limits_without_cache(config, weights.config, weights.dtype, target, small)
    other = account_of(config, weights, empty, draft).without_cache
    return resolve_limits(config, cached or weights.config, weights.dtype, other, target, small)


def account_of(
    config: EngineConfig, weights: Weights, limits: Limits, draft: Weights | None = None
) -> Account:
    """The account of an engine.

    Args:
      weights: the model's, as arrays or as shapes.
      limits: the engine's; without pages, as from `limits_without_cache`, the caches are 0.
    """
    sizes = Sizes.of(config, weights, limits)
    arrays = describe_arrays(weights, limits, sizes)
    sampler = local_bytes((arrays.tables, arrays.hidden, arrays.sampler, arrays.masks))
    temporaries = guessed_temporaries(weights, sizes)
    states = local_bytes(arrays.states)
    draft_cache = 0
    if draft is not None:
        own = draft_limits(limits, draft.config)
        steps = Sizes.of(config, draft, own, draft=True)
        small = describe_arrays(draft, own, steps, config.draft_places)
        kept = (small.tables, small.hidden, small.sampler, small.masks, small.proposals)
        sampler += local_bytes(kept)
        draft_cache = local_bytes(small.kv)
        states += local_bytes(small.states)
        temporaries = max(temporaries, guessed_temporaries(draft, steps))
    adapters = 0
    if config.enable_lora:
        stacks = describe_adapters(weights, config.max_loras, config.max_lora_rank)
        adapters = local_bytes(stacks)
    return Account(
        weights=weights.nbytes,
        adapters=adapters,
        draft_weights=0 if draft is None else draft.nbytes,
        sampler=sampler,
        states=states,
        temporaries=temporaries,
        cache=local_bytes(arrays.kv),
        draft_cache=draft_cache,
    )


def _mlp_width(model: DecoderConfig) -> int:
    """Numbers a token inside the widest MLP, or inside all of its experts together."""
    experts = model.experts
    if experts is None:
        return model.intermediate_size
    routed = experts.experts_per_token * (experts.intermediate_size + model.hidden_size)
    return max(model.intermediate_size, routed + (experts.shared_intermediate_size or 0))


def guessed_temporaries(weights: Weights, sizes: Sizes) -> int:
    """Bytes of one device that the largest program needs, where it was not compiled.

    The activations of one layer of the largest step, or the logits of the largest choice.
    """
    model, where = weights.config, weights.placement
    parts = 1 if where.mesh is None else where.mesh.size
    shapes = {model.kv_shape(kind) for kind in model.layer_kinds()}
    heads = max((2 * model.num_heads + 2 * count) * width for count, width in shapes) // parts
    if model.latent is not None:  # queries and results as wide as the latents, which are one head
        heads = (2 * model.num_heads // parts + 1) * model.latent.cached_dim
    linear, step = model.linear, 0
    if linear is not None:  # its operands in float32, and every sequence's state before and after
        width = 4 * (2 * linear.key_width + 3 * linear.value_width) // parts
        heads = max(heads, width // where.compute_dtype.itemsize)
        step = 2 * 4 * sizes.layouts[sizes.steps[-1]].rows * linear.state_size // parts
    row = 4 * model.hidden_size + 3 * _mlp_width(model) // parts + heads
    step += sizes.steps[-1] * row * where.compute_dtype.itemsize
    return max(step, _LIVE_LOGITS * 4 * sizes.samples[-1] * model.vocab_size)
