"""The benchmark's models as ONNX graphs with the same weights, written by hand.

The encoder is written with ONNX Runtime's own fused operators (one product for q, k and v,
attention, skip connections with their norms, gelu with its bias): what its transformer optimizer
would turn an exported graph into. Batch and length are free: nothing is padded to a bucket.
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

import _model_server_models as models

OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


class _Graph:
    def __init__(self) -> None:
        self.nodes, self.constants = [], []

    def constant(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, op: str, *inputs: str, out: str, domain: str = "", **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [out], domain=domain, **attributes))
        return out


def write(name: str, path: Path) -> None:
    """Write model `name` to `path`."""
    model = models.MODELS[name]
    graph = _Graph()
    params = model.params()
    inputs = [
        helper.make_tensor_value_info(name, TYPES[dtype], list(shape))
        for name, (dtype, shape) in model.inputs.items()
    ]
    if model.ragged:
        inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["b"]))
    _WRITERS[name](graph, params)
    outputs = [helper.make_tensor_value_info(model.output, TensorProto.FLOAT, None)]
    made = helper.make_graph(graph.nodes, name, inputs, outputs, graph.constants)
    save(helper.make_model(made, opset_imports=OPSETS, ir_version=10), path)


def _layers(graph: _Graph, params: dict[str, np.ndarray], x: str) -> str:
    for layer in range(3):
        w = graph.constant(f"w{layer}", params[f"w{layer}"])
        b = graph.constant(f"b{layer}", params[f"b{layer}"])
        x = graph.node("Gemm", x, w, b, out=f"h{layer}")
        if layer < 2:
            x = graph.node("Relu", x, out=f"r{layer}")
    return x


def _mlp(graph: _Graph, params: dict[str, np.ndarray]) -> None:
    graph.node("Softmax", _layers(graph, params, "x"), out="scores", axis=-1)


def _recommender(graph: _Graph, params: dict[str, np.ndarray]) -> None:
    tables = graph.constant("tables", params["tables"].reshape(-1, models.EMBED))
    offsets = np.arange(models.FIELDS, dtype=np.int32) * models.ROWS_A_TABLE
    flat = graph.node("Add", "ids", graph.constant("offsets", offsets), out="flat")
    x = graph.node("Gather", tables, flat, out="embedded")
    shape = graph.constant("shape", np.array([-1, models.FIELDS * models.EMBED]))
    x = graph.node("Reshape", x, shape, out="joined")
    dense = graph.node("MatMul", "dense", graph.constant("w", params["dense"]), out="projected")
    dense = graph.node("Relu", dense, out="activated")
    x = graph.node("Concat", x, dense, out="features", axis=1)
    x = graph.node("Sigmoid", _layers(graph, params, x), out="column")
    graph.node("Reshape", x, graph.constant("flat_shape", np.array([-1])), out="score")


def _encoder(graph: _Graph, params: dict[str, np.ndarray]) -> None:
    fused = {"domain": "com.microsoft"}

    def weight(name: str) -> str:
        return graph.constant(f"p.{name}", params[name])

    zero, one = (graph.constant(str(n), np.array(n)) for n in (0, 1))
    size = graph.node("Gather", graph.node("Shape", "ids", out="size"), one, out="t")
    steps = graph.node("Range", zero, size, one, out="steps")
    lengths = graph.node("Cast", "lengths", out="lengths64", to=TensorProto.INT64)
    column = graph.node(
        "Unsqueeze", lengths, graph.constant("axis", np.array([1])), out="lengths_column"
    )
    inside = graph.node("Less", steps, column, out="inside")
    mask = graph.node("Cast", inside, out="mask", to=TensorProto.INT32)
    tokens = graph.node("Gather", weight("tokens"), "ids", out="token_rows")
    positions = graph.node("Gather", weight("positions"), steps, out="position_rows")
    x = graph.node("Add", tokens, positions, out="embedded")
    x = graph.node(
        "LayerNormalization",
        x,
        weight("embed.scale"),
        weight("embed.shift"),
        out="x",
        epsilon=1e-12,
    )
    for n in range(models.LAYERS):
        attended = graph.node(
            "Attention",
            x,
            weight(f"{n}.qkv"),
            weight(f"{n}.qkv.b"),
            mask,
            out=f"{n}.attended",
            num_heads=models.HEADS,
            **fused,
        )
        out = graph.node("MatMul", attended, weight(f"{n}.o"), out=f"{n}.out")
        x = _skip_norm(graph, n, "first", (out, x), weight, weight(f"{n}.o.b"))
        up = graph.node("MatMul", x, weight(f"{n}.up"), out=f"{n}.up")
        up = graph.node("BiasGelu", up, weight(f"{n}.up.b"), out=f"{n}.gelu", **fused)
        down = graph.node("MatMul", up, weight(f"{n}.down"), out=f"{n}.down")
        x = _skip_norm(graph, n, "second", (down, x), weight, weight(f"{n}.down.b"))
    _pool(graph, x, mask, column)


def _skip_norm(graph: _Graph, n: int, part: str, pair: tuple[str, str], weight, bias: str) -> str:
    return graph.node(
        "SkipLayerNormalization",
        *pair,
        weight(f"{n}.{part}.scale"),
        weight(f"{n}.{part}.shift"),
        bias,
        out=f"{n}.{part}",
        domain="com.microsoft",
        epsilon=1e-12,
    )


def _pool(graph: _Graph, x: str, mask: str, lengths_column: str) -> None:
    floats = graph.node("Cast", mask, out="mask_float", to=TensorProto.FLOAT)
    row = graph.node("Unsqueeze", floats, graph.constant("rows", np.array([1])), out="mask_row")
    sums = graph.node("MatMul", row, x, out="sums")
    flat = graph.node("Squeeze", sums, "rows", out="sums_flat")
    divisor = graph.node("Cast", lengths_column, out="divisor", to=TensorProto.FLOAT)
    mean = graph.node("Div", flat, divisor, out="mean")
    graph.node("LpNormalization", mean, out="embedding", axis=-1, p=2)


_WRITERS = {"mlp": _mlp, "recommender": _recommender, "encoder": _encoder}
