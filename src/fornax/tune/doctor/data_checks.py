"""Checks of the data as the loss sees it: one beginning, a learned end, a true template."""

import numpy as np

from fornax.tune.config import SFTConfig
from fornax.tune.configs.distill import DistillConfig
from fornax.tune.configs.preference import KTOConfig, PreferenceConfig
from fornax.tune.configs.reward_model import RewardModelConfig
from fornax.tune.data import (
    Encoded,
    Problems,
    doubled_beginnings,
    load_examples,
    load_labelled,
    load_pairs,
    load_prompts,
    read_lines,
    template_fault,
    without_end,
)
from fornax.tune.doctor.findings import Outcome, failed, passed, skipped
from fornax.tune.doctor.patient import Patient, sequences_of
from fornax.tune.doctor.small import head
from fornax.tune.rl.config import RLConfig
from fornax.tune.splits import codec_of, limit_of

__all__ = ["beginnings", "end_is_learned", "template"]

_LOOKED_AT = 256


def template(patient: Patient) -> Outcome:
    """Text, prompt and end of a conversation survive the template and the tokenizer."""
    run, codec = patient.run, codec_of(patient.run, patient.origin)
    if patient.origin.template is None:
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
        "template, or how the tokenizer splits what it writes, loses or moves text. Mend the "
        f"template of {patient.origin.tokenizer_path}, or give a right one with --template FILE"
    )


def beginnings(patient: Patient) -> Outcome:
    """No sequence begins twice."""
    codec = codec_of(patient.run, patient.origin)
    if codec.bos_id is None:
        return skipped("the tokenizer has no beginning token")
    sequences = _encoded(patient)
    doubled = doubled_beginnings(sequences, codec.bos_id)
    if not doubled:
        return passed(f"none of {len(sequences)} sequences begins twice")
    token = patient.origin.tokenizer.decode([codec.bos_id], special=True)
    return failed(
        f"{doubled} of the first {len(sequences)} sequences hold the beginning token {token!r} "
        "twice, at their start or before the answer: chat template and tokenizer both write it, "
        "or the text spells it. The model has never seen that and learns to expect it. Take it out "
        "of the template or the data, or set add_bos_token to false in tokenizer_config.json"
    )


def end_is_learned(patient: Patient) -> Outcome:
    """Every completion's end token is among the targets of the loss."""
    ends = codec_of(patient.run, patient.origin).eos_ids
    if isinstance(patient.run, RLConfig):
        return skipped("completions are drawn; their ends are looked at among the samples")
    sequences = _encoded(patient) + sequences_of(_own_columns(patient))
    missing = without_end(sequences, ends)
    share = missing / max(len(sequences), 1)
    cut = patient.run.too_long == "truncate"
    if missing and not (cut and share < 0.5):
        names = [patient.origin.tokenizer.decode([end], special=True) for end in ends]
        return failed(
            f"in {missing} of {len(sequences)} sequences the loss counts no end token "
            f"({', '.join(map(repr, names)) or 'the tokenizer has none'}): the model would learn "
            "to answer and never to stop. The end is cut off (raise max_length, or use "
            "too_long=drop), masked, or another token than these: name the turn's end in "
            "eos_token_id of generation_config.json, and write it into the template after an answer"
        )
    note = f", {missing} are cut" if missing else ""
    return passed(f"the loss counts the end of {len(sequences) - missing} sequences{note}")


def _own_columns(patient: Patient) -> dict[str, np.ndarray]:
    """The rows without what stands in them only to be compared with."""
    rows = patient.rows
    if isinstance(patient.run, KTOConfig):
        return {name: x[:, 0] for name, x in rows.items() if x.ndim == 3}
    return rows


def _encoded(patient: Patient) -> list[Encoded]:
    """The first records as they are encoded; of prompts, nothing is learned."""
    run, codec = patient.run, codec_of(patient.run, patient.origin)
    data = head(run, patient.folder / "head.jsonl", _LOOKED_AT)
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
