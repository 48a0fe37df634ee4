"""One decoder layer as a graph of what it computes: what each remat policy keeps and does again.

The backward pass needs some of the layer's values. Those a policy keeps are memory; the others are
computed again from the nearest kept ones, and what lies on the way is work done twice. Both follow
from the graph, for any set of kept names.

Sizes are of one device: N heads, K key/value heads and F hidden width are the device's shares. H is
the width of a head's query and key, V of its value; of latent attention Q and R are the ranks of
queries, and of keys and values. Of linear attention N are the heads of values, K those of keys, C
tokens a chunk. Tokens are taken to choose each expert equally often.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.models import DecoderConfig
from fornax.models.config import LayerKind
from fornax.models.remat import Remat
from fornax.plan.closed_form.shards import LinearShares, Shares

Kind = Literal["input", "product", "batched", "inverse", "attention", "cheap", "name"]
"""What a value is: given to the layer, a product with weights, one of two values (of each head of
each chunk), products inside the triangular inverse, which has a derivative of its own so that no
policy sees them, attention's result, whatever takes no product, or another value under a name."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A value of the layer."""

    name: str
    kind: Kind
    needs: tuple[str, ...] = ()
    """Values it is computed from."""
    width: float = 0.0
    """Elements a token, in the compute dtype."""
    wide: float = 0.0
    """Elements a token in float32 (the log-sum-exp of attention, or what linear layers compute)."""
    contract: int = 0
    """Length of the sum of a product."""
    columns: float = 0
    """Columns of a product before sums over devices are divided: `width`, or more."""
    backward: float = 2.0
    """FLOPs of its backward pass over those of a product."""
    rows: float = 1
    """Rows of a product for each token of the device: the experts that it chooses, or what the
    device's experts have to run for all."""
    experts: int = 0
    """Matrices of a grouped product, whose rows are divided among them; 0: one for all rows."""
    head: int = 0
    """Its last dimension where that is a head's width, which a TPU pads to whole lanes; or 0."""

    @property
    def flops(self) -> float:
        """FLOPs per token of a product; attention is counted elsewhere."""
        count = 2.0 * self.rows * self.contract * self.columns
        return count if self.kind in ("product", "batched", "inverse") else 0.0


Graph = Mapping[str, Node]


