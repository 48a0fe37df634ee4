"""`LLM`: a model in this process, called like a function."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax.config import from_mapping
from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.llm.build import build_engine
from fornax.llm.config import EngineConfig
from fornax.llm.engine import Failure, Output
from fornax.llm.outputs import EmbeddingOutput, RequestOutput, RequestOutputKind
from fornax.llm.request import PoolingRequest, Request
from fornax.llm.sampling_params import SamplingParams
from fornax.llm.stats import Observer
from fornax.llm.weights import Weights
from fornax.models import Decoder

__all__ = ["LLM"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""
Message = Mapping[str, object]
"""A message of a conversation, in OpenAI's form."""


class LLM:
    """Completes prompts in batches, with vLLM's interface.

    Example:
      LLM("runs/quickstart/hf").generate(["def main("], SamplingParams(max_tokens=64, seed=1))
    """

    def __init__(
        self,
        model: str | Path | Decoder,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        """Load a model and compile its steps.

        Args:
          model: a Hugging Face directory, `org/name[@revision]` on the Hub, a GGUF file, or a
            decoder in memory, whose arrays are shared.
          tokenizer: a tokenizer or its folder; None takes the one in the model's directory.
          observer: called with the figures of steps and requests.
          **options: fields of `EngineConfig`.

        Raises:
          ConfigError: an unknown option, or a bad value.
          CheckpointError, DataError, EngineError: from loading.
        """
        self._parts = build_engine(
            model, from_mapping(EngineConfig, options), tokenizer=tokenizer, observer=observer
        )
        self.tokenizer = self._parts.tokenizer
        """The model's tokenizer."""
        self.max_model_len = self._parts.limits.max_model_len
        """Tokens of a sequence, prompt and output, at most."""
        self._engine = self._parts.engine
        self._ids = itertools.count()
        self._parts.programs.compile_all()
        self._parts.programs.wait()

    @property
    def weights(self) -> Weights:
        """The weights that run now."""
        return self._engine.runner.weights

    @property
    def num_pages(self) -> int:
        """Pages of the cache, over all groups."""
        return sum(pool.num_pages - 1 for pool in self._engine.scheduler.manager.pools)

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, over all groups; they may still serve the prefix cache."""
        return sum(pool.available for pool in self._engine.scheduler.manager.pools)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, by vLLM's name for it."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        return SamplingParams.from_optional(**self._parts.default_sampling_params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results are in the prompts' order.

        Args:
          prompts: one or several.
          sampling_params: for all, or one for each; None takes the model's own defaults.
          lora: adapter for all, or one for each.
          priority: one for each, lower goes first, under scheduling_policy "priority".

        Raises:
          EngineError: a request that is not supported; nothing was run then.
        """
        many = _as_list(prompts)
        params = sampling_params or self.get_default_sampling_params()
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        loras = [lora] * len(many) if lora is None or isinstance(lora, str) else list(lora)
        priorities = list(priority) if priority is not None else [0] * len(many)
        for name, values in (("sampling_params", each), ("lora", loras), ("priority", priorities)):
            if len(values) != len(many):
                raise EngineError(
                    f"{len(values)} {name} for {len(many)} prompts; give one for each, or one"
                )
        requests = []
        for prompt, one, adapter, rank in zip(many, each, loras, priorities, strict=True):
            text, ids = self._read(prompt)
            requests.append(
                self._parts.input_processor.request(
                    ids,
                    _final(one),
                    request_id=self._id(),
                    lora=adapter,
                    priority=rank,
                    prompt=text,
                )
            )
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
          messages: one conversation in OpenAI's form, or several.
          sampling_params: see `generate`.
          lora: adapter for all.
          add_generation_prompt: whether the prompt ends with the beginning of the assistant's turn.
          continue_final_message: whether the last message is to be continued.
          tools: functions in OpenAI's form.
          chat_template_kwargs: variables for the template.

        Raises:
          EngineError: no chat template, or messages it refuses.
        """
        template = self._parts.chat_template
        if template is None:
            raise EngineError(
                "this model has no chat template; use generate, or add chat_template.jinja to its "
                "directory"
            )
        prompts = []
        for conversation in _conversations(messages):
            text = template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "add_special_tokens": False})
        return self.generate(prompts, sampling_params, lora=lora)

    def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[EmbeddingOutput]:
        """The embedding of each prompt: the final norm's output at its last token, of unit length.

        Raises:
          EngineError: a prompt that is not supported.
        """
        found = []
        for prompt in _as_list(prompts):
            _, ids = self._read(prompt)
            found.append(self._parts.input_processor.pooling(ids, request_id=self._id()))
        return self._run(found)

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load an adapter in PEFT's format.

        Raises:
          EngineError: adapters are off, or it does not fit.
        """
        if self._engine.adapters is None:
            raise EngineError("adapters are off; give enable_lora=True")
        self._engine.add_adapter(self._engine.adapters.read(name, path))

    def unload_lora(self, name: str) -> None:
        """Unload an adapter."""
        self._engine.remove_adapter(name)

    def update_weights(self, params: object, version: int) -> None:
        """Continue with other weights of the same model.

        Arrays whose dtype and sharding agree are shared, not copied, except that on one CPU weights
        are packed again. The prefix cache is dropped; tokens carry the version that made them.

        Args:
          params: a `Decoder`, its `nnx.State`, or the nested mapping of its arrays.
          version: what later tokens are tagged with.

        Raises:
          EngineError: names or shapes that are not the model's.
        """
        self._engine.update_weights(self._engine.runner.weights.adopt(params), version)

    def sleep(self) -> None:
        """Give the cache's memory back."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the cache's memory again."""
        self._engine.wake()

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        special = True
        if isinstance(prompt, Mapping):
            special = bool(prompt.get("add_special_tokens", True))
            known = ("prompt", "prompt_token_ids")
            given = [prompt[name] for name in known if prompt.get(name) is not None]
            if len(given) != 1:
                raise EngineError("a prompt's mapping needs one of prompt and prompt_token_ids")
            prompt = given[0]
        if not isinstance(prompt, str):
            return None, [int(token) for token in prompt]
        if self.tokenizer is None:
            raise EngineError("this model came without a tokenizer; give prompts as token ids")
        return prompt, self.tokenizer.backend.encode(prompt, add_special_tokens=special).ids

    def _id(self) -> str:
        return str(next(self._ids))

    def _run(self, requests: Sequence[Request | PoolingRequest]) -> list[Any]:
        if self._engine.is_sleeping:
            raise EngineError("the engine sleeps and has no cache; call wake() first")
        wanted = [request.request_id for request in requests]
        finished: dict[str, Output] = {}
        try:
            for request in requests:
                self._engine.add(request)
            while self._engine.has_work:
                for output in self._engine.step():
                    if isinstance(output, Failure):
                        raise EngineError(output.message)
                    finished[output.request_id] = output
        finally:  # after an error, nothing of these requests stays
            for request_id in wanted:
                self._engine.abort(request_id)
        return [finished[request_id] for request_id in wanted]


def _conversations(messages: Any) -> list[Sequence[Message]]:
    several = bool(messages) and not isinstance(messages[0], Mapping)
    return list(messages) if several else [messages]


def _as_list(prompts: Any) -> list[Prompt]:
    single = isinstance(prompts, str | Mapping) or (
        isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    )
    return [prompts] if single else list(prompts)


def _final(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
