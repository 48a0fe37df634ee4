"""Tokens that a grammar allows spell what was asked for; what cannot be is refused."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from fornax.config.errors import EngineError
from fornax.data import Tokenizer, train_bpe
from fornax.llm.sampling_params import StructuredOutputsParams
from fornax.llm.structured import Grammar, GrammarCompiler

_WIDTH = 14
_VOCAB = 440
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 20]}},
    "required": ["n"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ['{"name": "wörld", "n": 20}', "yes no hello <tool>ab</tool>", "日本 🎉"]
    return train_bpe(texts * 20, 420)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer):
    assert tokenizer.eos_id is not None
    made = GrammarCompiler(tokenizer.backend, _VOCAB, [tokenizer.eos_id], seconds=240)
    yield made
    made.close()


def _allowed(grammar: Grammar) -> list[int]:
    row = np.full(_WIDTH, 0xDEADBEEF, np.uint32)
    grammar.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def _walk(grammar: Grammar, tokenizer: Tokenizer, seed: int, steps: int = 300) -> str:
    """Text of random allowed tokens; the end as soon as it is allowed, from half the steps on."""
    choose = random.Random(seed)
    ids: list[int] = []
    for step in range(steps):
        allowed = _allowed(grammar)
        assert allowed, "nothing may follow"
        assert max(allowed) < tokenizer.vocab_size
        ends = tokenizer.eos_id in allowed
        token = choose.choice(allowed)
        if ends and step > 30:
            token = tokenizer.eos_id or 0
        assert grammar.advance(token)
        if token == tokenizer.eos_id:
            return tokenizer.decode(ids)
        ids.append(token)
    return tokenizer.decode(ids)


def _spells(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a grammar takes a text and may end after it."""
    return all(grammar.advance(int(token)) for token in tokenizer.encode(text)) and (
        tokenizer.eos_id in _allowed(grammar)
    )


@pytest.mark.parametrize("seed", range(8))
def test_allowed_tokens_spell_json_of_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    params = StructuredOutputsParams(
        json=_SCHEMA, disable_any_whitespace=True, disable_additional_properties=True
    )
    found = json.loads(_walk(compiler.compile(params), tokenizer, seed))
    assert set(found) <= {"name", "n"}
    assert found["n"] in (1, 20)
    assert len(found.get("name", "")) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_allowed_tokens_match_the_regex(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    regex = r"[a-c]{2,5}(日|🎉)+x?"
    grammar = compiler.compile(StructuredOutputsParams(regex=regex))
    assert re.fullmatch(regex, _walk(grammar, tokenizer, seed))


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"choice": ["yes", "né"]}, ["yes", "né"], ["no", "ye", "yess"]),
        ({"json_object": True}, ['{"a": [1, null]}', "{}"], ["[1]", "1", "{"]),
        ({"json": json.dumps({"type": "integer"})}, ["12"], ["a", '"1"']),
        ({"json": _SCHEMA}, ['{"n": 1, "other": 2}', '{"n":1}'], ['{"n": 2}']),
        (
            {"json": _SCHEMA, "disable_additional_properties": True},
            ['{"n": 1}'],
            ['{"n": 1, "other": 2}'],
        ),
        ({"json": _SCHEMA, "disable_any_whitespace": True}, ['{"n":1}'], ['{"n": 1}']),
        ({"json": _SCHEMA, "whitespace_pattern": "_"}, ['{_"n":_1}'], ['{ "n": 1}']),
        ({"grammar": 'start: "a" B\nB: /b+/'}, ["abb"], ["a", "ba"]),
        ({"grammar": 'root ::= "a" "b"*'}, ["a", "abb"], ["b", "ac"]),
        (
            {
                "structural_tag": json.dumps(
                    {
                        "structures": [
                            {"begin": "<tool>", "schema": {"type": "integer"}, "end": "</tool>"}
                        ],
                        "triggers": ["<tool"],
                    }
                )
            },
            ["hello", "hello <tool>12</tool> and"],
            ["hello <tool>x", "<tools"],
        ),
    ],
)
def test_each_kind_takes_what_fits_and_nothing_else(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    params: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    for text in good:
        assert _spells(compiler.compile(StructuredOutputsParams(**params)), tokenizer, text), text
    for text in bad:
        grammar = compiler.compile(StructuredOutputsParams(**params))
        assert not _spells(grammar, tokenizer, text), text


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable schema"),
        ({"json": {"type": "objectz"}}, "objectz"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"$ref": "http://example.com/a"}}, "not present"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "JSON schema"),
        ({"regex": "(a"}, "invalid regex"),
        ({"regex": "a(?=b)"}, "invalid regex"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"choice": ["a", ""]}, "choice"),
        ({"json_object": False}, "json_object=false"),
        ({"structural_tag": "{}"}, "structures"),
        ({"structural_tag": '{"structures": [1], "triggers": ["<a"]}'}, "structural_tag"),
        (
            {
                "structural_tag": json.dumps(
                    {
                        "structures": [{"begin": "<b>", "schema": {}, "end": ""}],
                        "triggers": ["<a"],
                    }
                )
            },
            "none of the triggers",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    compiler: GrammarCompiler, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        compiler.compile(StructuredOutputsParams(**params))


def test_a_huge_constraint_is_refused_at_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=240)
    with pytest.raises(EngineError, match="at most 1048576"):
        compiler.submit(StructuredOutputsParams(regex="a" * (1 << 20)))
    compiler.close()


