"""What each test process holds: compiled programs are freed between files, and peaks are reported.

A laptop of 8 GB runs two workers. Nothing that jax has compiled is ever freed by itself, so without
this a worker of the whole suite ends at 5 GB.
"""

import ctypes
import gc
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_MB = 2500
"""Peak of a worker, at most."""
_KEPT_MB = 1200
"""Below this programs stay: the next file may run them again, and freeing them takes a second."""
_GROWN_MB = 200
"""By this it must have grown since programs were freed last, as what was left then stays."""
_FULL_MB = 1500
"""Above this they are freed in any case."""

_left = 0
"""What the process held after programs were freed last, in MB."""

_peaks: dict[str, tuple[int, str]] = {}
"""Process to its peak, and the file in which it rose to that."""
_risen: tuple[int, str] = (0, "collecting")


@pytest.fixture(scope="module", autouse=True)
def programs_let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a file, where the process has grown large, drop what was compiled for it."""
    global _risen
    yield
    if _peak_mb() > _risen[0]:
        _risen = (_peak_mb(), request.path.name)
    let_programs_go()


@pytest.fixture(scope="module", autouse=True)
def cache_left_as_found() -> Iterator[None]:
    """After a file, jax's compilation cache is on or off as before: a program that was loaded from
    it says less of itself (no simulation of its heap), and the trainer and engines turn it on."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield
    if before != {name: jax.config.values[name] for name in names}:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def small_process() -> Iterator[None]:
    """For tests each of which compiles its own programs."""
    yield
    let_programs_go()


def let_programs_go(above: int = _KEPT_MB) -> None:
    """Drop what was compiled, where the process has grown above some MB: for files with many models
    too."""
    global _left
    limit = max(above, min(_left + _GROWN_MB, _FULL_MB))
    if "jax" in sys.modules and _resident_mb() > limit:
        import jax

        jax.clear_caches()
        gc.collect()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        _left = _resident_mb()


def pytest_collection_finish() -> None:
    """Tests and imported modules stay until the end: no later collection looks at them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells its peak; the process that started it fails where one is too high."""
    gc.unfreeze()
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["peak"] = _risen
        return
    _peaks["this process"] = (_peak_mb(), _risen[1])
    if max(_peaks.values())[0] > MOST_MB and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker told; one that crashed told nothing."""
    if "peak" in getattr(node, "workeroutput", {}):
        _peaks[node.gateway.id] = tuple(node.workeroutput["peak"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for all, and one for a limit that was passed."""
    said = (f"{name} {peak} MB in {file}" for name, (peak, file) in sorted(_peaks.items()))
    terminalreporter.write_line(f"peak memory: {', '.join(said)}")
    if _peaks and max(_peaks.values())[0] > MOST_MB:
        terminalreporter.write_line(
            f"a test process needed more than {MOST_MB} MB; free what its largest files keep",
            red=True,
        )


def _resident_mb() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux
        return _peak_mb()
    return pages * resource.getpagesize() // 2**20


def _peak_mb() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 2**20 if sys.platform == "darwin" else peak // 2**10