class _Graph:
    """A layer's values as they are added."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.used: set[str] = set()
        """What the backward pass takes."""

    def add(self, node: Node) -> str:
        self.nodes[node.name] = node
        return node.name

    def cheap(self, name: str, *needs: str, width: float, head: int = 0) -> str:
        return self.add(Node(name=name, kind="cheap", needs=needs, width=width, head=head))

    def named(self, name: str, of: str, width: float, head: int) -> str:
        """Another value, or a part of it, under a name that policies know."""
        return self.add(Node(name=name, kind="name", needs=(of,), width=width, head=head))

    def given(self, name: str, width: float) -> str:
        """A value that the layer is given, which the loop over layers keeps."""
        return self.add(Node(name=name, kind="input", width=width))

    def wide(self, name: str, *needs: str, width: float, head: int = 0) -> str:
        """A value in float32 that takes no product."""
        return self.add(Node(name=name, kind="cheap", needs=needs, wide=width, head=head))

    def batched(
        self,
        name: str,
        needs: tuple[str, ...],
        rows: float,
        columns: float,
        contract: int,
        *,
        backward: float = 2.0,
        head: int = 0,
    ) -> str:
        """A product of two values in float32; rows are those of a token."""
        return self.add(
            Node(
                name=name,
                kind="batched",
                needs=needs,
                wide=rows * columns,
                contract=contract,
                columns=columns,
                rows=rows,
                backward=backward,
                head=head,
            )
        )

    def norm(self, name: str, of: str, wanted: bool, width: float, head: int = 0) -> str:
        if not wanted:
            return of
        self.used.add(of)
        return self.cheap(name, of, width=width, head=head)

    def product(
        self, name: str, of: str, contract: int, columns: int, width: int, **more: int
    ) -> str:
        self.used.add(of)
        return self.add(
            Node(
                name=name,
                kind="product",
                needs=(of,),
                width=width,
                contract=contract,
                columns=columns,
                **more,
            )
        )

    def by_head(self, name: str, of: str, contract: int, heads: int, head: int) -> str:
        """A product whose columns are heads."""
        return self.product(name, of, contract, heads * head, heads * head, head=head)

    def grouped(self, name: str, of: str, contract: int, columns: int, shares: Shares) -> str:
        """A product of rows with the matrices of their experts."""
        self.used.add(of)
        return self.add(
            Node(
                name=name,
                kind="product",
                needs=(of,),
                width=shares.routed.room * columns,
                contract=contract,
                columns=columns,
                rows=shares.routed.busiest,
                experts=shares.experts,
            )
        )


@functools.cache
def layer_graph(
    model: DecoderConfig, shares: Shares, kind: LayerKind
) -> tuple[Graph, frozenset[str]]:
    """The layer's values, and which of them the backward pass uses.

    Every product uses its inputs (for the gradients of its weights, or of each other), every norm
    its input, attention its inputs and outputs, a gate its two factors, the sum of experts its
    terms (for the gradient of their weights). Rotation and sums use nothing.
    """
    D, S = model.hidden_size, shares.stream
    graph = _Graph()
    graph.given("x", S)
    before = kind.placement in ("pre", "sandwich")
    after = kind.placement in ("post", "sandwich")
    into = graph.norm("attention_norm", "x", before, D)
    attend = _add_linear if kind.linear else _add_attention
    out = graph.norm("post_attention_norm", attend(graph, into, model, shares, kind), after, S)
    y = graph.cheap("middle", "x", out, width=S)
    if kind.mlp != "none":
        into = graph.norm("mlp_norm", y, before, D)
        add = _add_experts if kind.mlp == "experts" else _add_mlp
        down = graph.norm("post_mlp_norm", add(graph, into, model, shares, kind), after, S)
        y = graph.cheap("y", y, down, width=S)
    if model.layer_inputs is not None and kind.layer_input:
        y = _add_layer_input(graph, y, model, shares)
    if kind.layer_scale:
        graph.used.add(y)
        graph.cheap("scaled", y, width=S)
    return graph.nodes, frozenset(graph.used)


def _add_layer_input(graph: _Graph, y: str, model: DecoderConfig, shares: Shares) -> str:
    """What a layer makes of its input beside the stream."""
    inputs = model.layer_inputs
    assert inputs is not None
    D, P, S = model.hidden_size, inputs.width, shares.stream
    own = graph.given("layer_input", P)
    gate = graph.product("input_gate", y, D, P, P)
    graph.used.update((own, gate))
    out = graph.product("input_product", graph.cheap("gated_input", gate, own, width=P), P, D, S)
    return graph.cheap("with_input", y, graph.norm("input_norm", out, True, S), width=S)


def _add_attention(
    graph: _Graph, into: str, model: DecoderConfig, shares: Shares, kind: LayerKind
) -> str:
    """Latent or grouped-query attention."""
    D, S, N = model.hidden_size, shares.stream, shares.heads
    V = model.value_width if model.latent is not None else model.kv_shape(kind)[1]
    if model.latent is not None:
        _add_latents(graph, into, model, shares)
    else:
        _add_heads(graph, into, model, shares, kind)
    o = Node(name="o", kind="attention", needs=("q", "k", "v"), width=N * V, wide=N, head=V)
    graph.used.update(("q", "k", "v", graph.add(o)))
    out = "o"
    if model.attention_gate:
        graph.used.add("q_product")
        out = graph.cheap("gated", "o", "q_product", width=N * V, head=V)
    return graph.product("o_product", out, N * V, D, S)


_FOR_OTHERS = "for others: "


def _add_heads(
    graph: _Graph, into: str, model: DecoderConfig, shares: Shares, kind: LayerKind
) -> None:
    """q, k and v of grouped-query attention. A layer that shares those of another is given them."""
    D, N, K, H = model.hidden_size, shares.heads, shares.kv_heads_of(kind), model.kv_shape(kind)[1]
    normed = model.qk_norm != "none"
    with_gate = 2 if model.attention_gate else 1
    q = graph.by_head("q_product", into, D, N, with_gate * H)
    q = graph.norm("q_norm", q, normed, N * H, H)
    graph.cheap("q", q, width=N * H, head=H)
    if kind.keys == "shared":  # they count with the layer that keeps them
        for name in ("k", "v"):
            graph.named(name, graph.given(f"given {name}", 0), width=K * H, head=H)
        return
    k = v = graph.by_head("k_product", into, D, K, H)
    wide = model.global_heads if kind.global_heads else None
    if wide is None or not wide.keys_as_values:
        v = graph.by_head("v_product", into, D, K, H)
    k = graph.norm("k_norm", k, normed, K * H, H)
    v = graph.norm("v_norm", v, model.value_norm, K * H, H)
    graph.cheap("k", k, width=K * H, head=H)
    graph.named("v", v, width=K * H, head=H)
    if kind.keys == "kept":
        graph.given(f"{_FOR_OTHERS}k", K * H)
        graph.given(f"{_FOR_OTHERS}v", K * H)


def _add_linear(
    graph: _Graph, into: str, model: DecoderConfig, shares: Shares, kind: LayerKind
) -> str:
    """Linear attention: projections, convolutions, the rule, and what is made of its result."""
    del kind
    add = _add_gated_delta if model.gated_delta is not None else _add_mamba2
    rule, own = model.linear, shares.linear
    assert rule is not None
    assert own is not None
    add(graph, into, model, own)
    graph.used.update(("read", "z_product"))
    width = own.heads * rule.value_dim
    out = Node(name="gated", kind="cheap", needs=("read", "z_product"), width=width)
    return graph.product("o_product", graph.add(out), width, model.hidden_size, shares.stream)


def _add_mixed(graph: _Graph, name: str, into: str, D: int, heads: int, head: int) -> str:
    """A projection whose channels a convolution mixes over time."""
    graph.used.add(graph.by_head(f"{name}_product", into, D, heads, head))
    graph.used.add(graph.cheap(name, f"{name}_product", width=heads * head, head=head))
    return name


def _add_gated_delta(graph: _Graph, into: str, model: DecoderConfig, own: LinearShares) -> None:
    delta = model.gated_delta
    assert delta is not None
    D, K, N, H, V = model.hidden_size, own.key_heads, own.heads, delta.key_dim, delta.value_dim
    for name in ("q", "k"):
        _add_mixed(graph, name, into, D, K, H)
        graph.wide(f"{name}_unit", name, width=K * H, head=H)
    _add_mixed(graph, "v", into, D, K, N // K * V)
    graph.by_head("z_product", into, D, K, N // K * V)
    for name in ("beta", "decay"):
        graph.used.add(graph.product(f"{name}_product", into, D, N, N))
        graph.wide(name, f"{name}_product", width=N)
    _add_rule(graph, ("q_unit", "k_unit", "v", "decay"), own, H, V, corrects=True)
    graph.used.add("o")
    graph.wide("read", "o", width=N * V, head=V)


def _add_mamba2(graph: _Graph, into: str, model: DecoderConfig, own: LinearShares) -> None:
    mamba = model.mamba2
    assert mamba is not None
    D, K, N, H, V = model.hidden_size, own.key_heads, own.heads, mamba.state_dim, mamba.head_dim
    graph.by_head("z_product", into, D, N, V)
    _add_mixed(graph, "v", into, D, N, V)
    _add_mixed(graph, "k", into, D, K, H)
    _add_mixed(graph, "q", into, D, K, H)
    graph.used.add(graph.product("dt_product", into, D, N, N))
    graph.used.add(graph.wide("dt", "dt_product", width=N))
    graph.wide("decay", "dt", width=N)
    graph.wide("stepped", "dt", "v", width=N * V, head=V)
    _add_rule(graph, ("q", "k", "stepped", "decay"), own, H, V, corrects=False)
    graph.wide("past", "o", "v", width=N * V, head=V)
    graph.used.update(("past", "z_product"))
    graph.wide("read", "past", "z_product", width=N * V, head=V)


def _add_rule(
    graph: _Graph,
    operands: tuple[str, str, str, str],
    own: LinearShares,
    H: int,
    V: int,
    *,
    corrects: bool,
) -> None:
    """The chunked rule of `kernels.gated_delta_rule` -> o, all of it in float32.

    Args:
      graph: to add to.
      operands: queries, keys, values and logarithms of decays.
      own: heads and chunks.
      H: key width.
      V: value width.
      corrects: whether a token corrects what its key finds, by "beta".
    """
    q, k, v, decay = operands
    K, N, C = own.key_heads, own.heads, own.chunk
    more = own.padding  # tokens of chunks for each token
    # Sums of decays since the chunk's start, in two parts; the coarse one has no gradient.
    coarse = graph.batched("coarse", (decay,), more, N, C, backward=0)
    fine = graph.batched("fine", (decay,), more, N, C, backward=1)
    graph.used.update((coarse, fine, k, q))
    decays = graph.wide("decays", coarse, fine, width=more * N * C, head=C)
    since = graph.wide("since", coarse, fine, width=more * N)
    graph.used.update((decays, since))
    moved = v
    if corrects:
        moved = _add_corrections(graph, k, v, own, H, V)
    scores = graph.batched("scores_product", (q, k), more, K * C, H, head=C)
    graph.used.add(scores)
    scores = graph.wide("scores", decays, scores, width=more * N * C, head=C)
    state = N * H * V / C  # of a chunk, for each of its tokens
    looked = graph.batched("looked", (q, "state"), more, N * V, H, head=V)
    mixed = graph.batched("mixed", (scores, moved), more, N * V, C, head=V)
    left = graph.wide("left", decays, moved, width=more * N * V, head=V)
    written = graph.batched("written", (k, left), more, state, C, head=V)
    graph.wide("state", written, since, width=more * state, head=V)
    graph.used.update((looked, scores, moved, left, "state"))
    graph.wide("o", looked, since, mixed, width=N * V, head=V)


def _add_corrections(graph: _Graph, k: str, v: str, own: LinearShares, H: int, V: int) -> str:
    """Values less what keys find: a triangular system of each chunk, then the states."""
    K, N, C, more = own.key_heads, own.heads, own.chunk, own.padding
    keys = graph.batched("keys", (k, k), more, K * C, H, head=C)
    coupling = graph.wide("coupling", "beta", "decays", keys, width=more * N * C, head=C)
    graph.used.update((keys, "beta", v))
    # Blocks of twice the size are solved by two products each; backward takes two at their end.
    levels = max(0, C.bit_length() - 2)
    solve = coupling
    if levels:
        outer = Node(
            name="blocks",
            kind="inverse",
            needs=(coupling,),
            wide=more * N * C,
            contract=C,
            columns=more * 2 * levels * N * C,
            backward=1 / levels,
            head=C,
        )
        solve = graph.wide("solve", graph.add(outer), coupling, width=more * N * C, head=C)
    moves = graph.wide("moves", "beta", v, width=more * N * V, head=V)
    values = graph.batched("values", (solve, moves), more, N * V, C, head=V)
    weighted = graph.wide("weighted", "beta", "since", k, width=more * N * H, head=H)
    reads = graph.batched("reads", (solve, weighted), more, N * H, C, head=H)
    found = graph.batched("found", (reads, "state"), more, N * V, H, head=V)
    graph.used.update((solve, moves, weighted, reads))
    return graph.wide("moved", values, found, width=more * N * V, head=V)


def _add_latents(graph: _Graph, into: str, model: DecoderConfig, shares: Shares) -> None:
    """q, k and v of latent attention: latents are whole on each device, heads are divided."""
    latent = model.latent
    assert latent is not None
    D, N, H, V = model.hidden_size, shares.heads, model.head_width, latent.value_dim
    Q, R, kept = latent.query_rank, latent.key_value_rank, latent.cached_dim
    q, contract = into, D
    if Q is not None:
        q, contract = graph.norm("q_norm", graph.product("q_down", into, D, Q, Q), True, Q), Q
    q = graph.by_head("q_product", q, contract, N, H)
    down = graph.product("kv_down", into, D, kept, kept)
    normed = graph.norm("kv_norm", down, True, R)
    up = graph.by_head("kv_up", normed, R, N, latent.unrotated_dim + V)
    graph.cheap("q", q, width=N * H, head=H)
    graph.cheap("k", up, down, width=N * H, head=H)
    graph.named("v", up, width=N * V, head=V)


def _add_mlp(
    graph: _Graph, into: str, model: DecoderConfig, shares: Shares, kind: LayerKind
) -> str:
    D, F = model.hidden_size, shares.mlp * (2 if kind.wide_mlp else 1)
    gate = graph.product("gate", into, D, F, F)
    up = graph.product("up", into, D, F, F)
    graph.used.update((gate, up))
    return graph.product("down", graph.cheap("h", gate, up, width=F), F, D, shares.stream)


def _add_experts(
    graph: _Graph, into: str, model: DecoderConfig, shares: Shares, kind: LayerKind
) -> str:
    """Router, experts and what all tokens run through; with norms of their own router and experts
    read the stream itself."""
    del kind
    D, F, S = model.hidden_size, shares.expert_mlp, shares.stream
    experts = model.experts
    assert experts is not None
    separate = experts.separate_norms
    routed = read = into
    if separate:
        routed = graph.wide("router_norm", "middle", width=D)
        read = graph.norm("experts_norm", "middle", True, D)
    graph.used.add(routed)
    E = experts.num_experts
    router = Node(name="router", kind="product", needs=(routed,), wide=E, contract=D, columns=E)
    graph.used.add(graph.add(router))
    rows = _to_experts(graph, read, D, shares)
    gate = graph.grouped("gate", rows, D, F, shares)
    up = graph.grouped("up", rows, D, F, shares)
    graph.used.update((gate, up))
    inner = graph.cheap("h", gate, up, width=shares.routed.room * F)
    terms = graph.grouped("terms", inner, F, D, shares)
    back = 1 if shares.routed.sends else shares.routed.gathered
    terms = graph.cheap("returned", terms, width=back * shares.chosen * D)
    graph.used.add(terms)
    down = graph.cheap("down", terms, "router", width=S)
    if experts.shared_intermediate_size is None:
        return down
    shared = _add_shared(graph, into, read, model, shares)
    down = graph.norm("experts_out_norm", down, separate, S)
    shared = graph.norm("shared_out_norm", shared, separate, S)
    return graph.cheap("both", down, shared, width=S)


def _add_shared(
    graph: _Graph, into: str, gated_by: str, model: DecoderConfig, shares: Shares
) -> str:
    """The MLP that all tokens run through beside their experts, behind a gate or not."""
    experts, D, F, S = model.experts, model.hidden_size, shares.shared_mlp, shares.stream
    assert experts is not None
    gate = graph.product("shared_gate", into, D, F, F)
    up = graph.product("shared_up", into, D, F, F)
    graph.used.update((gate, up))
    inner = graph.cheap("shared_h", gate, up, width=F)
    shared = graph.product("shared_down", inner, F, D, S)
    if not experts.shared_gate:
        return shared
    weight = graph.product("shared_weight", gated_by, D, 1, 1)
    graph.used.update((shared, weight))
    return graph.cheap("gated_shared", shared, weight, width=S)


def _to_experts(graph: _Graph, into: str, D: int, shares: Shares) -> str:
    """The rows of the device's experts, sorted: of its own tokens, of those sent to it, or of those
    gathered."""
    routed = shares.routed
    if routed.devices == 1:
        return graph.cheap("rows", into, width=routed.leaving * D)
    if routed.sends:
        rows = graph.cheap("rows", into, width=routed.leaving * D)
        return graph.cheap("received", rows, width=routed.room * D)
    gathered = graph.cheap("gathered", into, width=routed.gathered * D)
    return graph.cheap("rows", gathered, width=routed.room * D)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What stays for the backward pass."""

    keeps_all: bool = False
    """No rematerialisation: whatever the backward pass uses stays."""
    products: bool = False
    """Results of products with weights stay."""
    batched: bool = False
    """Those of products of two values stay."""
    names: frozenset[str] = frozenset()
    """Values that stay by name."""
    host: frozenset[str] = frozenset()
    """Values that stay in the host's memory."""

    def keeps(self, name: str, kind: str) -> bool:
        """Whether a value of the layer stays, on the device or the host."""
        kept = (self.products and kind == "product") or (self.batched and kind == "batched")
        return kept or name in self.names or name in self.host


