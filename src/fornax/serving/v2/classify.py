"""Triton's classification extension: the k largest elements of an output, as strings."""

import numpy as np

from fornax.serving.v2.datatypes import refuse

__all__ = ["classify"]


def classify(name: str, array: np.ndarray, classes: int) -> np.ndarray:
    """The `classes` largest of each row, as BYTES elements `value:index`, largest first.

    Rows lie along the last axis: [..., n] becomes [..., min(classes, n)].

    Raises ServingError for an output without numbers.
    """
    if array.dtype.kind not in "iufV" or array.ndim == 0:
        raise refuse(f"output {name!r} is no row of numbers; parameter classification wants one")
    # Negated so that ties keep their order; NaN comes last.
    order = np.argsort(-array.astype(np.float64), axis=-1, kind="stable")[..., :classes]
    values = np.take_along_axis(array, order, axis=-1).astype(np.float64)
    texts = np.empty(order.shape, np.object_)
    pairs = zip(values.ravel().tolist(), order.ravel().tolist(), strict=True)
    texts.reshape(-1)[:] = [f"{value:f}:{index}".encode() for value, index in pairs]
    return texts
