"""Where tuning starts: the model's config and tokenizer, and the model with its adapters."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import Mesh

from fornax import adapters
from fornax.config.errors import ConfigError, DataError
from fornax.config.hub import find_model, pinned
from fornax.config.json_files import read_json_object
from fornax.data import Tokenizer, load_tokenizer
from fornax.llm.text import ChatTemplate, special_tokens
from fornax.mesh import Rules
from fornax.models import Decoder, DecoderConfig, num_parameters, open_pretrained
from fornax.optim import AdamW
from fornax.train import (
    count_modules,
    is_run,
    load_decoder,
    model_config,
    tokenizer_folder,
)
from fornax.train.state import trained_of
from fornax.tune.config import TuneConfig

__all__ = [
    "ModelOrigin",
    "Origin",
    "Policy",
    "fit_to_model",
    "policy",
    "read_model_origin",
    "read_origin",
]

ConfigT = TypeVar("ConfigT", bound=TuneConfig)

_HIGHEST_OF_ALL = 5e-5
_LOWEST_OF_ADAPTERS = 5e-6


@dataclass(frozen=True, kw_only=True)
class ModelOrigin:
    """What is known of the model to start from by its config alone."""

    path: Path
    """Absolute."""
    name: str
    """What the config of the run says: the path, or a repository of the Hub at its commit."""
    model_config: DecoderConfig
    """With its modules that predict further tokens where they are trained."""
    left_out: int
    """How many such modules its files have that are not."""


@dataclass(frozen=True, kw_only=True)
class Origin(ModelOrigin):
    """What is known of the model to start from, short of its weights."""

    tokenizer: Tokenizer
    """Encodes special tokens that a text spells out, as chat templates do."""
    tokenizer_path: Path
    """The folder it came from."""
    template: ChatTemplate | None
    """The chat template; None where the model has none."""
    eos_ids: tuple[int, ...]
    """Tokens that end a completion; the first is the tokenizer's own, where it has one."""


def read_origin(config: TuneConfig) -> Origin:
    """Read what `config.model` is; no weight is loaded.

    Raises:
      ConfigError: when it is neither a run nor a Hugging Face directory, or has no tokenizer.
      CheckpointError: a JSON file of the model cannot be read.
      DataError: when the tokenizer, or the template given, cannot be read or is too large.
    """
    of_model = read_model_origin(config, find_model(config.model))
    path, model = of_model.path, of_model.model_config
    folder = tokenizer_folder(path)
    if folder is None:
        raise ConfigError(
            f"there is no tokenizer in {path}; put tokenizer.json and tokenizer_config.json there"
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} ids and the model "
            f"{model.vocab_size}; give the model its own tokenizer"
        )
    tokenizer.backend.encode_special_tokens = False
    return Origin(
        path=path,
        name=of_model.name,
        model_config=model,
        left_out=of_model.left_out,
        tokenizer=tokenizer,
        tokenizer_path=folder,
        template=_template(config, folder, path, tokenizer),
        eos_ids=_eos_ids(model, tokenizer, path),
    )


def read_model_origin(config: TuneConfig, folder: Path) -> ModelOrigin:
    """What the config of the model in `folder` says, which needs neither weights nor tokenizer.

    Raises:
      ConfigError: when it is neither a run nor a Hugging Face directory.
    """
    path = folder.expanduser().resolve()
    model = model_config(path, mtp=config.trains_modules)
    return ModelOrigin(
        path=path,
        name=pinned(config.model, path),
        model_config=model,
        left_out=count_modules(path) - model.num_mtp_modules,
    )


def fit_to_model(config: ConfigT, origin: ModelOrigin) -> ConfigT:
    """The config with what follows from the model: its path, or its commit on the Hub, so that the
    run is found to belong to it from any folder, and `max_length`, no larger than its positions."""
    length = min(config.max_length, origin.model_config.max_position_embeddings)
    return dataclasses.replace(config, model=origin.name, max_length=length)


def _eos_ids(model: DecoderConfig, tokenizer: Tokenizer, path: Path) -> tuple[int, ...]:
    """The tokenizer's, the model's and those of generation_config.json, each once."""
    own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    file = path / "generation_config.json"
    more: object = None
    if file.is_file():
        more = read_json_object(file).get("eos_token_id")
    listed = more if isinstance(more, list) else [] if more is None else [more]
    return tuple(dict.fromkeys([*own, *model.eos_token_ids, *listed]))


