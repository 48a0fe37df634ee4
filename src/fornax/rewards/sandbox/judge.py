"""Runs tests against a program in another process, of which only values arrive here.

The tests are the data's and are trusted; the program is not. A function of the program is a
`Remote` here: calling it sends the arguments and brings a plain value back, which the test compares
in this process. The program never sees what it is compared with. Standard library only.

An object of the program that is not a plain value stays there, and a test may only ask of it what
cannot be answered by agreeing: never a comparison or arithmetic, which would be the program's own
verdict, nor what a plain value in its place would answer too (`startswith`, `count`, `in`), unless
the test itself made the object by calling a class. Whatever else a test needs is refused, and
the test is called weak.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import sys
import types

import values  # pyrefly: ignore[missing-import]

TYPE_CHECKING = False  # importing typing takes longer than judging
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

__all__ = ["judge"]

_PLAIN = {
    name
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
    for name in dir(kind)
}
_MODULES = ("program", "solution", "main")
"""Names under which tests import the program."""
_IN_PLACE = "__called_in_place__"


class Refused(BaseException):
    """A test cannot continue; no `except Exception` of a test catches it."""


class Channel:
    """Asks the program's process."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._number = 0
        self.exceptions: dict[str, type[Exception]] = {}
        """Stand-ins for the exceptions that the program defines."""
        self.gone = ""
        """Why the program can be asked no more."""
        self.clear()

    def clear(self) -> None:
        """Begin a test."""
        self.refused = ""
        """Why the test cannot be judged."""
        self.asked = False
        """Whether the program was asked for anything."""
        self.foreign = False
        """Whether something arrived that is not a plain value."""

    def refuse(self, reason: str) -> Refused:
        """Call the test weak."""
        self.refused = self.refused or reason
        return Refused(reason)

    def ask(
        self, operation: str, *operands: object, named: dict | None = None, back: bool = False
    ) -> Any:
        """The result of an operation on the program's objects; raises what it raised there."""
        if self.gone:
            raise Refused(self.gone)
        self.asked = self.asked or operation != "names"
        self._number += 1
        request = (self._number, operation, operands, named or {}, back)
        try:
            data = values.encode(request, self._reference)
        except values.MalformedError as error:
            raise self.refuse(str(error)) from None
        kind, result, more = self._exchange(data)
        if kind == "unfit":
            raise self.refuse(str(more))
        if kind != "value":
            raise self._exception(result, more)
        if back:
            _write_back(operands[1:], more if type(more) is tuple else ())
        return result

    def _exchange(self, data: bytes) -> tuple[object, object, object]:
        """Send a request and read the answer to it; whatever goes wrong ends all judging."""
        try:
            values.send(self._requests, data)
            reply = values.decode(values.receive(self._answers), self._remote)
            if type(reply) is not tuple or len(reply) != 4 or type(reply[0]) is not int:
                raise values.MalformedError("not an answer")
            if reply[0] != self._number or type(reply[1]) is not str:
                raise values.MalformedError("not the answer to this call")
        except (OSError, EOFError):
            self.gone = "the program ended its process"
        except Exception:
            self.gone = "the program answered nonsense"
        else:
            return reply[1:]
        raise Refused(self.gone)

    def _reference(self, value: object) -> int:
        if isinstance(value, Remote):
            return _inside(value, "number")
        raise self.refuse(f"a {type(value).__name__} cannot be sent to the program")

    def _remote(self, number: int) -> Remote:
        self.foreign = True
        return Remote(self, number)

    def _exception(self, classes: object, text: object) -> BaseException:
        names = classes if type(classes) is list else []
        for name in (name for name in names if type(name) is str):
            kind = self.exceptions.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(str(text))
                except TypeError:  # takes other arguments
                    continue
        self.gone = "the program ended inside a call"  # SystemExit and its like
        return Refused(self.gone)


class Remote:
    """An object of the program, seen from the judge."""

    def __init__(self, channel: Channel, number: int, name: str = "") -> None:
        """Refer to an object.

        Args:
          channel: asks the program.
          number: of the object.
          name: what the test calls it by.
        """
        inside = {"channel": channel, "number": number, "name": name, "iterator": None}
        for key, value in inside.items():
            object.__setattr__(self, f"_fornax_{key}", value)

    def __call__(self, *given: object, **named: object) -> Any:
        return _call(self, given, named, back=False)

    def __getattr__(self, name: str) -> Any:
        if name in _PLAIN:
            raise _inside(self, "channel").refuse(f".{name} of what may stand for a plain value")
        return _named(_ask(self, "getattr", name), name)

    def __instancecheck__(self, value: object) -> bool:
        channel = _inside(self, "channel")
        return isinstance(value, Remote) and channel.ask("isinstance", value, self) is True

    def __iter__(self) -> object:
        if _inside(self, "iterator") is None:  # once: asked twice it could answer in two ways
            object.__setattr__(self, "_fornax_iterator", _ask(self, "iter"))
        return _Items(_inside(self, "iterator"))

    def __next__(self) -> object:
        return _ask(self, "next")

    def __str__(self) -> str:
        return _text(self, "str")

    def __repr__(self) -> str:
        return _text(self, "repr")


