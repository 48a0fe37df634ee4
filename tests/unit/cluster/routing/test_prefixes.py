"""Prompts as blocks, and the index of who was sent which."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.cluster.routing.prefixes import PrefixIndex, block_keys, prompt_of

TEXT = bytes(range(256)) * 4


def completion(**fields):
    return prompt_of("/v1/completions", orjson.dumps(fields))


@given(st.binary(max_size=600), st.binary(max_size=600), st.binary(max_size=600))
def test_prompts_share_keys_as_far_as_their_blocks_are_equal(shared, first, second):
    one, two = shared + first, shared + second
    common = 0
    while one[common * 64 : common * 64 + 64] == two[common * 64 : common * 64 + 64]:
        if len(one) < common * 64 + 64:
            break
        common += 1
    keys, others = block_keys(one), block_keys(two)
    assert len(keys) == len(one) // 64
    assert keys[:common] == others[:common]
    assert not set(keys[common:]) & set(others[common:])


def test_a_long_prompt_is_looked_at_to_a_limit():
    assert len(block_keys(b"x" * 10_000_000)) == 2048


def test_a_prompt_is_told_by_model_and_salt_and_text():
    prompts = [
        completion(prompt="hello"),
        completion(prompt="hello", model="m"),
        completion(prompt="hello", model="m", cache_salt="s"),
        completion(prompt=[1, 2, 3], model="m"),
        prompt_of("/v1/chat/completions", b'{"messages": [{"role": "user"}]}'),
    ]
    assert all(prompts)
    assert len(set(prompts)) == len(prompts)
    assert completion(prompt=["hello", "other"]) == completion(prompt="hello")
    assert completion(prompt="hello", temperature=1) == completion(prompt="hello")


def test_tools_and_messages_begin_alike_when_a_turn_is_added():
    turns = [{"role": "user", "content": "a" * 500}, {"role": "assistant", "content": "b"}]
    path = "/v1/chat/completions"
    short = block_keys(prompt_of(path, orjson.dumps({"messages": turns[:1]})))
    longer = block_keys(prompt_of(path, orjson.dumps({"messages": turns})))
    assert longer[: len(short) - 1] == short[:-1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", b"[1]"),
        ("/v1/completions", b"{}"),
        ("/v1/completions", b'{"prompt": []}'),
        ("/v1/completions", b"\xff\xfe"),
        ("/v1/models", b'{"prompt": "hello"}'),
        ("/v2/models/x/infer", b'{"prompt": "hello"}'),
    ],
)
def test_what_has_no_prompt_has_none(path, body):
    assert prompt_of(path, body) == b""


def test_matches_are_the_leading_blocks_of_each():
    index = PrefixIndex()
    keys = block_keys(TEXT)
    index.add(keys[:5], "a")
    index.add(keys[:2], "b")
    index.add(keys[3:], "c")  # not from the beginning
    assert index.matches(keys) == {"a": 5, "b": 2}
    assert index.matches([]) == {}
    index.forget("a")
    assert index.matches(keys) == {"b": 2}


def test_what_was_used_longest_ago_is_forgotten_and_ends_before_beginnings():
    index = PrefixIndex(capacity=6)
    old, new = block_keys(TEXT)[:4], block_keys(TEXT[1:])[:4]
    index.add(old, "a")
    index.add(new, "a")
    assert len(index) == 6
    assert index.matches(new) == {"a": 4}
    assert index.matches(old) == {"a": 2}
