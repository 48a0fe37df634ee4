"""Draw the packages, floor by floor, from the import contract: writes docs/design/house.svg.

`make docs` runs it. A package that the contract names and `ROOMS` does not is an error.
"""

import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "design" / "house.svg"

ROOMS = {
    "cli": ("parse, call, exit code", "tyro · rich"),
    "quickstart": ("raw text to a tuned, served model", ""),
    "cluster": ("one command as many ranks that recover", "jax.distributed"),
    "dashboard": ("one local page over run directories", "FastAPI · uPlot"),
    "plan": ("compile, fit, speed, cost", "libtpu"),
    "preflight": ("is its parallelism right", ""),
    "evaluate": ("perplexity, pass@k", "lm-eval-harness"),
    "bench": ("load on servers", "openai · gRPC"),
    "diffusion": ("schedules, samplers, objectives of diffusion and flows", ""),
    "tune": ("SFT, preference, RL, distillation", ""),
    "train": ("trainer, tasks, report, convert", "TensorBoard"),
    "llm": ("LLM engine, OpenAI server", "FastAPI · llguidance"),
    "serving": ("server of exported models", "uvicorn · gRPC · V2"),
    "export": (
        "any function and its weights, sealed in a directory",
        "StableHLO · jax.export · TensorStore",
    ),
    "adapters": ("LoRA, DoRA, rsLoRA, QLoRA, PEFT's files", "safetensors"),
    "quant": ("rules, rounding, calibration, compressed-tensors' files", "safetensors"),
    "models": ("decoder, HF weight maps, generate", "Flax NNX · safetensors"),
    "optim": ("Optax chains from config", "Optax"),
    "kernels": ("one op, many implementations", "XLA · Pallas · native C++"),
    "data": ("sources, packing, position", "Grain · ArrayRecord"),
    "checkpoint": ("atomic, asynchronous", "Orbax · TensorStore"),
    "rewards": ("functions, verifiers, sandbox", "math-verify · jsonschema"),
    "profile": ("captures: time, memory, causes", "jax.profiler"),
    "hlo": ("compiled programs: work, buffers, exchanges, roofline", "jaxlib"),
    "mesh": ("meshes, sharding rules, dtypes, hardware, start-up", "JAX"),
    "gguf": ("GGUF files: container, blocks of codes, tokenizer", "NumPy"),
    "pages": ("pages that stand alone in one HTML file", "Jinja · matplotlib · uPlot"),
    "config": ("dataclass ↔ YAML ↔ flags, errors, environment", "PyYAML"),
}
"""Package: what it does, and the libraries that it composes."""

WIDTH, EDGE, GAP, HEIGHT = 900, 20, 12, 74
TOP, BOTTOM = (255, 247, 237), (219, 234, 254)
"""Fill of the highest and of the lowest floor, between which the others lie."""
NOTE = (
    "A package imports only from layers below its own, never from its own layer. "
    "In italics: the libraries it composes."
)


def floors() -> list[list[str]]:
    """The packages of each floor, the highest first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c.get("containers") == ["fornax"])
    named = [layer.split(" | ") for layer in layers]
    return [floor for floor in named if not floor[0].startswith("__")]


def draw(house: list[list[str]]) -> str:
    """The picture as SVG."""
    height = EDGE + len(house) * (HEIGHT + GAP) + 28
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The packages of Fornax, layer by layer" '
        'font-family="system-ui, DejaVu Sans, sans-serif">'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff" rx="12"/>'
    ]
    for number, floor in enumerate(house):
        share = number / (len(house) - 1)
        fill = "#" + "".join(
            f"{round(a + (b - a) * share):02x}" for a, b in zip(TOP, BOTTOM, strict=True)
        )
        width = (WIDTH - 2 * EDGE - GAP * (len(floor) - 1)) / len(floor)
        y = EDGE + number * (HEIGHT + GAP)
        for place, name in enumerate(floor):
            lines += _room(name, EDGE + place * (width + GAP), y, width, fill)
    lines.append(_text(WIDTH / 2, height - 14, NOTE, 'font-size="12" fill="#64748b"'))
    return "\n".join([*lines, "</svg>", ""])


def _room(name: str, x: float, y: float, width: float, fill: str) -> list[str]:
    does, composes = ROOMS[name]
    middle = x + width / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="10" fill="{fill}" '
        'stroke="#94a3b8"/>',
        _text(middle, y + 25, name, 'font-size="17" font-weight="700" fill="#1c2330"'),
        _text(middle, y + 45, does, 'font-size="13" fill="#334155"'),
        _text(middle, y + 63, composes, 'font-size="12" font-style="italic" fill="#64748b"'),
    ]


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(floors()), encoding="utf-8")
