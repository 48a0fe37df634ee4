"""Files of records: what is accepted, and errors that say which line to change and how."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.tune.data.chats import chat, write

from fornax.config.errors import DataError
from fornax.tune.data import (
    Problems,
    parse_example,
    parse_labelled,
    parse_pair,
    parse_prompt,
    read_lines,
)

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}


def read_records(path: Path, *, parse: Any, columns: Any = None) -> list[Any]:
    """The records of a file as the loaders read them."""
    problems = Problems()
    found = []
    for line in read_lines(path, problems, columns=columns):
        with problems.of(line.where):
            found += parse(line)
    problems.check()
    return found


read_examples = functools.partial(read_records, parse=parse_example)
read_labelled = functools.partial(read_records, parse=parse_labelled)
read_pairs = functools.partial(read_records, parse=parse_pair)
read_prompts = functools.partial(read_records, parse=parse_prompt)


def _error(path: Path, lines: list[Any], read: Any = read_examples) -> str:
    with pytest.raises(DataError) as caught:
        read(write(path, lines))
    return str(caught.value)


def test_three_kinds_of_examples_in_one_file(tmp_path: Path) -> None:
    lines = [
        {"messages": chat("hi", "yo")},
        {"prompt": "1 + 1 =", "completion": " 2"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"text": "plain"},
    ]
    found = read_examples(write(tmp_path / "a.jsonl", lines))
    assert [type(record).__name__ for record in found] == [
        "Chat",
        "Completion",
        "Completion",
        "Text",
    ]


def test_tools_and_their_answers_are_read(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, USER, CALLS, RESULT, ANSWER]
    for tools in (TOOLS, json.dumps(TOOLS)):
        path = write(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}])
        assert read_examples(path)[0].tools == TOOLS


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{bad", "not valid JSON"),
        ([1], "must be a JSON object"),
        ({"txt": "a"}, "needs messages, prompt and completion, or text"),
        ({"prompt": "a"}, "needs completion"),
        ({"completion": "a"}, "needs prompt"),
        ({"text": 3}, "text is a int; it must be text"),
        ({"text": "  "}, "text is empty"),
        ({"prompt": "a", "completion": ""}, "empty completion"),
        ({"prompt": "a", "completion": 4}, "completion is a int"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages is a str"),
        ({"messages": ["hi"]}, "message 1 is a str without a role"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "rename from to role"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "role 'bot'; use one of"),
        ({"messages": [USER]}, "ends with the role user"),
        ({"messages": [ANSWER]}, "message 1 has the role assistant, which comes first"),
        ({"messages": [USER, USER, ANSWER]}, "message 2 has the role user, which follows"),
        ({"messages": [USER, ANSWER, ANSWER]}, "message 3 has the role assistant"),
        ({"messages": [USER, {"role": "system", "content": "x"}, ANSWER]}, "role system"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty completion"),
        ({"messages": [{"role": "user"}, ANSWER]}, "has no content"),
        ({"messages": [{"role": "user", "content": " "}, ANSWER]}, "(user) has empty content"),
        ({"messages": [{"role": "user", "content": 1}, ANSWER]}, "content that is a int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
            "part of type image_url; the model reads text",
        ),
        ({"messages": [USER, RESULT, ANSWER]}, "no tool call of the assistant is left"),
        ({"messages": [USER, CALLS, USER, ANSWER]}, "has no answer"),
        ({"messages": [USER, CALLS, {**RESULT, "tool_call_id": "?"}, ANSWER]}, "answers the call"),
        ({"messages": [USER, CALLS], "tools": [{"name": "f"}]}, "not a function definition"),
        ({"messages": [USER, CALLS], "tools": "["}, "tools is text that is not JSON"),
        (
            {"messages": [USER, CALLS], "tools": [{"type": "function", "function": {"name": "g"}}]},
            "calls f, which is none of the tools g",
        ),
        (
            {
                "messages": [
                    USER,
                    {**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "arguments that are not JSON",
        ),
        ({"messages": [USER, {**ANSWER, "weight": 2}]}, "weight 2; use 1"),
    ],
)
def test_a_bad_example_is_named_by_file_and_line(tmp_path: Path, line: Any, said: str) -> None:
    line = json.dumps(line) if isinstance(line, list) else line
    path = tmp_path / "chats.jsonl"
    error = _error(path, [{"text": "fine"}, line, {"text": "fine"}])
    assert error.startswith(f"{path}:2: ")
    assert said in error


def test_the_first_five_problems_come_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    error = _error(path, [{"text": ""}, {"text": "a"}, *[{"text": ""}] * 6])
    assert [f"{path}:{n}: " in error for n in (1, 2, 3, 4, 5, 6, 7)] == [1, 0, 1, 1, 1, 1, 0]
    assert error.endswith("and 2 more records with problems")


def test_pairs_take_prompts_in_text_messages_or_shared(tmp_path: Path) -> None:
    other = {"role": "assistant", "content": "no"}
    lines = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [other]},
        {"chosen": [USER, ANSWER], "rejected": [USER, other]},
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, other], "margin": 2},
        {"prompt": [USER], "chosen": "yo", "rejected": "no"},
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
    ]
    found = read_pairs(write(tmp_path / "a.jsonl", lines))
    assert found[0].chosen == "b"
    for pair in found[1:5]:
        assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], [ANSWER], [other])
    assert found[3].margin == 2.0
    assert (found[5].prompt, found[5].chosen) == ("The sky is", " blue.")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "has chosen and no rejected: the preference is unpaired"),
        ({"prompt": "a", "rejected": "b"}, "has rejected and no chosen"),
        ({"prompt": "a"}, "needs chosen and rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is an empty completion"),
        ({"chosen": "b", "rejected": "c"}, "share no beginning"),
        ({"chosen": [USER, ANSWER], "rejected": "c"}, "one of chosen and rejected is text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin is 'x'"),
        (
            {
                "prompt": [USER],
                "chosen": [{"role": "user", "content": "?"}, ANSWER],
                "rejected": "c",
            },
            "does not begin with the prompt",
        ),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER]}, "must continue"),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(tmp_path: Path, line: Any, said: str) -> None:
    error = _error(tmp_path / "pairs.jsonl", [line], read_pairs)
    assert error.startswith(f"{tmp_path}/pairs.jsonl:1: ")
    assert said in error


def test_labels_come_from_columns_or_from_pairs(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "b", "label": 0},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    found = read_labelled(write(tmp_path / "a.jsonl", lines))
    assert [(r.completion, r.label) for r in found] == [
        ("b", True),
        ("b", False),
        ("b", True),
        ("c", False),
    ]
    assert "label is 'good'" in _error(
        tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b", "label": "good"}], read_labelled
    )
    assert "needs label" in _error(
        tmp_path / "c.jsonl", [{"prompt": "a", "completion": "b"}], read_labelled
    )


def test_prompts_keep_their_other_columns(tmp_path: Path) -> None:
    lines = [{"prompt": "1 + 1?", "answer": 2, "level": {"a": [1]}}, {"messages": [USER]}]
    found = read_prompts(write(tmp_path / "a.jsonl", lines))
    assert found[0].record == {"answer": 2, "level": {"a": [1]}}
    assert found[1].prompt == [USER]
    error = _error(tmp_path / "b.jsonl", [{"messages": [USER, ANSWER]}], read_prompts)
    assert "the model is to answer it; remove the last message" in error


def test_columns_of_other_names_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "1 + 1?", "answer": "2"}])
    found = read_examples(path, columns={"prompt": "question", "completion": "answer"})
    assert (found[0].prompt, found[0].completion) == ("1 + 1?", "2")


def test_a_name_in_columns_that_no_record_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}, {"text": "z"}])
    with pytest.raises(DataError, match=r"columns names label, which no .* they have text"):
        read_examples(path, columns={"prompt": "prompt", "chosen": "label"})
    assert len(read_examples(path, columns={"prompt": "prompt", "text": "text"})) == 2


def test_one_reading_of_every_kind_of_file(tmp_path: Path) -> None:
    lines = [{"messages": [USER, CALLS, RESULT, ANSWER]}, {"messages": [USER, ANSWER]}]
    (tmp_path / "a.json").write_text(json.dumps(lines, indent=1))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet")
    expected = [record.messages for record in read_examples(write(tmp_path / "a.jsonl", lines))]
    for name in ("a.json", "a.jsonl.gz", "a.parquet"):
        found = read_examples(tmp_path / name)
        assert [record.messages for record in found] == expected, name
    assert len(read_examples(tmp_path)) == 8


def test_errors_in_arrays_and_tables_say_where(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n{"text": "a"},\n\n{"text": ""}\n]')
    pq.write_table(pa.table({"text": ["a", ""]}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text('[\n{"text": "a"}\n{"text": "b"}]')
    for name, where in (("a.json", "a.json:4"), ("a.parquet", "a.parquet:row 2"), ("b.json", ":2")):
        with pytest.raises(DataError, match=f"{where}: "):
            read_examples(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "has no records"),
        ("a.txt", "x", "is of no known kind"),
        ("a.json", '{"text": "a"}', "is not a JSON array"),
        ("a.parquet", "x", "not a whole Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        read_examples(tmp_path / name)
    with pytest.raises(DataError, match="matches no file"):
        read_examples(tmp_path / "none.jsonl")
