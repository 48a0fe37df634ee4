"""Published training speeds and what Fornax needs to predict them: configs, and kept facts.

`published/maxtext.json` has the rows with their public addresses. `published/facts/` keeps of each
row's compiled program what its prediction is made from, so that the table can be made again without
compiling.
"""

import gzip
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fornax.config import from_mapping, to_mapping
from fornax.hlo import Collective, Done, Item, Loop, Operation, Run, Start
from fornax.kernels import GroupedTiles
from fornax.models import DecoderConfig
from fornax.plan.cost.network import GroupLayout, PhysicalAxis
from fornax.plan.facts import StepFacts, Work
from fornax.plan.topology import Topology, parse_topology
from fornax.train import TrainConfig

FOLDER = Path(__file__).parent / "published"
FACTS = FOLDER / "facts"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure."""

    id: str
    model: str
    topology: str
    batch_per_device: float
    seq_len: int
    remat: Any
    """A policy's name, or {"save": names, "offload": names}."""
    mesh: dict[str, int]
    params: str
    tflops: float
    """Published, per chip, by MaxText's own count of model FLOPs."""
    attention_flops: str
    """How that count takes attention: `full`, or `causal`, which halves it."""
    source: str
    flags: str
    """Which compiler options the run was made with: a key of the file's `flags`."""
    step_seconds: float | None = None
    """Published; None where only TFLOP/s are, and the time follows from them."""
    rules: dict[str, list[str]] = field(default_factory=dict)
    mu_dtype: str | None = None
    scheme: str | None = None
    """`quant.scheme`, where products are in 8 bits."""
    tiles: str | None = None
    """Of the published run's kernel for experts: a key of the file's `tiles`; None for ours."""
    capacity: float | None = None
    """Where the published run multiplies a fixed number of rows of each expert, of which tokens are
    sent and brought back by products with masks: that number over an even load."""
    differs: str | None = None
    """Where Fornax's run is not the published one."""
    missed: str | None = None
    """Why the prediction from its compiled program is far off, where it is."""


@dataclass(frozen=True)
class Published:
    """The file."""

    models: Mapping[str, DecoderConfig]
    flags: Mapping[str, Mapping[str, str]]
    """Compiler options, as the published scripts and benchmark configs give them."""
    tiles: Mapping[str, Mapping[tuple[str, int, int], GroupedTiles]]
    """Of other kernels for experts, by product and its sides, as `closed_form.grouped` has them."""
    rows: tuple[Row, ...]
    excluded: tuple[tuple[str, str], ...]
    """What is left out, and why."""


def load() -> Published:
    """Read `published/maxtext.json`."""
    told = json.loads((FOLDER / "maxtext.json").read_text(encoding="utf-8"))
    models = {name: from_mapping(DecoderConfig, model) for name, model in told["models"].items()}
    rows = tuple(Row(**row) for row in told["rows"])
    tiles = {
        name: {(which, *sides): GroupedTiles(*tile) for which, *sides, tile in table}
        for name, table in told["tiles"].items()
        if name != "source"
    }
    excluded = tuple((e["what"], e["why"]) for e in told["excluded"])
    return Published(models, told["flags"], tiles, rows, excluded)


def topology_of(row: Row) -> Topology:
    """The row's slice."""
    return parse_topology(row.topology)


def config_of(row: Row, model: DecoderConfig) -> TrainConfig:
    """The row's run as Fornax would do it."""
    named = isinstance(row.remat, dict)
    optimizer = {"type": "adamw", **({"mu_dtype": row.mu_dtype} if row.mu_dtype else {})}
    told = {
        "model": to_mapping(replace(model, max_position_embeddings=row.seq_len)),
        "batch_size": round(row.batch_per_device * topology_of(row).num_devices),
        "seq_len": row.seq_len,
        "remat": "names" if named else row.remat,
        "remat_save": row.remat.get("save", []) if named else [],
        "remat_offload": row.remat.get("offload", []) if named else [],
        "mesh": {**row.mesh, "rules": row.rules},
        "dtypes": {"params": row.params, "compute": "bfloat16"},
        "optim": {"optimizer": optimizer},
        "quant": {"scheme": row.scheme},
    }
    return from_mapping(TrainConfig, told)


