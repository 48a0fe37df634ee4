"""The decoder: embeddings, a scanned stack of layers, a final norm and the output projection.

Legend: B batch, T query tokens, S cache tokens, D model width, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.mesh import (
    axes_in_use,
    balance_ids,
    balance_length,
    balance_routed,
    balances,
    constrain,
    current_rules,
    restore_length,
    shards,
    stage_axes,
)
from fornax.models.attend import KeyValueCache
from fornax.models.cache import Cache
from fornax.models.capabilities import check_model
from fornax.models.config import DecoderConfig
from fornax.models.context import LayerContext
from fornax.models.layer_inputs import LayerInputs
from fornax.models.mtp import make_modules, run_first_module_cached, run_modules
from fornax.models.norm import RMSNorm
from fornax.models.paged_cache import PagedCache
from fornax.models.pipeline import run_pipeline
from fornax.models.pipeline_config import PipelineConfig
from fornax.models.projection import Embed, Projection
from fornax.models.remat import Remat, check_remat
from fornax.models.rope import rotations, sectioned_rotations
from fornax.models.routing import Routing, routed_experts_dtype
from fornax.models.scan import run_layers, run_layers_cached, run_layers_keeping
from fornax.models.scope import scoped
from fornax.models.stack import stack_decoder_layers

__all__ = ["Decoder", "document_positions"]

CacheT = TypeVar("CacheT", bound=KeyValueCache)


class Decoder(nnx.Module):
    """A decoder-only language model that is what its config says.

    Attributes:
      embed: token embeddings.
      layer_inputs: further inputs of each layer, or None.
      layers: all layers as one module; each part's parameters have a leading "layers" axis over
        the layers that have it.
      final_norm: the norm before the output projection.
      lm_head: the output projection, or None when it is the embedding table.
      mtp: the modules that predict further tokens, stacked like layers, or None.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make all parameters.

        Args:
          config: what the model is.
          rngs: source of randomness.
          dtype: parameter dtype.
          compute_dtype: dtype of activations and matrix products; None for the parameters' own.
        """
        compute_dtype = jnp.dtype(dtype if compute_dtype is None else compute_dtype)
        make = {"dtype": jnp.dtype(dtype), "compute_dtype": compute_dtype}
        self.config = config
        self.compute_dtype = compute_dtype
        self.embed = Embed(config, rngs=rngs, **make)
        has_inputs = config.layer_inputs is not None
        self.layer_inputs = LayerInputs(config, rngs=rngs, **make) if has_inputs else None
        self.layers = stack_decoder_layers(config, rngs=rngs, **make)
        # Logits are linear in what the norm gives, so every way to them is scaled here.
        self.final_norm = RMSNorm(
            (config.hidden_size,), config, dtype=dtype, divisor=config.logits_scaling
        )
        self.lm_head = None if config.tie_embeddings else _lm_head(config, rngs=rngs, **make)
        self.mtp = make_modules(config, rngs=rngs, **make) if config.num_mtp_modules else None

    @scoped
    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> jax.Array | tuple[jax.Array, Cache]:
        """Logits of the next token after each token.

        Args:
          tokens_BT: int32 token ids.
          positions_BT: int32 position of each token in its document. None counts from 0 in each
            document, after what the cache already holds of it.
          segment_ids_BT: int32 document of each token; tokens see only their own document, and
            0 is padding, whose logits mean nothing. None: one document, no padding.
          cache: from `init_cache`; the tokens are appended to it. Its room is not checked here,
            where sizes used are traced: writing past the end is the caller's error.

        Returns:
          float32 logits [B, T, V]; with a cache, (logits, the cache with the tokens in it).
        """
        if cache is None:
            return self.logits(self.hidden(tokens_BT, positions_BT, segment_ids_BT))
        x_BTD, cache = self._cached(tokens_BT, positions_BT, segment_ids_BT, cache)
        return self.logits(x_BTD), cache

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        *,
        consecutive: bool | None = None,
        remat: str | Remat = "none",
        unroll: int | bool = 1,
        implementation: str | None = None,
        pipeline: PipelineConfig | None = None,
        disturb: Callable[[jax.Array], jax.Array] | None = None,
    ) -> jax.Array:
        """The final norm's output x [B, T, D], for a loss that makes logits piece by piece.

        Args are those of `hidden_and_routing`.
        """
        return self.hidden_and_routing(
            tokens_BT,
            positions_BT,
            segment_ids_BT,
            consecutive=consecutive,
            remat=remat,
            unroll=unroll,
            implementation=implementation,
            pipeline=pipeline,
            disturb=disturb,
        )[0]

    def hidden_and_routing(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        *,
        consecutive: bool | None = None,
        remat: str | Remat = "none",
        unroll: int | bool = 1,
        implementation: str | None = None,
        pipeline: PipelineConfig | None = None,
        disturb: Callable[[jax.Array], jax.Array] | None = None,
        routed_experts_BTLk: jax.Array | None = None,
        drop_tokens: bool = False,
    ) -> tuple[jax.Array, Routing | None]:
        """The final norm's output x [B, T, D], and what the routers of its experts did.

        Args:
          tokens_BT: int32 token ids.
          positions_BT: see `__call__`.
          segment_ids_BT: see `__call__`.
          consecutive: says that given positions count up by one with the index inside each
            document, as in packed rows: kernels that mask by index need it. None: only where
            positions are not given.
          remat: what the backward pass recomputes: a `Remat`, or one of `REMAT_POLICIES`.
          unroll: how much of the layer loop is unrolled; True for all of it.
          implementation: attention implementation to force.
          pipeline: how the stages of the mesh in use work, where it has any; None: as by default.
          disturb: applied to the embeddings x [B, T, D]: noise, in training.
          routed_experts_BTLk: integers, the experts that each token takes in each of the L layers
            with experts (routing replay: see `models.routing.choose`), as `paged_and_experts` gives
            them; below 0 where the router chooses. None: it chooses for all.
          drop_tokens: whether experts have room for no more tokens of a row than
            `ExpertsConfig.capacity_factor` says, as in pretraining. False: for all.

        Raises:
          ConfigError: when the mesh divides the length of rows, and a layer needs all of it; given
            experts in a pipeline, or of another shape than the model's; names of `remat` that the
            model does not have.
        """
        x_BTD, _, routing = self._uncached(
            tokens_BT,
            positions_BT,
            segment_ids_BT,
            consecutive=consecutive,
            remat=remat,
            unroll=unroll,
            implementation=implementation,
            pipeline=pipeline,
            disturb=disturb,
            routed_experts_BTLk=routed_experts_BTLk,
            drop_tokens=drop_tokens,
        )
        return x_BTD, routing

    @scoped
    def hidden_states(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        *,
        layers: Sequence[int],
        embeddings_BTD: jax.Array | None = None,
        positions_ABT: jax.Array | None = None,
        sections: Sequence[int] = (),
        implementation: str | None = None,
    ) -> jax.Array:
        """States after chosen layers, as other models take them from a language model.

        Args:
          tokens_BT: int32 token ids, each row one text, padded on either side.
          mask_BT: int32, 0 for padding, which no token sees; padding itself sees the tokens before
            it. None: no padding. Positions count from 0 at the start of a row, padding or not.
          layers: after how many layers each is taken: 0 for the embeddings; for all of them the
            final norm's output, as in transformers' `hidden_states`. A negative number counts from
            that, which is -1.
          embeddings_BTD: what the first layer takes, where it is not `embed` of all the tokens: an
            image's states stand among them. None: it is.
          positions_ABT: int32 positions on several axes, of which the rotary embedding takes one
            for each of `sections` (`rope.sectioned_rotations`); None: those said above.
          sections: pairs of a head that turn together, where positions are of several axes.
          implementation: attention implementation to force.

        Returns:
          x [B, T, len(layers), D] in the compute dtype.

        Raises:
          ConfigError: no such layers; a mask for a model whose layers' states pass through padding.
        """
        count = self.config.num_layers
        after = tuple(layer + count + 1 if layer < 0 else layer for layer in layers)
        if not after or min(after) < 0 or max(after) > count:
            raise ConfigError(
                f"layers={list(layers)} of a model with {count} layers; name at least one, from 0, "
                f"the embeddings, to {count}, the final norm's output, or -1 to {-count - 1} from "
                "the end"
            )
        kinds = self.config.layer_kinds()
        if mask_BT is not None and any(
            kind.attention in ("gated_delta", "mamba2") for kind in kinds
        ):
            raise ConfigError(
                "a mask of padding is given to a model with recurrent layers, whose states pass "
                "through padding; pass rows without padding"
            )
        positions_BT = document_positions(tokens_BT.shape, None)
        context = LayerContext(
            positions_BT=positions_BT,
            segment_ids_BT=None,
            seen_BT=None if mask_BT is None else (mask_BT != 0).astype(jnp.int32),
            rotations=dict(
                rotations(self.config, positions_BT)
                if positions_ABT is None
                else sectioned_rotations(self.config, positions_ABT, sections)
            ),
            consecutive=True,
            exchange=self.config.context_exchange,
            implementation=implementation,
        )
        x_BTD = self.embed(tokens_BT) if embeddings_BTD is None else embeddings_BTD
        x_BTD = constrain(x_BTD, ("batch", "length", "activation_embed"))
        context = self._with_inputs(context, tokens_BT, x_BTD)
        with jax.named_scope("layers"):
            x_BTD, kept = run_layers_keeping(self.layers, kinds, x_BTD, context, after)
        last_BTD = self.final_norm(x_BTD)
        found = [last_BTD if at == count else kept[i] for i, at in enumerate(after)]
        return jnp.stack(found, axis=2)

    def hidden_ahead(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        *,
        consecutive: bool | None = None,
        remat: str | Remat = "none",
        unroll: int | bool = 1,
        implementation: str | None = None,
        disturb: Callable[[jax.Array], jax.Array] | None = None,
        drop_tokens: bool = False,
    ) -> tuple[jax.Array, list[jax.Array], Routing | None]:
        """The final norm's output x [B, T, D], what each module makes of it, and the routing.

        Args are those of `hidden_and_routing`; `disturb` is applied to the first layer's embeddings
        alone, not to those that modules take.

        Returns:
          x; for the k-th module, from 1, the y [B, T, D] whose logits (`output_weights`) are of the
          (k + 1)-th token after each, and mean something where all up to the k-th are in the row
          and of its document; the routing of the layers with experts, then of those in modules.
        """
        return self._uncached(
            tokens_BT,
            positions_BT,
            segment_ids_BT,
            consecutive=consecutive,
            remat=remat,
            unroll=unroll,
            implementation=implementation,
            disturb=disturb,
            ahead=True,
            drop_tokens=drop_tokens,
        )

    def prefill(
        self, tokens_BT: jax.Array, segment_ids_BT: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Read prompts into a cache; returns the float32 logits [B, V] after their last tokens.

        Args:
          tokens_BT: int32 token ids, padded on the left.
          segment_ids_BT: int32, 1 for tokens and 0 for padding.
          cache: from `init_cache`, with room for T tokens.
        """
        x_BTD, cache = self._cached(tokens_BT, None, segment_ids_BT, cache)
        return self.logits(x_BTD[:, -1:])[:, 0], cache

    def paged(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        cache: PagedCache,
        *,
        longest: int | None = None,
    ) -> tuple[jax.Array, PagedCache]:
        """Run a ragged batch, tokens of several sequences one after the other, through a cache.

        Args:
          tokens_T: int32 token ids.
          positions_T: int32 position of each token in its sequence.
          cache: pages and where this batch's tokens lie in them.
          longest: the longest sequence served, for rope scalings that depend on it: a sequence's
            result must not depend on those beside it.

        Returns:
          (the final norm's output x [T, D], the cache with the tokens in it).
        """
        x_TD, cache, _ = self._paged(tokens_T, positions_T, cache, longest)
        return x_TD, cache

    def paged_and_experts(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        cache: PagedCache,
        *,
        longest: int | None = None,
    ) -> tuple[jax.Array, PagedCache, jax.Array]:
        """`paged` of a model with experts, and the experts that each token took: [T, L, k] over the
        L layers with experts, the best first, in `routed_experts_dtype`."""
        x_TD, cache, experts_LBTk = self._paged(
            tokens_T, positions_T, cache, longest, returns_experts=True
        )
        assert experts_LBTk is not None, "a model without experts"
        assert self.config.experts is not None
        experts_TLk = jnp.swapaxes(experts_LBTk[:, 0], 0, 1)
        return x_TD, cache, experts_TLk.astype(routed_experts_dtype(self.config.experts))

    @scoped
    def paged_ahead(
        self,
        x_TD: jax.Array,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        cache: PagedCache,
        *,
        longest: int | None = None,
    ) -> tuple[jax.Array, PagedCache]:
        """Run the first module over a ragged batch, through the cache of a model with modules.

        Args:
          x_TD: hidden states: what `paged` returned for these tokens, or this function for the ones
            before them.
          tokens_T: int32, the token after each.
          positions_T: int32 position of each.
          cache: pages and where the batch is in them.
          longest: see `paged`.

        Returns:
          (y [T, D], whose logits are of the second token after each; the cache with the keys and
          values of the module's layer in it).
        """
        assert self.mtp is not None, "a model without modules"
        cache = cache.prepare(self.config, len(tokens_T), self.compute_dtype)
        positions_BT = positions_T[None]
        context = LayerContext(
            positions_BT=positions_BT,
            segment_ids_BT=None,
            rotations=dict(rotations(self.config, positions_BT, longest)),
        )
        embedded_BTD = self.embed(tokens_T[None])
        with jax.named_scope("mtp"):
            y_BTD, cache = run_first_module_cached(
                self.mtp, self.config, x_TD[None], embedded_BTD, context, cache
            )
        return y_BTD[0], cache

    def output_weights(self) -> jax.Array:
        """The output projection w [D, V], in the parameters' dtype."""
        if self.lm_head is None:
            return self.embed.embedding[...].T
        return self.lm_head.kernel.get_value()

    @scoped
    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Logits [B, T, V], float32, of the final norm's output."""
        with jax.named_scope("lm_head"):
            w_DV = self.output_weights()
            if isinstance(w_DV, jax.Array):
                w_DV = w_DV.astype(self.compute_dtype)
                logits_BTV = jnp.einsum(
                    "BTD,DV->BTV", x_BTD, w_DV, preferred_element_type=jnp.float32
                )
            else:
                logits_BTV = kernels.linear(x_BTD.astype(jnp.float32), w_DV)
            logits_BTV = constrain(logits_BTV, ("batch", "length", "activation_vocab"))
            cap = self.config.final_logit_softcap
            return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

    @scoped
    def _uncached(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
        *,
        consecutive: bool | None,
        remat: str | Remat,
        unroll: int | bool,
        implementation: str | None,
        pipeline: PipelineConfig | None = None,
        disturb: Callable[[jax.Array], jax.Array] | None = None,
        routed_experts_BTLk: jax.Array | None = None,
        ahead: bool = False,
        drop_tokens: bool = False,
    ) -> tuple[jax.Array, list[jax.Array], Routing | None]:
        """`hidden_and_routing`, and with `ahead` what modules make of it."""
        if axes_in_use("length"):
            check_model(self.config, "context axis")
        if shards(("stage",)) > 1:
            check_model(self.config, "stage axis")
        check_remat(remat, self.config)
        routed_LBTk = self._given(routed_experts_BTLk, tokens_BT)
        if consecutive is None:
            consecutive = positions_BT is None
        if positions_BT is None:
            positions_BT = document_positions(tokens_BT.shape, segment_ids_BT)
        balanced = balances(tokens_BT.shape[1], shards(axes_in_use("length")))
        if balanced:
            positions_BT = balance_ids(positions_BT)
            segment_ids_BT = None if segment_ids_BT is None else balance_ids(segment_ids_BT)
            routed_LBTk = None if routed_LBTk is None else balance_routed(routed_LBTk)
        context = LayerContext(
            positions_BT=positions_BT,
            segment_ids_BT=segment_ids_BT,
            rotations=dict(rotations(self.config, positions_BT)),
            consecutive=consecutive,
            balanced=balanced,
            routed_experts_LBTk=routed_LBTk,
            drops_tokens=drop_tokens,
            exchange=self.config.context_exchange,
            implementation=implementation,
        )
        own_BT = balance_ids(tokens_BT) if balanced else tokens_BT
        if disturb is None:
            x_BTD = self.embed(own_BT)
        else:  # of the tokens in order, on any mesh
            x_BTD = disturb(self.embed(tokens_BT))
            x_BTD = balance_length(x_BTD) if balanced else x_BTD
        x_BTD = constrain(x_BTD, ("batch", "length", "activation_embed"))
        context = self._with_inputs(context, own_BT, x_BTD)
        run: Callable[..., tuple[jax.Array, Routing | None]] = run_layers
        if shards(stage_axes(current_rules())) > 1:
            run = functools.partial(run_pipeline, pipeline=pipeline or PipelineConfig())
        kinds = self.config.layer_kinds()
        with jax.named_scope("layers"):
            x_BTD, routing = run(self.layers, kinds, x_BTD, context, remat=remat, unroll=unroll)
        found = [self.final_norm(x_BTD)]
        if ahead and self.mtp is not None:

            def embedded(count: int) -> jax.Array:
                later_BT = jnp.roll(tokens_BT, -count, axis=1)
                later_BTD = self.embed(balance_ids(later_BT) if balanced else later_BT)
                return constrain(later_BTD, ("batch", "length", "activation_embed"))

            with jax.named_scope("mtp"):
                more, routings = run_modules(
                    self.mtp,
                    self.config,
                    found[0],
                    embedded,
                    context,
                    remat=remat,
                    unroll=unroll,
                )
            found += more
            if routing is not None:
                routings.insert(0, routing)
            if routings:
                routing = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)
        x_BTD, *further = [restore_length(each) if balanced else each for each in found]
        return x_BTD, further, routing

    def _cached(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None,
        segment_ids_BT: jax.Array | None,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        if tokens_BT.shape[1] > cache.num_slots:
            raise ConfigError(
                f"{tokens_BT.shape[1]} tokens do not fit in a cache of {cache.num_slots} slots; "
                "make a longer one with init_cache"
            )
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones(tokens_BT.shape, jnp.int32)
        if positions_BT is None:
            positions_BT = _continued_positions(segment_ids_BT, cache)
        cache = cache.append(positions_BT, segment_ids_BT)
        return self._through(cache, tokens_BT, positions_BT, segment_ids_BT)[:2]

    def _given(self, routed_BTLk: jax.Array | None, tokens_BT: jax.Array) -> jax.Array | None:
        """Experts that tokens are to take, checked, by layer: [L, B, T, k]."""
        if routed_BTLk is None:
            return None
        experts = self.config.experts
        if experts is None:
            raise ConfigError("experts are given to a model that has none; leave them out")
        if shards(stage_axes(current_rules())) > 1:
            raise ConfigError("a pipeline does not take given experts; use mesh.fsdp")
        wanted = (*tokens_BT.shape, self.config.num_expert_layers, experts.experts_per_token)
        if routed_BTLk.shape != wanted:
            raise ConfigError(
                f"given experts of shape {routed_BTLk.shape}; tokens, layers with experts and "
                f"experts_per_token of this model want {wanted}"
            )
        return jnp.moveaxis(routed_BTLk, 2, 0)

    def _paged(
        self,
        tokens_T: jax.Array,
        positions_T: jax.Array,
        cache: PagedCache,
        longest: int | None,
        *,
        returns_experts: bool = False,
    ) -> tuple[jax.Array, PagedCache, jax.Array | None]:
        cache = cache.prepare(self.config, len(tokens_T), self.compute_dtype)
        x_BTD, cache, experts_LBTk = self._through(
            cache,
            tokens_T[None],
            positions_T[None],
            None,
            longest,
            returns_experts=returns_experts,
        )
        return x_BTD[0], cache, experts_LBTk

    def _with_inputs(
        self, context: LayerContext, tokens_BT: jax.Array, x_BTD: jax.Array
    ) -> LayerContext:
        if self.layer_inputs is None:
            return context
        return replace(context, layer_inputs_LBTP=self.layer_inputs(tokens_BT, x_BTD))

    @scoped
    def _through(
        self,
        cache: CacheT,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        longest: int | None = None,
        *,
        returns_experts: bool = False,
    ) -> tuple[jax.Array, CacheT, jax.Array | None]:
        context = LayerContext(
            positions_BT=positions_BT,
            segment_ids_BT=segment_ids_BT,
            rotations=dict(rotations(self.config, positions_BT, longest)),
            returns_experts=returns_experts,
        )
        x_BTD = constrain(self.embed(tokens_BT), ("batch", "length", "activation_embed"))
        context = self._with_inputs(context, tokens_BT, x_BTD)
        kinds = self.config.layer_kinds()
        with jax.named_scope("layers"):
            x_BTD, cache, experts_LBTk = run_layers_cached(
                self.layers, kinds, x_BTD, context, cache
            )
        return self.final_norm(x_BTD), cache, experts_LBTk


def _lm_head(config: DecoderConfig, **make) -> Projection:
    return Projection(
        {"embed": config.hidden_size},
        {"vocab": config.vocab_size},
        bias=False,
        std=config.initializer_range,
        **make,
    )


def document_positions(shape: tuple[int, ...], segment_ids_BT: jax.Array | None) -> jax.Array:
    """int32 positions [B, T] that count from 0 in each document, and are 0 in padding.

    Padding must not count: two rope scalings look at the longest position.
    """
    index_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids_BT is None:
        return index_BT
    first = jnp.ones((shape[0], 1), bool)
    starts_BT = jnp.concatenate([first, segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]], axis=1)
    positions_BT = index_BT - jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)
    return jnp.where(segment_ids_BT == 0, 0, positions_BT)


def _continued_positions(segment_ids_BT: jax.Array, cache: Cache) -> jax.Array:
    """Positions that continue those in the cache: tokens of the same document before each token."""
    from_cache_BT = jnp.sum(
        segment_ids_BT[:, :, None] == cache.segment_ids_BS[:, None, :], axis=2, dtype=jnp.int32
    )
    positions_BT = document_positions(segment_ids_BT.shape, segment_ids_BT) + from_cache_BT
    return jnp.where(segment_ids_BT == 0, 0, positions_BT)
