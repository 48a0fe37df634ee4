"""Tasks of lm-eval-harness on our engine, through the harness's Python API."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from fornax.config.errors import ConfigError
from fornax.evaluate.config import EvaluateConfig
from fornax.evaluate.model import EvaluatedModel
from fornax.evaluate.perplexity import windows
from fornax.llm import LLM, SamplingParams

__all__ = ["HarnessModel", "check_harness", "run_tasks"]

Settings = dict[str, Any]
"""Generation settings of a task, as the harness gives them."""

TaskResults = dict[str, Any]
"""What the harness found: figures by task, versions, numbers of samples."""

_SCORE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
_MAX_TOKENS = 256
_GROUP = 256


def check_harness() -> None:
    """See that the harness can be imported.

    Raises:
      ConfigError: saying how to install it.
    """
    try:
        import lm_eval.tasks  # noqa: F401  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ConfigError(
            f"tasks need lm-eval-harness, which cannot be imported ({error}); pip install lm-eval, "
            "and datasets for its tasks' data"
        ) from error


class HarnessModel:
    """What the harness asks of a model: log-likelihoods of continuations, and completions."""

    def __init__(
        self, subject: EvaluatedModel, *, context: int | None = None, max_num_seqs: int = 32
    ):
        """Make an engine for a model.

        Args:
          subject: the model.
          context: tokens of a sequence at most; None takes up to 2048, as the model allows.
          max_num_seqs: sequences that run at once.
        """
        self.context = min(context or 2048, subject.max_positions)
        self._subject = subject
        self._codec = subject.codec
        tokenizer = subject.origin.tokenizer
        begins = (self._codec.bos_id, tokenizer.eos_id)
        self._prefix = next((token for token in begins if token is not None), 0)
        self._llm = LLM(
            subject.decoder,
            tokenizer=tokenizer,
            max_model_len=self.context,
            max_num_seqs=max_num_seqs,
            step_sizes="coarse",
        )

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For (context, continuation): log-likelihood in nats, and whether greedy would write it.

        Context and continuation are encoded together and divided where the context's tokens end;
        white space at the context's end belongs to the continuation, as the harness expects it.
        """
        pairs = [self._divided(context, continuation) for context, continuation in requests]
        return self._score([(context + more, len(context)) for context, more in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihood of whole texts, each after the beginning token, in full-sized windows."""
        pieces: list[tuple[int, tuple[list[int], int]]] = []
        room = self.context - 1  # the engine makes a token more
        for number, text in enumerate(texts):
            tokens = [self._prefix, *self._ids(text)]
            for start, end, first in windows(len(tokens), room, room - 1):
                pieces.append((number, (tokens[start:end], first - start)))
        sums = [0.0] * len(texts)
        scores = self._score([piece for _, piece in pieces])
        for (number, _), (value, _) in zip(pieces, scores, strict=True):
            sums[number] += value
        return sums

    def generate(self, requests: Sequence[tuple[str, Settings]]) -> list[str]:
        """Completions of (context, settings), settings as the harness gives them."""
        prompts, params = [], []
        for context, settings in requests:
            one = _sampling(settings)
            room = self.context - min(one.max_tokens or _MAX_TOKENS, self.context - 1)
            prompts.append(self._begun(context)[-room:])
            params.append(dataclasses.replace(one, max_tokens=self.context - room))
        if not prompts:
            return []
        stops = [tuple(each.stop or ()) for each in params]
        texts = [output.outputs[0].text for output in self._llm.generate(prompts, params)]
        return [_cut(text, stop) for text, stop in zip(texts, stops, strict=True)]

    def chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation as the text of the model's chat template.

        Raises:
          ConfigError: it has none.
        """
        template = self._subject.origin.template
        if template is None:
            raise ConfigError(f"{self._subject.name} has no chat template; give --template FILE")
        return template.render(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _ids(self, text: str) -> list[int]:
        return self._subject.origin.tokenizer.backend.encode(text, add_special_tokens=False).ids

    def _begun(self, text: str) -> list[int]:
        """A text's tokens after the beginning token that the tokenizer puts there, if any."""
        return self._codec.prompt(text).tolist() or [self._prefix]

    def _divided(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            return [self._prefix], self._ids(continuation)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return [self._prefix], self._ids(continuation)
        whole, begun = self._begun(stripped + continuation), self._begun(stripped)
        return whole[: len(begun)], whole[len(begun) :]

    def _score(self, items: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """For (tokens, first): the sum of tokens from `first` on, and whether each ranks first."""
        found: list[tuple[float, bool]] = []
        for at in range(0, len(items), _GROUP):
            cut = [self._fitted(*item) for item in items[at : at + _GROUP]]
            outputs = self._llm.generate([tokens for tokens, _ in cut], _SCORE)
            for (tokens, first), output in zip(cut, outputs, strict=True):
                scores: Any = output.prompt_logprobs
                each = [scores[n][tokens[n]] for n in range(first, len(tokens))]
                found.append((sum(s.logprob for s in each), all(s.rank == 1 for s in each)))
        return found

    def _fitted(self, tokens: list[int], first: int) -> tuple[list[int], int]:
        """Without the beginning that does not fit, one token of context at least kept."""
        over = max(0, len(tokens) - (self.context - 1))
        return tokens[over:], max(1, first - over)


def run_tasks(subject: EvaluatedModel, config: EvaluateConfig) -> TaskResults:
    """Results of the harness's `simple_evaluate`: metrics by task, versions and settings.

    Raises:
      ConfigError: the harness is not installed, or has no such task.
    """
    check_harness()
    import lm_eval  # pyrefly: ignore[missing-import]
    from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]

    manager = TaskManager(include_path=list(config.task_paths) or None)
    unknown = [name for name in config.tasks if not _knows(manager, name)]
    if unknown:
        raise ConfigError(
            f"lm-eval-harness has no task {', '.join(unknown)}; see lm-eval ls tasks, or name the "
            "folder of your own with --task-paths"
        )
    model = HarnessModel(subject, context=config.context, max_num_seqs=config.max_num_seqs)
    found = lm_eval.simple_evaluate(
        model=_adapter(model),
        tasks=list(config.tasks),
        num_fewshot=config.shots,
        limit=config.limit,
        task_manager=manager,
        random_seed=config.seed,
        numpy_random_seed=config.seed,
        fewshot_random_seed=config.seed,
        log_samples=False,
    )
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {name: found[name] for name in kept if found and name in found}


def metrics(results: TaskResults) -> Iterator[tuple[str, str, float, float | None]]:
    """Task, metric, value and standard error of each figure the harness found."""
    for task, figures in results.get("results", {}).items():
        for name, value in figures.items():
            metric, _, filtered = name.partition(",")
            if isinstance(value, bool | str) or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            if isinstance(value, int | float) and metric not in ("alias", "sample_len"):
                yield task, metric, value, error if isinstance(error, float) else None


def _knows(manager: Any, name: str) -> bool:
    return bool(manager.match_tasks([name]))


def _adapter(model: HarnessModel) -> Any:
    """The model as the class that the harness knows."""
    from lm_eval.api.model import LM  # pyrefly: ignore[missing-import]

    class Adapter(LM):
        def loglikelihood(self, requests: list) -> list:
            return model.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list) -> list:
            return model.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list) -> list:
            return model.generate([request.args for request in requests])

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return model.chat(chat_history, add_generation_prompt=add_generation_prompt)

        @property
        def tokenizer_name(self) -> str:
            return "fornax"

    return Adapter()


def _sampling(settings: Settings) -> SamplingParams:
    """The harness's settings as ours.

    Raises:
      ConfigError: a setting that is not known.
    """
    left = dict(settings)
    until = left.pop("until", [])
    sampled = left.pop("do_sample", left.get("temperature", 0.0) > 0)
    values = {
        "temperature": float(left.pop("temperature", 1.0)) if sampled else 0.0,
        "max_tokens": int(left.pop("max_gen_toks", left.pop("max_tokens", _MAX_TOKENS))),
        "stop": tuple([until] if isinstance(until, str) else until),
    }
    left.pop("temperature", None)
    for name in ("top_p", "top_k", "min_p", "seed"):
        if name in left:
            values[name] = left.pop(name)
    if left:
        raise ConfigError(
            f"the task asks for generation with {', '.join(left)}, which is not known here; set "
            "its generation_kwargs to until, max_gen_toks, do_sample, temperature, top_p, top_k"
        )
    return SamplingParams(**values)


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0] if stop else text
    return text