def with_masks(facts: StepFacts, row: Row, model: DecoderConfig) -> StepFacts:
    """The step with experts as MaxText's `dense_matmul` computes them (its layers/moe.py).

    Of a row of T tokens each expert has C = capacity T k / E slots, all of which are multiplied.
    Masks of tokens by slots [T, E C] bring tokens there, and outputs back, as products; all of it
    is computed again for the backward pass but the last product.
    """
    experts, capacity = model.experts, row.capacity
    assert experts is not None
    assert capacity is not None
    D, F, E, k = (
        model.hidden_size,
        experts.intermediate_size,
        experts.num_experts,
        experts.experts_per_token,
    )
    slots = round(capacity * row.seq_len * k)  # E C
    M, L = round(row.batch_per_device * row.seq_len), model.num_expert_layers
    R = M // row.seq_len * slots
    item = 2
    inner = Work(
        kind="experts",
        flops=2.0 * R * D * F,
        bytes=float(item * (R * (D + F) + E * D * F)),
        count=3 * 4 * L,  # gate, up, down: forward, again, two gradients
    )
    masked = Work(
        kind="dispatch",
        flops=2.0 * M * slots * D,
        bytes=float(item * (M * D + M * slots + R * D)),
        count=6 * L,  # there: forward, again, a gradient; back: forward, two gradients
    )
    masks = Work(kind="dispatch", bytes=float(item * M * slots), count=5 * L)  # 2, again, gradient
    router = Work(kind="experts", flops=2.0 * M * D * E, count=4 * L)
    kept = [work for work in facts.work if work.kind not in ("experts", "dispatch")]
    return replace(facts, work=(*kept, inner, masked, masks, router))


def published_flops(row: Row, model: DecoderConfig) -> float:
    """Model FLOPs of a step on one chip as MaxText counts them.

    `calculate_tflops_training_per_device` of MaxText's maxtext_utils.py: three times the forward
    products, the output projection once, no input look-up; attention by keys, halved where the
    version of the run halved it for the causal mask.
    """
    topology = topology_of(row)
    tokens = row.batch_per_device * row.seq_len * topology.chip.devices
    kinds = model.layer_kinds()
    keys = sum(min(row.seq_len, kind.window or row.seq_len) for kind in kinds)
    widths = model.head_width + model.value_width
    scores = 2 * model.num_heads * widths * keys * (0.5 if row.attention_flops == "causal" else 1.0)
    mlps = sum(_mlp_flops(model, kind.mlp) for kind in kinds)
    products = len(kinds) * _projection_flops(model) + mlps
    products += 2 * model.hidden_size * model.vocab_size
    return 3 * tokens * (products + scores)


def _projection_flops(model: DecoderConfig) -> int:
    """Of a token's attention in a layer, forward."""
    D, N, H = model.hidden_size, model.num_heads, model.head_width
    latent = model.latent
    if latent is None:
        return 2 * D * H * (2 * N + 2 * model.kv_heads)
    rank = latent.query_rank
    query = D * N * H if rank is None else rank * (D + N * H)
    up = latent.key_value_rank * N * (latent.unrotated_dim + latent.value_dim)
    return 2 * (query + D * latent.cached_dim + up + N * latent.value_dim * D)


def _mlp_flops(model: DecoderConfig, mlp: str) -> int:
    """Of a token's MLP, or of its experts, their router and what all tokens run through."""
    D, experts = model.hidden_size, model.experts
    if mlp == "mlp" or experts is None:
        return 6 * D * model.intermediate_size
    width = experts.experts_per_token * experts.intermediate_size
    width += experts.shared_intermediate_size or 0
    return 6 * D * width + 2 * D * experts.num_experts


def published_seconds(row: Row, model: DecoderConfig) -> float:
    """The published time of a step, or the one that the published TFLOP/s mean."""
    return row.step_seconds or published_flops(row, model) / (row.tflops * 1e12)


def generation(row: Row) -> str:
    """The kind of chip."""
    return topology_of(row).chip.name


@dataclass(frozen=True)
class Facts:
    """What a prediction is made from."""

    schedule: tuple[Item, ...]
    spans: dict[str, tuple[GroupLayout, ...]]
    details: dict[str, Any]
    """What the table says besides: memory, versions, seconds of compilation."""


