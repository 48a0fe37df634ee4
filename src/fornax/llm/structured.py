"""Constraints on generated text: JSON schemas, regular expressions, choices, grammars.

llguidance compiles them and says which tokens may come next.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from fornax.config.errors import EngineError
from fornax.llm.grammar_process import GrammarProcess, GrammarTimeout
from fornax.llm.sampling.masks import ALL
from fornax.llm.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer, StructTag

__all__ = ["SECONDS", "Grammar", "GrammarCompiler", "too_slow"]

SECONDS = 10.0
"""How long a request waits for its grammar, at most."""
_MASK_SECONDS = 3e-3
"""Processor time that one token's mask may take of the engine, and so of all who are served."""
_MAX_CHARACTERS = 1 << 20
_CACHED_GRAMMARS = 128


class Grammar:
    """What a sequence's tokens must spell, and how far it got.

    `starts_after` are tokens, the end of reasoning, up to which everything is allowed.
    """

    def __init__(self, matcher: "LLMatcher", eos: Sequence[int], starts_after: Sequence[int] = ()):
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._starts_after = tuple(starts_after)
        self._free: list[int] = []
        self._started = not self._starts_after
        self._matched = False

    def copy(self) -> "Grammar":
        """Another one, just as far."""
        other = Grammar(self._matcher.deep_copy(), tuple(self._eos), self._starts_after)
        other._free, other._started, other._matched = self._free, self._started, self._matched
        return other

    def fill(self, row_W: np.ndarray) -> None:
        """Write which tokens may come next: one bit each, uint32 `[W]`, lowest bit first.

        Raises `EngineError` when the constraint became too complex to follow.
        """
        if not self._started:
            row_W[:] = ALL
            return
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        width = min(len(allowed), len(row_W))
        row_W[:width] = allowed[:width]
        row_W[width:] = 0

    def advance(self, token: int) -> bool:
        """Take a token; False, and nothing taken, when it is not allowed."""
        if not self._started:
            self._free = [*self._free, token][-len(self._starts_after) :]
            self._started = tuple(self._free) == self._starts_after
            return True
        if self._matched and self._matcher.is_stopped() and token in self._eos:
            return True  # ignore_eos: one more end of text
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        self._matched = self._matched or taken
        return taken

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(
                f"structured output cannot continue ({_first_line(self._matcher.get_error())}): "
                "simplify the constraint"
            )


class GrammarCompiler:
    """Makes grammars for one tokenizer, in a thread of its own, and caches them.

    `vocab_size` is the number of logits; `eos` are the ids that may end a text. A constraint that
    takes longer than `seconds` to compile is refused.
    """

    def __init__(
        self, backend: Tokenizer, vocab_size: int, eos: Sequence[int], seconds: float = SECONDS
    ):
        self._backend = backend
        self._vocab_size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        self._eos = tuple(eos)
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._made: OrderedDict[str, LLMatcher] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        self._process = GrammarProcess(backend, self._vocab_size, self._eos)

    def compile(
        self, params: StructuredOutputsParams, *, starts_after: Sequence[int] = ()
    ) -> Grammar:
        """A grammar at its start; waits for it.

        Raises `EngineError` for a constraint that is invalid, impossible, or too large.
        """
        made = self.submit(params, starts_after=starts_after)
        try:
            return made.result(self._seconds)
        except WaitedTooLong:
            made.cancel()
            raise too_slow(self._seconds) from None

    def submit(
        self, params: StructuredOutputsParams, *, starts_after: Sequence[int] = ()
    ) -> Future[Grammar]:
        """The same without waiting; the future raises what `compile` raises but for the time."""
        key = constraint_key(params)
        if len(key) > _MAX_CHARACTERS:
            raise EngineError(
                f"structured_outputs has {len(key)} characters; at most {_MAX_CHARACTERS}"
            )
        made = self._recall(key)
        if made is None:
            return self._pool.submit(self._make, key, params, starts_after)
        ready: Future[Grammar] = Future()
        ready.set_result(Grammar(made.deep_copy(), self._eos, starts_after))
        return ready

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    def _recall(self, key: str) -> "LLMatcher | None":
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
            return self._made.get(key)

    def _make(
        self, key: str, params: StructuredOutputsParams, starts_after: Sequence[int]
    ) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        made = self._recall(key)
        if made is None:
            source = constraint_source(params, self._backend)
            self._try(source)
            limits = LLParserLimits(verbose_errors=False)
            made = LLMatcher(self._llguidance(), source, log_level=0, limits=limits)
            made.compute_bitmask()  # the first one prepares others, which copies share
            if made.is_error():
                raise EngineError(
                    f"structured_outputs cannot be followed ({_first_line(made.get_error())}): "
                    "change the constraint"
                )
            with self._lock:
                self._made[key] = made
                if len(self._made) > _CACHED_GRAMMARS:
                    self._made.popitem(last=False)
        return Grammar(made.deep_copy(), self._eos, starts_after)

    def _try(self, source: str) -> None:
        """Compile it where it can be stopped. Raises `EngineError` when it was."""
        self._llguidance()  # first: what is wrong with the tokenizer is an error of its own
        try:
            each = self._process.run(source, self._seconds / 2)
        except GrammarTimeout:
            raise too_slow(self._seconds / 2) from None
        if each > _MASK_SECONDS:
            raise EngineError(
                f"structured_outputs takes {1e3 * each:.1f} ms of each token to follow, at most "
                f"{1e3 * _MASK_SECONDS:g} are taken: shorten its longest texts and patterns"
            )

    def _llguidance(self) -> "LLTokenizer":
        """llguidance's view of the vocabulary; made once, about a second for a large one."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._backend.to_str(),
                        n_vocab=self._vocab_size,
                        eos_token=list(self._eos) or None,
                    )
                except ValueError as error:
                    raise EngineError(
                        f"structured output does not work with this tokenizer ({error})"
                    ) from error
            return self._tokenizer


def too_slow(seconds: float) -> EngineError:
    """The error of a request whose grammar was not compiled in time."""
    return EngineError(f"structured_outputs takes more than {seconds:g} s to compile: simplify it")


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0] if message.strip() else "no reason given"


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


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise EngineError(f"structured_outputs holds {value!r}, which is not JSON")


def _read(text: str, name: str) -> object:
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
    options: dict[str, object] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    text = json.dumps(schema, default=_plain)
    try:
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides=options,  # pyrefly: ignore[bad-argument-type]
        )
    except ValueError as error:
        raise EngineError(f"structured_outputs.json is not a JSON schema ({error})") from error


def _closed(schema: object) -> object:
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
