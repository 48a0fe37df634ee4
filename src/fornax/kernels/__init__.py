"""Operations worth several implementations: one signature, the fastest that can run the call."""

from fornax.config.errors import KernelError
from fornax.kernels._attention import AttentionCall, attention, attention_operation
from fornax.kernels._delta_rule import gated_delta_rule
from fornax.kernels._exchange import exchange_rows
from fornax.kernels._experts import (
    GroupOrder,
    fused_experts,
    fuses_experts,
    route_top_k,
    sort_by_group,
)
from fornax.kernels._grouped import (
    GroupedCall,
    GroupedTiles,
    GroupedWeight,
    grouped_matmul,
    grouped_matmul_operation,
    grouped_tiles,
)
from fornax.kernels._linear import LINEAR_OUTPUT, Weight, linear, linears
from fornax.kernels._matmul import orthogonalize
from fornax.kernels._native import build_all as build_native
from fornax.kernels._norm import StackedScale, rms_norm
from fornax.kernels._packed import PackedWeight, pack
from fornax.kernels._paged_attention import (
    TPU_LANES,
    PreparedAttention,
    copy_pages,
    paged_attention,
    paged_attention_operation,
    paged_table_fits,
    paged_write,
    paged_write_operation,
    prepare_paged_attention,
)
from fornax.kernels._ragged_delta_rule import ragged_gated_delta_rule
from fornax.kernels._vocabulary import (
    LogitsLoss,
    LossSums,
    TokenLogprobs,
    cross_entropy_operation,
    linear_cross_entropy,
    linear_logprobs,
    linear_loss,
    logits_logprobs,
    logprobs_operation,
)
from fornax.kernels.choices import Kept, kept
from fornax.kernels.registry import (
    Choice,
    Implementation,
    Operation,
    Support,
    Work,
    operations,
    recording_calls,
    recording_choices,
    register,
    target_platform,
)
from fornax.kernels.tuning import autotuning

__all__ = [
    "LINEAR_OUTPUT",
    "TPU_LANES",
    "AttentionCall",
    "Choice",
    "GroupOrder",
    "GroupedCall",
    "GroupedTiles",
    "GroupedWeight",
    "Implementation",
    "Kept",
    "KernelError",
    "LogitsLoss",
    "LossSums",
    "Operation",
    "PackedWeight",
    "PreparedAttention",
    "StackedScale",
    "Support",
    "TokenLogprobs",
    "Weight",
    "Work",
    "attention",
    "attention_operation",
    "autotuning",
    "build_native",
    "copy_pages",
    "cross_entropy_operation",
    "exchange_rows",
    "fused_experts",
    "fuses_experts",
    "gated_delta_rule",
    "grouped_matmul",
    "grouped_matmul_operation",
    "grouped_tiles",
    "kept",
    "linear",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_loss",
    "linears",
    "logits_logprobs",
    "logprobs_operation",
    "operations",
    "orthogonalize",
    "pack",
    "paged_attention",
    "paged_attention_operation",
    "paged_table_fits",
    "paged_write",
    "paged_write_operation",
    "prepare_paged_attention",
    "ragged_gated_delta_rule",
    "recording_calls",
    "recording_choices",
    "register",
    "rms_norm",
    "route_top_k",
    "sort_by_group",
    "target_platform",
]
