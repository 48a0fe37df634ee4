"""The text of tokens one by one is the library's text of them all; it ends at stop strings."""

import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fornax.llm.text import Detokenizer, TokenTable

_ALL = ("byte_level", "llama", "gemma", "metaspace")


@pytest.fixture(params=_ALL)
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def _text(table: TokenTable, ids: list[int], **options: object) -> str:
    detokenizer = Detokenizer(table, **options)  # pyrefly: ignore[bad-argument-type]
    sent = [detokenizer.push([token]).text for token in ids]
    assert all(isinstance(text, str) for text in sent)
    return "".join(sent) + detokenizer.finish()


def _same(found: str, whole: str) -> bool:
    """Equal but for a character cut at the end."""
    return whole.startswith(found) and set(whole[len(found) :]) <= {"\ufffd"}


@given(ids=st.lists(st.integers(0, 420), max_size=40), skip=st.booleans())
def test_any_bytes_read_as_the_library_reads_them(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    table = TokenTable(byte_level)
    assert table.exact
    found = _text(table, ids, skip_special_tokens=skip)
    assert _same(found, byte_level.decode(ids, skip_special_tokens=skip))


@given(text=st.text(), skip=st.booleans())
def test_any_text_comes_back(llama: Tokenizer, gemma: Tokenizer, text: str, skip: bool) -> None:
    for backend in (llama, gemma):
        ids = backend.encode(text).ids
        table = TokenTable(backend)
        assert table.exact
        assert _text(table, ids, skip_special_tokens=skip) == backend.decode(
            ids, skip_special_tokens=skip
        )


def test_no_half_character_is_sent(backend: Tokenizer) -> None:
    ids = backend.encode("日本🎉").ids
    detokenizer = Detokenizer(TokenTable(backend))
    sent = [detokenizer.push([token]).text for token in ids]
    assert [text for text in sent if text] == ["日", "本", "🎉"]
    detokenizer = Detokenizer(TokenTable(backend))
    assert "".join(detokenizer.push([token]).text for token in ids[:-1]) == "日本"
    assert detokenizer.finish() == ""


def test_spaces_at_the_start_are_kept_after_a_prompt(llama: Tokenizer) -> None:
    table = TokenTable(llama)
    ids = llama.encode("  w").ids
    assert _text(table, ids) == llama.decode(ids) == " w"
    assert _text(table, ids, prompt=[1]) == " w"
    assert _text(table, ids, prompt=[1, *llama.encode("hell").ids]) == "  w"


def test_output_continues_the_prompt_with_the_librarys_stream(metaspace: Tokenizer) -> None:
    table = TokenTable(metaspace)
    assert not table.exact
    prompt, ids = metaspace.encode("hell").ids, metaspace.encode(" world").ids
    assert _text(table, ids, prompt=prompt) == " world"


@given(ids=st.lists(st.integers(0, 280), max_size=40), skip=st.booleans())
def test_bytes_that_are_no_text_never_stop_the_stream(
    llama: Tokenizer, gemma: Tokenizer, metaspace: Tokenizer, ids: list[int], skip: bool
) -> None:
    for backend in (llama, gemma, metaspace):
        detokenizer = Detokenizer(TokenTable(backend), skip_special_tokens=skip)
        for token in [*ids, 0x80 + 3]:
            detokenizer.push([token])
        said = "".join(detokenizer.push([token]).text for token in backend.encode("hell w").ids)
        assert said.endswith("hell w")


def test_special_tokens_are_left_out_or_spelled(backend: Tokenizer) -> None:
    table = TokenTable(backend)
    special = sorted(table.special)
    ids = [special[0], *backend.encode("a").ids, special[1]]
    assert _text(table, ids) == "a"
    spelled = table.special[special[0]] + "a" + table.special[special[1]]
    assert _text(table, ids, skip_special_tokens=False) == spelled


@pytest.mark.parametrize("spaces", [True, False])
def test_added_tokens_side_by_side_are_spelled_without_spaces(spaces: bool) -> None:
    from tokenizers import AddedToken, decoders, models

    backend = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()  # pyrefly: ignore[missing-attribute]
    backend.add_tokens([AddedToken("<x>"), AddedToken("<y>")])
    found = _text(
        TokenTable(backend),
        [0, 2, 3, 0],
        skip_special_tokens=False,
        spaces_between_special_tokens=spaces,
    )
    assert found == ("a <x> <y> a" if spaces else "a <x><y> a")


def test_an_id_without_a_token_says_nothing(backend: Tokenizer) -> None:
    assert _text(TokenTable(backend), [10**6]) == ""


def test_single_tokens_have_bytes_and_text(byte_level: Tokenizer, gemma: Tokenizer) -> None:
    for backend in (byte_level, gemma):
        table = TokenTable(backend)
        ids = backend.encode("🎉 w").ids
        assert b"".join(map(table.token_bytes, ids)) == "🎉 w".encode()
    table = TokenTable(gemma)
    assert table.token_text(3 + 0xF0) == "\ufffd"
    assert table.token_text(3 + 0x0A) == "\n"
    assert table.token_text(1) == "<s>"


def test_text_ends_before_a_stop_string_across_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the fox\n\nHuman: hello").ids
    detokenizer = Detokenizer(TokenTable(byte_level), stop=["Human:", "\n\nHum"])
    sent = [detokenizer.push([token]) for token in ids]
    assert "".join(pushed.text for pushed in sent) == "the fox"
    assert detokenizer.stop == sent[-1].stop == "\n\nHum"
    assert sent[-1].consumed == 0
    whole = Detokenizer(TokenTable(byte_level), stop=["\n\nHum"], include_stop_str_in_output=True)
    pushed = whole.push(ids)
    assert pushed.text == "the fox\n\nHum"
    assert byte_level.decode(ids[: pushed.consumed]).endswith("Hum")


def test_only_what_may_begin_a_stop_string_is_held_back(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(TokenTable(byte_level), stop=["fox hunt"])
    sent = [
        detokenizer.push(byte_level.encode(text).ids).text for text in ("the", " fo", "x", "es")
    ]
    assert sent == ["the", " ", "", "foxes"]
    assert detokenizer.push(byte_level.encode(" f").ids).text == " "
    assert detokenizer.finish() == "f"


def test_stop_strings_do_not_count_before_min_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a.b.c.d").ids
    assert len(ids) == 7
    for minimum, text in ((0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c")):
        detokenizer = Detokenizer(TokenTable(byte_level), stop=["."], min_tokens=minimum)
        assert detokenizer.push(ids).text == text


_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def test_long_stop_strings_take_memory_and_time_in_proportion_to_their_length() -> None:
    """Twelve thousand characters once took 70 MB for each completion."""
    from fornax.llm.text.detokenizer import StopStrings

    tracemalloc.start()
    finders = [StopStrings(["ab" * 6000 + "c"]) for _ in range(8)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12_000 * 1000
    # A text that is nearly the stop string, again and again, is read once.
    began = time.process_time()
    sent, stop = finders[0].push("ab" * 100_000)
    assert time.process_time() - began < 2
    assert stop is None
    assert len(sent) + len(finders[0].finish()) == 200_000


@given(pieces=st.lists(st.text("abcd", max_size=5), max_size=12), stops=_STOPS, cut=st.booleans())
def test_a_stop_ends_the_text_the_same_however_it_is_cut(
    pieces: list[str], stops: list[str], cut: bool
) -> None:
    from fornax.llm.text.detokenizer import StopStrings

    whole = "".join(pieces)
    ends = [(whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    expected = whole
    if ends:
        end, _, stop = min(ends)
        expected = whole[: end - len(stop)]
    finder, text, found = StopStrings(stops), "", None
    for piece in pieces if cut else [whole]:
        more, found = finder.push(piece)
        text += more
        assert whole.startswith(text)
        if found:
            break
    else:
        text += finder.finish()
    assert text == expected
    assert (found is not None) == bool(ends)
