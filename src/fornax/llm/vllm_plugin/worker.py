"""What vLLM asks of a worker, answered by Fornax's runner: weights, cache, step and sampler."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from vllm.utils.torch_utils import (  # pyrefly: ignore[missing-import]
    STR_DTYPE_TO_TORCH_DTYPE,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec  # pyrefly: ignore[missing-import]
from vllm.v1.outputs import (  # pyrefly: ignore[missing-import]
    EMPTY_MODEL_RUNNER_OUTPUT,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase  # pyrefly: ignore[missing-import]

from fornax.config.errors import EngineError
from fornax.llm.adapters import Adapters
from fornax.llm.devices import attached_devices
from fornax.llm.memory import fit_limits
from fornax.llm.program_cache import ProgramCache
from fornax.llm.runner import Runner, RunnerOutput
from fornax.llm.sampling.sampler import Scored
from fornax.llm.scheduler_output import SchedulerOutput
from fornax.llm.vllm_plugin.batch import Batch, Request
from fornax.llm.vllm_plugin.options import engine_config
from fornax.llm.weights import load_weights
from fornax.mesh.startup import use_compilation_cache
from fornax.models import (
    DecoderConfig,
    cache_windows,
    check_model,
    config_from_hf,
    page_bytes,
    read_config,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest  # pyrefly: ignore[missing-import]
    from vllm.v1.core.sched.output import (  # pyrefly: ignore[missing-import]
        GrammarOutput,
    )
    from vllm.v1.core.sched.output import (  # pyrefly: ignore[missing-import]
        SchedulerOutput as Scheduled,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig  # pyrefly: ignore[missing-import]

__all__ = ["FornaxWorker"]

_log = logging.getLogger("fornax.llm")


class FornaxWorker(WorkerBase):
    """Runs what vLLM's scheduler plans; the only one, whatever the number of devices."""

    # Starting.

    def init_device(self) -> None:
        """JAX finds its devices when it first needs them."""
        use_compilation_cache(least_seconds=0)
        self._config = engine_config(self.vllm_config)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the weights as `fornax serve` does."""
        folder = Path(self.model_config.model)
        if load_dummy_weights or not folder.is_dir():
            raise EngineError(f"{folder} is not a folder; give the model's, weights included")
        check_model(config_from_hf(read_config(folder)), "vLLM plugin")
        self._weights = load_weights(folder, self._config)
        model = _unwindowed(self._weights.config)
        self._limits = fit_limits(self._config, self._weights, attached_devices(), cached=model)

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """A layer's share of a page, for each layer.

        Windowed layers too are given pages for all tokens, as vLLM does where a platform does not
        support its hybrid cache.
        """
        model = self._weights.config
        spec = FullAttentionSpec(
            block_size=self._limits.page_size,
            num_kv_heads=self._limits.cache_heads[0].count,
            head_size=self._limits.cache_heads[0].width,
            dtype=STR_DTYPE_TO_TORCH_DTYPE[str(self._limits.cache_dtype)],
        )
        return {f"layers.{index}": spec for index in range(model.num_layers)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The one that says least: the cache's arrays are made here."""
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        """Bytes for the cache."""
        limits, model = self._limits, _unwindowed(self._weights.config)
        [each] = page_bytes(model, limits.page_size, limits.cache_dtype, limits.cache_heads)
        return each * limits.num_pages[0]

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take over the length that vLLM fitted to the memory."""
        self._limits = dataclasses.replace(self._limits, max_model_len=max_model_len)

    def initialize_from_config(self, kv_cache_config: "KVCacheConfig") -> None:
        """Make the cache and begin compiling."""
        [_] = kv_cache_config.kv_cache_groups
        model = self._weights.config
        groups = len(cache_windows(model))
        self._limits = dataclasses.replace(
            self._limits,
            num_pages=(kv_cache_config.num_blocks,) * groups,
            cache_heads=self._limits.cache_heads * groups,
        )
        self._programs = ProgramCache(self._config.compile_threads)
        self._runner = Runner(self._config, self._weights, self._limits, self._programs, apart=True)
        self._batch = Batch(
            rows=self._limits.max_num_seqs,
            groups=groups,
            vocab_size=model.vocab_size,
            seed=self._config.seed,
        )
        self._planned: tuple[SchedulerOutput, int] | None = None
        self._programs.compile_all()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Wait until every step is compiled."""
        began = time.monotonic()
        self._programs.wait()
        return CompilationTimes(language_model=time.monotonic() - began, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What requests may ask for."""
        return ("generate",)

    def shutdown(self) -> None:
        """Stop compiling."""
        if hasattr(self, "_programs"):
            self._programs.close()

    # While serving.

    def sleep(self, level: int = 1) -> None:
        """Give back the cache's memory; the weights stay where they are.

        Raises:
            EngineError: level 2, which would give back the weights too.
        """
        if level != 1:
            raise EngineError(
                f"sleep level {level} is not supported; level 1 gives back the cache's memory"
            )
        self._runner.executor.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Make the cache again."""
        if tags is None or "kv_cache" in tags:
            self._runner.executor.wake()

    def reset_encoder_cache(self) -> None:
        """There are no encoders."""

    def add_lora(self, lora_request: "LoRARequest") -> bool:
        """Load an adapter; returns whether it was not there yet."""
        name = str(lora_request.lora_int_id)
        adapters = self._need_adapters()
        if name in adapters.paths:
            if not lora_request.load_inplace:
                return False
            adapters.remove(name)
        adapters.add(adapters.read(name, lora_request.lora_path))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; returns whether it was there."""
        adapters, name = self._need_adapters(), str(lora_id)
        known = name in adapters.paths
        if known:
            adapters.remove(name)
        return known

    def list_loras(self) -> set[int]:
        """Adapters that are loaded."""
        return {int(name) for name in self._need_adapters().paths}

    def _need_adapters(self) -> Adapters:
        if self._runner.adapters is None:
            raise EngineError("adapters are off; start vLLM with --enable-lora")
        return self._runner.adapters

    # A step.

    def execute_model(self, scheduler_output: "Scheduled") -> ModelRunnerOutput | None:
        """Dispatch the model's part of a step; vLLM then calls `sample_tokens`."""
        plan = self._batch.plan(scheduler_output)
        if not plan.num_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        vocab = self._weights.config.vocab_size
        for sequence in plan.started:
            request = self._batch.requests[sequence.request_id]
            assert sequence.row is not None, "a sequence starts without a row"
            self._runner.load_row(sequence.row, request.row_params(vocab))
        self._planned = plan, self._runner.forward(plan, self._load_adapters(plan))
        return None

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> ModelRunnerOutput:
        """Sample the step that was dispatched, and wait for it."""
        assert self._planned is not None, "there is no step to sample"
        plan, bucket = self._planned
        self._planned = None
        requests = [self._batch.requests[entry.sequence.request_id] for entry in plan.entries]
        logprobs = [requests[sample.entry].params.logprobs for sample in plan.samples]
        limit = self._config.max_logprobs
        wanted = [_count_logprobs(count, limit) for count in logprobs if count is not None]
        most = max(wanted, default=None)
        result = self._runner.sample(
            plan,
            bucket,
            self._masks(plan, requests, grammar_output),
            set(),
            most is not None,
            _prompt_targets(plan, requests),
        )
        names = [entry.sequence.request_id for entry in plan.entries]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[] for _ in names],
            logprobs=None if most is None else _sampled_logprobs(result, most),
            prompt_logprobs_dict=_prompt_logprobs(result, requests, limit),
        )
        for sample, [token] in zip(plan.samples, result.tokens(), strict=True):
            if token < 0:
                output.num_nans_in_logits = output.num_nans_in_logits or {}
                output.num_nans_in_logits[names[sample.entry]] = 1
                _log.error("the logits of request %s are not finite", names[sample.entry])
                token = 0  # what the sampler has noted too
            sample.sequence.tokens.append(token)
            output.sampled_token_ids[sample.entry].append(token)
        return output

    def _load_adapters(self, plan: SchedulerOutput) -> dict[int, str]:
        """Load the step's adapters; returns the name of each entry's that has one."""
        requests = [self._batch.requests[entry.sequence.request_id] for entry in plan.entries]
        asked = {
            index: adapter
            for index, request in enumerate(requests)
            if (adapter := request.adapter) is not None
        }
        if not asked:
            return {}
        adapters = self._need_adapters()
        for adapter in asked.values():
            if str(adapter.lora_int_id) not in adapters.paths:
                self.add_lora(adapter)
        return {index: str(adapter.lora_int_id) for index, adapter in asked.items()}

    def _masks(
        self, plan: SchedulerOutput, requests: list[Request], grammar_output: "GrammarOutput | None"
    ) -> dict[int, np.ndarray]:
        """Tokens that each sample may choose from, where there are rules about it."""
        grammars: dict[str, np.ndarray] = {}
        if grammar_output is not None:
            names = grammar_output.structured_output_request_ids
            rows = grammar_output.grammar_bitmask.view(np.uint32)
            grammars = {name: row.copy() for name, row in zip(names, rows, strict=True)}
        masks = {}
        for index, sample in enumerate(plan.samples):
            mask = grammars.get(sample.sequence.request_id)
            rules = requests[sample.entry].rules
            if rules is not None:
                known = sample.sequence
                mask = rules.apply(known.tokens, mask, prompt=known.num_prompt)
            if mask is not None:
                masks[index] = mask
        return masks


