"""From `StructuredOutputsParams` to llguidance's grammars."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from fornax.config.errors import EngineError
from fornax.llm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import StructTag

__all__ = ["constraint_key", "constraint_source"]


def constraint_key(params: StructuredOutputsParams) -> str:
    """Text that equal constraints share."""
    schema = _read(params.json, "json") if isinstance(params.json, str) else params.json
    shared = (
        params.regex,
        params.choice,
        params.grammar,
        params.json_object,
        params.disable_any_whitespace,
        params.disable_additional_properties,
        params.whitespace_pattern,
        params.structural_tag,
    )
    # The order of keys stays: it is the order in which the model writes them.
    return json.dumps([schema, *shared], default=_plain)


def constraint_source(params: StructuredOutputsParams, backend: Tokenizer) -> str:
    """The grammar as llguidance reads it. Raises `EngineError` for one that is malformed."""
    from llguidance import LLMatcher

    if params.json is not None:
        return _from_schema(params.json, params)
    if params.json_object:
        return _from_schema({"type": "object"}, params)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return LLMatcher.grammar_from_lark(_from_choice(params.choice))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(_from_grammar(params.grammar))
    if params.structural_tag is not None:
        return _from_structural_tag(params.structural_tag, backend)
    raise EngineError("structured_outputs.json_object=false constrains nothing; leave it out")


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise EngineError(f"structured_outputs holds {value!r}, which is not JSON")


def _read(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"structured_outputs.{name} is not valid JSON ({error})") from error


def _from_schema(schema: object, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if isinstance(schema, str):
        schema = _read(schema, "json")
    if not isinstance(schema, Mapping | bool):
        raise EngineError(f"structured_outputs.json is {schema!r}; give a JSON schema, an object")
    if params.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    text = json.dumps(schema, default=_plain)
    try:
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides=options,  # pyrefly: ignore[bad-argument-type]
        )
    except ValueError as error:
        raise EngineError(f"structured_outputs.json is no JSON schema ({error})") from error


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it names properties only."""
    if isinstance(schema, Mapping):
        found = {key: _closed(value) for key, value in schema.items()}
        named = "properties" in found or "patternProperties" in found
        if named and "additionalProperties" not in found:
            found["additionalProperties"] = False
        return found
    return [_closed(item) for item in schema] if isinstance(schema, list | tuple) else schema


def _from_choice(choice: object) -> str:
    words = list(choice) if isinstance(choice, list | tuple) else []
    if not words or not all(isinstance(word, str) and word for word in words):
        raise EngineError(f"structured_outputs.choice={choice!r}: give texts that are not empty")
    return "start: " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


def _from_grammar(grammar: str) -> str:
    """Lark's syntax; GBNF is translated, as in vLLM."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the translator raises bare Exception
        raise EngineError(f"structured_outputs.grammar cannot be read ({error})") from error


def _from_structural_tag(text: str, backend: Tokenizer) -> str:
    """Free text in which each trigger begins a constrained stretch: `structures`, `triggers`."""
    from llguidance import StructTag

    tag = _read(text, "structural_tag")
    if not isinstance(tag, dict) or "structures" not in tag or "triggers" not in tag:
        raise EngineError(
            "structured_outputs.structural_tag must be JSON with structures and triggers; other "
            "formats are not supported"
        )
    tags = [_tag(structure, tag["triggers"]) for structure in tag["structures"]]
    if not tags:
        raise EngineError("structured_outputs.structural_tag names no structures; give one")
    angled = {t.trigger for t in tags if t.trigger.startswith("<") and t.trigger.endswith(">")}
    tokens = {trigger for trigger in angled if backend.token_to_id(trigger) is not None}
    if tokens and tokens != angled:
        raise EngineError(
            "structured_outputs.structural_tag mixes triggers that are tokens "
            f"({', '.join(sorted(tokens))}) and triggers that are not "
            f"({', '.join(sorted(angled - tokens))}); use one kind"
        )
    return StructTag.to_grammar(tags, assume_special=bool(tokens))


def _tag(structure: object, triggers: object) -> "StructTag":
    from llguidance import StructTag

    if not isinstance(structure, dict) or not isinstance(triggers, list):
        raise EngineError("structural_tag: structures are objects, triggers a list of texts")
    begin, schema, end = (structure.get(key) for key in ("begin", "schema", "end"))
    if not (isinstance(begin, str) and isinstance(schema, dict) and isinstance(end, str)):
        raise EngineError("structural_tag: each structure needs begin, schema and end")
    for trigger in triggers:
        if isinstance(trigger, str) and trigger and begin.startswith(trigger):
            return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
    raise EngineError(
        f"structural_tag: begin={begin!r} starts with none of the triggers {triggers}"
    )
