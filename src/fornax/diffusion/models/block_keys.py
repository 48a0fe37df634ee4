"""Key maps of the blocks that U-Nets and image autoencoders share, in diffusers' names."""

from fornax.diffusion.models.keys import Key

__all__ = ["image_attention_keys", "residual_keys"]


def residual_keys(path: str, name: str) -> list[Key]:
    """Of an `image_blocks.ResidualBlock`."""
    names = {"time": "time_emb_proj", "shortcut": "conv_shortcut"}
    parts = ("norm1", "conv1", "time", "norm2", "conv2", "shortcut")
    return [Key(f"{path}/{part}", f"{name}.{names.get(part, part)}") for part in parts]


def image_attention_keys(path: str, name: str) -> list[Key]:
    """Of an `image_blocks.ImageAttention`."""
    names = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}
    return [
        *(Key(f"{path}/{ours}", f"{name}.{theirs}") for ours, theirs in names.items()),
        Key(f"{path}/norm", f"{name}.group_norm"),
    ]
