"""Builds an engine from a model directory, or from a model in memory."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from fornax.config.errors import ConfigError, DataError
from fornax.config.hub import find_model
from fornax.config.json_files import read_json_object
from fornax.data import Tokenizer, has_tokenizer, load_tokenizer
from fornax.llm.block_manager import BlockManager, PagePool
from fornax.llm.config import DraftModel, EngineConfig, NGram
from fornax.llm.devices import DeviceSpec, attached_devices
from fornax.llm.engine import Engine
from fornax.llm.input_processor import InputProcessor
from fornax.llm.limits import Limits, draft_limits
from fornax.llm.memory import fit_limits
from fornax.llm.program_cache import ProgramCache
from fornax.llm.routed_experts import check_routes
from fornax.llm.runner import Runner
from fornax.llm.scheduler import Scheduler, SchedulerConfig
from fornax.llm.speculation import DraftProposer, MTPProposer, NGramProposer, Proposer
from fornax.llm.state_pool import StatePool
from fornax.llm.stats import Observer
from fornax.llm.text.chat_template import ChatTemplate
from fornax.llm.weights import Weights, load_weights
from fornax.mesh.startup import use_compilation_cache
from fornax.models import Decoder, DecoderConfig, cache_windows, takes

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
    input_processor: InputProcessor
    programs: ProgramCache
    limits: Limits
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
      model: a Hugging Face directory, the name of one on the Hub, a GGUF file, or a decoder in
        memory.
      config: limits and choices; the defaults if None.
      tokenizer: a tokenizer or its folder; None takes the one in the model's directory, if any.
      observer: called with the figures of steps and requests.
      devices: the engine's, `tensor_parallel_size` of them; None takes the first of JAX's.

    Raises:
      CheckpointError, ConfigError, DataError, EngineError: what is wrong with any of these.
    """
    target = attached_devices(devices)
    config = config or EngineConfig()
    use_compilation_cache(least_seconds=0)
    model = model if isinstance(model, Decoder) else find_model(model)
    folder = None if isinstance(model, Decoder) else model
    beside = Path(tokenizer) if isinstance(tokenizer, str | Path) else folder
    weights = load_weights(model, config, target)
    if config.enable_return_routed_experts:
        check_routes(weights.config)
    draft = _draft_weights(config, weights, target)
    limits = fit_limits(config, weights, target, draft=draft)
    loaded = _tokenizer(folder, tokenizer, weights.config)
    generation = _read_json(folder, "generation_config.json")
    programs = ProgramCache(config.compile_threads)
    runner = Runner(config, weights, limits, programs)
    input_processor = InputProcessor(
        config,
        limits,
        vocab_size=weights.config.vocab_size,
        eos=_eos(weights.config, generation, loaded),
        tokenizer=loaded,
        lora_salt=None if runner.adapters is None else runner.adapters.salt,
    )
    engine = Engine(
        runner,
        _scheduler(config, limits, weights.config, runner.buckets),
        programs,
        proposer=_proposer(config, runner, draft, programs),
        token_text=input_processor.token_text,
        observer=observer,
    )
    return Parts(
        engine=engine,
        input_processor=input_processor,
        programs=programs,
        limits=limits,
        tokenizer=loaded,
        chat_template=_chat_template(beside, folder),
        default_sampling_params={
            field: generation[key]
            for key, field in _GENERATION_FIELDS.items()
            if generation.get(key) is not None
        },
    )


def _scheduler(
    config: EngineConfig, limits: Limits, model: DecoderConfig, buckets: tuple[int, ...]
) -> Scheduler:
    pools = [
        PagePool(pages, window)
        for pages, window in zip(limits.num_pages, cache_windows(model), strict=True)
    ]
    states = None
    if limits.state_versions:
        kept = limits.state_checkpoints
        states = StatePool(limits.max_num_seqs, limits.state_versions, kept)
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            max_loras=config.max_loras if config.enable_lora else 0,
            buckets=buckets,
            inter_token_latency_target=config.inter_token_latency_target,
        ),
        BlockManager(
            pools,
            limits.page_size,
            config.enable_prefix_caching and takes(model, "prefix reuse"),
            states,
        ),
    )


def _proposer(
    config: EngineConfig, runner: Runner, draft: Weights | None, programs: ProgramCache
) -> Proposer | None:
    if isinstance(config.speculative_config, NGram):
        return NGramProposer(config.speculative_config)
    if config.mtp:
        return MTPProposer(runner)
    if draft is None:
        return None
    own = draft_limits(runner.limits, draft.config)
    return DraftProposer(Runner(config, draft, own, programs, draft=True), config.num_drafts)


def _draft_weights(config: EngineConfig, weights: Weights, target: DeviceSpec) -> Weights | None:
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
    elif folder is not None and has_tokenizer(folder):
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
        found = None if folder is None else ChatTemplate.find(folder)
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
    return read_json_object(folder / name)
