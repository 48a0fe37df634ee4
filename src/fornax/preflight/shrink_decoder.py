"""A decoder's config small enough for virtual CPU devices: narrow and shallow, but of the same
structure.

The decoder keeps the kinds of its layers in their order and the ratios of its widths; the data is
random documents.

Legend: D model width, N query heads, K key/value heads, H head width, F hidden width.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Literal

import numpy as np

from fornax.config.errors import ConfigError
from fornax.data import Prefetch, PythonSource
from fornax.mesh import ProcessConfig, Rules, stage_axes
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    PipelineConfig,
    layers_outside,
)
from fornax.models.config import GlobalHeads, LayerInputConfig
from fornax.models.delta_config import GatedDeltaConfig
from fornax.models.mamba_config import Mamba2Config
from fornax.models.rope_config import LongRopeScaling, RopeConfig
from fornax.preflight.shrink import (
    Pieces,
    Shrunk,
    meshes_of,
    pieces_on,
    settled_optim,
    smallest_multiple,
)
from fornax.train import EvalConfig, ProfileConfig, TrainConfig

__all__ = ["RandomDocuments", "shrink"]

_MOST_SHARDS = 8
_SOURCE = "fornax.preflight.shrink_decoder:RandomDocuments"
_DOCUMENTS = 1 << 14
_WIDTH = 64
_VOCABULARY = 256
_LINEAR_WIDTH = 16
_HEAD_WIDTHS = (16, 24, 32, 40, 48, 64, 80, 96, 128)

Depth = Literal["whole", "quick", "kinds"]


def shrink(
    config: TrainConfig, *, seq_len: int = 64, depth: Depth = "whole"
) -> Shrunk[TrainConfig]:
    """Shrink a config.

    Sizes of the mesh become 2 each, and the axis that takes what is left takes what is left of
    eight devices. Widths become the least that divide over it in the proportions of the model.

    Args:
      config: the user's; its model resolved.
      seq_len: tokens of a row.
      depth: how many layers; see `shrink_model`. `kinds` is for one device.

    Raises:
      ConfigError: when the config names no model.
    """
    if config.model is None:
        raise ConfigError("model is null; name weights with init_from, or describe the model")
    sizes = config.mesh.axis_sizes()
    axes, meshes = meshes_of(config, lambda axis, devices: _rest(config, axis, devices))
    rules = config.mesh.resolved_rules()
    pieces = pieces_on(config, meshes)
    pipeline = _shrink_pipeline(config)
    parts = max(mesh.num_stages() for mesh in meshes) * pipeline.repeats
    model = shrink_model(
        _with_exchange(config.model, sizes, rules),
        pieces=pieces,
        seq_len=seq_len,
        original_seq_len=config.seq_len,
        depth=depth,
        parts=1 if depth == "kinds" else parts,
    )
    if _has_layers_before(config) and not layers_outside(model.layer_kinds(), 2, pipeline):
        model = dataclasses.replace(model, num_layers=model.num_layers + 1)
    accumulate = min(config.accumulate, 2)
    shards = min(config.data.virtual_shards, _MOST_SHARDS)
    along = stage_axes(rules)
    together = math.lcm(
        *(
            math.prod(getattr(mesh, axis) for axis in rules["batch"] if axis not in along)
            * (pipeline.count(mesh.num_stages()) if mesh.num_stages() > 1 else 1)
            for mesh in meshes
        )
    )
    rows = smallest_multiple(
        8, math.lcm(shards, pieces("batch") * accumulate, together * accumulate)
    )
    source = PythonSource(
        target=_SOURCE,
        arguments={"seed": config.seed, "vocab": model.vocab_size, "seq_len": seq_len},
    )
    small = dataclasses.replace(
        config,
        model=model,
        init_from=None,
        seq_len=smallest_multiple(seq_len, pieces("length")),
        batch_size=rows,
        accumulate=accumulate,
        mesh=meshes[0],
        pipeline=pipeline if meshes[0].num_stages() > 1 else PipelineConfig(),
        optim=settled_optim(config.optim, model.hidden_size / config.model.hidden_size),
        data=dataclasses.replace(
            config.data,
            source=source,
            eval_source=None,
            holdout=0.0,
            transforms=(),
            skip_steps=(),
            skip_records=(),
            epochs=None,
            virtual_shards=shards,
            prefetch=Prefetch(buffer=0),
        ),
        # Narrow matrices have no groups of a scheme's size.
        quant=dataclasses.replace(config.quant, qat=None, rules=(), group_size=None),
        eval=EvalConfig(),
        processes=ProcessConfig(),
        profile=ProfileConfig(),
    )
    return Shrunk(config=small, axes=axes, meshes=meshes)


def _with_exchange(model: DecoderConfig, sizes: Mapping[str, int], rules: Rules) -> DecoderConfig:
    """The model with the way that tokens reach experts on the user's mesh, not on the small one."""
    experts = model.experts
    if experts is None or experts.exchange != "auto":
        return model
    over = [sizes[axis] for axis in rules["expert"]]
    sends = -1 in over or experts.experts_per_token < math.prod(over)
    way = "all_to_all" if sends else "all_gather"
    return dataclasses.replace(model, experts=dataclasses.replace(experts, exchange=way))


