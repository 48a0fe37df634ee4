"""Turns a prompt and its parameters into a request, or refuses it with an error that says why."""

import functools
import itertools
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Unpack

from fornax.config.errors import EngineError
from fornax.data import Tokenizer
from fornax.llm.config import EngineConfig
from fornax.llm.limits import Limits
from fornax.llm.request import (
    Completion,
    PoolingOptions,
    PoolingRequest,
    RepetitionDetector,
    Request,
    RequestOptions,
)
from fornax.llm.sampling.masks import TokenRules, bad_word_tokens
from fornax.llm.sampling_params import SamplingParams, StructuredOutputsParams
from fornax.llm.sequence import Sequence
from fornax.llm.structured import Grammar, GrammarCompiler
from fornax.llm.text.detokenizer import Detokenizer
from fornax.llm.text.token_table import TokenTable

__all__ = ["InputProcessor"]


class InputProcessor:
    """Knows a model's limits, vocabulary and tokenizer; safe to use from several threads."""

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        *,
        vocab_size: int,
        eos: frozenset[int],
        tokenizer: Tokenizer | None,
        lora_salt: Callable[[str], bytes] | None,
    ) -> None:
        self._limits = limits
        self._vocab = vocab_size
        self._eos = eos
        self._max_logprobs = config.max_logprobs
        self._tokenizer = tokenizer
        self._lora_salt = lora_salt
        self._table: TokenTable | None = None
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            self._table = TokenTable(tokenizer.backend)
            self._grammars = GrammarCompiler(tokenizer.backend, vocab_size, sorted(eos))
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)

    def token_text(self, token: int) -> str:
        """The text of one token, special ones as they are spelled."""
        return "" if self._table is None else self._table.token_text(token)

    def warm_up(self) -> None:
        """Prepare grammars in the background: the first one of a tokenizer takes seconds."""
        if self._grammars is not None:
            self._grammars.submit(StructuredOutputsParams(choice=["a"]))

    def close(self) -> None:
        """Stop the threads of grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def grammar(
        self, params: SamplingParams, constrain_after: tuple[int, ...] = ()
    ) -> "Future[Grammar] | None":
        """What a request's text must spell, begun to be compiled in a thread; None for anything.

        Args:
          constrain_after: tokens, such as the end of reasoning, up to which all is allowed.

        Raises:
          EngineError: a constraint that is too large; the future raises what else is wrong.
        """
        if params.structured_outputs is None:
            return None
        self._check_text(params)
        assert self._grammars is not None, "there is a tokenizer"
        return self._grammars.submit(params.structured_outputs, starts_after=constrain_after)

    def request(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        grammar: Grammar | None = None,
        token_logprobs: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Prepare a request for `Engine.add`.

        `grammar` is what `grammar` made; without it the constraint is compiled here.

        With `token_logprobs` its outputs have the sampled tokens' log probabilities as plain
        numbers, much cheaper than `SamplingParams.logprobs`.

        Raises:
          EngineError: a prompt or parameters that is not supported; it names them.
        """
        self._check_prompt(prompt_ids, room=1)
        params.check_for_model(vocab_size=self._vocab, max_logprobs=self._max_logprobs)
        self._check_text(params)
        if grammar is None and params.structured_outputs is not None and self._grammars is not None:
            grammar = self._grammars.compile(params.structured_outputs)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        rules = self._rules(params)
        most = self._limits.max_model_len
        if params.max_tokens is not None:
            most = min(most, len(prompt_ids) + params.max_tokens)
        sequence = self._sequences(prompt_ids, request_id, most, options)
        # Later completions share the first one's pages, scored or not.
        reads = params.reads_cache and params.prompt_logprobs is None
        detection = params.repetition_detection
        completions = [
            Completion(
                index=index,
                sequence=sequence(id=next(self._ids), reads_cache=index > 0 or reads),
                params=params,
                eos=self._eos,
                stop_ids=frozenset(params.stop_token_ids),
                seed=seed + index,
                vocab_size=self._vocab,
                detokenizer=self._detokenizer(prompt_ids, params),
                grammar=grammar if grammar is None or index == 0 else grammar.copy(),
                rules=rules,
                repetition=None if detection is None else RepetitionDetector(detection),
                token_logprobs=[] if token_logprobs else None,
            )
            for index in range(params.n)
        ]
        return Request(
            request_id=request_id,
            prompt=options.get("prompt"),
            prompt_ids=prompt_ids,
            params=params,
            completions=completions,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            arrival=completions[0].sequence.arrival,
        )

    def pooling(
        self, prompt_ids: list[int], *, request_id: str, **options: Unpack[PoolingOptions]
    ) -> PoolingRequest:
        """Prepare a request for an embedding, for `Engine.add`.

        Raises:
          EngineError: a prompt that is not supported.
        """
        self._check_prompt(prompt_ids, room=0)
        sequence = self._sequences(prompt_ids, request_id, len(prompt_ids), options)
        return PoolingRequest(request_id, sequence(id=next(self._ids), pooling=True))

    def _sequences(
        self, prompt_ids: list[int], request_id: str, most: int, options: PoolingOptions
    ) -> Callable[..., Sequence]:
        """Makes the request's sequences, of at most `most` tokens each."""
        lora = options.get("lora")
        return functools.partial(
            Sequence,
            request_id=request_id,
            prompt=prompt_ids,
            max_len=most,
            priority=options.get("priority", 0),
            arrival=time.monotonic(),
            salt=self._salt(lora, options.get("cache_salt")),
            lora=lora,
        )

    def _check_prompt(self, prompt_ids: list[int], room: int) -> None:
        most = self._limits.max_model_len
        if not prompt_ids:
            raise EngineError("the prompt is empty; give it at least one token")
        if len(prompt_ids) + room > most:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens; this model's maximum context length "
                f"is {most} tokens, of which {room} must be left for the output: shorten the prompt"
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab:
            wrong = next(token for token in prompt_ids if not 0 <= token < self._vocab)
            raise EngineError(
                f"token id {wrong} of the prompt is outside the vocabulary of {self._vocab} tokens"
            )

    def _check_text(self, params: SamplingParams) -> None:
        if self._tokenizer is not None:
            return
        needs = {
            "stop": params.stop,
            "bad_words": params.bad_words,
            "structured_outputs": params.structured_outputs,
        }
        for name, value in needs.items():
            if value:
                raise EngineError(f"{name} needs a tokenizer, and this model came without one")

    def _rules(self, params: SamplingParams) -> TokenRules | None:
        wanted = (
            params.bad_words,
            params.min_tokens,
            params.allowed_token_ids is not None,
            params.trace_decode_token_ids,
        )
        if not any(wanted):
            return None
        words: list[list[int]] = []
        if self._tokenizer is not None:
            encode = self._tokenizer.encode
            words = bad_word_tokens(params.bad_words, lambda text: list(encode(text)), self._vocab)
        stops = sorted(self._eos | set(params.stop_token_ids))
        return TokenRules(params, stop_ids=stops, bad_words=words, vocab_size=self._vocab)

    def _detokenizer(self, prompt_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self._table is None or not params.detokenize:
            return None
        return Detokenizer(
            self._table,
            prompt=prompt_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _salt(self, lora: str | None, cache_salt: str | None) -> bytes:
        salt = (cache_salt or "").encode()
        if lora is None:
            return salt
        if self._lora_salt is None:
            raise EngineError(
                f"adapter {lora!r} cannot be used: adapters are off; start the engine with "
                "enable_lora"
            )
        return salt + b"\0" + self._lora_salt(lora)
