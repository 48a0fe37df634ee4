"""What the head of an inference says, read once for all requests that have the same."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fornax.serving.http.bodies import accepted_coding
from fornax.serving.v2.datatypes import refuse

__all__ = ["Head", "read_head"]

_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SIZE = re.compile(rb"[0-9]{1,18}")


class Head(NamedTuple):
    """An inference's path and headers."""

    model: str
    version: str
    text: int | None
    """Bytes of the body's JSON; None: all of it."""
    id: str
    """Empty: none, or none that is fit to be repeated."""
    trace: bytes | None
    """The caller's trace context."""
    accepted: bytes
    """The coding that the client asks its answer in; empty: none."""


def read_head(headers: Mapping[bytes, bytes], model: str, version: str) -> Head:
    """Read the headers of an inference; ServingError for a size of its JSON that is no number."""
    size = headers.get(b"inference-header-content-length")
    if size is not None and _SIZE.fullmatch(size) is None:
        raise refuse("Inference-Header-Content-Length is no number of bytes")
    name = headers.get(b"x-request-id", b"")
    return Head(
        model,
        version,
        None if size is None else int(size),
        name.decode("ascii") if _ID.fullmatch(name) else "",
        headers.get(b"traceparent"),
        accepted_coding(headers.get(b"accept-encoding", b"")),
    )
