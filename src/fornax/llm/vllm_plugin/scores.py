"""Log probabilities from the device's arrays to what vLLM's worker returns."""

from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists, LogprobsTensors  # pyrefly: ignore[missing-import]

from fornax.llm.logprobs import Scores
from fornax.llm.plan import Plan
from fornax.llm.runner import Ticket
from fornax.llm.vllm_plugin.batch import Request

__all__ = ["count_logprobs", "prompt_logprobs", "prompt_targets", "sampled_logprobs"]


def count_logprobs(wanted: int, max_logprobs: int) -> int:
    """Log probabilities besides the token's own; -1 asks for all."""
    return max_logprobs if wanted < 0 else wanted


def sampled_logprobs(ticket: Ticket, count: int) -> Any:
    """A row for each entry; zeros where nothing was sampled."""
    scores, entries = ticket.logprobs, len(ticket.plan.entries)
    ids = np.zeros((entries, count + 1), np.int32)
    values = np.zeros((entries, count + 1), np.float32)
    ranks = np.zeros(entries, np.int32)
    for index, (sample, token) in enumerate(zip(ticket.plan.samples, ticket.tokens(), strict=True)):
        at = sample.entry
        ids[at, 0], values[at, 0] = max(token, 0), scores.logprob_M[index]
        ids[at, 1:] = scores.top_ids_MK[index, :count]
        values[at, 1:] = scores.top_logprobs_MK[index, :count]
        ranks[at] = scores.rank_M[index]
    return LogprobsLists(ids, values, ranks)


def _scores_prompt(request: Request) -> bool:
    """Whether its prompt is to be scored, and was not before a preemption."""
    sequence = request.sequence
    return request.params.prompt_logprobs is not None and not sequence.output


def prompt_targets(plan: Plan, requests: list[Request]) -> dict[int, np.ndarray]:
    """The prompt tokens after each token of an entry, where they are to be scored."""
    found = {}
    for index, (entry, request) in enumerate(zip(plan.entries, requests, strict=True)):
        if _scores_prompt(request):
            targets = np.full(entry.count, -1, np.int32)
            known = entry.sequence.prompt[entry.start + 1 : entry.stop + 1]
            targets[: len(known)] = known
            found[index] = targets
    return found


def prompt_logprobs(ticket: Ticket, requests: list[Request], max_logprobs: int) -> dict[str, Any]:
    """Those of prompts that are complete with this step."""
    done = {}
    for index, (entry, request) in enumerate(zip(ticket.plan.entries, requests, strict=True)):
        if not _scores_prompt(request):
            continue
        prompt = entry.sequence.prompt
        count = count_logprobs(request.params.prompt_logprobs or 0, max_logprobs)
        if request.prompt_scores is None:
            request.prompt_scores = LogprobsTensors.empty_cpu(len(prompt) - 1, count + 1)
        at = entry.start
        for piece in ticket.scored.get(index, ()):
            at = _store(request.prompt_scores, at, Scores.read(piece), prompt, count)
        if entry.stop >= len(prompt):
            done[entry.sequence.request_id] = request.prompt_scores
            request.prompt_scores = None
    return done


def _store(into: Any, at: int, scores: Scores, prompt: list[int], count: int) -> int:
    """Write log probabilities of the prompt's tokens from `at` + 1 on; returns where they end."""
    targets = prompt[at + 1 : at + 1 + len(scores.rank_M)]
    rows, stop = slice(len(targets)), at + len(targets)
    ids, values = into.logprob_token_ids.numpy(), into.logprobs.numpy()
    ids[at:stop, 0], values[at:stop, 0] = targets, scores.logprob_M[rows]
    ids[at:stop, 1:] = scores.top_ids_MK[rows, :count]
    values[at:stop, 1:] = scores.top_logprobs_MK[rows, :count]
    into.selected_token_ranks.numpy()[at:stop] = scores.rank_M[rows]
    return stop