def _unwindowed(model: DecoderConfig) -> DecoderConfig:
    """The model as vLLM's block tables have it: every layer attends to all tokens."""
    return dataclasses.replace(
        model, attention_pattern=("full",), sliding_window=None, local_rope=None
    )


def _count_logprobs(wanted: int, max_logprobs: int) -> int:
    """Log probabilities besides the token's own; -1 asks for all."""
    return max_logprobs if wanted < 0 else wanted


def _sampled_logprobs(result: RunnerOutput, count: int) -> LogprobsLists:
    """A row for each entry; zeros where nothing was sampled."""
    scores, entries = result.logprobs, len(result.plan.entries)
    ids = np.zeros((entries, count + 1), np.int32)
    values = np.zeros((entries, count + 1), np.float32)
    ranks = np.zeros(entries, np.int32)
    sampled = zip(result.plan.samples, result.tokens(), strict=True)
    for index, (sample, [token]) in enumerate(sampled):
        at = sample.entry
        ids[at, 0], values[at, 0] = max(token, 0), scores.logprobs[index]
        ids[at, 1:] = scores.top_ids[index, :count]
        values[at, 1:] = scores.top_logprobs[index, :count]
        ranks[at] = scores.ranks[index]
    return LogprobsLists(ids, values, ranks)


