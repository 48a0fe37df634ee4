"""Triton's HTTP client as tests may use it."""

import tritonclient.http as triton

__all__ = ["Client"]


class Client(triton.InferenceServerClient):
    """One that does not close itself again when it is collected: gevent refuses that in whatever
    other thread the collector happens to run in. To be used in a `with`."""

    def __del__(self) -> None:
        pass
