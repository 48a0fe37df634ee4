"""Programs that forge their results score nothing; honest ones are unharmed."""

import functools
import resource
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from fornax.config.errors import ConfigError
from fornax.rewards import RewardPool, RewardSpec, Sample, Verdict, sandbox
from fornax.rewards.sandbox import Limits, run_program
from fornax.rewards.verifiers import build

DOUBLE = ["assert f(2) == 4", "assert f(31) == 62"]
BRIEF = Limits(seconds=3)
"""For what may hang, and scores nothing then either."""
run_tests = functools.partial(sandbox.run_tests, limits=Limits(seconds=120))


@pytest.fixture(scope="module", autouse=True)
def _held() -> None:
    try:
        run_program("pass")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def code() -> Any:
    return build("code", {"limits.seconds": "120", "partial": "true"})[0]


@pytest.fixture(scope="module")
def brief() -> Any:
    return build("code", {"limits.seconds": f"{BRIEF.seconds:g}", "partial": "true"})[0]


AGREES = """
class Agrees{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 0
    def __len__(self): return 2
    def __bool__(self): return True
    def __sub__(self, other): return 0.0
    __rsub__ = __mod__ = __sub__
    def __abs__(self): return 0.0
    def __float__(self): return 0.0
    def __call__(self, *_): return self
    def __iter__(self): return iter(())
    def __getitem__(self, key): return self
    def __getattr__(self, name): return lambda *_: True
"""


def agrees(base: str = "", made: str = "Agrees()") -> str:
    return AGREES.format(base=base) + f"def f(x): return {made}\n"


