"""The source of the caching allocator, and the command that compiles it.

Standard library only: the build of a wheel runs this file alone.
"""

from pathlib import Path

SOURCE = Path(__file__).with_name("caching_allocator.cc")
SHIPPED = SOURCE.with_suffix(".so")
"""The library, in a wheel."""


def compile_command(cxx: str, output: str | Path) -> list[str]:
    """Return the command that compiles the library.

    It needs the C library alone: every library of a process would see what it brought along.
    """
    return [
        *(cxx, "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-builtin"),
        *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-nodefaultlibs"),
        *(str(SOURCE), "-o", str(output), "-Wl,--as-needed", "-lc", "-ldl", "-lpthread"),
    ]
