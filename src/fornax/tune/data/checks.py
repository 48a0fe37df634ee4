"""What a doctor asks of encoded data: one beginning, an end that is learned, a faithful template.

Each function looks at what would be trained on, not at how it was made.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fornax.config.errors import DataError
from fornax.tune.data.codec import Codec
from fornax.tune.data.encoded import Encoded
from fornax.tune.data.messages import Messages
from fornax.tune.data.records import Chat

__all__ = ["doubled_beginnings", "template_fault", "without_end"]

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

    A conversation is rendered, encoded and decoded: its text must come back, its answer must go on
    from the tokens that ask for it when the model is served, and the answer's end must be learned.

    Args:
      codec: the model's.
      messages: a conversation that ends with an answer; None: a short one.
    """
    messages = messages or _PROBE
    try:
        prompt = codec.prompt(messages[:-1])
        found = codec.chat(Chat(where="", messages=messages))[-1]
    except DataError as error:
        return str(error)
    text = codec.pieces.show(found.tokens)
    answer = messages[-1]["content"]
    if answer not in text:
        return (
            f"the answer {answer!r} is not in what the tokenizer makes of the rendered "
            f"conversation, {text!r}; mend the template or the tokenizer"
        )
    begun = min(len(prompt), found.length)
    if not (found.tokens[:begun] == prompt[:begun]).all():
        return (
            f"a conversation is encoded as {text!r}, which does not begin with the prompt that the "
            f"model is served, {codec.pieces.show(prompt)!r}; mend the template"
        )
    if without_end([found], codec.eos_ids):
        return (
            f"no end token is learned from {text!r}; add the turn's end to eos_token_id in "
            "generation_config.json"
        )
    return None