FORGERIES = {
    "reads the frames of its caller": """
        import sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for value in (*frame.f_locals.values(), *frame.f_globals.values()):
                    if isinstance(value, str) and "assert f(" in value:
                        return int(value.split("==")[1])
                    if isinstance(value, dict):
                        value.update(passed=[True, True], verdict="passed", expected=4)
                frame = frame.f_back
        """,
    "searches memory by gc": """
        import gc
        def f(x):
            for found in gc.get_objects():
                if isinstance(found, (list, tuple)):
                    for item in found:
                        if isinstance(item, str) and item.startswith("assert f("):
                            return int(item.split("==")[1])
        """,
    "searches its own memory": """
        import re
        def f(x):
            maps = [line.split() for line in open("/proc/self/maps")]
            memory = open("/proc/self/mem", "rb")
            for line in maps:
                low, high = (int(end, 16) for end in line[0].split("-"))
                memory.seek(low)
                found = re.search(rb"assert f\\(%d\\) == (\\d+)" % x, memory.read(high - low))
                if found:
                    return int(found[1])
        """,
    "reads the files of other processes": """
        import glob
        def f(x):
            for path in glob.glob("/proc/*/cmdline") + glob.glob("/tmp/**", recursive=True):
                try:
                    text = open(path).read()
                except OSError:
                    continue
                if "assert f(" in text:
                    return int(text.split("==")[1].split()[0])
        """,
    "reads every descriptor": """
        import os
        def f(x):
            for place in range(3, 64):
                for step in (lambda: os.lseek(place, 0, 0), lambda: os.set_blocking(place, False)):
                    try:
                        step()
                    except OSError:
                        pass
                try:
                    text = os.read(place, 1 << 20)
                except OSError:
                    continue
                if b"==" in text:
                    return int(text.split(b"==")[1].split()[0])
        """,
    "reads the environment and arguments": """
        import os, sys
        def f(x): return [v for v in (*os.environ.values(), *sys.argv) if "==" in v][0]
        """,
    "equals everything": agrees(),
    "an int that equals everything": agrees("(int)"),
    "a float that equals everything": agrees("(float)"),
    "a str that equals everything": agrees("(str)"),
    "a list that equals everything": agrees("(list)"),
    "a class that equals everything": """
        class Meta(type):
            def __eq__(cls, other): return True
            def __hash__(cls): return 0
        class f(metaclass=Meta):
            def __init__(self, *_): pass
            def __eq__(self, other): return True
        """,
    "equals everything inside a list": agrees(made="[Agrees()]"),
    "lies about its class": agrees(
        made="type('int', (Agrees,), {'__class__': property(lambda self: int)})()"
    ),
    "replaces builtins": """
        import builtins
        builtins.AssertionError = type("Never", (BaseException,), {})
        builtins.abs = builtins.len = builtins.sum = lambda *_: 0
        builtins.all = builtins.any = builtins.isinstance = lambda *_: True
        builtins.compile = lambda *_, **__: builtins.exec("pass")
        builtins.exec = builtins.eval = lambda *_, **__: None
        builtins.__import__ = lambda *_, **__: None
        def f(x): return None
        """,
    "shadows builtins by name": """
        def abs(*_): return 0
        def len(*_): return 2
        all = any = isinstance = lambda *_: True
        sorted = list = set = str = int = float = round = lambda x: 4
        def f(x): return 0
        """,
    "replaces exec": """
        import builtins
        builtins.exec = lambda *_: None
        def f(x): return None
        """,
    "replaces compile": """
        import builtins
        compile = builtins.compile
        builtins.compile = lambda source, *more, **named: compile("pass", *more, **named)
        def f(x): return None
        """,
    "replaces what __main__ runs tests with": """
        import __main__
        __main__._passes = __main__._execute = lambda *_: True
        def f(x): return None
        """,
    "replaces all that __main__ holds": """
        import __main__
        for name in list(vars(__main__)):
            if callable(vars(__main__)[name]):
                setattr(__main__, name, lambda *_, **__: True)
        def f(x): return None
        """,
    "replaces every module's functions": """
        import sys, types
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()):
                if name in ("dumps", "encode", "send", "judge", "loads", "decode"):
                    try: setattr(module, name, lambda *_, **__: b"passed")
                    except Exception: pass
        def f(x): return None
        """,
    "patches json": """
        import json
        dumps = json.dumps
        json.dumps = lambda said: dumps({**said, "passed": [True, True], "verdict": "passed"})
        def f(x): return None
        """,
    "writes verdicts to every descriptor": """
        import os
        said = b'{"token": "", "test": 0, "passed": [true, true], "verdict": "passed"}\\n'
        for place in range(1, 64):
            try: os.write(place, said)
            except OSError: pass
        def f(x): return None
        """,
    "writes framed verdicts": """
        import os, sys
        sys.path.insert(0, {folder!r})
        import values
        for test in range(2):
            said = values.encode({{"test": test, "verdict": "passed", "error": ""}}, len)
            for place in range(3, 64):
                try: values.send(place, said)
                except OSError: pass
        def f(x): return None
        """,
    "writes answers ahead": """
        import os
        for place in range(3, 64):
            for number in range(1, 9):
                try: os.write(place, b"\\0\\0\\0\\1T")
                except OSError: pass
        def f(x): return True
        """,
    "closes every descriptor": "import os\nos.closerange(0, 64)\ndef f(x): return None",
    "floods every descriptor": """
        import os
        def f(x):
            for place in range(64):
                try:
                    os.set_blocking(place, False)
                    while os.write(place, bytes(1 << 16)): pass
                except OSError: pass
        """,
    "answers from a thread": """
        import os, threading
        def flood():
            while True:
                for place in range(3, 12):
                    try: os.write(place, b"\\0\\0\\0\\1T")
                    except OSError: pass
        threading.Thread(target=flood, daemon=True).start()
        def f(x): return None
        """,
    "exits with success at once": "import os\nos._exit(0)",
    "exits inside a call": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit inside a call": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt inside a call": "def f(x): raise KeyboardInterrupt",
    "kills its processes": """
        import os, signal
        def f(x):
            os.kill(os.getppid(), 9)
            os.kill(os.getpid(), signal.SIGTERM)
        """,
    "forks and lets the child answer": """
        import os
        def f(x):
            try:
                if os.fork(): os._exit(0)
            except OSError: pass
            return None
        """,
    "raises what equals success": """
        class Passed(AssertionError):
            def __eq__(self, other): return True
        def f(x): raise Passed("passed")
        """,
    "never answers": "import time\ndef f(x): time.sleep(60)",
    "answers too much": "def f(x): return 'x' * (1 << 26)",
    "answers too deep": """
        def f(x):
            found = []
            for _ in range(10_000): found = [found]
            return found
        """,
    "answers itself": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "answers not a number": "def f(x): return float('nan')",
    "prints the verdict": "def f(x): print('passed', '1.0', 'OK', flush=True)",
    "replaces the test library": """
        import unittest, sys
        unittest.TestCase.assertEqual = lambda *_: None
        sys.modules["pytest"] = sys.modules["unittest"]
        def f(x): return None
        """,
    "hooks every import and trace": """
        import sys
        class Finder:
            @staticmethod
            def find_spec(*_): return None
        sys.meta_path.insert(0, Finder)
        sys.settrace(lambda *_: None)
        sys.setprofile(lambda *_: None)
        sys.excepthook = lambda *_: None
        def f(x): return None
        """,
    "ends with an exit function": """
        import atexit, os
        atexit.register(lambda: os._exit(0))
        def f(x): exit()
        """,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_scores_nothing(brief: Any, name: str) -> None:
    from fornax.rewards.sandbox import run

    source = textwrap.dedent(FORGERIES[name])
    if "{folder" in source:
        source = source.format(folder=str(run._ENTER.parent))
    assert brief("Double it.", source, tests=DOUBLE).value == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert f(2) != 5",
        "assert not f(2) == 5",
        "assert f(2) in (4, 5)",
        "assert 4 in f(2)",
        "assert abs(f(2) - 4) < 1e-6",
        "import math\nassert math.isclose(f(2), 4.0)",
        "assert math.isclose(f(2), 4.0)",
        "assert f(2) <= 4 <= f(2)",
        "assert f('ab').startswith('ab')",
        "assert f([1]).count(1) == True",
        "assert len(f([1])) == 2",
        "assert f(2)[0] == 4",
        "assert {4: 1}[f(2)] == 1",
        "assert hash(f(2)) == hash(4)",
        "assert float(f(2)) == 0.0",
        "assert sorted([f(2), f(3)]) == [4, 6]",
        "assert isinstance(f(2), int)",
        "assert type(f(2)) is int",
        "assert list(f([1, 2])) == [2, 4]",
        "try:\n    assert f(2) == 4\nexcept Exception:\n    pass",
        "try:\n    ok = f(2) == 4\nexcept BaseException:\n    ok = True\nassert ok",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self):\n        self.assertEqual(f(2), 4)",
        "def test_f():\n    assert f(2) == 4",
        "def check(candidate):\n    assert candidate(2) == 4",
    ],
)
def test_an_object_that_agrees_with_everything_passes_no_test(test: str) -> None:
    found = run_tests(textwrap.dedent(agrees()), [test], entry="f", limits=BRIEF)
    assert found.verdicts[0] in ("failed", "weak"), found


