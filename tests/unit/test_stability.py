"""What was stable in the last release is there; the table names all that is public."""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stability() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stability", ROOT / "docs" / "stability.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_stable_names_of_the_last_release_are_there(stability: ModuleType) -> None:
    said = stability.broken(stability.released_lines(), stability.stable_lines())
    assert not said, (
        f"{'; '.join(said)}. A stable name is deprecated for a release before it is removed: "
        f"see {stability.POLICY}"
    )


def test_the_list_is_of_a_version_that_the_changelog_has_or_of_the_next(
    stability: ModuleType,
) -> None:
    import fornax

    text = (ROOT / "CHANGELOG.md").read_text()
    version = stability.released_version()
    assert version == fornax.__version__ or f"\n## {version} (" in text


@pytest.mark.slow
def test_the_page_has_every_exported_name_once(stability: ModuleType) -> None:
    exported = {name: importlib.import_module(name).__all__ for name in stability.packages()}
    sections = stability.page(exported).split("\n## ")[1:]
    assert [section.split("\n")[0] for section in sections] == list(exported)
    for section, names in zip(sections, exported.values(), strict=True):
        listed = section.replace("`", "").replace("|", ",").replace("\n", ",").split(",")
        assert all([word.strip() for word in listed].count(name) == 1 for name in names)


def test_every_stable_package_is_in_the_reference(stability: ModuleType) -> None:
    assert set(stability.STABLE) <= set(stability.packages())


RELEASED = ["a.f(x, y=)", "a.C(n=)", "a.E", "a.old(x) deprecated"]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (["a.f(x, y=, z=)", "a.C(n=, m=)", "a.E"], []),
        (["a.f(x, y=, **k)", "a.C(n=)", "a.E", "a.new(q)"], []),
        (["a.f(x, y=)", "a.E"], ["a.C was stable in the last release and is not now"]),
        (["a.f(x)", "a.C(n=)", "a.E"], ["a.f has lost its parameter y"]),
        (
            ["a.f(x, why=)", "a.C(n=)", "a.E"],
            ["a.f has lost its parameter y"],
        ),
        (
            ["a.f(x, y=, z)", "a.C(n=)", "a.E"],
            ["a.f needs z, which calls of the last release leave out"],
        ),
        (
            ["a.f(x, y)", "a.C(n=)", "a.E"],
            ["a.f needs y, which calls of the last release leave out"],
        ),
    ],
)
def test_what_would_break_a_caller_is_named(
    stability: ModuleType, now: list[str], said: list[str]
) -> None:
    assert stability.broken(RELEASED, now) == said


def test_a_line_tells_defaults_and_deprecation(stability: ModuleType) -> None:
    typing_extensions = pytest.importorskip("typing_extensions")

    @typing_extensions.deprecated("use g")
    def f(x: int, *rest: int, y: int = 0, **more: int) -> None: ...

    assert stability.line_of("a.f", f) == "a.f(x, *rest, y=, **more) deprecated"
    assert stability.line_of("a.E", KeyError) == "a.E"
    assert stability.line_of("a.N", 3) == "a.N"
    [(name, found)] = stability.parse(["a.f(x, *rest, y=, **more) deprecated"]).items()
    assert (name, found) == ("a.f", (["x", "*rest", "y=", "**more"], True))
