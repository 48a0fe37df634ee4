"""Checks of the data as the loss sees it: one beginning, a learned end, a true template."""

from collections.abc import Iterable, Sequence

import numpy as np

from fornax.config.errors import DataError
from fornax.tune.config import (
    DistillConfig,
    KTOConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from fornax.tune.data import (
    Chat,
    Codec,
    Encoded,
    Problems,
    load_examples,
    load_labelled,
    load_pairs,
    load_prompts,
    read_lines,
)
from fornax.tune.data.records import Messages
from fornax.tune.doctor.results import Outcome, failed, passed, skipped
from fornax.tune.doctor.trial_run import TrialRun, head, sequences_of
from fornax.tune.splits import codec_of, limit_of

__all__ = [
    "beginnings",
    "doubled_beginnings",
    "end_is_learned",
    "template",
    "template_fault",
    "without_end",
]


_PROBE: Messages = [
    {"role": "user", "content": "How many legs has a spider?"},
    {"role": "assistant", "content": "Eight."},
]


def doubled_beginnings(sequences: Iterable[Encoded], bos_id: int | None) -> int:
    """How many sequences have a second beginning token: at their start, or before the answer."""

    def doubled(sequence: Encoded) -> bool:
        begins = sequence.tokens == bos_id
        return bool(begins[1:2].any() or begins[1:][sequence.prompt - 1 : sequence.prompt].any())

    return 0 if bos_id is None else sum(map(doubled, sequences))


def without_end(sequences: Iterable[Encoded], eos_ids: Sequence[int]) -> int:
    """How many sequences have no end token among those that are learned.

    Examples that were truncated have none either.
    """
    return sum(not np.isin(sequence.tokens[sequence.mask], eos_ids).any() for sequence in sequences)


def template_fault(codec: Codec, messages: Messages | None = None) -> str | None:
    """What is wrong with the template, or None.

    A conversation is rendered, encoded and decoded: its text must come back, its answer must
    continue the tokens that ask for it when the model is served, and the answer's end must be
    learned.

    Args:
      codec: the model's.
      messages: a conversation that ends with an answer; None: a short one.
    """
    messages = messages or _PROBE
    try:
        prompt = codec.prompt(messages[:-1])
        found = codec.chat(Chat(messages=messages))[-1]
    except DataError as error:
        return str(error)
    text = codec.encoder.decode(found.tokens)
    answer = messages[-1]["content"]
    if answer not in text:
        return (
            f"the answer {answer!r} is not in what the tokenizer makes of the rendered "
            f"conversation, {text!r}; fix the template or the tokenizer"
        )
    begun = min(len(prompt), found.length)
    if not (found.tokens[:begun] == prompt[:begun]).all():
        return (
            f"a conversation is encoded as {text!r}, which does not begin with the prompt that the "
            f"model is served, {codec.encoder.decode(prompt)!r}; fix the template"
        )
    if without_end([found], codec.eos_ids):
        return (
            f"no end token is learned from {text!r}; add the turn's end to eos_token_id in "
            "generation_config.json"
        )
    return None


_LOOKED_AT = 256


def template(trial: TrialRun) -> Outcome:
    """Text, prompt and end of a conversation survive the template and the tokenizer."""
    run, codec = trial.run, codec_of(trial.run, trial.origin)
    if trial.origin.template is None:
        return skipped("the model has no chat template")
    line = next(read_lines(run.data, Problems(), columns=run.columns or None))
    fields = line.fields
    messages = fields.get("messages")
    spoken = any(isinstance(fields.get(name), list) for name in ("prompt", "completion", "chosen"))
    if messages is None and not spoken:
        return skipped("the data holds no conversations")
    fault = template_fault(codec)
    if fault is None and messages and [m.get("role") for m in messages] == ["user", "assistant"]:
        fault = template_fault(codec, messages)
    if fault is None:
        return passed("a conversation comes back from it, its answer where serving puts it")
    return failed(
        f"{fault}. What is learned would not be what the model is asked when it is served: the "
        "template, or how the tokenizer splits what it writes, loses or moves text. Fix the "
        f"template of {trial.origin.tokenizer_path}, or give a right one with --template FILE"
    )


def beginnings(trial: TrialRun) -> Outcome:
    """No sequence begins twice."""
    codec = codec_of(trial.run, trial.origin)
    if codec.bos_id is None:
        return skipped("the tokenizer has no beginning token")
    sequences = _encoded(trial)
    doubled = doubled_beginnings(sequences, codec.bos_id)
    if not doubled:
        return passed(f"none of {len(sequences)} sequences begins twice")
    token = trial.origin.tokenizer.decode([codec.bos_id], special=True)
    return failed(
        f"{doubled} of the first {len(sequences)} sequences hold the beginning token {token!r} "
        "twice, at their start or before the answer: chat template and tokenizer both write it, "
        "or the text spells it. The model has never seen that and learns to expect it. Take it out "
        "of the template or the data, or set add_bos_token to false in tokenizer_config.json"
    )


def end_is_learned(trial: TrialRun) -> Outcome:
    """Every completion's end token is among the targets of the loss."""
    ends = codec_of(trial.run, trial.origin).eos_ids
    if isinstance(trial.run, RLConfig):
        return skipped("completions are drawn; their ends are looked at among the samples")
    sequences = _encoded(trial) + sequences_of(_own_columns(trial))
    missing = without_end(sequences, ends)
    share = missing / max(len(sequences), 1)
    cut = trial.run.too_long == "truncate"
    if missing and not (cut and share < 0.5):
        names = [trial.origin.tokenizer.decode([end], special=True) for end in ends]
        return failed(
            f"in {missing} of {len(sequences)} sequences the loss counts no end token "
            f"({', '.join(map(repr, names)) or 'the tokenizer has none'}): the model would learn "
            "to answer and never to stop. The end is cut off (raise max_length, or use "
            "too_long=drop), masked, or another token than these: name the turn's end in "
            "eos_token_id of generation_config.json, and write it into the template after an answer"
        )
    note = f", {missing} are cut" if missing else ""
    return passed(f"the loss counts the end of {len(sequences) - missing} sequences{note}")


def _own_columns(trial: TrialRun) -> dict[str, np.ndarray]:
    """The rows without what is in them only to be compared with."""
    rows = trial.rows
    if isinstance(trial.run, KTOConfig):
        return {name: x[:, 0] for name, x in rows.items() if x.ndim == 3}
    return rows


def _encoded(trial: TrialRun) -> list[Encoded]:
    """The first records as they are encoded; of prompts, nothing is learned."""
    run, codec = trial.run, codec_of(trial.run, trial.origin)
    data = head(run, trial.folder / "head.jsonl", _LOOKED_AT)
    given = (str(data), codec, limit_of(run))
    columns = run.columns or None
    if isinstance(run, RLConfig):
        prompts = load_prompts(*given, columns=columns).items
        return [
            Encoded(tokens=p.tokens, mask=np.zeros(len(p.tokens), bool), prompt=len(p.tokens))
            for p in prompts
        ]
    if isinstance(run, PreferenceConfig | RewardModelConfig):
        pairs = load_pairs(*given, columns=columns).items
        return [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if isinstance(run, KTOConfig):
        return [item.sequence for item in load_labelled(*given, columns=columns).items]
    assert isinstance(run, SFTConfig | DistillConfig)
    return load_examples(*given, columns=columns).items
