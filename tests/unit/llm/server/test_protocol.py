"""Every field that OpenAI's and vLLM's clients can send is supported or refused by name."""

import typing

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from fornax.cli.reference import requests_page
from fornax.llm.server.chat_protocol import ChatBody
from fornax.llm.server.completions import CompletionBody
from fornax.llm.server.embeddings import EmbeddingBody

# Fields of vLLM's request bodies that OpenAI does not have.
VLLM = [
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "ec_transfer_params",
    "ignore_eos",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logprob_token_ids",
    "min_p",
    "min_tokens",
    "priority",
    "prompt_logprobs",
    "repetition_detection",
    "repetition_penalty",
    "request_id",
    "response_format",
    "return_mm_kwargs",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "routed_experts_prompt_start",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream_interval",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "vllm_xargs",
    "watermarking",
]
VLLM_CHAT = [
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "include_reasoning",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
]
VLLM_EMBEDDING = [
    "add_special_tokens",
    "cache_salt",
    "embed_dtype",
    "endianness",
    "mm_processor_kwargs",
    "priority",
    "request_id",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_activation",
]


def openai_fields(params):
    """Names of the fields of the client's request types."""
    names = set()
    for part in dir(params):
        if part.endswith(("ParamsBase", "CreateParams", "ParamsNonStreaming")):
            found = getattr(params, part)
            if isinstance(found, type):
                names |= set(typing.get_type_hints(found, include_extras=True))
    assert names
    return names


@pytest.mark.parametrize(
    ("body", "params", "others"),
    [
        (CompletionBody, completion_create_params, [*VLLM, "prompt_embeds"]),
        (ChatBody, chat_create_params, [*VLLM, *VLLM_CHAT]),
        (EmbeddingBody, embedding_create_params, VLLM_EMBEDDING),
    ],
)
def test_no_known_field_is_unknown_here(body, params, others):
    known = set(body.model_fields) | set(body.refused)
    assert (openai_fields(params) | set(others)) - known == set()


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, EmbeddingBody])
def test_no_field_is_both_honoured_and_refused(body):
    assert not set(body.model_fields) & set(body.refused)


def test_the_table_has_a_line_for_each_field():
    page = requests_page()
    for body in (CompletionBody, ChatBody, EmbeddingBody):
        for name in [*body.model_fields, *body.refused]:
            assert f"| `{name}` |" in page
    assert "None |" not in page.replace("`None` |", "")