_ATTENTION = frozenset(("q", "k", "v", "o"))
_NAMES = {
    "layer_input": ("x",),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "attention": ("o",),
    "attention_out": ("o_product",),
    "mlp_gate": ("gate", "shared_gate"),
    "mlp_up": ("up", "shared_up"),
    "expert_down": ("terms",),
    "mlp_down": ("down", "shared_down"),
}
"""`fornax.models.REMAT_NAMES` to the values they name."""


@functools.cache
def policy_of(remat: Remat) -> Policy:
    """What a `Remat` keeps."""
    match remat.policy:
        case "none":
            return Policy(keeps_all=True)
        case "full":
            return Policy()
        case "dots":
            return Policy(products=True, batched=True, names=_ATTENTION)
        case "dots_no_batch":
            return Policy(products=True)
        case "save_attention":
            return Policy(names=_ATTENTION)
        case "names":
            return Policy(
                names=frozenset(node for name in remat.save for node in _NAMES[name]),
                host=frozenset(node for name in remat.offload for node in _NAMES[name]),
            )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a policy makes of a layer."""

    kept: tuple[Node, ...]
    """Values kept on the device for the backward pass."""
    offloaded: tuple[Node, ...]
    """Values kept in the host's memory."""
    again: tuple[Node, ...]
    """Values computed again."""

    @property
    def product_flops(self) -> float:
        """FLOPs per token of the products done again."""
        return sum(node.flops for node in self.again)

    @property
    def attention_again(self) -> bool:
        """Whether attention's forward pass runs twice."""
        return any(node.kind == "attention" for node in self.again)


