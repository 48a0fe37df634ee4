"""`POST /v1/completions`: text that continues from a prompt."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator

from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.server.errors import ApiError
from fornax.llm.server.generation import GenerationResponse
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.preprocessing import sampling_params
from fornax.llm.server.protocol import (
    FailFastList,
    GenerationBody,
    JsonObject,
    PositionLogprob,
    Refused,
    Reply,
    TokenId,
    Usage,
    failures,
    one_by_one,
    stream_of,
)
from fornax.llm.server.responses import (
    ResponseBuilder,
    completion_logprobs,
    prompt_logprobs,
    routed_experts,
)
from fornax.llm.server.state import Server, ServerDep
from fornax.llm.server.web import ContextDep, StrictRoute

__all__ = ["Completion", "CompletionBody", "CompletionResponseBuilder", "router"]


_MOST_PROMPTS = 1024


class CompletionBody(GenerationBody):
    """A text to continue from."""

    prompt: str | FailFastList[TokenId] | FailFastList[str] | FailFastList[FailFastList[TokenId]]
    """A text, its token ids, or several of either."""
    echo: bool | None = False
    """Whether the prompt comes before the completion."""
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    """Log probabilities of the tokens, and of this many others at each place."""
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    """Most tokens to make; 0 only with echo."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to the prompt."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **GenerationBody.refused,
        "suffix": Refused("text is made at the end only", ("",)),
        "prompt_embeds": Refused("give text or token ids"),
    }

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionBody":
        if self.prompt == []:
            raise ApiError(400, "prompt is empty; give a text or token ids", param="prompt")
        if len(self.prompts()) > _MOST_PROMPTS:
            raise ApiError(
                400,
                f"prompt has {len(self.prompts())} prompts; send at most {_MOST_PROMPTS}",
                param="prompt",
            )
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 makes nothing without echo", param="max_tokens")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        return one_by_one(self.prompt)


class CompletionLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "repetition"] | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PositionLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class Completion(Reply):
    """The answer to a completion; a stream's chunks are the same object with what is new."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What an echo shows of a prompt."""

    echo: str
    logprobs: JsonObject | None


class CompletionResponseBuilder(ResponseBuilder):
    """Choices of `/v1/completions`."""

    def __init__(
        self,
        body: CompletionBody,
        server: Server,
        context: RequestContext,
        answer_id: str,
        prompts: Mapping[str, int],
    ):
        """`prompts` has the number of each prompt by its request id in the engine."""
        text = (b'"text":', b"")
        kind = "text_completion"
        super().__init__(body, server, context, answer_id=answer_id, kind=kind, text=text)
        self._body = body
        self._numbers = prompts
        self._n = body.n or 1
        self._prompts: dict[str, _Prompt] = {}
        self._offsets: dict[int, int] = {}
        self._plain = not (
            body.echo
            or body.return_token_ids
            or body.logprobs is not None
            or self._chunks.usage == "every"
        )

    def _index(self, output: RequestOutput, completion: CompletionOutput) -> int:
        return self._numbers[output.request_id] * self._n + completion.index

    def _events(self, index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        due = self._due(completion, index)
        if due is None:
            return b""
        if self._plain and due.finish_reason is None:
            return self._chunks.text(index, due.text) if due.text else b""
        return self._chunks.choice(self._choice(index, output, due), self._usage)

    def _whole_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> JsonObject:
        wanted = self._body.prompt_logprobs is not None
        scores = prompt_logprobs(output.prompt_logprobs) if wanted else None
        return {**self._choice(index, output, completion), "prompt_logprobs": scores}

    def _choice(self, index: int, output: RequestOutput, new: CompletionOutput) -> JsonObject:
        """A choice, or what is new of it; the prompt's part comes with its first."""
        first = index not in self._offsets
        prompt = self._prompt(output) if first and self._body.echo else None
        text, ids, logprobs = new.text, new.token_ids, new.logprobs
        if self._body.max_tokens == 0:  # one token was made only to score the prompt
            text, ids, logprobs = "", [], None if logprobs is None else []
        offset = self._offsets.get(index, len(prompt.echo) if prompt else 0)
        shaped, self._offsets[index] = None, offset
        if self._body.logprobs is not None and logprobs is not None:
            shaped, self._offsets[index] = completion_logprobs(
                ids,
                logprobs,
                offset,
                as_ids=self._as_ids,
                top=self._body.logprobs,
                decode=self._decode,
            )
        if prompt is not None:
            text = prompt.echo + text
            if shaped is not None and prompt.logprobs is not None:
                shaped = {key: prompt.logprobs[key] + shaped[key] for key in shaped}
        choice: JsonObject = {
            "index": index,
            "text": text,
            "logprobs": shaped,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice | routed_experts(new)

    def _prompt(self, output: RequestOutput) -> _Prompt:
        found = self._prompts.get(output.request_id)
        if found is None:
            ids = output.prompt_token_ids
            text = output.prompt if output.prompt is not None else self._encoder.decode(ids)
            shaped = None
            if self._body.logprobs is not None and output.prompt_logprobs is not None:
                shaped, _ = completion_logprobs(
                    ids,
                    output.prompt_logprobs,
                    0,
                    as_ids=self._as_ids,
                    top=self._body.logprobs,
                    decode=self._decode,
                )
            found = self._prompts[output.request_id] = _Prompt(text, shaped)
        return found


router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={**failures(404, 429, 503, 504), 200: stream_of("The completions")},
)
async def complete(
    body: CompletionBody, server: ServerDep, context: ContextDep
) -> GenerationResponse:
    """Continue from each prompt."""
    context.log_fields.update(model=body.model, user=body.user, session_id=body.session_id)
    adapter = server.adapter(body.model)
    server.require_ready()
    limits = server.config.request_limits
    limits.check(body, len(body.prompts()))
    most = max(1, body.max_tokens or 1)
    prompts = [
        await server.encoder.tokenize(body, prompt, reserve=most) for prompt in body.prompts()
    ]
    limits.check_prompts(sum(map(len, prompts)), body.n or 1)
    limit = None if body.max_tokens is None else max(1, body.max_tokens)
    params = [
        sampling_params(
            body,
            server.defaults,
            max_tokens=server.encoder.max_new_tokens(prompt, limit),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    answer_id = f"cmpl-{body.request_id or context.id}"
    numbers = {server.engine_id(answer_id, context): number for number in range(len(prompts))}

    def start() -> Sequence[AsyncIterator[RequestOutput]]:
        return [
            server.engine.generate(
                prompts[number],
                params[number],
                request_id=name,
                lora=adapter,
                priority=body.priority,
                prompt=text if isinstance(text := body.prompts()[number], str) else None,
                cache_salt=body.cache_salt,
            )
            for name, number in numbers.items()
        ]

    builder = CompletionResponseBuilder(body, server, context, answer_id, numbers)
    return GenerationResponse(server, context, start, builder, streams=bool(body.stream))
