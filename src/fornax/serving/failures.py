"""What a client is told of a failure: its own fault in words, ours by its kind, the rest logged."""

import logging

from fornax.config import FornaxError, ServingCode, ServingError

__all__ = ["as_serving_error"]

_log = logging.getLogger("fornax.serving")


def as_serving_error(error: BaseException, what: str = "the request") -> ServingError:
    """The error that answers `what`; what is no error of Fornax's is logged with its traceback."""
    if isinstance(error, ServingError):
        # Its frames hold the request, and what holds the error: a ring, kept until a collection.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
    if isinstance(error, FornaxError):
        return ServingError(ServingCode.FAILED_PRECONDITION, str(error))
    _log.error("%s failed", what, exc_info=error)
    return ServingError(
        ServingCode.INTERNAL,
        f"the server failed on {what} ({type(error).__name__}); its log says where",
    )
