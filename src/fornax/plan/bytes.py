"""Bytes as people read them."""

__all__ = ["show_bytes"]


def show_bytes(count: float) -> str:
    """Such as `12.3 GiB`: binary units, as memory is sold and compilers report it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
