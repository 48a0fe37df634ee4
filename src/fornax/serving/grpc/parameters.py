"""Parameters of the protocol's messages to and from plain values."""

from collections.abc import Callable, Mapping
from typing import Any

from fornax.serving.v2.datatypes import refuse

__all__ = ["parameter_values", "set_parameters"]


def parameter_values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a map of parameters; ServingError for one without a value."""
    values = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise refuse(f"parameter {key[:80]!r} has no value; give it one, or leave it out")
        values[key] = getattr(parameter, kind)
    return values


def set_parameters(parameters: Any, values: Mapping[str, Any]) -> None:
    """Put plain values into a map of parameters; what is no number or truth value, as text."""
    for key, value in values.items():
        parameter = parameters[key]
        setter = next((set_ for kind, set_ in _SETTERS if isinstance(value, kind)), _string)
        setter(parameter, value)


def _boolean(parameter: Any, value: bool) -> None:
    parameter.bool_param = value


def _integer(parameter: Any, value: int) -> None:
    if value < 2**63:
        parameter.int64_param = value
    else:
        parameter.uint64_param = value


def _float(parameter: Any, value: float) -> None:
    parameter.double_param = value


def _string(parameter: Any, value: object) -> None:
    parameter.string_param = str(value)


_SETTERS: tuple[tuple[type, Callable[[Any, Any], None]], ...] = (
    (bool, _boolean),
    (int, _integer),
    (float, _float),
)
