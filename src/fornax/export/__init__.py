"""Export: a JAX function and its weights, sealed in a directory that needs none of their code."""

__all__: list[str] = []
