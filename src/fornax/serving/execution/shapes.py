"""Which padded shape a request goes to, and which others it could be computed in."""

from collections.abc import Mapping

from fornax.config.errors import BundleError
from fornax.export.buckets import choose
from fornax.export.spec import Signature
from fornax.serving.batching import Key

__all__ = ["Shapes"]

_REMEMBERED = 4096


class Shapes:
    """The padded shapes of a function apart from its rows; `rows` has each one's batch buckets."""

    def __init__(self, signature: Signature):
        self.signature = signature
        self.batch = signature.batch
        self.names = tuple(name for name in signature.dims if name != signature.batch)
        self.rows: dict[Key, tuple[int, ...]] = {}
        for dims in signature.shapes:
            rows, key = self.bucket(dims)
            self.rows[key] = tuple(sorted({*self.rows.get(key, ()), rows}))
        self._exact = tuple(name in signature.exact for name in self.names)
        self._found: dict[tuple[int, ...], Key] = {}

    def key(self, dims: Mapping[str, int]) -> Key:
        """The padded shape in these dimensions."""
        return tuple([dims[name] for name in self.names])

    def bucket(self, dims: Mapping[str, int]) -> tuple[int, Key]:
        """Rows (1 without a batch) and padded shape in these dimensions."""
        return (1 if self.batch is None else dims[self.batch]), self.key(dims)

    def place(self, dims: Mapping[str, int]) -> tuple[int, Key]:
        """Rows and padded shape of a request of these sizes.

        Raises:
          BundleError: when no bucket holds it, or it has no rows.
        """
        rows = 1 if self.batch is None else dims[self.batch]
        if rows == 0:
            raise BundleError(
                f"the request to {self.signature.name!r} has 0 rows ({self.batch}=0); send one "
                "or more"
            )
        if not self.names:
            return rows, ()
        sizes = tuple([dims[name] for name in self.names])
        key = self._found.get(sizes)
        if key is None:
            key = self.key(choose(self.signature, None, dims))
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[sizes] = key
        return rows, key

    def fits(self, small: Key, large: Key) -> bool:
        """Whether requests of one padded shape may be computed in the other."""
        return all(
            a == b if exact else a <= b
            for a, b, exact in zip(small, large, self._exact, strict=True)
        )