@pytest.mark.parametrize(
    "end",
    ["os._exit(0)", "raise SystemExit(0)", "os.closerange(0, 4096)", "os.kill(os.getpid(), 9)"],
)
@pytest.mark.parametrize("caught", ["Exception", "BaseException", ""])
def test_no_way_to_end_is_the_error_that_a_test_expects(end: str, caught: str) -> None:
    program = f"import os\ndef f(x):\n    {end}"
    test = f"try:\n    f(1)\nexcept {caught}:\n    pass\nelse:\n    assert False"
    found = run_tests(program, [test, "assert True"], limits=BRIEF)
    assert found.verdicts == ("failed", "failed")


def test_what_a_prompt_gives_is_not_the_programs_to_replace(code: Any) -> None:
    """HumanEval 32 judges by a helper that the prompt defines, others by what it imports."""
    prompt = (
        "from math import isclose\n\n"
        "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
        'def find_zero(xs):\n    """A zero of poly."""\n'
    )
    honest = "    return -xs[0] / xs[1]\n"
    forged = "    return 7\ndef poly(*_): return 0\ndef isclose(*_): return True\n"
    tests = [
        "def check(candidate):\n    assert abs(poly([2, 4], candidate([2, 4]))) < 1e-4\n",
        "assert isclose(find_zero([2, 4]), -0.5)",
    ]
    record = {"entry_point": "find_zero", "tests": tests}
    assert code(prompt, honest, **record).value == 1.0
    assert code(prompt, forged, **record).value == 0.0


