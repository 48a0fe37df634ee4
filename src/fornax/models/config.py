"""What a decoder is: every choice of architecture as a field of `DecoderConfig`, none as a name."""

import math
from dataclasses import dataclass, field
from typing import Literal

from fornax.config.errors import ConfigError
from fornax.models.delta_config import GatedDeltaConfig
from fornax.models.experts_config import ExpertsConfig
from fornax.models.latent_config import LatentConfig
from fornax.models.mamba_config import Mamba2Config
from fornax.models.rope_config import DynamicNTKScaling, LongRopeScaling, RopeConfig, YarnScaling

__all__ = ["DecoderConfig", "GlobalHeads", "LayerInputConfig", "LayerKind", "QueryScaling"]


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries times 1 + beta log(1 + floor((position + shift) / length)), after rotation (Llama 4,
    Nakanishi 2025)."""

    beta: float
    """How fast queries grow."""
    length: int
    """Positions up to which they do not."""
    shift: Literal[0, 1] = 0
    """1 counts positions from 1."""
    layers: Literal["all", "unrotated"] = "all"
    """Which layers' queries grow: all, or those of layers without rotation."""

    def __post_init__(self) -> None:
        """Check the length."""
        _positive("query_scaling.length", self.length)


@dataclass(frozen=True, kw_only=True)
class GlobalHeads:
    """Heads of the layers that see everything, where sliding layers have others (Gemma 4)."""

    head_dim: int
    """Width of a head."""
    num_kv_heads: int
    """Number of key/value heads, a divisor of `num_heads`."""
    keys_as_values: bool = False
    """Whether one projection gives keys and values; the key's norm and rotation are its own."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        _positive("global_heads.head_dim", self.head_dim)
        _positive("global_heads.num_kv_heads", self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class LayerInputConfig:
    """A further input of each layer: embeddings of the tokens in a table of its own, summed with a
    projection of the first layer's input (per-layer embeddings, Gemma 3n and Gemma 4)."""

    vocab_size: int
    """Number of token ids in the table, at least the model's."""
    width: int
    """Width of each layer's input."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        _positive("layer_inputs.vocab_size", self.vocab_size)
        _positive("layer_inputs.width", self.width)


@dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer, all of it static: the parts a kernel specialises on."""

    window: int | None
    """Keys visible to a query, itself included, at most; None for all before it."""
    rope: Literal["global", "local", "none"]
    """Which rotary embedding the layer's queries and keys get."""
    attention: Literal["attention", "latent", "gated_delta", "mamba2"] = "attention"
    """The layer's first branch: grouped-query, latent or linear attention."""
    mlp: Literal["mlp", "experts", "none"] = "mlp"
    """The layer's second branch: one MLP, a mixture of experts, or none."""
    placement: Literal["pre", "post", "sandwich"] = "pre"
    """Where its norms stand."""
    chunked: bool = False
    """Whether windows lie side by side, so that a query sees no key before its own window's first,
    instead of behind each query."""
    global_heads: bool = False
    """Whether its heads are those of `DecoderConfig.global_heads`."""
    keys: Literal["own", "kept", "shared"] = "own"
    """Whose keys and values it attends to: its own, its own that later layers take too, or those
    of the layer before it that kept them and has the same window."""
    wide_mlp: bool = False
    """Whether its MLP has twice the width."""
    layer_input: bool = False
    """Whether it has an input of its own beside the residual stream."""
    layer_scale: bool = False
    """Whether its output is multiplied by a learned number."""
    residual_multiplier: float = 1.0
    """Factor on what its branches add to the residual stream."""

    @property
    def linear(self) -> bool:
        """Whether it keeps a state of a fixed size in place of keys and values."""
        return self.attention in ("gated_delta", "mamba2")

    @property
    def attention_part(self) -> str:
        """The attribute of `DecoderLayer` that attends: attention of another form is another."""
        if self.attention != "attention":
            return self.attention
        return "global_" * self.global_heads + "shared_" * (self.keys == "shared") + "attention"

    @property
    def mlp_part(self) -> str:
        """The attribute of `DecoderLayer` that is its second branch."""
        return "wide_mlp" if self.wide_mlp else self.mlp

    def parts(self) -> tuple[str, ...]:
        """What the layer consists of: its attributes of `DecoderLayer`, in order."""
        before = self.placement in ("pre", "sandwich")
        after = self.placement in ("post", "sandwich")
        found: list[str] = []
        branches = [(self.attention_part, "attention")]
        branches += [] if self.mlp == "none" else [(self.mlp_part, "mlp")]
        for branch, norm in branches:
            found += [f"{norm}_norm"] * before + [branch] + [f"post_{norm}_norm"] * after
        found += ["layer_input"] * self.layer_input + ["layer_scale"] * self.layer_scale
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; the fields say what it is."""

    vocab_size: int = 32_000
    """Number of token ids."""
    hidden_size: int = 512
    """Width of the residual stream."""
    intermediate_size: int = 1_408
    """Width inside the gated MLP."""
    num_layers: int = 8
    """Number of layers."""
    num_mtp_modules: int = 0
    """Modules after the layers that predict further tokens, each the one after the last's (DeepSeek
    V3 report, section 2.2); 0 for none."""
    num_heads: int = 8
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads, a divisor of `num_heads`; None means as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None means `hidden_size // num_heads`, or what `latent` says."""
    global_heads: GlobalHeads | None = None
    """Heads of the full layers, where sliding layers alone have those above; None for the same."""
    shared_kv_layers: int = 0
    """How many of the last layers have no keys and values: they attend to those of the last layer
    before them with the same window."""
    wide_shared_mlp: bool = False
    """Whether the MLPs of those layers have twice the width."""
    layer_inputs: LayerInputConfig | None = None
    """A further input of each layer, made of the tokens; None for none."""
    layer_scale: bool = False
    """Whether each layer's output is multiplied by a learned number."""
    latent: LatentConfig | None = None
    """Latent attention in all layers that attend; None for grouped-query attention."""
    gated_delta: GatedDeltaConfig | None = None
    """Gated DeltaNet in the layers that `attention_pattern` calls linear; None for none."""
    mamba2: Mamba2Config | None = None
    """Mamba-2 in those layers; None for none."""
    max_position_embeddings: int = 2_048
    """Longest sequence the model is made for; some rope scalings refer to it."""

    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary embedding of the layers that see everything (and of all, unless `local_rope`)."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of sliding-window layers, when it is another one."""
    rope_pattern: tuple[bool, ...] = (True,)
    """Whether a layer rotates at all (False: NoPE), repeated over the layers."""
    sliding_window: int | None = None
    """Keys visible in a sliding-window layer, the query's own included."""
    attention_chunk: int | None = None
    """Positions of a chunk in a chunked layer, where tokens see the tokens of their own chunk."""
    attention_pattern: tuple[Literal["full", "sliding", "chunked", "linear"], ...] = ("full",)
    """Kind of each layer's attention, repeated over the layers."""
    experts: ExpertsConfig | None = None
    """The mixture of experts that takes the MLP's place; None for none."""
    context_exchange: Literal["auto", "all_gather", "heads", "ring"] = "auto"
    """How devices that divide the length of rows (mesh axis `context`) attend to each other's
    tokens: each gathers the keys and values of all, they exchange the length for heads, or keys and
    values are passed round in a ring, so that no device holds all of them. It changes no result.
    auto takes what the fastest kernel does, and the ring where that kernel cannot run."""
    mlp_pattern: tuple[Literal["mlp", "experts", "none"], ...] | None = None
    """Whether each layer has the MLP, the experts or neither, repeated over the layers; None gives
    all layers the experts where there are any."""

    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    attention_output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    """Whether the MLP's projections have a bias."""
    qk_norm: Literal["none", "head", "full", "unweighted"] = "none"
    """RMSNorm of queries and keys: over each head, over all heads' width together, or over each
    head without a weight, after rotation and only in layers that rotate (Llama 4)."""
    value_norm: bool = False
    """Whether values are normalised over each head, without a weight (Gemma 4)."""
    qkv_clip: float | None = None
    """Queries, keys and values are cut to within -c and c, before rotation; None leaves them."""
    query_pre_attn_scalar: float | None = None
    """Scores are multiplied by this to the power -1/2; None takes the head width."""
    query_scaling: QueryScaling | None = None
    """How queries grow with their position; None for not at all."""
    attention_logit_softcap: float | None = None
    """c in c tanh(score / c); None for no cap."""
    attention_sinks: bool = False
    """Whether each query head has a learned logit that takes part in the softmax without a value
    (gpt-oss; Xiao et al. 2023, section 3.3)."""
    attention_gate: bool = False
    """Whether each head's result is multiplied by the sigmoid of a gate, which is projected with
    its query (Qwen3-Next)."""
    final_logit_softcap: float | None = None
    """c in c tanh(logit / c) for the output logits; None for no cap."""

    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """RMSNorm before attention and MLP, after them (before the residual sum), or both."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    norm_unit_offset: bool = False
    """Whether norms multiply by (1 + weight) instead of weight."""
    scale_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    embedding_multiplier: float = 1.0
    """A further factor on the embeddings."""
    residual_multiplier: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logits_scaling: float = 1.0
    """What the output logits are divided by; a cap comes after it."""
    tie_embeddings: bool = False
    """Whether the output projection is the embedding table."""

    initializer_range: float = 0.02
    """Standard deviation of initial weights (a normal cut at three deviations)."""
    scale_residual_init: bool = True
    """Whether projections into the residual stream start smaller by sqrt(2 num_layers)."""

    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens at which generation stops."""
    pad_token_id: int | None = None
    """Token that fills batches; it is masked by segment ids, never by its number."""
    family: str | None = None
    """Hugging Face family to save as; None takes the first that can express these fields."""

    def __post_init__(self) -> None:
        """Check sizes and combinations."""
        for name in _SIZES:
            value = getattr(self, name)
            if value is not None:
                _positive(name, value)
        self._check_pattern()
        self._check_heads()
        self._check_sharing()
        self._check_mtp()
        self._check_tokens()

    def _check_heads(self) -> None:
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"hidden_size={self.hidden_size} does not divide into num_heads={self.num_heads}; "
                "use a multiple, or set head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        for name, rope in (("rope", self.rope), ("local_rope", self.local_rope)):
            if rope is not None and self.attends:
                self._check_rope(name, rope)

    def _check_latent(self, latent: LatentConfig) -> None:
        width = latent.unrotated_dim + latent.rotated_dim
        if self.head_dim not in (None, width):
            raise ConfigError(
                f"head_dim={self.head_dim} is not the {width} that latent.unrotated_dim and "
                "latent.rotated_dim make together; leave head_dim out"
            )
        fixed = {
            "num_kv_heads": self.kv_heads == self.num_heads,
            "qkv_bias": not self.qkv_bias,
            "qk_norm": self.qk_norm == "none",
            "value_norm": not self.value_norm,
            "global_heads": self.global_heads is None,
            "shared_kv_layers": not self.shared_kv_layers,
            "qkv_clip": self.qkv_clip is None,
            "attention_sinks": not self.attention_sinks,
            "attention_gate": not self.attention_gate,
        }
        wrong = [f"{name}={getattr(self, name)!r}" for name, right in fixed.items() if not right]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)} is of grouped-query attention, which a model with `latent` "
                "does not have; leave it out"
            )

    def _check_sharing(self) -> None:
        if self.global_heads is not None:
            attends = set(self._attends())
            if "full" not in attends or not attends <= {"full", "sliding"}:
                raise ConfigError(
                    f"global_heads is set and attention_pattern={self.attention_pattern!r}; it "
                    "needs full layers, whose heads they are, beside sliding layers at most"
                )
            if self.num_heads % self.global_heads.num_kv_heads:
                raise ConfigError(
                    f"num_heads={self.num_heads} is not a multiple of global_heads.num_kv_heads="
                    f"{self.global_heads.num_kv_heads}"
                )
        inputs = self.layer_inputs
        if inputs is not None and inputs.vocab_size < self.vocab_size:
            raise ConfigError(
                f"layer_inputs.vocab_size={inputs.vocab_size} is below vocab_size="
                f"{self.vocab_size}; every token needs a row"
            )
        if not 0 <= self.shared_kv_layers < self.num_layers:
            raise ConfigError(
                f"shared_kv_layers={self.shared_kv_layers} must be at least 0 and less than "
                f"num_layers={self.num_layers}"
            )
        if self.wide_shared_mlp and (not self.shared_kv_layers or "experts" in self.mlps):
            raise ConfigError(
                "wide_shared_mlp widens the dense MLPs of the layers of shared_kv_layers="
                f"{self.shared_kv_layers}; set some, and no experts"
            )
        if not self.shared_kv_layers:
            return
        attends = self._attends()
        first = self.num_layers - self.shared_kv_layers
        if "linear" in attends or not set(attends[first:]) <= set(attends[:first]):
            raise ConfigError(
                f"shared_kv_layers={self.shared_kv_layers} needs before the last layers one of "
                f"each kind that they are of ({', '.join(sorted(set(attends[first:])))}), and no "
                "linear layer; share fewer"
            )

    def _check_mtp(self) -> None:
        if self.num_mtp_modules < 0:
            raise ConfigError(f"num_mtp_modules={self.num_mtp_modules} must be 0 or more")
        without = {
            "layer_inputs": self.layer_inputs is None,
            "shared_kv_layers": not self.shared_kv_layers,
            "attention_pattern": self.attends,
        }
        wrong = [f"{name}={getattr(self, name)!r}" for name, right in without.items() if not right]
        if self.num_mtp_modules and wrong:
            raise ConfigError(
                f"num_mtp_modules={self.num_mtp_modules} and {', '.join(wrong)} do not go "
                "together: a module's layer has keys and values of its own and no further input; "
                "set num_mtp_modules to 0"
            )

    def _attends(self) -> list[str]:
        pattern = self.attention_pattern
        return [pattern[index % len(pattern)] for index in range(self.num_layers)]

    def _check_rope(self, name: str, rope: RopeConfig) -> None:
        width = self.rotated_width(rope, wide=name == "rope")
        if width % 2 or width == 0:
            raise ConfigError(
                f"{name}.fraction={rope.fraction} of head_dim={self.head_width} rotates {width} "
                "dimensions; rotation needs an even number above 0"
            )
        scaling = rope.scaling
        if isinstance(scaling, LongRopeScaling) and len(scaling.short_factor) != width // 2:
            raise ConfigError(
                f"{name}.scaling.short_factor has {len(scaling.short_factor)} values; "
                f"{width} rotated dimensions need {width // 2}"
            )
        if isinstance(scaling, DynamicNTKScaling) and width == 2:
            raise ConfigError(
                f"{name}.scaling.type=dynamic needs more than 2 rotated dimensions; "
                "use a wider head or another scaling"
            )

    def _check_pattern(self) -> None:
        if not self.attention_pattern or not self.rope_pattern:
            raise ConfigError("attention_pattern and rope_pattern need at least one value each")
        if "sliding" in self.attention_pattern and self.sliding_window is None:
            raise ConfigError(
                "attention_pattern has sliding layers and sliding_window is None; set the window"
            )
        if self.sliding_window is not None and "sliding" not in self.attention_pattern:
            raise ConfigError(
                f"sliding_window={self.sliding_window} is used by no layer; put 'sliding' in "
                "attention_pattern, or leave the window out"
            )
        if (self.attention_chunk is not None) != ("chunked" in self.attention_pattern):
            raise ConfigError(
                f"attention_pattern={self.attention_pattern!r} and attention_chunk="
                f"{self.attention_chunk} do not go together: chunked layers need the length of a "
                "chunk, and it a layer that is chunked"
            )
        if {"sliding", "chunked"} <= set(self.attention_pattern):
            raise ConfigError(
                "attention_pattern has sliding and chunked layers; a model can have one of the two"
            )
        if self.local_rope is not None and "sliding" not in self.attention_pattern:
            raise ConfigError("local_rope is used by no layer: attention_pattern has no 'sliding'")
        if not self.mlps:
            raise ConfigError("mlp_pattern needs at least one value, or None")
        linear = "linear" in self._attends()
        given = [part for part in (self.gated_delta, self.mamba2) if part is not None]
        if len(given) != linear:
            raise ConfigError(
                f"attention_pattern={self.attention_pattern!r}, gated_delta={self.gated_delta!r} "
                f"and mamba2={self.mamba2!r} do not go together: linear layers need `gated_delta` "
                "or `mamba2`, one of the two, and either a layer that is linear"
            )
        used = {self.mlps[index % len(self.mlps)] for index in range(self.num_layers)}
        if ("experts" in used) != (self.experts is not None):
            raise ConfigError(
                f"mlp_pattern={self.mlp_pattern!r} and experts={self.experts!r} do not go "
                "together: layers with experts need `experts`, and `experts` a layer that has them"
            )

    def _check_tokens(self) -> None:
        for name, ids in (
            ("bos_token_id", (self.bos_token_id,)),
            ("eos_token_ids", self.eos_token_ids),
            ("pad_token_id", (self.pad_token_id,)),
        ):
            for token in ids:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise ConfigError(
                        f"{name} has {token}, outside the vocabulary of {self.vocab_size} tokens"
                    )

    @property
    def linear(self) -> GatedDeltaConfig | Mamba2Config | None:
        """What the linear layers compute; None where there are none."""
        return self.gated_delta or self.mamba2

    @property
    def attends(self) -> bool:
        """Whether a layer has keys and values."""
        return any(each != "linear" for each in self._attends())

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlps(self) -> tuple[Literal["mlp", "experts", "none"], ...]:
        """`mlp_pattern`, resolved."""
        if self.mlp_pattern is not None:
            return self.mlp_pattern
        return ("mlp",) if self.experts is None else ("experts",)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Widths inside the MLPs that layers have: dense, of an expert, of what is shared."""
        kinds = {self.mlps[index % len(self.mlps)] for index in range(self.num_layers)}
        widths = [self.intermediate_size] if "mlp" in kinds else []
        if self.experts is not None:
            shared = self.experts.shared_intermediate_size
            widths += [self.experts.intermediate_size] + ([shared] if shared else [])
        return tuple(widths)

    @property
    def head_width(self) -> int:
        """Width of a head's query, resolved."""
        if self.latent is not None:
            return self.latent.unrotated_dim + self.latent.rotated_dim
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.head_width if self.latent is None else self.latent.value_dim

    def kv_shape(self, kind: LayerKind) -> tuple[int, int]:
        """Number and width of the key/value heads of a layer with grouped-query attention."""
        wide = self.global_heads
        if wide is not None and kind.global_heads:
            return wide.num_kv_heads, wide.head_dim
        return self.kv_heads, self.head_width

    def rotated_width(self, rope: RopeConfig, *, wide: bool = False) -> int:
        """How many dimensions of a head a rotary embedding rotates; `wide`: of `global_heads`,
        where the model has them."""
        whole = self.head_width if self.latent is None else self.latent.rotated_dim
        if wide and self.global_heads is not None:
            whole = self.global_heads.head_dim
        return int(whole * rope.fraction)

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores; YaRN's second scale counts in latent attention."""
        scalar = self.query_pre_attn_scalar
        scale = (self.head_width if scalar is None else scalar) ** -0.5
        yarn = self.rope.scaling
        if self.latent is None or not isinstance(yarn, YarnScaling) or not yarn.mscale_all_dim:
            return scale
        return scale * yarn.temperature(yarn.mscale_all_dim) ** 2

    @property
    def embedding_scale(self) -> float:
        """Factor on the embeddings."""
        scale = math.sqrt(self.hidden_size) if self.scale_embeddings else 1.0
        return scale * self.embedding_multiplier

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, first to last."""
        return tuple(self._kind(index) for index in range(self.num_layers))

    def kinds_with_modules(self) -> tuple[LayerKind, ...]:
        """`layer_kinds`, then the kind of the layer in each of the `num_mtp_modules`."""
        return self.layer_kinds() + (self.mtp_kind,) * self.num_mtp_modules

    @property
    def mtp_kind(self) -> LayerKind:
        """The kind of the layer in each of the `num_mtp_modules`: full attention, and the last
        layer's MLP or experts."""
        return LayerKind(
            window=None,
            rope="global" if any(self.rope_pattern) else "none",
            attention="latent" if self.latent else "attention",
            mlp=self.layer_kinds()[-1].mlp,
            placement=self.norm_placement,
            global_heads=self.global_heads is not None,
            layer_scale=self.layer_scale,
            residual_multiplier=self.residual_multiplier,
        )

    @property
    def num_expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return sum(kind.mlp == "experts" for kind in self.layer_kinds())

    def _kind(self, index: int) -> LayerKind:
        attends = self.attention_pattern[index % len(self.attention_pattern)]
        sliding, linear = attends == "sliding", attends == "linear"
        chunked = attends == "chunked"
        rotates = not linear and self.rope_pattern[index % len(self.rope_pattern)]
        other = self.local_rope is not None or self.global_heads is not None
        where = "local" if sliding and other else "global"
        rule: Literal["gated_delta", "mamba2"] = "mamba2" if self.mamba2 else "gated_delta"
        mlps = self.mlps
        first_shared = self.num_layers - self.shared_kv_layers
        shares, all_attend = index >= first_shared, self._attends()
        is_last = attends not in all_attend[index + 1 : first_shared]
        keeps = not shares and is_last and attends in all_attend[first_shared:]
        return LayerKind(
            window=self.attention_chunk if chunked else self.sliding_window if sliding else None,
            chunked=chunked,
            rope=where if rotates else "none",
            attention=rule if linear else "latent" if self.latent else "attention",
            mlp=mlps[index % len(mlps)],
            placement=self.norm_placement,
            global_heads=self.global_heads is not None and not sliding,
            keys="shared" if shares else "kept" if keeps else "own",
            wide_mlp=self.wide_shared_mlp and shares,
            layer_input=self.layer_inputs is not None,
            layer_scale=self.layer_scale,
            residual_multiplier=self.residual_multiplier,
        )

    def part_layers(self) -> dict[str, tuple[int, ...]]:
        """The layers that have each part (`LayerKind.parts`): a part's parameters are stacked over
        these."""
        found: dict[str, list[int]] = {}
        for index, kind in enumerate(self.layer_kinds()):
            for part in kind.parts():
                found.setdefault(part, []).append(index)
        return {part: tuple(layers) for part, layers in found.items()}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "attention_chunk",
    "qkv_clip",
    "query_pre_attn_scalar",
    "attention_logit_softcap",
    "final_logit_softcap",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name}={value} must be above 0")
