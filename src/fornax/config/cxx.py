"""The C++ compiler of this machine, and libraries that it makes once."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fornax.config import environment

__all__ = ["CxxError", "compile_library", "compiler", "version"]

_TIMEOUT_S = 300


class CxxError(Exception):
    """Why there is no library, as half a sentence."""


def compiler() -> str | None:
    """Return the C++ compiler's path: CXX if set, else the first of c++, g++, clang++."""
    named = environment.cxx()
    if named is not None:
        return shutil.which(named)
    return next((found for c in ("c++", "g++", "clang++") if (found := shutil.which(c))), None)


def version(cxx: str) -> str:
    """What the compiler says of itself.

    Raises:
      CxxError: it does not run.
    """
    try:
        done = subprocess.run(
            [cxx, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CxxError(f"{cxx} --version failed: {error}") from error
    return done.stdout


def compile_library(command: Callable[[str], list[str]], source: str, path: Path) -> None:
    """Compile a library beside its place and rename it into it, so that concurrent processes only
    ever see whole files.

    Args:
      command: of the path to write, the compiler's command.
      source: the name of what is compiled, for errors.
      path: the library's place.

    Raises:
      CxxError: the folder cannot be written, or the compiler fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so.tmp")
    except OSError as error:
        raise CxxError(
            f"{path.parent} cannot be written ({error.strerror}); set FORNAX_CACHE_DIR"
        ) from error
    os.close(handle)
    words = command(temporary)
    try:
        subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        os.replace(temporary, path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr)
        raise CxxError(f"{words[0]} failed to compile {source}: {first.strip()}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise CxxError(f"{words[0]} failed to compile {source}: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