def _rest(config: TrainConfig, axis: str, devices: int) -> int:
    """The most devices that the open axis can have: its heads and layers must divide."""
    model = config.model
    assert model is not None
    wide = model.global_heads
    counts = {
        "kv_heads": math.gcd(model.kv_heads, wide.num_kv_heads) if wide else model.kv_heads,
        "heads": math.gcd(model.num_heads, model.linear.sharded_heads)
        if model.linear
        else model.num_heads,
        "layers": model.num_layers,
        "expert": model.experts.num_experts if model.experts else 1,
    }
    rules = config.mesh.resolved_rules()
    bound = [count for name, count in counts.items() if axis in rules[name]]
    while devices > 2 and any(count % devices for count in bound):
        devices //= 2
    return devices


def _shrink_pipeline(config: TrainConfig) -> PipelineConfig:
    """One or two microbatches for each stage, and one repeat or two, as the user has."""
    mesh, microbatches = config.mesh, config.pipeline.microbatches
    stages = mesh.num_stages()
    each = 2 if microbatches is None or stages < 2 else min(microbatches // stages, 2)
    small = 4 if mesh.stage_slices() > 1 and mesh.stage > 1 else 2
    return PipelineConfig(
        microbatches=small * each if stages != -1 else None, repeats=min(config.pipeline.repeats, 2)
    )


def _has_layers_before(config: TrainConfig) -> bool:
    """Whether layers that repeat are too many for the parts of a pipeline."""
    model, stages, slices = config.model, config.mesh.num_stages(), config.mesh.stage_slices()
    if model is None or stages < 2 or len(_pattern(model)) == model.num_layers:
        return False
    return layers_outside(model.layer_kinds(), stages, config.pipeline, slices=slices) > 0


def shrink_model(
    model: DecoderConfig,
    *,
    pieces: Pieces,
    seq_len: int,
    original_seq_len: int,
    depth: Depth,
    parts: int = 1,
) -> DecoderConfig:
    """Shrink a decoder.

    Kept: modules that predict further tokens, two at most; the rule of a router, with eight experts
    at most; the ratio of query heads to key/value heads, those of the MLP and of latents to the
    model's width, those of the parts of a head of latent attention, and of linear attention those
    of its widths and heads, tied embeddings, norms, caps, biases, the kind of every rope. Of layers
    that share keys and values a period does, after those that keep them. Windows and
    chunks still cut documents, and queries grow, where they do in rows of the original length.
    Weights start larger, so that activations have the size that they have at the full width.
    Patterns of layers keep their kinds and order: of equal layers in a row two stay (one, unless
    `whole`), and the pattern repeats twice, with what is left over at its end; `kinds` has it once,
    without the rest.

    Args:
      model: the user's.
      pieces: what sizes must divide into.
      seq_len: tokens of a row.
      original_seq_len: tokens of a row of the user's.
      depth: how much of the pattern of layers; see above.
      parts: into how many a pipeline cuts the layers; there are as many equal ones at least.
    """
    N, K = _heads(model, pieces)
    H = _head_width(model)
    D = smallest_multiple(_WIDTH, pieces("embed", "activation_embed"))
    latent = model.latent and _latent(model.latent, D / model.hidden_size, pieces)
    turned = (model.head_width, H)
    if model.latent is not None and latent is not None:
        H = latent.unrotated_dim + latent.rotated_dim
        turned = (model.latent.rotated_dim, latent.rotated_dim)
    elif model.head_dim is None:
        D = N * H
        while D % pieces("embed", "activation_embed"):
            D, H = D + 8 * N, H + 8
        turned = (model.head_width, H)

    def width(whole: int) -> int:
        share = min(whole / model.hidden_size, 4)
        return smallest_multiple(max(1, round(D * share)), pieces("mlp", "activation_mlp"))

    vocabulary = smallest_multiple(_VOCABULARY, pieces("vocab", "activation_vocab"))

    def window(whole: int) -> int:
        return max(2, seq_len // 8) if whole < original_seq_len else seq_len

    kinds = _pattern(model)
    longest = 2 if depth == "whole" else 1
    periods = max(2, parts)
    first_shared = model.num_layers - model.shared_kv_layers
    if len(kinds) == model.num_layers:  # no period: a run of equal layers is what can be cut
        longest = max(longest, parts)
        kept = _compressed(kinds, longest, first_shared)
        layers, shared = len(kept), sum(i >= first_shared for i in kept)
    else:
        kept = _compressed(kinds, longest)
        one = depth == "kinds" and not model.shared_kv_layers
        layers = len(kept) if one else _depth(model, len(kinds), kept, periods)
        shared = min(len(kept), model.shared_kv_layers)
    wide = model.global_heads
    share = seq_len / original_seq_len
    mlps = tuple(kinds[i][2] for i in kept)
    return dataclasses.replace(
        model,
        vocab_size=vocabulary,
        hidden_size=D,
        intermediate_size=width(model.intermediate_size),
        experts=model.experts and _experts(model.experts, width, pieces),
        mlp_pattern=None if model.mlp_pattern is None and not model.experts else mlps,
        num_layers=layers,
        num_mtp_modules=min(model.num_mtp_modules, 2),
        shared_kv_layers=shared,
        global_heads=wide and _global_heads(model, wide, (N, K, H), pieces),
        layer_inputs=model.layer_inputs and _layer_inputs(vocabulary, pieces),
        gated_delta=model.gated_delta and _gated_delta(model.gated_delta, pieces),
        mamba2=model.mamba2 and _mamba2(model.mamba2, pieces),
        attention_pattern=tuple(kinds[i][0] for i in kept),
        rope_pattern=tuple(kinds[i][1] for i in kept),
        num_heads=N,
        num_kv_heads=None if model.num_kv_heads is None else K,
        head_dim=None if model.head_dim is None else H,
        latent=latent,
        max_position_embeddings=max(seq_len, round(model.max_position_embeddings * share)),
        sliding_window=model.sliding_window and window(model.sliding_window),
        attention_chunk=model.attention_chunk and window(model.attention_chunk),
        query_scaling=model.query_scaling
        and dataclasses.replace(model.query_scaling, length=window(model.query_scaling.length)),
        rope=_rope(model.rope, *(_wide(turned, wide, model)), share),
        local_rope=model.local_rope and _rope(model.local_rope, *turned, share),
        query_pre_attn_scalar=model.query_pre_attn_scalar
        and model.query_pre_attn_scalar * H / model.head_width,
        initializer_range=model.initializer_range * math.sqrt(model.hidden_size / D),
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
    )


def _experts(experts: ExpertsConfig, width: Callable[[int], int], pieces: Pieces) -> ExpertsConfig:
    """A few experts with the same rule; the losses of routers have a check of their own, because
    they are of all tokens at once, whatever micro-batch or document these belong to."""
    groups = min(experts.num_groups, 2)
    E = smallest_multiple(min(experts.num_experts, 8), math.lcm(2 * groups, pieces("expert")))
    opened = experts.groups_per_token == experts.num_groups
    groups_per_token = groups if opened else 1
    most = E // groups * groups_per_token
    share = round(experts.experts_per_token * E / experts.num_experts)
    every = experts.experts_per_token == experts.num_experts
    shared = experts.shared_intermediate_size
    return dataclasses.replace(
        experts,
        num_experts=E,
        experts_per_token=E if every else min(max(share, min(experts.experts_per_token, 2)), most),
        num_groups=groups,
        groups_per_token=groups_per_token,
        intermediate_size=width(experts.intermediate_size),
        shared_intermediate_size=None if shared is None else width(shared),
        balance_loss=0.0,
        router_z_loss=0.0,
    )


def _latent(latent: LatentConfig, share: float, pieces: Pieces) -> LatentConfig:
    """Heads with eight rotated numbers and the others in proportion; ranks shrunk as the model."""

    def part(whole: int) -> int:
        return smallest_multiple(max(1, round(whole * 8 / latent.rotated_dim)), 4)

    def rank(whole: int) -> int:
        return smallest_multiple(max(8, round(whole * share)), pieces("latent"))

    return dataclasses.replace(
        latent,
        key_value_rank=rank(latent.key_value_rank),
        query_rank=None if latent.query_rank is None else rank(latent.query_rank),
        unrotated_dim=part(latent.unrotated_dim),
        rotated_dim=8,
        value_dim=part(latent.value_dim),
    )


def _gated_delta(delta: GatedDeltaConfig, pieces: Pieces) -> GatedDeltaConfig:
    """Two key heads, of two value heads each where there are several; widths in proportion."""
    K = smallest_multiple(2, pieces("heads", "activation_heads"))
    return dataclasses.replace(
        delta,
        num_key_heads=K,
        num_value_heads=K * min(delta.heads_per_key, 2),
        key_dim=_LINEAR_WIDTH,
        value_dim=_in_proportion(delta.value_dim, delta.key_dim),
    )


def _mamba2(mamba: Mamba2Config, pieces: Pieces) -> Mamba2Config:
    """Two groups at most, of two heads each where there are several."""
    groups, R = min(mamba.num_groups, 2), min(mamba.heads_per_key, 2)
    return dataclasses.replace(
        mamba,
        num_groups=groups,
        num_heads=smallest_multiple(
            groups * R, math.lcm(groups, pieces("heads", "activation_heads"))
        ),
        state_dim=_LINEAR_WIDTH,
        head_dim=_in_proportion(mamba.head_dim, mamba.state_dim),
    )


def _in_proportion(width: int, of: int) -> int:
    """The width of a linear layer's values beside keys of `_LINEAR_WIDTH`."""
    return smallest_multiple(max(1, round(_LINEAR_WIDTH * min(width / of, 2))), 4)


def _layer_inputs(vocabulary: int, pieces: Pieces) -> LayerInputConfig:
    return LayerInputConfig(
        vocab_size=vocabulary, width=smallest_multiple(8, pieces("layer_input"))
    )


def _global_heads(
    model: DecoderConfig, wide: GlobalHeads, heads: tuple[int, int, int], pieces: Pieces
) -> GlobalHeads:
    """Heads of full layers in proportion to the others'; `heads` are (N, K, H) of those."""
    N, K, H = heads
    of_k = pieces("kv_heads", "activation_kv_heads")
    count = smallest_multiple(max(1, round(K * wide.num_kv_heads / model.kv_heads)), of_k)
    while N % count:
        count += of_k
    return dataclasses.replace(
        wide, num_kv_heads=count, head_dim=_times(H, wide.head_dim, model.head_width)
    )


def _times(width: int, whole: int, of: int) -> int:
    """A width of a full layer's head, in proportion to the others'."""
    return smallest_multiple(max(1, round(width * whole / of)), 8)


def _wide(
    turned: tuple[int, int], wide: GlobalHeads | None, model: DecoderConfig
) -> tuple[int, int]:
    """Widths of a head before and after, for the rope of full layers."""
    if wide is None:
        return turned
    return wide.head_dim, _times(turned[1], wide.head_dim, model.head_width)


def _heads(model: DecoderConfig, pieces: Pieces) -> tuple[int, int]:
    """(N, K): two groups of key heads, four where each has one query head."""
    ratio = model.num_heads // model.kv_heads
    # Heads that are exchanged for the length divide over its devices too.
    apart = pieces("length") if model.context_exchange == "heads" else 1
    of_q = pieces("heads", "activation_heads") * apart
    if model.kv_heads == 1:
        return smallest_multiple(min(model.num_heads, 4), of_q), 1
    of_k = pieces("kv_heads", "activation_kv_heads") * apart
    K = smallest_multiple(4 if ratio == 1 else 2, of_k)
    while K * ratio % of_q:
        K += of_k
    return K * ratio, K


def _head_width(model: DecoderConfig) -> int:
    """The least width that every rope can rotate its share of."""
    wide = model.global_heads

    def rotates(width: int, rope: RopeConfig) -> bool:
        rotated = int(width * rope.fraction)
        return rotated % 2 == 0 and rotated > 2

    def fits(width: int) -> bool:
        own = width if wide is None else _times(width, wide.head_dim, model.head_width)
        local = model.local_rope or (None if wide is None else model.rope)
        return rotates(own, model.rope) and (local is None or rotates(width, local))

    fitting = (width for width in _HEAD_WIDTHS if fits(width))
    return next(fitting, model.head_width)


def _pattern(model: DecoderConfig) -> list[tuple]:
    """One period of (kind of attention, whether it rotates, kind of MLP), without repetition."""
    patterns = (model.attention_pattern, model.rope_pattern, model.mlps)
    kinds = [
        tuple(pattern[i % len(pattern)] for pattern in patterns) for i in range(model.num_layers)
    ]
    for period in range(1, len(kinds)):
        if all(kind == kinds[i % period] for i, kind in enumerate(kinds)):
            return kinds[:period]
    return kinds


def _compressed(kinds: list[tuple], longest: int, border: int | None = None) -> list[int]:
    """Indexes of the layers that stay: the first `longest` of each run of equal ones. A run ends at
    the border."""
    runs = groupby(range(len(kinds)), key=lambda i: (kinds[i], border is not None and i >= border))
    return [i for _, run in runs for i in list(run)[:longest]]


def _depth(model: DecoderConfig, period: int, kept: list[int], periods: int) -> int:
    """This many periods at most, and what is left over."""
    repeats, left = divmod(model.num_layers, period)
    return len(kept) * min(repeats, periods) + sum(i < left for i in kept)


def _rope(rope: RopeConfig, old_width: int, new_width: int, share: float) -> RopeConfig:
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        count = int(new_width * rope.fraction) // 2
        old = int(old_width * rope.fraction) // 2
        picks = [i * old // count for i in range(count)]
        scaling = dataclasses.replace(
            scaling,
            short_factor=tuple(scaling.short_factor[i] for i in picks),
            long_factor=tuple(scaling.long_factor[i] for i in picks),
            original_max_position_embeddings=max(
                2, round(scaling.original_max_position_embeddings * share)
            ),
        )
    return dataclasses.replace(rope, scaling=scaling)


class RandomDocuments:
    """Documents of an eighth to a half of a row, so that several share one; no two are equal."""

    def __init__(self, seed: int, vocab: int, seq_len: int):
        """Remember how to draw.

        Args:
          seed: of everything.
          vocab: token ids are drawn from 1 to `vocab` - 1.
          seq_len: tokens of a row.
        """
        self._seed, self._vocab, self._seq_len = seed, vocab, seq_len

    def __len__(self) -> int:
        return _DOCUMENTS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self._seed, index])
        length = int(rng.integers(max(2, self._seq_len // 8), max(3, self._seq_len // 2)))
        return {"tokens": rng.integers(1, self._vocab, length, dtype=np.uint32)}