class Made(Remote):
    """An object that the test made by calling a class: it means the object, whatever that says."""

    def __getattr__(self, name: str) -> Any:
        return _named(_ask(self, "getattr", name), name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __iter__(self) -> object:
        return _Items(_ask(self, "iter"))

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __len__(self) -> int:
        return _ask(self, "len")

    def __contains__(self, value: object) -> bool:
        return _ask(self, "contains", value) is True

    def __getitem__(self, key: object) -> object:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: object) -> None:
        _ask(self, "delitem", key)


class _Items:
    """Continues with an iterator of the program."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> object:
        return next(self._iterator)


def _refuses(operation: str) -> Callable[..., Any]:
    def refuse(self: Remote, *_: object) -> Any:
        raise _inside(self, "channel").refuse(f"{operation} of the program's own objects")

    return refuse


_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash")
_COMPUTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow")
_BITWISE = ("lshift", "rshift", "and", "or", "xor")
_CONVERTED = ("neg", "pos", "abs", "invert", "int", "float", "complex", "index", "bytes", "round")
_REFLECTED = tuple(f"r{name}" for name in (*_COMPUTED, *_BITWISE))
for _name in (*_COMPARED, *_COMPUTED, *_BITWISE, *_REFLECTED, *_CONVERTED):
    setattr(Remote, f"__{_name}__", _refuses(f"__{_name}__"))


def _inside(remote: Remote, key: str) -> Any:
    return object.__getattribute__(remote, f"_fornax_{key}")


def _ask(remote: Remote, operation: str, *operands: object) -> Any:
    return _inside(remote, "channel").ask(operation, remote, *operands)


def _text(remote: Remote, operation: str) -> str:
    found = _ask(remote, operation)
    if type(found) is not str:
        raise _inside(remote, "channel").refuse(f"{operation}() gave no text")
    return found


def _named(found: object, name: str) -> Any:
    """The same, and what the test calls it by where it is the program's object."""
    if isinstance(found, Remote):
        object.__setattr__(found, "_fornax_name", name)
    return found


def _call(function: Any, given: tuple, named: dict, *, back: bool) -> Any:
    if not isinstance(function, Remote):
        return function(*given, **named)
    channel = _inside(function, "channel")
    found = channel.ask("call", function, *given, named=named, back=back)
    if isinstance(found, Remote) and _inside(function, "name")[:1].isupper():  # a class's name
        return Made(channel, _inside(found, "number"))
    return found


def _write_back(given: Sequence[Any], after: Sequence[Any]) -> None:
    """Let a test see what a call did to its lists, dicts and sets."""
    for old, new in zip(given, after, strict=False):
        if type(old) is not type(new):
            continue
        if type(old) is list:
            old[:] = new
        elif type(old) in (dict, set):
            old.clear()
            old.update(new)


class _InPlace(ast.NodeTransformer):
    """Statements that are only a call are there for what they do to their arguments."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call):
            name = ast.Name(_IN_PLACE, ast.Load())
            made = ast.Call(name, [call.func, *call.args], call.keywords)
            node = ast.Expr(made)
            ast.copy_location(node, call)
            ast.fix_missing_locations(node)
        return node


def judge(job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Run tests one by one, in one name space, and report each.

    Args:
      job: `tests`, sources; `setup`, trusted source whose names the tests use; `entry`, the name of
        the function that was asked for; `requests` and `answers`, descriptors.
      report: takes {"test": number, "verdict": "passed", "failed", "weak" or "setup", "error"}.
        Set-up passes and asks nothing of the program.
    """
    channel = Channel(job["requests"], job["answers"])
    space: dict[str, Any] = {"__name__": "tests", _IN_PLACE: _called_in_place}
    for name in _MODULES:
        sys.modules[name] = _module(name, channel)
    if job["setup"]:
        try:
            exec(compile(job["setup"], "prompt.py", "exec"), space)
        except Exception as error:
            report({"test": -1, "verdict": "setup", "error": f"{type(error).__name__}: {error}"})
    entry = job["entry"] or _asked_builtin(job["tests"])
    for number, test in enumerate(job["tests"]):
        channel.clear()
        error = ""
        try:
            _run(test, space, channel, entry)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
            if channel.foreign and not isinstance(raised, AssertionError | Refused):
                channel.refuse(error)  # the library could not work with the program's object
        error = channel.gone or channel.refused or error
        verdict = "failed" if error else "passed" if channel.asked else "setup"
        if channel.refused and not channel.gone:
            verdict = "weak"
        report({"test": number, "verdict": verdict, "error": error})


