"""The whole life of a model on JAX, in one stack.

Nothing is imported here: each package (`fornax.models`, `fornax.data`, …) stands alone.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
