"""What devices exchange in a step, as XLA's partitioner makes it of our sharding rules.

A weight that `fsdp` divides is gathered before each use, in the compute dtype, and its gradient is
reduced to where the parameter is. Axes that divide the batch or its length but not the weight
reduce the gradient too. Where `tensor` divides heads and widths, each branch's sum is reduced over
it, forward and backward. Where `context` divides the length, keys and values are gathered or passed
round, or by kernels that need all of it, the length is exchanged for heads. Where `expert` divides
experts, tokens are sent to them, or gathered by all.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fornax.models.config import LayerKind
from fornax.plan.closed_form.attention import (
    attention_choice,
    exchanges_heads,
    head_widths,
    ring_of,
)
from fornax.plan.closed_form.shards import (
    MODULE_LAYERS,
    LocalStep,
    Section,
    kinds_of,
    sections,
)
from fornax.plan.closed_form.state import StateArray, dealt_elements
from fornax.plan.closed_form.work import CHUNK, layer_replays
from fornax.plan.facts import Exchange


def exchanges(local: LocalStep, state: tuple[StateArray, ...]) -> tuple[Exchange, ...]:
    """All exchanges of a step."""
    found = [
        *_weights(local, [array for array in state if array.owner == "parameters"]),
        *_lookup(local),
        *_vocabulary(local),
        *(one for section in sections(local) for one in _layers(section)),
        *_reordering(local),
        *_pipeline(local, state),
    ]
    return tuple(exchange for exchange in found if exchange.bytes and exchange.count)


def _layers(section: Section) -> Iterable[Exchange]:
    yield from _branches(section)
    yield from _latents(section)
    yield from _experts(section)
    yield from _context(section)
    yield from _offload(section)
    if section.stack == MODULE_LAYERS:
        yield from _projected(section)


def _group(local: LocalStep, axes: tuple[str, ...]) -> int:
    return math.prod(local.mesh[axis] for axis in axes)


def _weights(local: LocalStep, params: list[StateArray]) -> Iterable[Exchange]:
    """Gathers of divided weights, reductions of all gradients; layers' arrays taken together."""
    sums: Counter[_Gathered] = Counter()
    for array in params:
        for gathered, size in _gathers(local, array):
            sums[gathered] += size
    for gathered, size in sums.items():
        whole = size * _group(local, gathered.axes)
        yield from _of_weight(local, gathered, whole, size)


@dataclass(frozen=True)
class _Gathered:
    """Weights that are gathered and whose gradients are reduced alike."""

    place: str
    axes: tuple[str, ...]
    """That they are gathered over."""
    reduced: tuple[str, ...]
    """That their gradients are added up over."""
    runs: int
    """Of a step."""


def _gathers(local: LocalStep, array: StateArray) -> Iterable[tuple[_Gathered, int]]:
    """How an array is gathered, and how many elements a device has of what is gathered at once.

    A stage gathers the parameters of its layers at each tick, over the axes within it.
    """
    data = (*local.axes("batch"), *local.axes("length"))
    place = _place(array, tied=local.model.tie_embeddings)
    accumulate = local.config.accumulate
    if array.stack is None:
        axes = tuple(axis for dim in array.axes for axis in dim)
        reduced = tuple(axis for axis in data if axis not in axes)
        axes = tuple(axis for axis in axes if axis in data)
        yield _Gathered(place, axes, reduced, accumulate), math.prod(array.shape)
        return
    stays = array.axes[1] if array.of_experts else ()
    dividing = [axis for dim in array.axes[1:] for axis in dim]
    size = math.prod(array.shape[1:])
    for section in sections(local):
        if section.stack != array.stack:
            continue
        own = tuple(a for a in data if not (section.staged and a in local.stage_axes))
        axes = tuple(axis for axis in dividing if axis in own and axis not in stays)
        reduced = tuple(axis for axis in own if axis not in dividing)
        held = size * (local.mesh["stage"] if section.staged and "stage" in dividing else 1)
        if not section.staged:
            reduced = tuple(axis for axis in reduced if axis not in array.axes[0])
        runs = section.runs * sum(array.part in kind.parts() for kind in section.kinds) * accumulate
        yield _Gathered(place, axes, reduced, runs), held


