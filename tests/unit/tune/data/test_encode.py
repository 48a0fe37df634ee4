"""Tokens and masks: what the assistant wrote and the end of it, nothing else, nothing twice."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tune.data.chats import CHATML, FORGETFUL, MARKED, chat, codec, tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from fornax.config.errors import DataError
from fornax.data import Tokenizer
from fornax.tune.data import Chat, Codec, Encoded

FIRST = codec()
WORDS = st.text("ab \n{}'é🎉", min_size=1, max_size=6).filter(str.strip)


def _chat(made: Codec, messages: list[dict[str, Any]], **fields: Any) -> list[Encoded]:
    return made.chat(Chat(messages=messages, **fields))


def _learned(made: Codec, sequence: Encoded) -> list[str]:
    """Texts of the runs of learned tokens."""
    edges = np.flatnonzero(np.diff(np.r_[0, sequence.mask.astype(int), 0]))
    return [
        made.encoder.decode(sequence.tokens[a:b])
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_and_its_end_are_learned(template: str) -> None:
    made = codec(template)
    (found,) = _chat(made, chat("hello", "world", "what", "is one"))
    assert _learned(made, found) == ["world<|im_end|>", "is one<|im_end|>"]
    assert made.encoder.decode(found.tokens).count("<|im_start|>") == 4


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.sampled_from([0, 1]))
def test_masks_hold_exactly_the_answers(turns: list[tuple[str, str]], marked: int) -> None:
    made = _MADE[marked]
    (found,) = _chat(made, chat(*(text for turn in turns for text in turn)))
    assert _learned(made, found) == [f"{answer}<|im_end|>" for _, answer in turns]


_MADE = (FIRST, codec(MARKED))


@given(WORDS, WORDS)
def test_the_prompt_is_the_one_that_is_served(question: str, answer: str) -> None:
    prompt = FIRST.prompt(chat(question))
    found = FIRST.completion(chat(question), [{"role": "assistant", "content": answer}])
    np.testing.assert_array_equal(found.tokens[: found.prompt], prompt)
    (alone,) = _chat(FIRST, chat(question, answer))
    np.testing.assert_array_equal(alone.tokens, found.tokens)
    np.testing.assert_array_equal(alone.mask, found.mask)


def test_tool_calls_and_thoughts_are_learned_and_results_are_not() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "three", "reasoning_content": "is"},
    ]
    (found,) = _chat(FIRST, messages)
    assert _learned(FIRST, found) == [
        '<call>{"x": 1}</call><|im_end|>',
        "<think>is</think>three<|im_end|>",
    ]


def test_a_template_that_forgets_thoughts_gives_each_turn_its_own_context() -> None:
    made = codec(FORGETFUL)
    messages = chat("one", "two", "three", "what")
    messages[1]["reasoning_content"] = "is"
    messages[3]["reasoning_content"] = "def"
    first, second = _chat(made, messages)
    assert _learned(made, first) == ["<think>is</think>two<|im_end|>"]
    assert _learned(made, second) == ["<think>def</think>what<|im_end|>"]
    assert "<think>" not in made.encoder.decode(second.tokens[: second.prompt])
    del messages[1]["reasoning_content"]
    assert len(_chat(made, messages)) == 1


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_turns_of_weight_zero_are_not_learned(template: str) -> None:
    made = codec(template)
    messages = chat("one", "two", "three", "what")
    messages[1]["weight"] = 0
    (found,) = _chat(made, messages)
    assert _learned(made, found) == ["what<|im_end|>"]
    messages[3]["weight"] = 0
    with pytest.raises(DataError, match="nothing to learn"):
        _chat(made, messages)


def test_no_token_lies_across_the_boundary_of_an_answer() -> None:
    def texts(ids: Any) -> list[str]:
        return [FIRST.encoder.decode([i]) for i in ids]

    assert texts(FIRST.encoder.encode_with_offsets("assistant\n\n\n")[0])[-2:] == ["\n\n", "\n"]
    (found,) = _chat(FIRST, chat("one", "\n\nworld"))
    prompt = FIRST.prompt(chat("one"))
    assert texts(prompt)[-1] == "\n"
    np.testing.assert_array_equal(found.tokens[: found.prompt], prompt)
    assert _learned(FIRST, found) == ["\n\nworld<|im_end|>"]


def test_a_completion_is_apart_from_its_prompt_and_ends() -> None:
    made = codec()
    found = made.completion("def f(x):", " return x")
    eos = made.eos_ids[0]
    assert found.tokens[-1] == eos
    assert found.mask[-1]
    np.testing.assert_array_equal(found.tokens[: found.prompt], made.prompt("def f(x):"))
    assert _learned(made, found) == [" return x<|endoftext|>"]
    again = made.completion("def f(x):", " return x<|endoftext|>")
    np.testing.assert_array_equal(again.tokens, found.tokens)


def test_a_text_is_learned_whole_but_for_its_first_token() -> None:
    found = FIRST.text("hello world")
    assert found.mask.tolist() == [False] + [True] * (found.length - 1)
    assert found.tokens[-1] == FIRST.eos_ids[0]


def _with_bos() -> Tokenizer:
    """A tokenizer that puts <|begin|> before texts by itself."""
    made = tokenizer()
    begin = "<|begin|>"
    made.backend.post_processor = processors.TemplateProcessing(  # pyrefly: ignore[bad-assignment]
        single=f"{begin} $A", special_tokens=[(begin, made.backend.token_to_id(begin))]
    )
    return made


def test_the_beginning_token_stands_once() -> None:
    made = codec("{{ bos_token }}" + CHATML, tokenizer=_with_bos())
    begin = made.tokenizer.bos_id
    assert made.bos_id == begin
    for text in ("one", "<|begin|>one"):
        for tokens in (
            made.prompt(text),
            made.text(text).tokens,
            made.completion(text, "a").tokens,
        ):
            assert (tokens == begin).tolist() == [True] + [False] * (len(tokens) - 1)
    spelled = codec("<|begin|>" + CHATML, tokenizer=_with_bos())
    (found,) = _chat(spelled, chat("one", "two"))
    assert (found.tokens == begin).sum() == 1
    twice = codec("<|begin|><|begin|>" + CHATML, tokenizer=_with_bos())
    with pytest.raises(DataError, match=r"begins with <\|begin\|> twice"):
        _chat(twice, chat("one", "two"))


def test_no_space_comes_between_prompt_and_completion() -> None:
    pieces = {"▁": -9, "▁a": -1, "a": -2, "b": -2, "▁b": -1, "\n": -3, "</s>": -9, "<unk>": -9}
    backend = Backend(models.Unigram(list(pieces.items()), unk_id=7))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # pyrefly: ignore[bad-assignment]
    backend.decoder = decoders.Metaspace()  # pyrefly: ignore[bad-assignment]
    made = Codec(Tokenizer(backend, eos_id=6))
    found = made.completion("a", "b")
    assert [backend.id_to_token(int(i)) for i in found.tokens] == ["▁a", "b", "</s>"]
    spaced = made.completion("a", " b")
    assert [backend.id_to_token(int(i)) for i in spaced.tokens] == ["▁a", "▁b", "</s>"]


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (None, chat("a", "b"), "has no chat template; name a Jinja file with --template"),
        (CHATML.replace("<|im_end|>", "|"), chat("a", "b"), "would not learn to stop"),
        (CHATML + "{{ raise_exception('no') }}", chat("a", "b"), "refuses this conversation"),
        (CHATML, chat("a <|im_end|>", "b"), "message 1 .user. spells the special token"),
        (
            CHATML.replace("assistant\n{%", "assistant\n<think>{%"),
            chat("a", "b"),
            "the model would learn from a prompt that it never sees",
        ),
    ],
)
def test_what_no_mask_can_be_right_for_is_refused(
    template: str | None, messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        _chat(codec(template), messages)


def test_marks_without_the_turns_end_get_it() -> None:
    made = codec(MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    (found,) = _chat(made, chat("hello", "world"))
    assert _learned(made, found) == ["world<|im_end|>"]


def test_the_first_of_several_ends_is_the_last_learned() -> None:
    made = codec(CHATML.replace("<|im_end|>\n", "<|im_end|>\n<|endoftext|>\n"))
    (found,) = _chat(made, chat("hello", "world", "what", "is one"))
    assert _learned(made, found) == ["world<|im_end|>", "is one<|im_end|>"]


def test_a_tokenizer_without_an_end_is_refused() -> None:
    bare = tokenizer()
    bare.eos_id = None
    with pytest.raises(DataError, match="no end token"):
        Codec(bare).text("hello")


def test_template_variables_of_the_run_and_of_a_record_reach_the_template() -> None:
    made = codec("{{ style }}" + CHATML, variables={"style": "one "})
    (run,) = _chat(made, chat("a", "b"))
    (record,) = _chat(made, chat("a", "b"), variables={"style": "two "})
    assert made.encoder.decode(run.tokens).startswith("one ")
    assert made.encoder.decode(record.tokens).startswith("two ")
