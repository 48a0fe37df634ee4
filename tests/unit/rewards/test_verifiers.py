"""What each built-in verifier calls right and wrong."""

from typing import Any

import pytest

from fornax.config.errors import ConfigError
from fornax.rewards import RewardPool, RewardSpec, Sample
from fornax.rewards.verifiers import build
from fornax.rewards.verifiers.extract import answer_text, boxed, fenced_block
from fornax.rewards.verifiers.mathematics import equal
from fornax.rewards.verifiers.python_source import parse, signature

AREA = "def area(width: float, height: float = 1.0) -> float:\n"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} and \boxed{\text{a}}", r"\text{a}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x^{2}}", "x^{2}"),
        (r"\boxed {7}. And 8.", "7"),
        (r"\boxed{7", "7"),
        ("a\n#### 1,234\nmore 5", "1,234"),
        ("it costs $1,234.50 in all.", "$1,234.50"),
        ("from 3 to -4", "-4"),
        ("x2 is 3/4", "3/4"),
        ("about 50%", "50%"),
        ("none here", None),
        ("", None),
    ],
)
def test_the_answer_is_found(text: str, answer: str | None) -> None:
    assert answer_text(text) == answer


def test_unbalanced_boxes_are_no_boxes() -> None:
    assert boxed(r"\boxed{a{b}") is None
    assert boxed(r"\boxed{a} then \boxed{b") == "a"


def test_the_last_closed_block_counts() -> None:
    assert fenced_block("```\na\n```\ntext\n```python\nb\n```\n") == "b\n"
    assert fenced_block("```python\nopen") is None


@pytest.fixture(scope="module")
def math() -> Any:
    return build("math", {})[0]


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"\boxed{\frac12}", "0.5", True),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", True),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", True),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", True),
        (r"\boxed{[0, 1)}", "[0,1)", True),
        (r"\boxed{[0, 1]}", "[0,1)", False),
        (r"\boxed{\frac{\pi}{2}}", r"\pi/2", True),
        (r"\boxed{50\%}", "0.5", True),
        (r"\boxed{x = 3}", "3", True),
        (r"\boxed{\text{(C)}}", r"\text{(C)}", True),
        ("the total is $1,000.", "1000", True),
        ("#### 42", "six times seven is\n#### 42", True),
        ("It is 18", r"we get \boxed{18}", True),
        ("It is 17.9999999", "18", False),
        (r"\boxed{0.333333}", "1/3", False),
        (r"\boxed{x^2}", "x^3", False),
        ("no number", "1", False),
        ("", "1", False),
    ],
)
def test_mathematics(math: Any, completion: str, answer: str, right: bool) -> None:
    assert math("p", completion, answer=answer) == float(right)


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        # decimals: as many places as `digits` asks for
        ("3.14159265", "3.141593", True),
        ("3.141593", "3.14159265", True),
        ("3.141593", "3.14159", False),
        ("3.14159265", "3.141594", False),
        ("3.14", "3.14159265", False),
        ("0.5", "0.50000001", True),
        ("0.3333333", "1/3", True),
        ("1/3", "0.3333333", False),
        ("18", "17.9999999", False),
        ("0.0000000001", "0", False),
        ("1.5e-9", "1.5000001e-9", True),
        ("1.5e-9", "1.6e-9", False),
        (r"6.022\times 10^{23}", "6.022e23", True),
        (r"1.5 \cdot 10^3", "1500", True),
        ("33.3333333%", "33.333333%", True),
        # spaces and separators
        ("12", "1 2", False),
        ("12", "1,2", False),
        ("1234", "12,34", False),
        ("123", "1 2 3", False),
        ("1 2", "1 2", True),
        ("1, 2", "1,2", True),
        ("1,234", "1234", True),
        ("1,234,567.5", "1234567.5", True),
        ("1{,}234", "1234", True),
        (r"1\,234", "1234", True),
        ("1 234", "1234", True),
        ("1,234", "(1,234)", False),
        (".5", "0.5", True),
        ("5.", "5", True),
        # fractions and mixed numbers
        (r"\frac{1}{2}", "1/2", True),
        (r"\dfrac12", "0.5", True),
        (r"-\frac{3}{4}", "-0.75", True),
        ("3/2", "1 1/2", True),
        ("1.5", r"1\frac{1}{2}", True),
        ("11/2", "1 1/2", False),
        (r"\frac{11}{2}", r"1\frac12", False),
        ("-1 1/2", "-1.5", True),
        ("2 and 3/4", "2.75", True),
        ("1/2", "2/4", True),
        ("1/0", "7", False),
        # percentages
        ("0.5", "50%", True),
        (r"50\%", "50 percent", True),
        ("12.5%", "1/8", True),
        ("50", "5%", False),
        # units and money
        ("10", "10 cm", True),
        (r"10\text{ cm}", "10", True),
        ("10 m", "10 cm", False),
        (r"10\,\mathrm{m}", r"10\text{ m}", True),
        ("2 hours", "2 minutes", False),
        ("1 hour", "1 hours", True),
        ("5 m^2", r"5\text{ m}^2", True),
        ("5 m^2", "5 m", False),
        ("$5", "5 dollars", True),
        ("$5", "5 euros", False),
        (r"\$1,000", "1000", True),
        (r"90^\circ", "90 degrees", True),
        (r"90^{\circ}", "90", True),
        ("2x", "2", False),
        ("2 xy", "2", False),
        ("3 and 4", "3", False),
        # tuples, sets, intervals
        ("(1,2)", "(1, 2)", True),
        ("(1,2)", "(2,1)", False),
        ("(1,2)", "(1,3)", False),
        (r"\{1,2\}", r"\{2, 1\}", True),
        (r"\{1,2\}", r"\{1,3\}", False),
        ("[0,1)", "[0, 1)", True),
        ("[0,1)", "[0,1]", False),
        (r"(-\infty,2]", r"(-\infty, 2]", True),
        (r"\frac{1}{2}, \frac{1}{3}", "1/2, 1/3", True),
        # LaTeX and words
        (r"$2\sqrt{2}$", r"\sqrt{8}", True),
        (r"2 \sqrt{2}", r"2\sqrt{2}", True),
        (r"\pi", "3.141593", True),
        ("2^{10}", "1024", True),
        (r"\text{Paris}", "paris", True),
        ("x=3", "3", True),
        ("x=3", "y=3", False),
    ],
)
def test_what_equals_what(reference: str, answer: str, right: bool) -> None:
    assert equal(reference, answer) is right


