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
        "paged_attention": lambda: PagedCall(
            **pages, rows=8, table_width=8, heads=4, window=None, softcap=None, sinks=False
        ),
        "paged_write": lambda: WriteCall(**pages),
        "gated_linear_unit": lambda: kernels.GatedUnitCall(
            platform=platform, rows=32, width=256, dtype="bfloat16", activation="silu", devices=1
        ),
        "take_rows": lambda: kernels.TakeRowsCall(
            platform=platform, table_rows=512, width=128, rows=32, table_dtype="bfloat16",
            dtype="float32", devices=1,
        ),
        "argmax": lambda: kernels.ArgmaxCall(platform=platform, rows=8, width=1024, devices=1),
        "linear_cross_entropy": lambda: CrossEntropyCall(**products, z_loss=True),
        "linear_logprobs": lambda: LogprobsCall(**products, entropy=True),
    }[operation]()  # fmt: skip
