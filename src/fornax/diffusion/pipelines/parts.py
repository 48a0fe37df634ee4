"""The parts of a pipeline's folder as diffusers writes it: model_index.json and one folder each."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import CheckpointError, ConfigError
from fornax.config.json_files import read_json_object
from fornax.diffusion.models.components import load_component
from fornax.diffusion.models.files import read_folder_config
from fornax.diffusion.models.text import PromptTokenizer, load_prompt_tokenizer
from fornax.diffusion.pipelines.scheduler import Scheduler, read_scheduler
from fornax.llm.text import ChatTemplate
from fornax.models import Decoder, load_pretrained

__all__ = ["Parts", "compiled", "texts"]


class Parts:
    """Loads the components of a folder as they are asked for, each once.

    Attributes:
      folder: of the pipeline.
      index: its model_index.json.
      modules: that were loaded, by name.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        modules: Mapping[str, nnx.Module] = MappingProxyType({}),
    ):
        """Read model_index.json.

        Args:
          folder: of the pipeline.
          dtype: of the denoiser and the text encoders; None for what they are stored as. The
            autoencoder computes in float32 where that is float16.
          compute_dtype: of the products; None for that of the weights.
          modules: to take in place of the folder's, by name.

        Raises:
          CheckpointError: there is no readable model_index.json.
        """
        self.folder = Path(folder)
        self._dtype, self._compute_dtype = dtype, compute_dtype
        self.modules: dict[str, Any] = dict(modules)
        self.index = read_json_object(
            self.folder / "model_index.json",
            "give a folder that diffusers saved, with model_index.json, or a run of fornax "
            "diffusion train",
        )

    def has(self, name: str) -> bool:
        """Whether the pipeline has a component."""
        said = self.index.get(name)
        return isinstance(said, list) and said[-1] is not None

    @property
    def controls(self) -> list[str]:
        """Folders of the ControlNets, in the order of the images that they follow."""
        if not self.has("controlnet"):
            return []
        if self.index["controlnet"][-1] != "MultiControlNetModel":
            return ["controlnet"]
        more = itertools.takewhile(
            lambda name: (self.folder / name).is_dir(),
            (f"controlnet_{number}" for number in itertools.count(1)),
        )
        return ["controlnet", *more]

    @property
    def denoisers(self) -> list[str]:
        """The names of the networks that draw: one, or that of the early and that of the late
        steps."""
        return [name for name in ("unet", "transformer", "transformer_2") if self.has(name)]

    def module(self, name: str, **options: Any) -> Any:
        """A component's module; options are those of `load_component`.

        Raises:
          ConfigError: the pipeline has none of the name, or one of another class.
        """
        if name not in self.modules:
            dtype = self._dtype
            if name == "vae" and dtype is not None and jnp.dtype(dtype) == jnp.float16:
                dtype = jnp.float32  # its activations overflow float16
            given = {"dtype": dtype, "compute_dtype": self._compute_dtype, **options}
            at = self.folder / name if name in self.controls else self._of_class(name)
            self.modules[name] = load_component(at, **given)
        return self.modules[name]

    def _of_class(self, name: str) -> Path:
        """A part's folder, but not of another pipeline, whose tensors may have the same shapes."""
        place = self.at(name)
        library, wanted = self.index[name]
        found = read_folder_config(place).get("_class_name", wanted)
        # Files of DiT and PixArt before 0.30 have one name for both of them.
        old = "Transformer2DModel" in (found, wanted)
        if library == "diffusers" and found != wanted and not old:
            raise ConfigError(
                f"{place} holds {found}, and {self.folder / 'model_index.json'} says {wanted}; "
                "copy the pipeline's own there"
            )
        return place

    def language_model(self, name: str, layers: Sequence[int]) -> Callable[..., jax.Array]:
        """States of a language model: int32 tokens and mask [B, S] to [B, S, D].

        Args:
          name: of the component.
          layers: after which states are taken (`Decoder.hidden_states`), one behind another in D.

        Raises:
          ConfigError, CheckpointError: those of `load_pretrained`; a model with fewer layers.
        """

        def call(decoder: Decoder, tokens_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
            states = decoder.hidden_states(tokens_BS, mask_BS, layers=layers)
            return states.reshape(*states.shape[:2], -1)

        return compiled(self.decoder(name), call)

    def decoder(self, name: str) -> Decoder:
        """A language model; errors are those of `load_pretrained`."""
        stored, computed = (None if d is None else jnp.dtype(d) for d in self.dtypes.values())
        return load_pretrained(self.at(name), stored, compute_dtype=computed)

    @property
    def dtypes(self) -> dict[str, DTypeLike | None]:
        """Of text encoders, as `load_component` takes them."""
        return {"dtype": self._dtype, "compute_dtype": self._compute_dtype}

    def chat(self, name: str) -> Callable[..., str]:
        """`chat(messages, ask=True, **variables)`: a conversation as a tokenizer's template writes
        it, where it asks with the beginning of an answer.

        Raises:
          ConfigError: the tokenizer has no template.
        """
        template = ChatTemplate.find(self.at(name))
        if template is None:
            raise ConfigError(
                f"{self.at(name)} has no chat template, which this pipeline's prompts are written "
                "with; copy chat_template.jinja, or tokenizer_config.json with it, there again"
            )

        def write(messages: Any, *, ask: bool = True, **variables: Any) -> str:
            return template.render(messages, add_generation_prompt=ask, variables=variables)

        return write

    def fingerprint(self, *names: str) -> str:
        """The hash of all files of components; those that the pipeline has not are passed over."""
        digest = hashlib.sha256()
        for file in sorted(f for n in names if self.has(n) for f in self.at(n).rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(self.folder)}".encode())
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def tokenizer(self, name: str) -> PromptTokenizer:
        """A tokenizer; errors are those of `load_prompt_tokenizer`."""
        return load_prompt_tokenizer(self.at(name))

    def settings(self, name: str) -> dict[str, Any]:
        """What the folder of an image processor, or of a processor of images and text, says.

        Raises:
          CheckpointError: there is neither preprocessor_config.json nor processor_config.json that
            can be read.
        """
        file = self.at(name) / "preprocessor_config.json"
        whole = self.at(name) / "processor_config.json"
        if file.exists() or not whole.exists():
            return read_json_object(file)
        found = read_json_object(whole).get("image_processor")
        if not isinstance(found, dict):
            raise CheckpointError(f"{whole} says nothing of an image_processor; copy it again")
        return found

    def length(self, name: str, default: int) -> int:
        """Tokens of a prompt that a tokenizer's config allows; `default` where it says none."""
        said = self._said(name, "model_max_length")
        return said if isinstance(said, int) and 0 < said <= 4096 else default

    def pads_left(self, name: str) -> bool:
        """Whether a tokenizer's config says that padding comes before the tokens."""
        return self._said(name, "padding_side") == "left"

    def _said(self, name: str, key: str) -> Any:
        """Of a tokenizer's config; None where it says nothing."""
        file = self.at(name) / "tokenizer_config.json"
        return read_json_object(file).get(key) if file.exists() else None

    @functools.cached_property
    def scheduler(self) -> Scheduler:
        """The scheduler; errors are those of `read_scheduler`."""
        return self.scheduler_with(None)

    def scheduler_with(self, dynamic_shift: Callable[[int, int], float] | None) -> Scheduler:
        """The scheduler with a rule of its own; see `read_scheduler`."""
        return read_scheduler(self.at("scheduler"), dynamic_shift)

    def at(self, name: str) -> Path:
        """A component's folder.

        Raises:
          ConfigError: the pipeline has none of the name.
        """
        if not self.has(name):
            raise ConfigError(
                f"{self.folder / 'model_index.json'} names no {name}, which this pipeline needs; "
                "save it with all its parts"
            )
        return self.folder / name


def compiled(module: nnx.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(module, *arrays)` as a compiled function of the arrays, one program a shape."""
    graph, state = nnx.split(module)

    @jax.jit
    def run(state: Any, *arrays: Any) -> Any:
        return call(nnx.merge(graph, state), *arrays)

    return lambda *arrays: run(state, *arrays)


def texts(prompts: Sequence[str | None]) -> list[str]:
    """Prompts with the empty text for none."""
    return [prompt or "" for prompt in prompts]