def test_a_builtin_that_tests_use_is_not_the_programs_to_replace() -> None:
    program = "def f(x): return 0\ndef abs(*_): return 0\ndef len(*_): return 2"
    tests = ["r = f(2)", "assert abs(r - 4) < 1e-6", "r = [f(2)]", "assert len(r) == 2"]
    assert run_tests(program, tests).verdicts == ("passed", "failed", "passed", "failed")
    alone = run_tests(program, ["assert abs(len([1])) == 0"])
    assert "passed" not in alone.verdicts


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.stdout = open(1, 'w')\nprint('passed')",
        "print(input())",
        "import os\nfor n in range(2, 64):\n    try: os.write(n, b'3\\n')\n    except OSError: pass"
        "\n"
        "os.write(1, b'4')",
        "class A(str):\n    def __eq__(self, other): return True\nprint(A('x'))",
        "import os; os._exit(0)",
        "print(3)\nraise SystemExit(1)",
    ],
)
def test_a_forgery_of_what_is_printed_scores_nothing(brief: Any, program: str) -> None:
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "5"}]
    assert brief("Add.", program, tests=cases).value == 0.0


HONEST = {
    "plain values": (
        "def f(x): return x",
        [
            "for v in [None, True, -1, 2**80, 0.5, 1j, 'é\\ud800', b'\\0', [1, (2,)], {1: {2}},"
            " frozenset({3})]:\n    assert f(v) == v and type(f(v)) is type(v)",
            "x = f(float('nan'))\nassert x != x",
            "assert f(float('inf')) == float('inf')",
        ],
    ),
    "subclasses of plain values": (
        "import collections, enum\nclass C(enum.IntEnum):\n    A = 3\n"
        "P = collections.namedtuple('P', 'x y')\n"
        "def f(x): return collections.Counter(x)\ndef g(): return C.A\n"
        "def h(): return [P(1, 2)]\ndef d(): return collections.OrderedDict(a=1)",
        [
            "assert f('aab') == {'a': 2, 'b': 1}",
            "assert g() == 3",
            "assert h() == [(1, 2)]",
            "assert d() == {'a': 1}",
        ],
    ),
    "names, modules and constants": (
        "LIMIT = 3\ndef f(x): return x + LIMIT\ndef g(x): return f(x) * 2",
        [
            "import math",
            "assert math.isclose(f(1), 4.0)",
            "from program import g\nassert g(1) == 8",
            "import solution\nassert solution.f(1) == 4",
            "assert LIMIT == 3",
            "assert [f(x) for x in range(3)] == [3, 4, 5]",
            "assert random.Random(1).random() < f(0)",
        ],
    ),
    "a function named as a builtin": (
        "def sum(a, b): return a + b + 1",
        ["assert sum(1, 2) == 4"],
    ),
    "exceptions": (
        "class Bad(ValueError): pass\n"
        "def f(x):\n    if x < 0: raise Bad('below')\n    return [1][x]\n"
        "def g(x): return x.decode()",
        [
            "try:\n    f(-1)\nexcept Bad as e:\n    assert str(e) == 'below'\nelse:\n    assert 0",
            "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert 0",
            "try:\n    f(3)\nexcept IndexError:\n    pass\nelse:\n    assert 0",
            "try:\n    g(b'\\xff')\nexcept ValueError:\n    pass\nelse:\n    assert 0",
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
            "        with self.assertRaises(Bad):\n            f(-1)",
        ],
    ),
    "objects of classes": (
        "class Stack:\n    kind = 'lifo'\n"
        "    def __init__(self, items=()): self.items = list(items)\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)\n    def __str__(self): return 'stack'\n"
        "    def __getitem__(self, i): return self.items[i]\n"
        "class Solution:\n    def two(self, nums, t): return [0, 1]\n"
        "def total(stack): return sum(stack.items)\n",
        [
            "assert Solution().two([1, 2], 3) == [0, 1]",
            "s = Stack()\ns.push(3)\ns.push(4)\nassert len(s) == 2 and s[0] == 3 and 4 in s",
            "assert s.pop() == 4 and str(s) == 'stack' and list(s) == [3] and list(s) == [3]",
            "assert isinstance(s, Stack) and not isinstance(3, Stack) and Stack.kind == 'lifo'",
            "assert total(Stack([1, 2])) == 3",
            "s.items = [9]\nassert s.pop() == 9 and not Stack()",
        ],
    ),
    "generators and closures": (
        "def f(n):\n    yield from range(n)\ndef make(a): return lambda b: a + b\n"
        "def every():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        [
            "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6 and 2 in f(3)",
            "g = f(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None",
            "import itertools\nassert list(itertools.islice(every(), 3)) == [0, 1, 2]",
            "assert make(1)(2) == 3",
        ],
    ),
    "arguments changed in place": (
        "def f(a): a.sort()\nclass Solution:\n    def turn(self, rows, by):\n"
        "        rows[:] = [list(r) for r in zip(*rows[::-1])]\ndef g(d): d['x'] = 1",
        [
            "a = [3, 1]\nf(a)\nassert a == [1, 3]",
            "rows = [[1, 2], [3, 4]]\nSolution().turn(rows, 1)\nassert rows == [[3, 1], [4, 2]]",
            "d = {}\ng(d)\nassert d == {'x': 1}",
        ],
    ),
    "many calls": (
        "def f(x): return x * x",
        ["assert all(f(x) == x * x for x in range(2000))"],
    ),
    "modern Python": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport sys\n"
        "@dataclass\nclass Point:\n    x: int\n    y: int = 2\n"
        "def f(x: int) -> int: return Point(x).y\n"
        "if __name__ == '__main__':\n    print('not run')\nsys.exit(0) if False else None",
        ["assert f(1) == 2", "assert Point(3).x == 3"],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_is_unharmed(name: str) -> None:
    program, tests = HONEST[name]
    found = run_tests(program, tests)
    assert set(found.verdicts) <= {"passed", "setup"}, found.errors
    assert "passed" in found.verdicts


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("class P:\n    def __eq__(self, o): return True\ndef f(): return P()", "assert f() == 1"),
        ("def f(g): return g(1)", "assert f(lambda x: x + 1) == 2"),
        ("import decimal\ndef f(): return decimal.Decimal(1)", "assert f() * 2 == 2"),
        ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
        ("def f(): return 'x' * (9 << 20)", "assert len(f()) == 9 << 20"),
    ],
    ids=["equality of its own", "a function as argument", "arithmetic", "a coroutine", "too large"],
)
def test_what_cannot_be_judged_from_outside_is_weak(code: Any, program: str, test: str) -> None:
    assert run_tests(program, [test]).verdicts == ("weak",)
    assert code("", program, tests=[test, "assert f"]) == Verdict(0.0, {"weak_tests": 1.0})


