"""The doctor's questions find what is planted."""

import numpy as np
import pytest
from tests.unit.tune.data.chats import CHATML, MARKED, codec

from fornax.tune.data import Codec, Encoded
from fornax.tune.doctor.data_checks import doubled_beginnings, template_fault, without_end


def _sequence(tokens: list[int], learned: list[int]) -> Encoded:
    mask = np.isin(np.arange(len(tokens)), learned)
    return Encoded(tokens=np.asarray(tokens, np.int32), mask=mask, prompt=learned[0])


def test_a_second_beginning_is_counted() -> None:
    once = [_sequence([9, 1, 2], [1, 2]), _sequence([1, 2, 9], [1, 2])]  # 9 may be the end too
    twice = [_sequence([9, 9, 2], [2]), _sequence([9, 1, 9, 2], [2, 3])]
    sequences = [*once, *twice]
    assert doubled_beginnings(once, 9) == 0
    assert doubled_beginnings(sequences, 9) == 2
    assert doubled_beginnings(sequences, None) == 0


def test_an_end_that_is_not_learned_is_counted() -> None:
    sequences = [_sequence([1, 2, 7], [1, 2]), _sequence([1, 2, 7], [1]), _sequence([1, 2], [1])]
    assert without_end(sequences, (7, 8)) == 2


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_good_template_has_no_fault(template: str) -> None:
    assert template_fault(codec(template)) is None


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("<|im_end|>", ""), "would not learn to stop"),
        (CHATML.replace("m.content or ''", "(m.content or '') | upper"), "is not in what"),
        (
            MARKED.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}Go: "),
            "does not begin with the prompt",
        ),
    ],
)
def test_a_planted_fault_is_found(template: str, said: str) -> None:
    assert said in (template_fault(codec(template)) or "")


def test_no_template_is_a_fault(plain: Codec) -> None:
    assert "has no chat template" in (template_fault(Codec(plain.tokenizer)) or "")