def test_a_constraint_that_compiles_too_long_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=0.02)
    words = [f"word number {number}" for number in range(20000)]
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"more than 0\.02 s"):
        compiler.compile(StructuredOutputsParams(json={"enum": words}))
    assert time.monotonic() - began < 100
    compiler.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"grammar": "start: X\nX: /.*a.{18}/ & /.*b.{17}/ & ~/.*c.{16}/\n"},
        {
            "json": {
                "type": "string",
                "allOf": [{"pattern": f".*[a-{chr(98 + i % 20)}].{{{i}}}"} for i in range(40)],
            }
        },
    ],
)
def test_a_constraint_without_end_is_ended_and_holds_up_no_other(
    tokenizer: Tokenizer, params: dict[str, Any]
) -> None:
    """llguidance does not bound the intersection of regular expressions."""
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=8)
    compiler.submit(StructuredOutputsParams(regex="ab")).result(240)  # starts everything
    endless = compiler.submit(StructuredOutputsParams(**params))
    after = compiler.submit(StructuredOutputsParams(regex="a+b"))
    with pytest.raises(EngineError, match="simplify it"):
        endless.result(240)
    assert _spells(after.result(240), tokenizer, "aab")
    compiler.close()


@pytest.mark.parametrize("constraint", [{"choice": ["a" * 250_000]}, {"regex": "a" * 250_000}])
def test_a_constraint_whose_masks_take_long_is_refused(
    constraint: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Also where compiling it takes no longer than is allowed."""
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=120)
    params = StructuredOutputsParams(**constraint)
    with pytest.raises(EngineError, match=r"takes \d+\.\d ms of each token to follow"):
        compiler.compile(params)
    compiler.close()


def test_the_first_mask_is_made_before_the_grammar_is_handed_over(tokenizer: Tokenizer) -> None:
    """It takes long where there are many choices, and the engine would wait for it."""
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=240)
    try:
        choice = StructuredOutputsParams(choice=[f"{i:060d}" for i in range(4000)])
        grammar = compiler.compile(choice)
        row = np.zeros(_VOCAB // 32 + 1, np.uint32)
        begin = time.thread_time()
        grammar.fill(row)
        assert time.thread_time() - begin < 5e-3
    finally:
        compiler.close()


def test_a_text_ends_only_where_it_may(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex="abc"))
    eos = tokenizer.eos_id or 0
    assert not grammar.advance(eos)
    assert not grammar.advance(int(tokenizer.encode("x")[0]))
    assert _spells(grammar, tokenizer, "abc")
    assert _allowed(grammar) == [eos]
    assert grammar.advance(eos)
    assert grammar.advance(eos), "ignore_eos continues with ends of text"
    assert not grammar.advance(int(tokenizer.encode("x")[0]))


def test_reasoning_is_free_until_it_ends(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    end = [int(token) for token in tokenizer.encode("</tool>")]
    params = StructuredOutputsParams(choice=["yes"])
    grammar = compiler.compile(params, starts_after=end)
    assert len(_allowed(grammar)) == _WIDTH * 32
    assert _spells(grammar, tokenizer, "hello </tool")
    assert grammar.advance(end[-1])
    assert tokenizer.eos_id not in _allowed(grammar)
    assert not grammar.advance(int(tokenizer.encode("no")[0]))
    assert _spells(grammar, tokenizer, "yes")


def test_a_copy_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = compiler.compile(StructuredOutputsParams(choice=["ya", "yb"]))
    assert first.advance(int(tokenizer.encode("y")[0]))
    second = first.copy()
    assert _spells(first, tokenizer, "a")
    assert _spells(second, tokenizer, "b")


def test_equal_constraints_are_compiled_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=240)
    compiler.compile(StructuredOutputsParams(json={"a": 1, "b": 2} | {"type": "object"}))
    again = StructuredOutputsParams(json={"a": 1, "b": 2} | {"type": "object"})
    assert compiler.submit(again).done()
    compiler.close()


def test_many_threads_may_compile_at_once(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.backend, _VOCAB, [0], seconds=240)
    with ThreadPoolExecutor(4) as pool:
        params = [StructuredOutputsParams(regex=f"a{{{n % 5}}}b") for n in range(40)]
        made = list(pool.map(compiler.compile, params))
    for number, grammar in enumerate(made):
        assert _spells(grammar, tokenizer, "a" * (number % 5) + "b")
    compiler.close()


def test_a_row_wider_or_narrower_than_the_vocabulary(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer.backend, 10, [0], seconds=240)
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-z]+"))
    wide, narrow = np.ones(40, np.uint32), np.ones(3, np.uint32)
    grammar.fill(wide)
    grammar.fill(narrow)
    np.testing.assert_array_equal(wide[:3], narrow)
    assert not wide[_WIDTH:].any()
    compiler.close()


def test_a_sentencepiece_vocabulary_is_understood() -> None:
    """Spaces written as another character, and bytes as `<0x0A>`."""
    backend = Backend(_sentencepiece())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)  # pyrefly: ignore[missing-attribute]
    backend.add_special_tokens(["</s>", "<unk>"])
    compiler = GrammarCompiler(backend, len(_WORDS), [0], seconds=240)
    grammar = compiler.compile(StructuredOutputsParams(choice=["a b\n"]))
    for token in ("a", "▁b", "<0x0A>"):
        assert grammar.advance(_WORDS.index(token)), token
    row = np.zeros(len(_WORDS) // 32 + 1, np.uint32)
    grammar.fill(row)
    assert row[0] & 1, "the text may end here"
    compiler.close()


_WORDS = ["</s>", "<unk>", "a", "b", "▁", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]


def _sentencepiece() -> models.BPE:
    vocab = {word: number for number, word in enumerate(_WORDS)}
    return models.BPE(vocab=vocab, merges=[("▁", "b")], unk_token="<unk>", byte_fallback=True)
