"""A call of every operation that each of its implementations on a platform can run."""

from typing import Any

from fornax import kernels
from fornax.kernels._paged_attention.call import PagedCall, WriteCall
from fornax.kernels._vocabulary.cross_entropy import CrossEntropyCall
from fornax.kernels._vocabulary.logprobs import LogprobsCall

__all__ = ["sample_call"]


def sample_call(operation: str, implementation: str, platform: str) -> Any:
    """The call; small, but of sizes that tiles of a TPU and heads of a GPU's kernel divide.

    Raises:
      KeyError: for an operation that has none here yet.
    """
    # `blockwise` is for rows that make long scores; a small array of them is enough elsewhere.
    length = 2304 if implementation == "blockwise" else 256
    products = {
        "platform": platform, "tokens": 96, "width": 128, "vocabulary": 512, "dtype": "bfloat16",
        "softcap": None, "chunk": 32, "shards": 1,
    }  # fmt: skip
    pages = {
        "platform": platform, "tokens": 32, "kv_heads": 2, "head_dim": 128, "page_size": 16,
        "dtype": "bfloat16", "cache_dtype": "bfloat16", "shared": False,
    }  # fmt: skip
    logits = {"platform": platform, "rows": 8, "width": 1024, "devices": 1}
    norm = {
        "platform": platform, "rows": 32, "width": 256, "dtype": "bfloat16",
        "scale_dtype": "float32", "devices": 1,
    }  # fmt: skip
    return {
        "attention": lambda: kernels.AttentionCall(
            platform=platform, batch=1, queries=length, keys=length, heads=2, kv_heads=1,
            head_dim=128, value_dim=128, dtype="bfloat16", causal=True, window=None, softcap=None,
            sinks=False, positions=False, consecutive=True, balanced=False, segments=False,
            length_shards=1, exchange="auto",
        ),
        "grouped_matmul": lambda: kernels.GroupedCall(
            platform=platform, rows=256, groups=4, inputs=128, outputs=256, dtype="bfloat16",
            devices=1,
        ),
        "packed_grouped_matmul": lambda: kernels.PackedGroupedCall(
            platform=platform, rows=32, groups=4, inputs=128, outputs=256, dtype="bfloat16",
            precision="int4", group=64, layout="native" if implementation == "native" else "plain",
            devices=1,
        ),
        "paged_attention": lambda: PagedCall(
            **pages, rows=8, table_width=8, heads=4, window=None, softcap=None, sinks=False
        ),
        "paged_write": lambda: WriteCall(**pages),
        "gated_linear_unit": lambda: kernels.GatedUnitCall(
            platform=platform, rows=32, width=256, dtype="bfloat16", activation="silu", devices=1
        ),
        "convolution": lambda: kernels.ConvolutionCall(
            platform=platform, batch=1, space=(16, 16), window=(3, 3), stride=(1, 1),
            padding=((1, 1), (1, 1)), channels=128, outputs=256, dtype="bfloat16", bias=True,
            devices=1,
        ),
        "group_norm": lambda: kernels.GroupNormCall(
            platform=platform, batch=2, places=1024, channels=320, groups=32, dtype="bfloat16",
            activation="silu", devices=1,
        ),
        "rms_norm": lambda: kernels.NormCall(**norm),
        "add_rms_norm": lambda: kernels.AddNormCall(**norm),
        "take_rows": lambda: kernels.TakeRowsCall(
            platform=platform, table_rows=512, width=128, rows=32, table_dtype="bfloat16",
            dtype="float32", devices=1,
        ),
        "rotary_embedding": lambda: kernels.RotaryCall(
            platform=platform, tokens=32, heads=4, head_dim=64, rotated_dim=64, interleaved=False,
            dtype="bfloat16", devices=1,
        ),
        "ragged_convolution": lambda: kernels.RaggedConvolutionCall(
            platform=platform, tokens=96, rows=4, kept=1, channels=256, width=4, dtype="bfloat16",
            kept_dtype="bfloat16", bias=True, activation="silu", devices=1,
        ),
        "ragged_gated_delta_rule": lambda: kernels.RaggedDeltaCall(
            platform=platform, tokens=96, rows=4, kept=1, key_heads=2, heads_per_key=2, key_dim=64,
            value_dim=128, corrects=True, devices=1,
        ),
        "argmax": lambda: kernels.ArgmaxCall(**logits),
        "filter_logits": lambda: kernels.FilterLogitsCall(**logits),
        "sample_tokens": lambda: kernels.SampleTokensCall(**logits),
        "linear_cross_entropy": lambda: CrossEntropyCall(**products, z_loss=True),
        "linear_logprobs": lambda: LogprobsCall(**products, entropy=True),
    }[operation]()  # fmt: skip
