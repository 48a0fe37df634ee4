"""What a run needs beside its config: the examples, the words of captions, the whole network.

`<run>/diffusion.json` keeps what follows from the data, so that a run is loaded without it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config import from_mapping, to_mapping
from fornax.config.errors import CheckpointError, ConfigError, DataError
from fornax.config.files import write_whole
from fornax.diffusion.config import DiffusionConfig, Inputs, takes
from fornax.diffusion.cost import traced_flops
from fornax.diffusion.data import EncodedConfig, Examples
from fornax.diffusion.data.buckets import Size
from fornax.diffusion.models.transformer import Transformer, TransformerConfig
from fornax.diffusion.models.unet import UNet, UNetConfig
from fornax.diffusion.network import NAMES, Network
from fornax.diffusion.prompts import (
    LabelsConfig,
    Prompts,
    TextConfig,
    WordEncoder,
    WordsConfig,
    text_arrays,
)

__all__ = ["FACTS", "Facts", "check_read", "facts_of", "flops_per_image", "make_network"]

FACTS = "diffusion.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What follows from the data of a run."""

    channels: int
    sizes: tuple[Size, ...]
    """Heights and widths of training, of videos frames before them; the most frequent first."""
    prompts: Prompts | None

    def save(self, folder: Path) -> None:
        """Write `diffusion.json`, in process 0."""
        if jax.process_index():
            return
        facts: dict[str, Any] = {"channels": self.channels, "sizes": self.sizes}
        if self.prompts is not None:
            facts["text"] = to_mapping(self.prompts.config)
            facts["words"] = list(self.prompts.known)
        write_whole(folder / FACTS, json.dumps(facts, ensure_ascii=False))

    @classmethod
    def load(cls, folder: Path) -> "Facts":
        """Read what `save` wrote.

        Raises:
          CheckpointError: no such file, or a damaged one.
        """
        path = folder / FACTS
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            prompts = None
            if "text" in said:
                kind = LabelsConfig if said["text"]["type"] == "labels" else WordsConfig
                text: TextConfig = from_mapping(kind, said["text"])
                prompts = Prompts(text, tuple(str(word) for word in said["words"]))
            sizes: Any = tuple(tuple(int(n) for n in size) for size in said["sizes"])
            return cls(channels=int(said["channels"]), sizes=sizes, prompts=prompts)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}, which says what a diffusion run was trained on, cannot be read: {error}; "
                "copy it back from another copy of the run, or start the run again on its data"
            ) from error

    @property
    def usual(self) -> Size:
        """The size of most examples."""
        return self.sizes[0]


def facts_of(config: DiffusionConfig, examples: Examples, folder: Path) -> Facts:
    """The facts of a run's data; of a run that is resumed, with the words that it began with.

    Raises:
      DataError: the captions do not suit `text`, or the data has other channels or sizes than
        the run began with.
    """
    sizes = sizes_of(examples)
    if (folder / FACTS).is_file():
        found = Facts.load(folder)
        if found.channels != examples.channels:
            raise DataError(
                f"the run in {folder} was begun on images of {found.channels} channels, and "
                f"these have {examples.channels}; use its data, or another run directory"
            )
        if found.prompts is not None:
            found.prompts.encode(list(dict.fromkeys(examples.texts())))
        return found
    prompts = None
    if config.text is not None:
        prompts = Prompts.of(config.text, examples.texts())
        if isinstance(config.text, WordsConfig):
            _check_lengths(prompts, examples)
    return Facts(channels=examples.channels, sizes=sizes, prompts=prompts)


def sizes_of(examples: Examples) -> tuple[Size, ...]:
    """The buckets, the one with most examples first."""
    counts = [int((examples.bucket == b).sum()) for b in range(len(examples.sizes))]
    return tuple(examples.sizes[b] for b in sorted(range(len(counts)), key=lambda b: -counts[b]))


def _check_lengths(prompts: Prompts, examples: Examples) -> None:
    texts: Sequence[str] = list(dict.fromkeys(examples.texts()))
    if texts:
        prompts.encode(texts)


def network_config(config: DiffusionConfig, facts: Facts) -> TransformerConfig | UNetConfig:
    """The denoiser's config, with what follows from the data.

    Raises:
      ConfigError: the two do not go together.
    """
    words = isinstance(config.text, WordsConfig)
    prompts = facts.prompts
    pooled = text = config.text.width if isinstance(config.text, WordsConfig) else None
    if isinstance(config.data, EncodedConfig):
        pooled, text = config.data.pooled_width, config.data.text_width
    found = config.model.network(
        Inputs(
            channels=facts.channels,
            classes=None if words or prompts is None else prompts.count,
            pooled=pooled,
            text=text,
            videos=len(facts.usual) == 3,
        )
    )
    if isinstance(config.data, EncodedConfig):
        check_read(config.data, found)
    return found


def check_read(data: EncodedConfig, config: TransformerConfig | UNetConfig) -> None:
    """Refuse arrays of the data that the network would not read.

    Raises:
      ConfigError: with the key of one.
    """
    read = takes(config)
    for name in data.arrays:
        if NAMES[name] not in read:
            instead = {"text": ", or model.text of a dit to cross or joint"}.get(name, "")
            key = {"text": "text_length and data.text_width", "pooled": "pooled_width"}
            unset = "false" if name == "sizes" else "null"
            raise ConfigError(
                f"data has {name}, and the model does not read it; set data.{key.get(name, name)} "
                f"to {unset}{instead}"
            )


def make_network(
    config: DiffusionConfig,
    facts: Facts,
    rngs: nnx.Rngs,
    *,
    dtype: DTypeLike,
    compute_dtype: DTypeLike,
) -> Network:
    """The network of a run, with fresh weights."""
    whole = network_config(config, facts)
    make: Any = UNet if isinstance(whole, UNetConfig) else Transformer
    denoiser: Any = make(whole, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
    encoder = None
    if isinstance(config.text, WordsConfig) and facts.prompts is not None:
        encoder = WordEncoder(
            facts.prompts.count, config.text.width, rngs=rngs, compute_dtype=compute_dtype
        )
    return Network(denoiser, encoder, takes(whole))


def flops_per_image(config: DiffusionConfig, facts: Facts) -> float:
    """Floating-point operations of a training step for each image of the usual size: three times
    those of the network forward, nothing computed again."""
    network = nnx.eval_shape(
        lambda: make_network(
            config, facts, nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32
        )
    )
    graph, state = nnx.split(network)
    row: dict[str, Any] = {**text_arrays(facts.prompts, [""])}
    if isinstance(config.data, EncodedConfig):
        for name, (shape, dtype) in config.data.arrays.items():
            row[name] = jax.ShapeDtypeStruct((1, *shape), jnp.dtype(dtype))
    example = jax.ShapeDtypeStruct((1, *facts.usual, facts.channels), jnp.float32)

    def run(state: Any, x_BX: jax.Array, row: Any) -> jax.Array:
        network = nnx.merge(graph, state)
        point = config.objective.point(jnp.full((1,), 0.5))
        return network(x_BX, config.objective, point, network.condition(row))

    return 3 * traced_flops(run, state, example, row)
