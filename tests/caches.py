"""Caches of test sessions."""

from pathlib import Path

from fornax.config import environment

__all__ = ["fresh_cache"]


def fresh_cache(folder: Path) -> str:
    """`folder` as a cache without compiled programs, but with the native kernels of this machine:
    to compile those takes a minute of a processor."""
    native = environment.cache_dir() / "native"
    native.mkdir(parents=True, exist_ok=True)
    (folder / "native").symlink_to(native)
    return str(folder)
