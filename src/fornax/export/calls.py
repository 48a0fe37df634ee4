"""The custom calls in a bundle's graph: only those that jax promises to keep, and none of Python.

A graph can name any function that is registered in the process, Python callbacks and pointers among
them, so a loader looks before it compiles.
"""

from jax.interpreters import mlir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.ir import Operation, WalkResult

from fornax.config.errors import BundleError
from fornax.export import _exported

__all__ = ["check_calls", "custom_calls"]


def custom_calls(module: bytes) -> set[str]:
    """The targets that a portable artifact calls.

    Raises:
      BundleError: when it is none, or of a StableHLO that this jaxlib does not read.
    """
    found: set[str] = set()

    def look(operation: Operation) -> WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.add(str(operation.attributes["call_target_name"]).strip('"'))
        return WalkResult.ADVANCE

    context = mlir.make_ir_context()
    with context:
        try:
            stablehlo.deserialize_portable_artifact(context, module).operation.walk(look)
        except Exception as error:
            raise BundleError(
                f"this jaxlib does not read it ({str(error).splitlines()[0]}); use a newer jax, "
                "or export again"
            ) from None
    return found


def check_calls(module: bytes) -> None:
    """That a graph calls nothing but what every jax is promised to have.

    Raises:
      BundleError: naming the calls.
    """
    unknown = sorted(custom_calls(module) - _exported.stable_calls())
    if unknown:
        raise BundleError(
            f"it calls {', '.join(unknown)}, which no bundle may: such code is not part of it and "
            "not promised to be here; export the function with XLA's implementations"
        )
