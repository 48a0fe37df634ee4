"""A request of more rows than the largest bucket: cut into parts, and their outputs made one."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fornax.export.spec import Signature

__all__ = ["join", "split"]

Arrays = Mapping[str, np.ndarray]


def split(request: Arrays, rows: int, most: int) -> Iterator[tuple[int, Arrays]]:
    """Parts of at most `most` of a request's rows, each with how many it has."""
    for start in range(0, rows, most):
        part = {name: array[start : start + most] for name, array in request.items()}
        yield min(most, rows - start), part


def join(signature: Signature, parts: Sequence[Arrays]) -> Arrays:
    """The outputs of all parts as one; those that have no rows are the same in each."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: np.concatenate([part[name] for part in parts]) if name in signature.by_row else array
        for name, array in parts[0].items()
    }