def _scores_prompt(request: Request) -> bool:
    """Whether its prompt is to be scored, and was not before a preemption."""
    sequence = request.sequence
    return request.params.prompt_logprobs is not None and not sequence.output


def _prompt_targets(plan: SchedulerOutput, requests: list[Request]) -> dict[int, np.ndarray]:
    """The prompt tokens after each token of an entry, where they are to be scored."""
    found = {}
    for index, (entry, request) in enumerate(zip(plan.entries, requests, strict=True)):
        if _scores_prompt(request):
            targets = np.full(entry.count, -1, np.int32)
            known = entry.sequence.prompt[entry.start + 1 : entry.stop + 1]
            targets[: len(known)] = known
            found[index] = targets
    return found


def _prompt_logprobs(
    result: RunnerOutput, requests: list[Request], max_logprobs: int
) -> dict[str, LogprobsTensors]:
    """Those of prompts that are complete with this step."""
    done = {}
    for index, (entry, request) in enumerate(zip(result.plan.entries, requests, strict=True)):
        if not _scores_prompt(request):
            continue
        prompt = entry.sequence.prompt
        count = _count_logprobs(request.params.prompt_logprobs or 0, max_logprobs)
        if request.prompt_scores is None:
            request.prompt_scores = LogprobsTensors.empty_cpu(len(prompt) - 1, count + 1)
        at = entry.start
        for piece in result.scored.get(index, ()):
            at = _store(request.prompt_scores, at, jax.tree.map(np.asarray, piece), prompt, count)
        if entry.stop >= len(prompt):
            done[entry.sequence.request_id] = request.prompt_scores
            request.prompt_scores = None
    return done


def _store(into: LogprobsTensors, at: int, scores: Scored, prompt: list[int], count: int) -> int:
    """Write log probabilities of the prompt's tokens from `at` + 1 on; returns where they end."""
    targets = prompt[at + 1 : at + 1 + len(scores.ranks)]
    rows, stop = slice(len(targets)), at + len(targets)
    ids, values = into.logprob_token_ids.numpy(), into.logprobs.numpy()
    ids[at:stop, 0], values[at:stop, 0] = targets, scores.logprobs[rows]
    ids[at:stop, 1:] = scores.top_ids[rows, :count]
    values[at:stop, 1:] = scores.top_logprobs[rows, :count]
    into.selected_token_ranks.numpy()[at:stop] = scores.ranks[rows]
    return stop