def _run(source: str, space: dict[str, object], channel: Channel, entry: str) -> None:
    tree = ast.parse(source, "test.py")
    _fetch(source, tree, space, channel, entry)
    tops = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    checked = any("check" in _called(node) for node in tops)
    before = dict(space)
    exec(compile(_InPlace().visit(tree), "test.py", "exec"), space)
    fresh = {name: value for name, value in space.items() if before.get(name) is not value}
    for name, value in fresh.items():
        if isinstance(value, type):
            _unittest(value)
        elif isinstance(value, types.FunctionType):
            if name.startswith("test") and not value.__code__.co_argcount:
                value()
            elif name == "check" and entry and not checked:  # as HumanEval's
                value(space[entry])


def _unittest(case: type) -> None:
    unittest: Any = sys.modules.get("unittest")
    if unittest is None or not issubclass(case, unittest.TestCase):
        return
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if not result.wasSuccessful():
        raise AssertionError(f"{case.__name__}: a test failed")


def _fetch(
    source: str, tree: ast.AST, space: dict[str, object], channel: Channel, entry: str
) -> None:
    """Give the test the names of the program that it uses and nothing else defines."""
    free = _free(source) - set(space)
    for name in _only_attributes(tree) & free:
        if not name[:1].isupper():  # a module: the program's would see what it is compared with
            free.discard(name)
            if name in sys.stdlib_module_names:
                space[name] = importlib.import_module(name)
    wanted = {name for name in free if name == entry or not hasattr(builtins, name)}
    if entry and entry not in space:
        wanted.add(entry)
    space |= _program_names(channel, sorted(wanted))
    if "candidate" in free and "candidate" not in space and entry in space:
        space["candidate"] = space[entry]


def _program_names(channel: Channel, wanted: Sequence[str]) -> dict[str, Any]:
    if not wanted:
        return {}
    found, raised = channel.ask("names", *wanted)
    for name, base in raised.items():
        kind = getattr(builtins, base)
        if name[:1].isupper() and issubclass(kind, Exception):
            channel.exceptions[name] = type(name, (kind,), {})
    names = {name: _named(value, name) for name, value in found.items()}
    if any(not isinstance(value, Remote) for value in names.values()):
        channel.asked = True  # a value of the program's
    return {name: value for name, value in names.items() if name in wanted} | {
        name: channel.exceptions[name] for name in raised if name in channel.exceptions
    }


def _only_attributes(tree: ast.AST) -> set[str]:
    """Names that are used in `name.attribute` alone."""
    bases = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    within = {id(base) for base in bases}
    other = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in within}
    return {base.id for base in bases} - other


def _free(source: str) -> set[str]:
    """Global names that a source uses and does not bind."""
    top = symtable.symtable(source, "test.py", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    used, tables = set(), [top]
    for table in tables:
        tables += table.get_children()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is top or symbol.is_global())
        }
    return used - bound


def _asked_builtin(tests: Sequence[str]) -> str:
    """The function asked for where it is named as a builtin: all that the tests call, or none."""
    try:
        free = set().union(*map(_free, tests))
        called = free & set().union(*(_called(ast.parse(test)) for test in tests))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    return called.pop() if len(called) == 1 and all(hasattr(builtins, n) for n in free) else ""


def _called(tree: ast.AST) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {name.id for name in calls if isinstance(name, ast.Name)}


def _called_in_place(function: object, /, *given: object, **named: object) -> object:
    return _call(function, given, named, back=True)


def _module(name: str, channel: Channel) -> types.ModuleType:
    """What `from program import f` finds."""

    def attribute(name: str) -> object:
        found = {} if name.startswith("__") else _program_names(channel, [name])
        if name not in found:
            raise AttributeError(f"the program has no {name}")
        return found[name]

    module = types.ModuleType(name)
    module.__getattr__ = attribute
    module.__all__ = []  # pyrefly: ignore[missing-attribute]
    return module