def _place(array: StateArray, *, tied: bool) -> str:
    name = array.name
    if array.stack is not None:
        return "expert" if array.part == "experts" else "layer"
    if name.startswith("mtp/"):
        return "module"
    if name.startswith("layer_inputs/"):
        return "embedding" if name.startswith("layer_inputs/embedding") else "layer inputs"
    if name.startswith("embed/"):
        return "tied embedding" if tied else "embedding"
    return "output projection" if name.startswith("lm_head") else "final norm"


def _lookup(local: LocalStep) -> Iterable[Exchange]:
    """Rows of tables whose width is divided, embeddings and the layers' further inputs, for all
    tokens, to the tokens' devices.

    Each device looks up its part of the width for all tokens; an all-to-all turns parts of the
    width into whole rows, in the table's dtype, and the gradient's goes back in the other.
    """
    model, inputs = local.model, local.model.layer_inputs
    yield from _looked_up(local, "embeddings", "embed", model.hidden_size, _ends(local))
    if inputs is not None:
        width, runs = model.num_layers * inputs.width, local.config.accumulate
        yield from _looked_up(local, "layer inputs", "layer_input", width, runs)


def _ends(local: LocalStep) -> int:
    """How often a step looks up embeddings and makes a loss of hidden states: in each micro-batch
    once, and once for each module that predicts further tokens."""
    return (1 + local.model.num_mtp_modules) * local.config.accumulate


def _looked_up(
    local: LocalStep, what: str, logical: str, columns: int, runs: int
) -> Iterable[Exchange]:
    width = tuple(axis for axis in local.axes(logical) if axis in local.rules["batch"])
    numbers = local.tokens * columns
    if width:
        group = _group(local, width)
        for when, item in (("forward", local.param_bytes), ("backward", local.compute_bytes)):
            yield Exchange(
                name=f"exchange {what} for tokens ({when})",
                kind="all-to-all",
                axes=width,
                bytes=numbers * group * item,
                count=runs,
                blocking=True,
            )
    vocabulary = local.axes("vocab")
    if vocabulary:
        yield Exchange(
            name=f"add up {what} over the vocabulary's parts",
            kind="all-reduce",
            axes=vocabulary,
            bytes=numbers * local.param_bytes,
            count=runs,
            blocking=True,
        )


