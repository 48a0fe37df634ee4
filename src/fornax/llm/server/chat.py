"""`POST /v1/chat/completions`: the next message of a conversation."""

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter

from fornax.llm.outputs import CompletionOutput, RequestOutput
from fornax.llm.server.chat_parser import ChatParser, ParserChoice, choose_parsers
from fornax.llm.server.chat_protocol import Chat, ChatBody
from fornax.llm.server.generation import GenerationResponse
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.preprocessing import sampling_params
from fornax.llm.server.protocol import JsonObject, failures, stream_of
from fornax.llm.server.responses import (
    ResponseBuilder,
    chat_logprobs,
    prompt_logprobs,
    routed_experts,
)
from fornax.llm.server.state import Server, ServerDep
from fornax.llm.server.web import ContextDep, StrictRoute

__all__ = ["ChatResponseBuilder", "router"]


class ChatResponseBuilder(ResponseBuilder):
    """Choices of `/v1/chat/completions`."""

    def __init__(
        self,
        body: ChatBody,
        server: Server,
        context: RequestContext,
        answer_id: str,
        *,
        prompt: str,
        parsers: ParserChoice,
    ):
        """`prompt` is what the chat template made."""
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        text = (b'"delta":{"content":', b"}")
        super().__init__(body, server, context, answer_id=answer_id, kind=kind, text=text)
        self._body = body
        self._prompt = prompt
        self._named = parsers.named
        self._make_parser = parsers.make_parser
        self._parsers: dict[int, ChatParser] = {}
        self._role = server.config.response_role
        self._echo = _echoed(body, self._role)
        self._begun: set[int] = set()
        self._prompt_fields: JsonObject = {}
        self._plain = not (
            self._make_parser
            or body.logprobs
            or body.return_token_ids
            or self._chunks.usage == "every"
        )

    def _index(self, output: RequestOutput, completion: CompletionOutput) -> int:
        return completion.index

    def _events(self, index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
        begin = b"" if index in self._begun else self._begin(index, output)
        new = self._due(completion, index)
        if new is None:
            return begin
        if self._plain and new.finish_reason is None:
            return begin + self._chunks.text(index, new.text) if new.text else begin
        return begin + b"".join(
            self._chunks.choice(choice, self._usage) for choice in self._deltas(new)
        )

    def _extra(self) -> JsonObject:
        return self._prompt_fields

    def _begin(self, index: int, output: RequestOutput) -> bytes:
        """The event with a choice's role, and with what was asked about the prompt."""
        extra = {} if self._begun else self._about_prompt(output)
        self._begun.add(index)
        delta = {"role": self._role, "content": self._echo}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunks.choice(choice, self._usage, extra)

    def _about_prompt(self, output: RequestOutput) -> JsonObject:
        about: JsonObject = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = output.prompt_token_ids
        if self._body.return_prompt_text:
            about["prompt_text"] = self._prompt
        if self._body.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return about

    def _deltas(self, new: CompletionOutput) -> list[JsonObject]:
        """What is new of a choice, a delta each; the last has how it ended."""
        if self._make_parser is None:
            deltas: list[JsonObject] = [{"content": new.text}] if new.text else []
            called = False
        else:
            parser = self._parsers.setdefault(new.index, self._make_parser())
            deltas = parser.push(new.text)
            if new.finished:
                deltas += parser.finish()
            called = parser.called
        whole = self._ending(new, called)
        if not deltas and not (new.finished or whole["logprobs"] or "token_ids" in whole):
            return []
        choices = [
            {"index": new.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas or [{}]
        ]
        choices[-1] |= whole
        return choices

    def _ending(self, new: CompletionOutput, called: bool) -> JsonObject:
        """What of a choice does not depend on its text."""
        reason = new.finish_reason
        if called and reason == "stop" and not self._named:
            reason = "tool_calls"
        ending: JsonObject = {
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": new.stop_reason,
        }
        if self._body.logprobs and new.logprobs is not None:
            ending["logprobs"] = chat_logprobs(
                new.token_ids,
                new.logprobs,
                as_ids=self._as_ids,
                top=self._body.top_logprobs or 0,
                decode=self._decode,
            )
        if self._body.return_token_ids:
            ending["token_ids"] = new.token_ids
        return ending | routed_experts(new)

    def _whole_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> JsonObject:
        self._prompt_fields = self._about_prompt(output)
        message: JsonObject = {"role": self._role, "content": self._echo + completion.text}
        called = False
        if self._make_parser is not None:
            parser = self._make_parser()
            found = parser.message(completion.text)
            message |= found
            if found["content"] is not None or self._echo:
                message["content"] = self._echo + (found["content"] or "")
            called = parser.called
        return {
            "index": index,
            "message": message,
            **self._ending(completion, called),
        }


def _echoed(body: ChatBody, role: str) -> str:
    """The text of the last message where it is to come before the answer."""
    last = body.messages[-1]
    if not body.echo or last.role != role or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content)


router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/chat/completions",
    response_model=Chat,
    responses={**failures(404, 429, 503, 504), 200: stream_of("The message")},
)
async def chat(body: ChatBody, server: ServerDep, context: ContextDep) -> GenerationResponse:
    """Write the next message."""
    context.log_fields.update(
        model=body.model,
        user=body.user,
        session_id=body.session_id,
        safety_identifier=body.safety_identifier,
        metadata=body.metadata,
    )
    adapter = server.adapter(body.model)
    server.require_ready()
    limits = server.config.request_limits
    limits.check(body, 1)
    text = server.renderer.render(body)
    ids = await server.encoder.tokenize(body, text, reserve=body.limit() or 1)
    limits.check_prompts(len(ids), body.n or 1)
    parsers = choose_parsers(body, server.config, text)
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    params = sampling_params(
        body,
        server.defaults,
        max_tokens=_most_tokens(body, server, ids),
        logprobs=logprobs,
        structured=parsers.structured,
        special_tokens=parsers.special_tokens,
    )
    after = tuple(await server.encoder.encode(parsers.constrain_after, add_special_tokens=False))
    answer_id = f"chatcmpl-{body.request_id or context.id}"

    def start() -> Sequence[AsyncIterator[RequestOutput]]:
        return [
            server.engine.generate(
                ids,
                params,
                request_id=server.engine_id(answer_id, context),
                lora=adapter,
                priority=body.priority,
                prompt=text,
                cache_salt=body.cache_salt,
                constrain_after=after,
            )
        ]

    builder = ChatResponseBuilder(body, server, context, answer_id, prompt=text, parsers=parsers)
    return GenerationResponse(server, context, start, builder, streams=bool(body.stream))


def _most_tokens(body: ChatBody, server: Server, ids: list[int]) -> int:
    """What the request allows, else the model's default, else what the context has left."""
    most = server.encoder.max_new_tokens(ids, body.limit())
    default = server.defaults.get("max_tokens")
    return most if body.limit() is not None or default is None else min(most, default)