def test_digits_say_how_many_places_agree() -> None:
    assert equal("3.14159265", "3.14", digits=2)
    assert not equal("3.14159265", "3.14", digits=3)
    assert not equal("3.14159265", "3.141593", digits=8)


def test_regex() -> None:
    anywhere, columns = build("regex", {"pattern": r"ANSWER: \d+", "ignore_case": "true"})
    assert columns == ()
    assert anywhere("p", "so answer: 12.") == 1.0
    assert anywhere("p", "answer: x") == 0.0
    whole, columns = build("regex", {"whole": "true", "column": "want"})
    assert columns == ("want",)
    assert whole("p", " 12\n", want=r"\d+") == 1.0
    assert whole("p", "12.", want=r"\d+") == 0.0


def test_a_regex_that_never_ends_is_a_failure() -> None:
    spec = RewardSpec(function="regex", options={"pattern": r"^(a+)+$"}, timeout_seconds=2)
    with RewardPool([spec], workers=1, log="/dev/null") as pool:
        scores = pool.score([Sample("p", "a"), Sample("p", "a" * 64 + "b"), Sample("p", "aa")])
    assert [(s.total, bool(s.notes)) for s in scores] == [(1.0, False), (0.0, True), (1.0, False)]


def test_json_schema(tmp_path: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    verify, columns = build("json_schema", {})
    assert columns == ("schema",)
    for completion, right in [
        ('{"n": 1}', True),
        ('Here:\n```json\n{"n": 1}\n```\n', True),
        ('{"n": "1"}', False),
        ('{"n": 1} and more', False),
        ('{"n": NaN}', False),
        ("[" * 100_000, False),
        ("", False),
    ]:
        assert verify("p", completion, schema=schema) == float(right), completion[:40]
    (tmp_path / "s.json").write_text('{"type": "array"}')
    verify, columns = build("json_schema", {"schema": str(tmp_path / "s.json")})
    assert (columns, verify("p", "[]"), verify("p", "{}")) == ((), 1.0, 0.0)
    (tmp_path / "bad.json").write_text('{"type": "thing"}')
    with pytest.raises(ConfigError, match="cannot be used"):
        build("json_schema", {"schema": str(tmp_path / "bad.json")})


def test_python_parses() -> None:
    verify, _ = build("python_parses", {})
    assert verify("def f(x):\n", "    return x\n") == 1.0
    assert verify("Write a function.", "```python\ndef f(x):\n    return x\n```") == 1.0
    assert verify("def f(x):\n", "    return (x\n") == 0.0
    assert verify("x = 1\n", "") == 0.0
    assert verify("", "\\d = '\\d'") == 0.0
    assert parse("", "print('\\d')") is not None, "a warning of the parser is none of ours"
    assert verify("", "(" * 5000) == 0.0


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("    return width * height\n", 1.0),
        ('    """Docs."""\n    return width * height\n\n\ndef other():\n    pass\n', 1.0),
        ("```python\n" + AREA + "    return width * height\n```", 1.0),
        ("    return width\n", 0.5),
        ("    return None\n", 0.0),
        ("    print(width * height)\n", 0.5),
        ("    return\n    width, height\n", 0.5),
        ("    raise ValueError(width, height)\n", 0.5),
        ("    print(width)\n    raise ValueError(height)\n", 1.0),
        ("    raise NotImplementedError(width, height)\n", 0.0),
        ("    def inner():\n        return 1\n    inner(width, height)\n", 0.5),
        ("    pass\n", 0.0),
        ('    """Only a docstring."""\n', 0.0),
        ("def area(x):\n    return x\n", 0.0),
        ("    return width *\n", 0.0),
        ("", 0.0),
    ],
)
def test_answers_signature(completion: str, share: float) -> None:
    whole, _ = build("answers_signature", {})
    partial, _ = build("answers_signature", {"partial": "true"})
    prompt = "import math\n\n\n" + AREA
    assert whole(prompt, completion) == float(share == 1.0)
    assert partial(prompt, completion) == share


