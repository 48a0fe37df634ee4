"""Putting an engine together from a model directory, or from a model in memory."""

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fornax.config.errors import ConfigError, DataError
from fornax.config.hub import find_model
from fornax.data import Tokenizer, load_tokenizer
from fornax.llm.adapters import Adapters
from fornax.llm.admission import Admission
from fornax.llm.block_manager import BlockManager, PageGroup
from fornax.llm.config import DraftModel, EngineConfig, NGram
from fornax.llm.engine import Engine
from fornax.llm.limits import Limits, draft_limits, limits_without_cache, resolve_limits
from fornax.llm.lora import bind
from fornax.llm.memory import account_of
from fornax.llm.programs import Programs, keep_compiled
from fornax.llm.runner import Runner
from fornax.llm.scheduler import Scheduler, SchedulerConfig
from fornax.llm.speculation import DraftProposer, NGramProposer, Proposer
from fornax.llm.stats import Observer
from fornax.llm.target import Target, attached
from fornax.llm.text.chat_template import ChatTemplate
from fornax.llm.weights import Weights, load_weights
from fornax.models import Decoder, DecoderConfig, cache_windows

__all__ = ["Parts", "build_engine"]

_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json to fields of SamplingParams, as vLLM takes them over."""


@dataclass(frozen=True)
class Parts:
    """An engine and what belongs to it."""

    engine: Engine
    admission: Admission
    programs: Programs
    limits: Limits
    config: EngineConfig
    model_config: DecoderConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    default_sampling_params: Mapping[str, Any]


def build_engine(
    model: str | Path | Decoder,
    config: EngineConfig | None = None,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    observer: Observer | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Parts:
    """Load a model and make an engine for it; nothing is compiled yet.

    Args:
      model: a Hugging Face directory, the name of one on the Hub, or a decoder in memory.
      config: limits and choices; the defaults if None.
      tokenizer: a tokenizer or its folder; None takes the one in the model's directory, if any.
      observer: told of steps and requests.
      devices: the engine's, `tensor_parallel_size` of them; None takes the first of JAX's.

    Raises:
      CheckpointError, ConfigError, DataError, EngineError: what is wrong with any of these.
    """
    target = attached(devices)
    config = config or EngineConfig()
    keep_compiled()
    model = model if isinstance(model, Decoder) else find_model(model)
    folder = None if isinstance(model, Decoder) else model
    words = Path(tokenizer) if isinstance(tokenizer, str | Path) else folder
    weights = load_weights(model, config, target)
    draft = _draft_weights(config, weights, target)
    small = None if draft is None else draft.config
    empty = limits_without_cache(config, weights.config, weights.dtype, target, small)
    other = account_of(config, weights, empty, draft).without_cache
    limits = resolve_limits(config, weights.config, weights.dtype, other, target, small)
    loaded = _tokenizer(folder, tokenizer, weights.config)
    generation = _read_json(folder, "generation_config.json")
    programs = Programs(config.compile_threads)
    adapters = None
    if config.enable_lora:
        adapters = Adapters(weights, slots=config.max_loras, rank=config.max_lora_rank)
    runner = Runner(
        weights,
        limits,
        programs,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        drafts=config.num_drafts,
        places=config.draft_places,
        coarse=config.step_sizes == "coarse",
        state=None if adapters is None else adapters.attach(weights.state),
        bind=None if adapters is None else bind,
    )
    admission = Admission(
        limits,
        vocab_size=weights.config.vocab_size,
        eos=_eos(weights.config, generation, loaded),
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        tokenizer=loaded,
        clock=time.monotonic,
        lora_salt=None if adapters is None else adapters.salt,
    )
    engine = Engine(
        runner,
        _scheduler(config, limits, weights.config, runner.buckets),
        programs,
        proposer=_proposer(config, draft, limits, programs),
        adapters=adapters,
        token_text=admission.token_text,
        observer=observer,
    )
    return Parts(
        engine=engine,
        admission=admission,
        programs=programs,
        limits=limits,
        config=config,
        model_config=weights.config,
        tokenizer=loaded,
        chat_template=_chat_template(words, folder),
        default_sampling_params={
            field: generation[key]
            for key, field in _GENERATION_FIELDS.items()
            if generation.get(key) is not None
        },
    )


def _scheduler(
    config: EngineConfig, limits: Limits, model: DecoderConfig, buckets: tuple[int, ...]
) -> Scheduler:
    groups = [
        PageGroup(pages, window)
        for pages, window in zip(limits.num_pages, cache_windows(model), strict=True)
    ]
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            max_loras=config.max_loras if config.enable_lora else 0,
            buckets=buckets,
        ),
        BlockManager(groups, limits.page_size, config.enable_prefix_caching),
    )


def _proposer(
    config: EngineConfig, draft: Weights | None, limits: Limits, programs: Programs
) -> Proposer | None:
    if isinstance(config.speculative_config, NGram):
        return NGramProposer(config.speculative_config)
    if draft is None:
        return None
    runner = Runner(
        draft,
        draft_limits(limits, draft.config),
        programs,
        max_logprobs=0,
        places=config.draft_places,
        proposes=True,
        coarse=config.step_sizes == "coarse",
        name="draft",
    )
    return DraftProposer(runner, config.num_drafts)


def _draft_weights(config: EngineConfig, weights: Weights, target: Target) -> Weights | None:
    """Those of the draft model, if there is one."""
    draft = config.speculative_config
    if not isinstance(draft, DraftModel):
        return None
    small = load_weights(find_model(draft.model), config, target)
    if small.config.vocab_size != weights.config.vocab_size:
        raise ConfigError(
            f"the draft model {draft.model} has {small.config.vocab_size} tokens and the model "
            f"{weights.config.vocab_size}; use one with the same vocabulary"
        )
    length = config.max_model_len or weights.config.max_position_embeddings
    if small.config.max_position_embeddings < length:
        raise ConfigError(
            f"the draft model {draft.model} is made for {small.config.max_position_embeddings} "
            f"positions and max_model_len is {length}; lower max_model_len"
        )
    return small


def _tokenizer(
    folder: Path | None, given: str | Path | Tokenizer | None, model: DecoderConfig
) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        tokenizer = copy.deepcopy(given)  # changed below; the caller's own may read data
    elif given is not None:
        tokenizer = load_tokenizer(given)
    elif folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
    else:
        return None
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}; "
            "give the model's own tokenizer"
        )
    # A prompt may spell special tokens out: chat templates do.
    tokenizer.backend.encode_special_tokens = False
    return tokenizer


def _chat_template(*folders: Path | None) -> ChatTemplate | None:
    """The first template found."""
    for folder in folders:
        found = None if folder is None or not folder.is_dir() else ChatTemplate.find(folder)
        if found is not None:
            return found
    return None


def _eos(
    model: DecoderConfig, generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    found = set(model.eos_token_ids)
    more = generation.get("eos_token_id")
    if more is not None:
        found |= set(more if isinstance(more, list) else [more])
    if not found and tokenizer is not None and tokenizer.eos_id is not None:
        found = {tokenizer.eos_id}
    return frozenset(found)


def _read_json(folder: Path | None, name: str) -> dict[str, Any]:
    if folder is None or not (folder / name).is_file():
        return {}
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{folder / name} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
