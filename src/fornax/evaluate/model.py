"""A model under evaluation: its weights, its tokenizer, and how prompts become tokens."""

import functools
from dataclasses import dataclass

from fornax.models import Decoder
from fornax.train import load_decoder
from fornax.tune.config import TuneConfig
from fornax.tune.data import Codec
from fornax.tune.policy import Origin, read_origin

__all__ = ["EvaluatedModel", "open_model"]


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model and what belongs to it; its weights are read when they are first asked for."""

    name: str
    origin: Origin
    codec: Codec

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The weights, adapters merged in.

        Raises:
          CheckpointError: weights that are missing, damaged or of another shape.
        """
        decoder = load_decoder(self.origin.path)
        decoder.eval()
        return decoder

    @property
    def max_positions(self) -> int:
        """Tokens of a sequence that the model is made for."""
        return self.origin.model_config.max_position_embeddings


def open_model(path: str, template: str | None = None) -> EvaluatedModel:
    """The model at `path`: a Hugging Face directory or a run; no weight is read yet.

    Raises:
      ConfigError, DataError: what is wrong with it or its tokenizer.
    """
    origin = read_origin(TuneConfig(model=path, data="", max_length=2, template=template))
    codec = Codec(origin.tokenizer, template=origin.template, eos_ids=origin.eos_ids)
    return EvaluatedModel(name=path, origin=origin, codec=codec)
