"""`POST /v1/completions`: text that goes on from a prompt."""

from collections.abc import Sequence

from fastapi import APIRouter

from fornax.llm.server.answer import Answer, Outputs
from fornax.llm.server.body import StrictRoute, failures, stream_of
from fornax.llm.server.completions import CompletionShaper
from fornax.llm.server.protocol.completions import Completion, CompletionBody
from fornax.llm.server.sampling import sampling_params
from fornax.llm.server.state import RecordOf, Server, ServerOf

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={**failures(404, 429, 503, 504), 200: stream_of("The completions")},
)
async def complete(body: CompletionBody, server: ServerOf, record: RecordOf) -> Answer:
    """Go on from each prompt."""
    record.fields.update(model=body.model, user=body.user, session_id=body.session_id)
    adapter = server.adapter(body.model)
    server.require_ready()
    limits = server.config.request_limits
    limits.check(body, len(body.prompts()))
    prompts = [await _encode(body, server, prompt) for prompt in body.prompts()]
    limits.check_prompts(sum(map(len, prompts)), body.n or 1)
    limit = None if body.max_tokens is None else max(1, body.max_tokens)
    params = [
        sampling_params(
            body,
            server.defaults,
            max_tokens=server.encoder.room(prompt, limit),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for prompt in prompts
    ]
    answer_id = f"cmpl-{body.request_id or record.id}"
    numbers = {server.engine_id(answer_id): number for number in range(len(prompts))}

    def start() -> Sequence[Outputs]:
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

    shaper = CompletionShaper(body, server, record, answer_id, numbers)
    return Answer(server, record, start, shaper, streams=bool(body.stream))


async def _encode(body: CompletionBody, server: Server, prompt: str | list[int]) -> list[int]:
    keep = body.truncate_prompt_tokens
    if isinstance(prompt, str):
        prompt = await server.encoder.encode(
            prompt, add_special_tokens=body.add_special_tokens, truncated=keep is not None
        )
    room = server.encoder.max_model_len - max(1, body.max_tokens or 1)
    return server.encoder.truncate(prompt, keep, body.truncation_side or "left", room)
