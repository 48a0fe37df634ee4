"""One decoder layer as a graph of what it computes: what each remat policy keeps and does again.

The backward pass needs some of the layer's values. Those a policy keeps are memory; the others are
computed again from the nearest kept ones, and what lies on the way is work done twice. Both follow
from the graph, for any set of kept names.

Sizes are of one device: N heads, K key/value heads and F hidden width are the device's shares. H is
the width of a head's query and key, V of its value; of latent attention Q and R are the ranks of
queries, and of keys and values. Tokens are taken to choose each expert equally often.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.models import DecoderConfig
from fornax.models.remat import Remat
from fornax.plan.closed_form.shards import Shares

Kind = Literal["input", "product", "attention", "cheap"]
Mlp = Literal["mlp", "experts"]
"""`LayerKind.mlp`."""


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
    """Elements a token kept in float32 (the log-sum-exp of attention)."""
    contract: int = 0
    """Length of the sum of a product."""
    columns: int = 0
    """Columns of a product before sums over devices are divided: `width`, or more."""
    rows: float = 1
    """Rows of a product for each token of the device: the experts that it chooses, or what the
    device's experts have to run for all."""
    experts: int = 0
    """Matrices of a grouped product, whose rows are divided among them; 0: one for all rows."""
    head: int = 0
    """Its last dimension where that is a head's width, which a TPU pads to whole lanes; or 0."""

    @property
    def flops(self) -> float:
        """FLOPs a token of a product; attention is counted elsewhere."""
        count = 2.0 * self.rows * self.contract * self.columns
        return count if self.kind == "product" else 0.0


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
def layer_graph(model: DecoderConfig, shares: Shares, mlp: Mlp) -> tuple[Graph, frozenset[str]]:
    """The layer's values, and which of them the backward pass uses.

    Every product uses its input (for the gradient of its weights), every norm its input, attention
    its inputs and outputs, the gate its two factors, the sum of experts its terms (for the
    gradient of their weights). Rotation and sums use nothing.
    """
    D, V, S, N = model.hidden_size, model.value_width, shares.stream, shares.heads
    graph = _Graph()
    graph.add(Node(name="x", kind="input", width=S))
    before = model.norm_placement in ("pre", "sandwich")
    after = model.norm_placement in ("post", "sandwich")
    into = graph.norm("attention_norm", "x", before, D)
    project = _add_heads if model.latent is None else _add_latents
    project(graph, into, model, shares)
    o = Node(name="o", kind="attention", needs=("q", "k", "v"), width=N * V, wide=N, head=V)
    graph.used.update(("q", "k", "v", graph.add(o)))
    out = graph.product("o_product", "o", N * V, D, S)
    out = graph.norm("post_attention_norm", out, after, S)
    middle = graph.cheap("middle", "x", out, width=S)
    into = graph.norm("mlp_norm", middle, before, D)
    add = _add_experts if mlp == "experts" else _add_mlp
    down = graph.norm("post_mlp_norm", add(graph, into, model, shares), after, S)
    graph.cheap("y", middle, down, width=S)
    return graph.nodes, frozenset(graph.used)


def _add_heads(graph: _Graph, into: str, model: DecoderConfig, shares: Shares) -> None:
    """q, k and v of grouped-query attention."""
    D, H, N, K = model.hidden_size, model.head_width, shares.heads, shares.kv_heads
    normed = model.qk_norm != "none"
    q = graph.norm("q_norm", graph.by_head("q_product", into, D, N, H), normed, N * H, H)
    k = graph.norm("k_norm", graph.by_head("k_product", into, D, K, H), normed, K * H, H)
    v = graph.by_head("v_product", into, D, K, H)
    graph.cheap("q", q, width=N * H, head=H)
    graph.cheap("k", k, width=K * H, head=H)
    graph.cheap("v", v, width=K * H, head=H)


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
    graph.cheap("v", up, width=N * V, head=V)