def keep(row: Row, facts: Facts) -> Path:
    """Write a row's facts."""
    joined = sorted({span for spans in facts.spans.values() for span in spans}, key=repr)
    numbers = _numbers(facts.schedule)
    told = {
        "details": facts.details,
        "spans": [_span_to(span) for span in joined],
        "schedule": [_item_to(item, facts.spans, joined, numbers) for item in facts.schedule],
    }
    FACTS.mkdir(parents=True, exist_ok=True)
    path = FACTS / f"{row.id}.json.gz"
    text = json.dumps(told, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    return path


def kept(row: Row) -> Facts | None:
    """Read a row's facts, None if it has not been compiled."""
    path = FACTS / f"{row.id}.json.gz"
    if not path.exists():
        return None
    told = json.loads(gzip.decompress(path.read_bytes()))
    joined = [_span_from(span) for span in told["spans"]]
    spans: dict[str, tuple[GroupLayout, ...]] = {}
    begun: dict[str, Operation | Collective] = {}
    schedule = tuple(_item_from(item, spans, joined, begun) for item in told["schedule"])
    return Facts(schedule, spans, told["details"])


def _whats(schedule: Sequence[Item]) -> Iterator[Operation | Collective]:
    for item in schedule:
        if isinstance(item, Loop):
            yield from _whats(item.body)
        else:
            yield item.what


def _numbers(schedule: Sequence[Item]) -> dict[str, str]:
    """Short names."""
    names = dict.fromkeys(what.name for what in _whats(schedule))
    return {name: str(number) for number, name in enumerate(names)}


def _item_to(
    item: Item,
    spans: Mapping[str, tuple[GroupLayout, ...]],
    joined: list[GroupLayout],
    numbers: Mapping[str, str],
) -> list[Any]:
    if isinstance(item, Loop):
        body = [_item_to(inner, spans, joined, numbers) for inner in item.body]
        return ["loop", item.kind, item.count, item.exact, body]
    what = item.what
    if isinstance(item, Done):
        return ["done", numbers[what.name]]
    how = "run" if isinstance(item, Run) else "start"
    if isinstance(what, Operation):
        figures = [what.category, what.flops, what.bytes, what.dtype, what.cycles, what.count]
        return [how, numbers[what.name], *figures]
    places = [joined.index(span) for span in spans.get(what.name, ())]
    figures = [what.kind, list(what.axes), what.group_size, what.bytes, what.dtype, what.count]
    return [how, numbers[what.name], figures, places]


def _item_from(
    told: list[Any],
    spans: dict[str, tuple[GroupLayout, ...]],
    joined: list[GroupLayout],
    begun: dict[str, Operation | Collective],
) -> Item:
    how, *rest = told
    if how == "loop":
        kind, count, exact, body = rest
        items = tuple(_item_from(item, spans, joined, begun) for item in body)
        return Loop(name="loop", kind=kind, count=count, exact=exact, body=items)
    if how == "done":
        return Done(begun[rest[0]])
    name, *figures = rest
    if isinstance(figures[0], list):
        what = _collective(name, *figures[0])
        spans[name] = tuple(joined[index] for index in figures[1])
    else:
        what = _operation(name, *figures)
    begun[name] = what
    return Run(what) if how == "run" else Start(what)


_NOWHERE: dict[str, Any] = {"op_name": "", "source": "", "fornax_source": ""}


def _operation(
    name: str, category: Any, flops: float, moved: int, dtype: str, cycles: Any, count: float
) -> Operation:
    return Operation(
        name=name,
        opcode="",
        category=category,
        flops=flops,
        vector_flops=0,
        transcendentals=0,
        bytes=moved,
        dtype=dtype,
        count=count,
        cycles=cycles,
        **_NOWHERE,
    )


def _collective(
    name: str, kind: Any, axes: list[str], size: int, moved: int, dtype: str, count: float
) -> Collective:
    return Collective(
        name=name,
        kind=kind,
        axes=tuple(axes),
        groups=(),
        group_size=size,
        bytes=moved,
        dtype=dtype,
        count=count,
        **_NOWHERE,
    )


def _span_to(span: GroupLayout) -> list[Any]:
    axes = [[a.dimension, a.size, a.ring, a.share, a.way] for a in span.axes]
    return [span.cores, axes, span.switched, span.slices, span.regular, span.shared, span.switch]


def _span_from(told: list[Any]) -> GroupLayout:
    cores, axes, switched, slices, regular, shared, switch = told
    return GroupLayout(
        cores=cores,
        axes=tuple(
            PhysicalAxis(dimension=dimension, size=size, ring=ring, share=share, way=way)
            for dimension, size, ring, share, way in axes
        ),
        switched=switched,
        slices=slices,
        regular=regular,
        shared=shared,
        switch=switch,
    )


def with_slices(facts: Facts, slices: int) -> Facts:
    """The facts of a program of another number of slices, more than one: what a slice computes and
    exchanges inside is the same, only the groups between slices have other sizes."""
    return replace(
        facts,
        spans={
            name: tuple(replace(s, slices=slices) if s.slices > 1 else s for s in spans)
            for name, spans in facts.spans.items()
        },
    )


def errors(rows: Sequence[tuple[float, float]]) -> list[float]:
    """Signed relative errors of (predicted, published)."""
    return [predicted / published - 1 for predicted, published in rows]


def median(values: Sequence[float]) -> float:
    """Median of absolute values."""
    ordered = sorted(map(abs, values))
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else math.fsum(ordered[middle - 1 : middle + 1]) / 2


def by_generation(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each kind of chip."""
    ordered = sorted(rows, key=generation)
    return {name: list(group) for name, group in itertools.groupby(ordered, generation)}
