"""A request of more rows than the largest bucket: cut into parts, and their outputs made one."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fornax.export.dtypes import BYTES
from fornax.export.spec import Signature, TensorSpec

__all__ = ["Part", "join", "longest", "split"]

Arrays = Mapping[str, np.ndarray]


class Part(dict[str, np.ndarray]):
    """Some rows of a request; its strings count as long as the longest of the whole request.

    Outputs that are as long as the strings are thus of one size in all parts.
    """

    longest: Mapping[str, int]


def longest(request: Arrays, spec: TensorSpec) -> int:
    """The longest string of a bytes input, of the whole request where this is a part of one."""
    own = max(map(len, request[spec.name].ravel()), default=0)
    return max(own, request.longest[spec.name]) if isinstance(request, Part) else own


def split(
    signature: Signature, request: Arrays, rows: int, most: int
) -> Iterator[tuple[int, Arrays]]:
    """Parts of at most `most` of a request's rows, each with how many it has."""
    texts = [spec for spec in signature.inputs.values() if spec.dtype == BYTES]
    sizes = {spec.name: longest(request, spec) for spec in texts}
    for start in range(0, rows, most):
        part = Part({name: array[start : start + most] for name, array in request.items()})
        part.longest = sizes
        yield min(most, rows - start), part


def join(signature: Signature, parts: Sequence[Arrays]) -> Arrays:
    """The outputs of all parts as one; those that have no rows are the same in each."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: np.concatenate([part[name] for part in parts]) if name in signature.by_row else array
        for name, array in parts[0].items()
    }
