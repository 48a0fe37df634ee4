"""`POST /v1/chat/completions`: the next message of a conversation."""

from collections.abc import Sequence

from fastapi import APIRouter

from fornax.llm.server.answer import Answer, Outputs
from fornax.llm.server.body import StrictRoute, failures, stream_of
from fornax.llm.server.chat import ChatShaper
from fornax.llm.server.chat_reading import read_chat
from fornax.llm.server.protocol.chat import Chat, ChatBody
from fornax.llm.server.sampling import sampling_params
from fornax.llm.server.state import RecordOf, Server, ServerOf

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/chat/completions",
    response_model=Chat,
    responses={**failures(404, 429, 503, 504), 200: stream_of("The message")},
)
async def chat(body: ChatBody, server: ServerOf, record: RecordOf) -> Answer:
    """Write the next message."""
    record.fields.update(
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
    text = server.chats.render(body)
    encoder, keep = server.encoder, body.truncate_prompt_tokens
    ids = await encoder.encode(
        text, add_special_tokens=body.add_special_tokens, truncated=keep is not None
    )
    room = encoder.max_model_len - (body.limit() or 1)
    ids = encoder.truncate(ids, keep, body.truncation_side or "left", room)
    limits.check_prompts(len(ids), body.n or 1)
    reading = read_chat(body, server.config, text)
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    params = sampling_params(
        body,
        server.defaults,
        max_tokens=_most_tokens(body, server, ids),
        logprobs=logprobs,
        structured=reading.structured,
        special_tokens=reading.special_tokens,
    )
    after = tuple(await encoder.encode(reading.constrain_after, add_special_tokens=False))
    answer_id = f"chatcmpl-{body.request_id or record.id}"

    def start() -> Sequence[Outputs]:
        return [
            server.engine.generate(
                ids,
                params,
                request_id=server.engine_id(answer_id),
                lora=adapter,
                priority=body.priority,
                prompt=text,
                cache_salt=body.cache_salt,
                constrain_after=after,
            )
        ]

    shaper = ChatShaper(body, server, record, answer_id, prompt=text, reading=reading)
    return Answer(server, record, start, shaper, streams=bool(body.stream))


def _most_tokens(body: ChatBody, server: Server, ids: list[int]) -> int:
    """What the request allows, else the model's default, else what the context has left."""
    most = server.encoder.room(ids, body.limit())
    default = server.defaults.get("max_tokens")
    return most if body.limit() is not None or default is None else min(most, default)
