"""Figures as text: binary sizes, decimal rates, short source lines."""

import re

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
_PACKAGE_ROOT = re.compile(r"^\S*(?:src|site-packages)/(?:fornax/)?")
_TRACING_FRAMES = re.compile(
    r"\b(?:jit|jvp|transpose|checkpoint|remat\w*|while|body|closed_call|shard_map)\b"
)

_BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "ici": "links inside the slice",
    "dcn": "the network between slices or nodes",
    "host": "the link to the host",
}
_PLATFORM_BOUNDS = {
    "gpu": {"ici": "NVLink inside a node", "dcn": "the network between nodes"},
    "cpu": {"ici": "exchanges between devices", "dcn": "exchanges between devices"},
}


def format_bytes(value: float) -> str:
    """Bytes in binary units, three figures: 95.0 GiB, 512 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1000 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{_three(value)} {unit}"


def format_gib(value: float) -> str:
    """Bytes with two decimals, in GiB at most, as compilers report memory: 1023.40 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"


def format_count(value: float, unit: str = "") -> str:
    """A number in decimal units, three figures: 8.03 G, 459 TFLOP/s."""
    sign = "-" if value < 0 else ""
    value = abs(value)
    for prefix in _PREFIXES:
        if value < 999.5 or prefix == _PREFIXES[-1]:
            break
        value /= 1000
    shown = f"{value:.0f}" if prefix == "" and value == int(value) else _three(value)
    return f"{sign}{shown} {prefix}{unit}".rstrip()


def format_seconds(value: float) -> str:
    """A time: 35.2 us, 8.30 ms, 5.10 s, 3.2 min, 1.4 h, 12 days."""
    for limit, factor, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
        (172_800.0, 1 / 3600, "h"),
    ):
        if abs(value) < limit:
            return "0 s" if value == 0 else f"{_three(value * factor)} {unit}"
    return f"{_three(value / 86_400)} days"


def _three(value: float) -> str:
    """Three figures, thousands with a comma."""
    size = abs(value)
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:,.{digits}f}"


def format_plural(number: int, noun: str) -> str:
    """1 chip, 1,024 chips."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_axes(axes: tuple[str, ...]) -> str:
    """Mesh axes as a product; an exchange over none is one inside a device."""
    return " x ".join(axes) or "none"


def format_bound(bound: str, platform: str) -> str:
    """What a step waits for, as it is called on a platform."""
    return _PLATFORM_BOUNDS.get(platform, {}).get(bound, _BOUNDS[bound])


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the middle makes room, so that both ends can be read."""
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    if width < 8:
        return text[:width]
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def short_source(source: str) -> str:
    """A source line without the folders above the package."""
    return _PACKAGE_ROOT.sub("", source).removeprefix("fornax/")


def short_operation(op_name: str) -> str:
    """The end of an operation's name, without the frames that tracing puts around everything."""
    parts = [part for part in op_name.split("/") if part and not _TRACING_FRAMES.match(part)]
    return "/".join(parts[-3:]) or op_name


def argument_path(path: str) -> str:
    """An argument's path as names with slashes: state.params['mlp']['up'] is params/mlp/up."""
    plain = re.sub(r"\['?([^'\]]*)'?\]", r"/\1", path)
    return plain.removeprefix("state.").removeprefix("state/").replace(".", "/")
