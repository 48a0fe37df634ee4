"""One decoder layer as a graph of what it computes: what each remat policy keeps and does again.

The backward pass needs some of the layer's values. Those a policy keeps are memory; the others are
computed again from the nearest kept ones, and what lies on the way is work done twice. Both follow
from the graph, for any set of kept names.

Sizes are of one device: N heads, K key/value heads and F hidden width are the device's shares.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.models import DecoderConfig
from fornax.models.remat import Remat
from fornax.plan.closed_form.shards import Shares

Kind = Literal["input", "product", "attention", "cheap"]


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

    heads: bool = False
    """Whether its last dimension is a head's width, which a TPU pads to whole lanes."""

    @property
    def flops(self) -> float:
        """FLOPs a token of a product; attention is counted elsewhere."""
        return 2.0 * self.contract * self.columns if self.kind == "product" else 0.0


Graph = Mapping[str, Node]


@functools.cache
def layer_graph(model: DecoderConfig, shares: Shares) -> tuple[Graph, frozenset[str]]:
    """The layer's values, and which of them the backward pass uses.

    Every product uses its input (for the gradient of its weights), every norm its input, attention
    its inputs and outputs, the gate its two factors. Rotation and sums use nothing.
    """
    D, H, S = model.hidden_size, model.head_width, shares.stream
    N, K, F = shares.heads, shares.kv_heads, shares.mlp
    nodes: list[Node] = [Node(name="x", kind="input", width=S)]
    used: set[str] = set()

    def add(node: Node) -> str:
        nodes.append(node)
        return node.name

    def cheap(name: str, *needs: str, width: float) -> str:
        heads = name in ("q", "k", "v", "q_norm", "k_norm")
        return add(Node(name=name, kind="cheap", needs=needs, width=width, heads=heads))

    def norm(name: str, of: str, wanted: bool, width: float) -> str:
        if not wanted:
            return of
        used.add(of)
        return cheap(name, of, width=width)

    def product(name: str, of: str, contract: int, columns: int, width: int) -> str:
        used.add(of)
        return add(
            Node(
                name=name,
                kind="product",
                needs=(of,),
                width=width,
                contract=contract,
                columns=columns,
                heads=name in ("q_product", "k_product", "v_product"),
            )
        )

    before = model.norm_placement in ("pre", "sandwich")
    after = model.norm_placement in ("post", "sandwich")
    normed = model.qk_norm != "none"
    into = norm("attention_norm", "x", before, D)
    q = norm("q_norm", product("q_product", into, D, N * H, N * H), normed, N * H)
    k = norm("k_norm", product("k_product", into, D, K * H, K * H), normed, K * H)
    v = product("v_product", into, D, K * H, K * H)
    q = cheap("q", q, width=N * H)
    k = cheap("k", k, width=K * H)
    v = cheap("v", v, width=K * H)
    o = add(Node(name="o", kind="attention", needs=(q, k, v), width=N * H, wide=N, heads=True))
    used.update((q, k, v, o))
    out = norm("post_attention_norm", product("o_product", o, N * H, D, S), after, S)
    middle = cheap("middle", "x", out, width=S)
    into = norm("mlp_norm", middle, before, D)
    gate = product("gate", into, D, F, F)
    up = product("up", into, D, F, F)
    used.update((gate, up))
    h = cheap("h", gate, up, width=F)
    down = norm("post_mlp_norm", product("down", h, F, D, S), after, S)
    cheap("y", middle, down, width=S)
    return {node.name: node for node in nodes}, frozenset(used)


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
    "layer_input": "x",
    "query": "q",
    "key": "k",
    "value": "v",
    "attention": "o",
    "attention_out": "o_product",
    "mlp_gate": "gate",
    "mlp_up": "up",
    "mlp_down": "down",
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
                names=frozenset(_NAMES[name] for name in remat.save),
                host=frozenset(_NAMES[name] for name in remat.offload),
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
def replay(model: DecoderConfig, shares: Shares, policy: Policy) -> Replay:
    """Walk from what the backward pass uses to the nearest kept values.

    Without a policy norms and activations keep values of their own, which are none of the graph's:
    `memory.py` adds them.
    """
    graph, used = layer_graph(model, shares)
    if policy.keeps_all:
        names = {"q", "k", "v", "o", "gate", "up"}
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
