"""Curves over the steps of a run, as SVG."""

from collections.abc import Mapping, Sequence

__all__ = ["picture"]

COLORS = ("#374151", "#1d4ed8", "#0891b2", "#c2410c", "#ca8a04", "#be123c")


def picture(title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Curves by name, each of (step, value), as SVG; after six the colors begin again."""
    width, height, left, bottom = 760, 380, 56, 40
    points = [point for each in curves.values() for point in each]
    last = max(step for step, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(step: int, value: float) -> str:
        x = left + (width - left - 16) * step / last
        y = 16 + (height - bottom - 16) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{title}</title>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n in range(5):
        value = low + (high - low) * n / 4
        y = float(place(0, value).partition(",")[2])
        lines.append(f'<path d="M{left} {y}H{width - 16}" stroke="#e5e7eb"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
        step = round(last * n / 4)
        x = float(place(step, low).partition(",")[0])
        lines.append(f'<text x="{x}" y="{height - 20}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">step</text>')
    for n, (name, each) in enumerate(curves.items()):
        color = COLORS[n % len(COLORS)]
        path = " ".join(place(*point) for point in each)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines.append(f'<text x="{width - 240}" y="{34 + 18 * n}" fill="{color}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])