def _vocabulary(local: LocalStep) -> Iterable[Exchange]:
    """Gradients of the final hidden states over the vocabulary's parts, a chunk at a time."""
    vocabulary = local.axes("vocab")
    if not vocabulary:
        return
    chunks = -(-local.tokens // CHUNK)
    yield Exchange(
        name="add up the loss's gradients over the vocabulary's parts",
        kind="all-reduce",
        axes=vocabulary,
        bytes=4 * local.tokens // chunks * local.model.hidden_size,
        count=chunks * _ends(local),
        blocking=True,
    )


def _of_weight(local: LocalStep, how: _Gathered, whole: int, mine: int) -> Iterable[Exchange]:
    place, gathered, reduced, runs = how.place, how.axes, how.reduced, how.runs
    item = local.compute_bytes
    # The loss adds its gradient up in float32 before it is reduced; each module has a loss.
    wide = place in ("tied embedding", "output projection")
    sums = runs * (1 + local.model.num_mtp_modules) if wide else runs
    codes = place == "layer" and local.config.quant.scheme is not None  # of a byte
    if gathered and place != "embedding":
        twice = place in ("layer", "expert", "layer inputs")
        for when in ("forward", "backward") if twice else ("forward",):
            yield Exchange(
                name=f"gather {place} weights ({when})",
                kind="all-gather",
                axes=gathered,
                bytes=whole * (1 if codes else item),
                count=runs,
                blocking=place == "expert",  # compilers start it where the products need it
            )
        yield Exchange(
            name=f"reduce {place} gradients",
            kind="reduce-scatter",
            axes=gathered,
            bytes=whole * (4 if wide else item),
            count=sums,
        )
    if reduced:
        yield Exchange(
            name=f"add up {place} gradients over replicas",
            kind="all-reduce",
            axes=reduced,
            bytes=mine * item,
            count=sums,
        )


def _branches(section: Section) -> Iterable[Exchange]:
    """Sums over `tensor` of what a branch adds to the residual stream, and of its gradients.

    Where the stream itself is divided the sum is reduced to its parts, and each branch gathers its
    input; together that moves as much.
    """
    local = section.local
    axes = local.axes("activation_mlp")
    if not axes:
        return
    common = {
        "axes": axes,
        "bytes": local.tokens * local.model.hidden_size * local.compute_bytes,
        "blocking": True,
    }
    steps = local.config.accumulate
    branches = sum(runs * (2 - (kind.mlp == "none")) for kind, runs in section.runs_of.items())
    if local.shares.shared_mlp:
        branches += section.expert_layers
    backward = branches
    if local.model.latent is not None and local.model.latent.query_rank:
        # What attention adds up is no wider than its latents.
        backward -= sum(runs for kind, runs in section.runs_of.items() if not kind.linear)
    sums = 0
    for _, layers, found in layer_replays(section):
        sums += layers * sum(node.name in _SUMS for node in found.again)
    if not local.axes("activation_embed"):
        for when, count in (
            ("forward", branches),
            ("backward", backward),
            ("computed again", sums),
        ):
            name = f"add up branches over tensor shards ({when})"
            yield Exchange(name=name, kind="all-reduce", count=count * steps, **common)
        return
    inputs = 0 if local.config.remat == "none" else branches
    for when, gathers, reductions in (
        ("forward", branches, branches),
        ("backward", branches, backward),
        ("computed again", inputs, sums),
    ):
        name = f"gather branches' inputs ({when})"
        yield Exchange(name=name, kind="all-gather", count=gathers * steps, **common)
        name = f"reduce branches to their parts ({when})"
        yield Exchange(name=name, kind="reduce-scatter", count=reductions * steps, **common)


def _projected(section: Section) -> Iterable[Exchange]:
    """Sums over `tensor` of what modules that predict further tokens project for their layers, and
    its gradients, of which each device has a part of the width."""
    local = section.local
    axes = tuple(axis for axis in local.axes("mlp") if axis not in local.rules["batch"])
    if not axes:
        return
    bytes_of = local.tokens * local.model.hidden_size * local.compute_bytes
    for name, kind, size in (
        ("add up what modules project", "all-reduce", bytes_of),
        ("gather gradients of what modules project", "all-gather", 2 * bytes_of),
    ):
        yield Exchange(
            name=name,
            kind=kind,
            axes=axes,
            bytes=size,
            count=section.layers * local.config.accumulate,
            blocking=True,
        )


_SUMS = ("o_product", "down", "shared_down")
"""Values of a layer that are summed over the devices that divide heads and widths."""


def _latents(section: Section) -> Iterable[Exchange]:
    """Sums over `tensor` of the gradients of what is whole where heads are divided: latents, and
    B and C of Mamba-2."""
    local, model = section.local, section.local.model
    axes = local.axes("activation_heads")
    latent, mamba = model.latent, model.mamba2
    if not axes:
        return
    for kind, runs in section.runs_of.items():
        if kind.attention == "latent" and latent is not None:
            what, width = "latents", latent.cached_dim + (latent.query_rank or 0)
        elif kind.attention == "mamba2" and mamba is not None:
            what, width = "B and C", 2 * mamba.key_width
        else:
            continue
        yield Exchange(
            name=f"add up gradients of {what} over tensor shards",
            kind="all-reduce",
            axes=axes,
            bytes=local.tokens * width * local.compute_bytes,
            count=runs * local.config.accumulate,
            blocking=True,
        )


def _experts(section: Section) -> Iterable[Exchange]:
    """Tokens to the devices of their experts and outputs back; gradients go the other ways.

    Where a policy keeps no rows of the experts, tokens travel once more for the backward pass.
    """
    local, routed = section.local, section.local.shares.routed
    for kind, layers, found in layer_replays(section):
        if kind.mlp != "experts":
            continue
        again = {node.name for node in found.again}
        runs = layers * local.config.accumulate
        if routed.capacity is not None and local.axes("length"):
            yield Exchange(
                name="gather which experts a row's tokens chose",
                kind="all-gather",
                axes=local.axes("length"),
                bytes=4 * local.rows * local.config.seq_len * local.shares.chosen,
                count=(1 + ("router" in again)) * runs,
                blocking=True,
            )
        if routed.devices > 1:
            yield from _sent(local, runs, again) if routed.sends else _met(local, runs, again)


def _sent(local: LocalStep, runs: int, again: set[str]) -> Iterable[Exchange]:
    """Each token to the devices of its experts. XLA has no ragged exchange for CPU, where as many
    rows travel between each two devices as one can have for another."""
    routed = local.shares.routed
    rows = routed.busiest
    if local.topology.chip.platform == "cpu":
        rows = routed.room
    size = routed.devices * local.tokens * rows * local.model.hidden_size * local.compute_bytes
    for when, there, back in (
        ("forward", 1, 1),
        ("computed again", int("received" in again), int("returned" in again)),
        ("backward", 1, 1),
    ):
        for name, count in (("send tokens to experts", there), ("return experts' outputs", back)):
            yield Exchange(
                name=f"{name} ({when})",
                kind="all-to-all",
                axes=local.axes("expert"),
                bytes=round(size),
                count=count * runs,
                blocking=True,
            )


def _met(local: LocalStep, runs: int, again: set[str]) -> Iterable[Exchange]:
    """All tokens gathered, with their experts and weights, and outputs reduced and scattered."""
    holding = (*local.axes("batch"), *local.axes("length"))
    tokens = tuple(axis for axis in local.axes("expert") if axis in holding)
    same = tuple(axis for axis in local.axes("expert") if axis not in holding)
    count = local.tokens * local.shares.routed.gathered
    x = count * local.model.hidden_size * local.compute_bytes
    number = 4 * count * local.shares.chosen  # a weight or an index for each choice
    gathers, sums = 1 + ("gathered" in again), 1 + ("down" in again)
    for name, kind, size, times in (
        ("gather tokens for experts", "all-gather", x, gathers),
        ("gather weights and experts of tokens", "all-gather", number, 2 * gathers),
        ("reduce experts' outputs", "reduce-scatter", x, sums),
        ("gather gradients for experts", "all-gather", x, 1),
        ("reduce experts' gradients", "reduce-scatter", x, 1),
        ("reduce gradients of weights of tokens", "reduce-scatter", number, 1),
    ):
        if tokens:
            yield Exchange(
                name=name, kind=kind, axes=tokens, bytes=size, count=times * runs, blocking=True
            )
    if same:
        yield Exchange(
            name="add up experts' outputs",
            kind="all-reduce",
            axes=same,
            bytes=x // local.shares.routed.gathered,
            count=(1 + sums) * runs,
            blocking=True,
        )


def _context(section: Section) -> Iterable[Exchange]:
    """Keys and values of the whole row, forward, again, and their gradients back."""
    local = section.local
    axes = local.axes("length")
    if not axes:
        return
    met: set[int | None] = set()
    for kind, layers, found in layer_replays(section):
        runs = layers * local.config.accumulate
        if attention_choice(local, kind).implementation == "ring":
            passes = 3 if found.attention_again else 2
            yield from _passed_round(local, kind, runs, passes, first=kind.window not in met)
            met.add(kind.window)
        else:
            yield from _context_of(local, kind, runs, axes)


def _context_of(
    local: LocalStep, kind: LayerKind, runs: int, axes: tuple[str, ...]
) -> Iterable[Exchange]:
    """The same of layers of a kind."""
    row = local.rows * local.config.seq_len * sum(head_widths(local.model, kind))
    row *= local.compute_bytes
    heads, kv_heads = local.shares.attended(kind)
    if exchanges_heads(attention_choice(local, kind).implementation, local):
        yield Exchange(
            name="exchange the length for heads",
            kind="all-to-all",
            axes=axes,
            bytes=row * (heads + kv_heads),
            count=3 * runs,  # forward, again, backward
            blocking=True,
        )
        return
    common = {
        "axes": axes,
        "bytes": row * kv_heads,
        "blocking": True,
    }
    yield Exchange(name="gather keys and values", kind="all-gather", count=2 * runs, **common)
    yield Exchange(
        name="reduce gradients of keys and values", kind="reduce-scatter", count=runs, **common
    )


def _passed_round(
    local: LocalStep, kind: LayerKind, runs: int, passes: int, *, first: bool
) -> Iterable[Exchange]:
    """Keys and values of a device from hop to hop while it computes, with each pass, and backward
    their gradients in float32, of which the last way, home, is waited for. Positions and documents
    are those of all layers with this window and sent once, with the `first`."""
    numbers = local.tokens * local.shares.attended(kind)[1] * sum(head_widths(local.model, kind))
    ids = first * local.config.accumulate
    hops = len(ring_of(local, kind.window).hops) - 1
    keys, home = numbers * local.compute_bytes, runs * min(hops, 1)
    gradients = "pass gradients of keys and values"
    for name, size, count, blocking in (
        ("pass keys and values round", keys, runs * passes * hops, False),
        ("pass positions and documents round", 8 * local.tokens, ids * hops, False),
        (f"{gradients} round", 4 * numbers, runs * hops, False),
        (f"{gradients} home", 4 * numbers, home, True),
    ):
        if count:
            yield Exchange(
                name=name,
                kind="collective-permute",
                axes=local.axes("length"),
                bytes=size,
                count=count,
                blocking=blocking,
            )


def _reordering(local: LocalStep) -> Iterable[Exchange]:
    axes = local.axes("length")
    if axes and local.balanced:
        yield Exchange(
            name="put balanced tokens back in order",
            kind="collective-permute",
            axes=axes,
            bytes=local.tokens * local.model.hidden_size * local.compute_bytes,
            count=2 * _ends(local),
            blocking=True,
        )


def _offload(section: Section) -> Iterable[Exchange]:
    """Activations to the host's memory and back."""
    local = section.local
    for _, layers, found in layer_replays(section):
        width = sum(node.width * local.compute_bytes + 4 * node.wide for node in found.offloaded)
        for name in ("to the host", "back from the host"):
            yield Exchange(
                name=f"move activations {name}",
                kind="host-transfer",
                axes=(),
                bytes=int(width * local.tokens),
                count=layers * local.config.accumulate,
            )


def _pipeline(local: LocalStep, state: tuple[StateArray, ...]) -> Iterable[Exchange]:
    """Microbatches between stages, and parameters that lie elsewhere than where they are used."""
    staged = sections(local)[-1]
    if staged.staged:
        yield from _microbatches(staged)
        yield from _dealt(staged, [array for array in state if array.owner == "parameters"])


def _microbatches(staged: Section) -> Iterable[Exchange]:
    """At each tick a slot turns, the last stage's output goes home, all others move to the next
    stage; so does what belongs to the rows: positions, documents, rotations. Gradients of rows go
    back. Where slices divide layers, the way home crosses between them only if it leads to
    another one."""
    local = staged.local
    model, accumulate = local.model, local.config.accumulate
    stages = local.stages
    each = local.config.pipeline.count(stages) // stages
    home = stages - 1 - (stages - 1) // each
    tables = len({kind.rope for kind in kinds_of(model)} - {"none"})
    beside = 2 * 4 + tables * 2 * 4 * (model.rotated_width(model.rope, wide=True) // 2)
    rows = model.hidden_size * local.compute_bytes
    inside = home >= stages - local.mesh["stage"]
    for what, size, times in (("microbatches", rows, 2), ("positions and rotations", beside, 1)):
        for name, axes, moves in (
            (f"pass {what} between stages", local.stage_axes, 2),
            (
                f"pass {what} back from the last stage",
                ("stage",) if inside else local.stage_axes,
                int(home != stages - 1),
            ),
        ):
            yield Exchange(
                name=name,
                kind="collective-permute",
                axes=axes,
                bytes=local.tokens * size,
                count=times * moves * staged.runs * accumulate,
                blocking=True,
            )
    turned = sum((1 + (stages - 2 - slot) // each) % stages > 0 for slot in range(each))
    yield Exchange(
        name="bring microbatches home after the last stage",
        kind="collective-permute",
        axes=local.stage_axes,
        bytes=local.tokens * rows,
        count=2 * turned * accumulate,
        blocking=True,
    )


def _dealt(staged: Section, params: list[StateArray]) -> Iterable[Exchange]:
    """Parameters to the stages that use them and gradients back, once a micro-batch: of layers that
    do not divide over the stages, or of which some run before, and of stages with several parts."""
    local = staged.local
    repeats, stages = local.config.pipeline.repeats, local.stages
    parts, uneven = dealt_elements(staged, params)
    runs = 2 * local.config.accumulate
    if repeats > 1:
        yield Exchange(
            name="deal parts of the layers to stages",
            kind="collective-permute",
            axes=local.stage_axes,
            bytes=parts * local.param_bytes,
            count=repeats * runs,
            blocking=True,
        )
    yield Exchange(
        name="bring layers that do not divide to their stages",
        kind="all-to-all",
        axes=local.stage_axes,
        bytes=uneven * stages * local.param_bytes,
        count=runs,
        blocking=True,
    )