def test_a_docstring_may_promise_a_value() -> None:
    plain, _ = build("answers_signature", {})
    strict, _ = build("answers_signature", {"docstring": "true"})
    prompt = 'def double(x):  # always\n    """Return twice x."""\n'
    assert (plain(prompt, "    print(x)\n"), strict(prompt, "    print(x)\n")) == (1.0, 0.0)
    assert strict(prompt, "    return x + x\n") == 1.0
    assert strict(prompt.replace("Return", "Show"), "    print(x)\n") == 1.0


def test_a_signature_is_found_in_prompts_of_every_kind() -> None:
    found = signature("x = 1\nclass A:\n    def far(\n        self,\n        to,\n    ) -> None:\n")
    assert found is not None
    assert (found.name, [a.arg for a in found.args.args]) == ("far", ["self", "to"])
    assert signature('def f(x):\n    """Doc: def g(y) is not it."""\n').name == "f"  # pyrefly: ignore[missing-attribute]
    assert signature("no function here") is None
    verify, _ = build("answers_signature", {})
    assert verify("no function", "x") is None
    chat = [{"role": "user", "content": "Complete:\n" + AREA}]
    assert verify(chat, AREA + "    return width * height") == 1.0
    assert verify("a prompt", AREA + "    return width * height", signature=AREA) == 1.0


def test_code() -> None:
    verify, columns = build("code", {"limits.seconds": "120"})
    assert columns == ("tests",)
    prompt = "def double(x):\n"
    assert verify(prompt, "    return 2 * x\n", tests="assert double(2) == 4").value == 1.0
    assert verify(prompt, "    return 2 * x\n", tests=["assert double(2) == 5"]).value == 0.0
    assert verify(prompt, "    return 2 *\n", tests=["assert True"]).value == 0.0
    share, _ = build("code", {"partial": "true", "limits.seconds": "120"})
    tests = ["assert double(2) == 4", "assert double(0) == 1"]
    assert share("", "```\ndef double(x):\n    return 2 * x\n```", tests=tests).value == 0.5
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "5"}]
    adds = "print(sum(map(int, input().split())))"
    assert share("Add.", adds, tests=cases).value == 0.5
    assert verify("Add.", adds, tests=cases[:1]).value == 1.0
    with pytest.raises(ConfigError, match="tests must be"):
        verify("p", "x = 1", tests=[{"in": "x"}])