@functools.cache
def replay(model: DecoderConfig, shares: Shares, policy: Policy, kind: LayerKind) -> Replay:
    """Walk from what the backward pass uses to the nearest kept values.

    Without a policy norms and activations keep values of their own, which are none of the graph's:
    `memory.py` adds them.
    """
    graph, used = layer_graph(model, shares, kind)
    if policy.keeps_all:
        names = {"gate", "up", "shared_gate", "shared_up", "router", "input_gate", "layer_input"}
        names |= set() if kind.linear else _ATTENTION
        names -= {"k", "v"} if kind.keys == "shared" else set()
        names.add("returned")
        for node in graph.values():
            names.update(node.needs if node.kind == "product" or node.name == "scaled" else ())
        kept = [node for node in graph.values() if node.name in names]
        return Replay(kept=tuple(kept), offloaded=(), again=())
    found: dict[str, None] = {}
    again: dict[str, None] = {}
    waiting = [name for name in graph if name in used]
    while waiting:
        node = graph[waiting.pop()]
        if node.name in found or node.name in again:
            continue
        if policy.keeps(node.name, node.kind) or node.kind == "input":
            found[node.name] = None
        else:
            again[node.name] = None
            waiting.extend(node.needs)
    # The loop keeps what it carries from layer to layer and what it gives to each, but not the keys
    # and values that each layer keeps for itself.
    for node in graph.values():
        own = node.name.removeprefix(_FOR_OTHERS)
        if node.kind == "input" and (own == node.name or not policy.keeps(own, "name")):
            found[node.name] = None
    kept = [node for node in graph.values() if node.name in found]
    return Replay(
        kept=tuple(node for node in kept if node.name not in policy.host),
        offloaded=tuple(node for node in kept if node.name in policy.host),
        again=tuple(node for node in graph.values() if node.name in again),
    )