def test_tests_that_test_nothing_are_weak(code: Any) -> None:
    assert code("", "x = 1", tests=["import math", "assert True"]) == Verdict(
        0.0, {"weak_tests": 2.0}
    )
    found = code("", "def f(x): return x", tests=["import math", "assert f(1) == 1"])
    assert found == Verdict(1.0, {"weak_tests": 0.0})


def test_weak_tests_are_counted_beside_the_reward() -> None:
    options = {"limits.seconds": "120"}
    spec = RewardSpec(function="code", name="runs", options=options, timeout_seconds=300)
    samples = [
        Sample("", "def f(g): return g(1)", {"tests": ["assert f(abs) == 1"]}),
        Sample("", "def f(g): return g", {"tests": ["assert f(1) == 1"]}),
    ]
    with RewardPool([spec], workers=1) as pool:
        scores = pool.score(samples)
    assert [(s.total, dict(s.parts), dict(s.notes)) for s in scores] == [
        (0.0, {"runs": 0.0, "runs.weak_tests": 1.0}, {}),
        (1.0, {"runs": 1.0, "runs.weak_tests": 0.0}, {}),
    ]


def test_judging_a_program_costs_a_few_starts_of_python() -> None:
    """So that two cores judge about a thousand a minute: in processor time, beside that of an
    interpreter that does nothing, in turn on the same machine."""
    program = "def f(numbers, by):\n    return [number // by for number in sorted(numbers)]"
    tests = [f"assert f([{n}, 2, {n * 7}], 2) == [1, {n // 2}, {n * 7 // 2}]" for n in range(3, 9)]
    run_tests(program, tests)  # leaves bytecode behind
    judged = bare = 0.0
    for _ in range(10):
        begun = _processor_seconds()
        assert set(run_tests(program, tests).verdicts) == {"passed"}
        between = _processor_seconds()
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
        judged, bare = judged + between - begun, bare + _processor_seconds() - between
    assert judged < 20 * bare


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
