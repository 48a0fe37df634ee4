"""Options of tiny U-Nets and autoencoders of diffusers, those of released ones among them."""

from collections.abc import Collection
from typing import Any

import pytest

__all__ = ["LEVELS", "SMALL", "UNETS", "cases"]

SMALL: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "layers_per_block": 1,
}
_BOTH: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D",) * 2,
    "up_block_types": ("CrossAttnUpBlock2D",) * 2,
}
UNETS: dict[str, dict[str, Any]] = {
    "sd1": {"layers_per_block": (2, 1), "sample_size": 8},
    "sd2": {
        "use_linear_projection": True,
        "attention_head_dim": (2, 4),
        "upcast_attention": True,
        "time_cond_proj_dim": 10,
        "in_channels": 9,
        "encoder_hid_dim": 14,
    },
    "sdxl": {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "use_linear_projection": True,
        "transformer_layers_per_block": (1, 3),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 20,
    },
    "levels": {
        **_BOTH,
        "only_cross_attention": (True, False),
        "layers_per_block": 2,
        "transformer_layers_per_block": ((1, 2), (2, 1)),
        "reverse_transformer_layers_per_block": ((1, 2, 1), (3, 1, 1)),
        "act_fn": "gelu",
        "time_embedding_act_fn": "silu",
        "timestep_post_act": "gelu",
        "conv_in_kernel": 5,
        "conv_out_kernel": 1,
        "num_class_embeds": 7,
        "time_embedding_dim": 36,
    },
    "widths": {
        **_BOTH,
        "class_embed_type": "timestep",
        "class_embeddings_concat": True,
        "resnet_time_scale_shift": "scale_shift",
        "mid_block_type": "UNetMidBlock2D",
        "center_input_sample": True,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
    },
    "projection": {
        "class_embed_type": "projection",
        "projection_class_embeddings_input_dim": 12,
        "mid_block_type": None,
        "downsample_padding": 0,
    },
    "linear": {
        "class_embed_type": "simple_projection",
        "projection_class_embeddings_input_dim": 12,
        "mid_block_scale_factor": 1.4,
    },
}
"""Options of U-Nets over `SMALL`."""
LEVELS: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8, 8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
}
"""Of autoencoders."""


def cases(*quick: str, of: Collection[str] = tuple(UNETS)) -> list[Any]:
    """All cases as parameters of a test; those that are not quick take minutes together."""
    slow = pytest.mark.exhaustive
    return [case if case in quick else pytest.param(case, marks=slow) for case in of]