def _template(
    config: TuneConfig, folder: Path, path: Path, tokenizer: Tokenizer
) -> ChatTemplate | None:
    found = ChatTemplate.find(folder) or ChatTemplate.find(path)
    if config.template is None:
        return found
    file = Path(config.template).expanduser()
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"template={config.template} cannot be read: {error}; name a file of Jinja text"
        ) from error
    if found is not None:
        return found.with_source(source)
    return ChatTemplate(source, special_tokens(tokenizer))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The model to be trained: what a `train.Task` needs of it."""

    build: Callable[[nnx.Rngs], Decoder]
    """A decoder with fresh weights, adapters attached."""
    pretrained: Callable[[Mesh, Rules], Decoder]
    """The decoder with its weights, laid on the mesh, adapters attached."""
    trained: Filter
    """NNX filter of what is trained."""
    adapted: tuple[str, ...]
    """Paths of the modules with adapters; empty where all is trained."""
    parameters: int
    """All parameters, adapters included."""
    trained_parameters: int
    """Those that are trained."""
    caution: str = ""
    """What is unusual about the learning rate, and which parts of the model are left out."""

    @property
    def text(self) -> str:
        """What is trained, in a line."""
        share = self.trained_parameters / self.parameters
        trained = f"{self.trained_parameters:,} of {self.parameters:,} parameters are trained"
        if self.adapted:
            trained = f"{trained} ({share:.2%}): adapters on {', '.join(self.adapted)}"
        return f"{trained}. {self.caution}" if self.caution else trained


def policy(config: TuneConfig, origin: ModelOrigin) -> Policy:
    """The model that `config` trains.

    Raises:
      ConfigError: when a pattern of `config.lora` matches no module, or `config.freeze_router` has
        nothing to freeze.
    """
    dtypes = {"dtype": config.dtypes.param_dtype, "compute_dtype": config.dtypes.compute_dtype}
    adapted: list[str] = []

    held = None
    if config.lora is not None and config.lora.quantize == "stored" and not is_run(origin.path):
        held = adapters.held_codes(open_pretrained(origin.path, dtypes["dtype"]))

    def adapt(decoder: Decoder, rngs: nnx.Rngs) -> Decoder:
        if config.lora is not None:
            adapted[:] = adapters.attach(decoder, config.lora, rngs=rngs, held=held)
        return decoder

    def build(rngs: nnx.Rngs) -> Decoder:
        return adapt(Decoder(origin.model_config, rngs=rngs, **dtypes), rngs)

    def pretrained(mesh: Mesh, rules: Rules) -> Decoder:
        rngs, place = nnx.Rngs(config.seed), {"mesh": mesh, "rules": rules}
        if config.lora is not None and config.lora.quantize and not is_run(origin.path):
            return adapters.load_quantized(origin.path, config.lora, rngs=rngs, **place, **dtypes)
        mtp = config.trains_modules
        return adapt(load_decoder(origin.path, mtp=mtp, **place, **dtypes), rngs)

    trained = trained_of(config.lora, freeze_router=config.freeze_router)
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(config.seed)))
    if config.freeze_router:
        _check_frozen_router(origin.model_config, adapted)
    count = _count(nnx.state(abstract, trained))
    return Policy(
        build=build,
        pretrained=pretrained,
        trained=trained,
        adapted=tuple(adapted),
        parameters=num_parameters(origin.model_config) + (0 if config.lora is None else count),
        trained_parameters=count,
        caution=" ".join(filter(None, (_caution(config), _left_out(origin)))),
    )


def _check_frozen_router(model: DecoderConfig, adapted: Sequence[str]) -> None:
    """Refuse `freeze_router` where there is no router, or where its adapters are trained."""
    if model.experts is None:
        raise ConfigError("freeze_router=True, and this model has no experts; leave it out")
    if routers := [path for path in adapted if path.endswith("/router")]:
        raise ConfigError(
            f"freeze_router=True, and lora.targets adapts {', '.join(routers)}; leave one of them "
            "out"
        )


def _caution(config: TuneConfig) -> str:
    """A warning where the learning rate is one for adapters and all is trained, or vice versa.

    One default cannot fit both. Only AdamW's rates are known well enough to say so.
    """
    rate = config.optim.learning_rate
    if not isinstance(config.optim.optimizer, AdamW):
        return ""
    if config.lora is None and rate > _HIGHEST_OF_ALL:
        return (
            f"learning_rate={rate:g} is one for adapters: training all parameters with it forgets "
            "much of what the model knew; 1e-6 to 2e-5 is usual (--optim.learning-rate 1e-5)"
        )
    if config.lora is not None and rate < _LOWEST_OF_ADAPTERS:
        return (
            f"learning_rate={rate:g} is one for whole models: adapters hardly move with it; 1e-5 "
            "to 3e-4 is usual (--optim.learning-rate 1e-5)"
        )
    return ""


def _left_out(origin: ModelOrigin) -> str:
    """A sentence on modules that predict further tokens and that the run does without."""
    if not origin.left_out:
        return ""
    modules = "module" if origin.left_out == 1 else f"{origin.left_out} modules"
    return (
        f"The model's {modules} for multi-token prediction will be left out, so that what is tuned "
        "cannot speculate by `mtp`; fornax tune sft with --mtp-weight 0.1, and without lora, "
        "trains them too"
    )


def _count(state: nnx.State) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