def _add_mlp(graph: _Graph, into: str, model: DecoderConfig, shares: Shares) -> str:
    D, F = model.hidden_size, shares.mlp
    gate = graph.product("gate", into, D, F, F)
    up = graph.product("up", into, D, F, F)
    graph.used.update((gate, up))
    return graph.product("down", graph.cheap("h", gate, up, width=F), F, D, shares.stream)


def _add_experts(graph: _Graph, into: str, model: DecoderConfig, shares: Shares) -> str:
    D, F, S = model.hidden_size, shares.expert_mlp, shares.stream
    experts = model.experts
    assert experts is not None
    graph.used.add(into)
    E = experts.num_experts
    router = Node(name="router", kind="product", needs=(into,), wide=E, contract=D, columns=E)
    graph.used.add(graph.add(router))
    rows = _to_experts(graph, into, D, shares)
    gate = graph.grouped("gate", rows, D, F, shares)
    up = graph.grouped("up", rows, D, F, shares)
    graph.used.update((gate, up))
    inner = graph.cheap("h", gate, up, width=shares.routed.room * F)
    terms = graph.grouped("terms", inner, F, D, shares)
    if shares.routed.devices > 1:
        back = 1 if shares.routed.sends else shares.routed.gathered
        terms = graph.cheap("returned", terms, width=back * shares.chosen * D)
    graph.used.add(terms)
    down = graph.cheap("down", terms, "router", width=S)
    if experts.shared_intermediate_size is None:
        return down
    F = shares.shared_mlp
    gate = graph.product("shared_gate", into, D, F, F)
    up = graph.product("shared_up", into, D, F, F)
    graph.used.update((gate, up))
    inner = graph.cheap("shared_h", gate, up, width=F)
    shared = graph.product("shared_down", inner, F, D, S)
    return graph.cheap("both", down, shared, width=S)


def _to_experts(graph: _Graph, into: str, D: int, shares: Shares) -> str:
    """The rows of the device's experts, sorted: of its own tokens, of those sent to it, or of those
    gathered."""
    routed = shares.routed
    if routed.devices == 1:
        return graph.cheap("rows", into, width=shares.chosen * D)
    if routed.sends:
        rows = graph.cheap("rows", into, width=shares.chosen * D)
        return graph.cheap("received", rows, width=routed.room * D)
    gathered = graph.cheap("gathered", into, width=routed.gathered * D)
    return graph.cheap("rows", gathered, width=routed.room * D)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What stays for the backward pass."""

    keeps_all: bool = False
    """No rematerialisation: whatever the backward pass uses stays."""
    products: bool = False
    """Results of matrix products stay."""
    names: frozenset[str] = frozenset()
    """Values that stay by name."""
    host: frozenset[str] = frozenset()
    """Values that stay in the host's memory."""

    def keeps(self, name: str, kind: str) -> bool:
        """Whether a value of the layer stays, on the device or the host."""
        return (self.products and kind == "product") or name in self.names or name in self.host


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
            return Policy(products=True, names=_ATTENTION)
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
        """FLOPs a token of the products done again."""
        return sum(node.flops for node in self.again)

    @property
    def attention_again(self) -> bool:
        """Whether attention's forward pass runs twice."""
        return any(node.kind == "attention" for node in self.again)


@functools.cache
def replay(model: DecoderConfig, shares: Shares, policy: Policy, mlp: Mlp) -> Replay:
    """Walk from what the backward pass uses to the nearest kept values.

    Without a policy norms and activations keep values of their own, which are none of the graph's:
    `memory.py` adds them.
    """
    graph, used = layer_graph(model, shares, mlp)
    if policy.keeps_all:
        names = {"q", "k", "v", "o", "gate", "up", "shared_gate", "shared_up", "router"}
        names.add("returned" if "returned" in graph else "terms")
        for node in graph.values():
            names.update(node.needs if node.kind == "product" else ())
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
    found["x"] = None  # The scan keeps what it carries from layer to layer.
    kept = [node for node in graph.values() if node.name in found]
    return Replay(
        kept=tuple(node for node in kept if node.name not in policy.host),
        offloaded=tuple(node for node in kept if node.name in policy.host),
        again=tuple(node for node in graph.values() if node.name in again),
    )
