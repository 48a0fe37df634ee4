"""The examples in docstrings and in the guide give what they say."""

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest

from fornax.kernels._vocabulary import logprobs
from fornax.tune import advantages
from fornax.tune.losses import distill, policy, preference

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "losses.md"


@pytest.mark.parametrize("module", [logprobs, advantages, distill, policy, preference])
def test_examples_in_docstrings(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_the_first_example_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    exec(code, {})
    assert capsys.readouterr().out.startswith("[0.598")
