"""The V2 inference protocol, free of any transport: dtypes, tensors, documents, shared memory."""

__all__: list[str] = []
