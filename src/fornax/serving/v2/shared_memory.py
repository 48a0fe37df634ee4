"""Regions of system shared memory that clients register, to pass tensors outside the request.

A region is read and written through its descriptor, not mapped: a client that truncates a mapped
file would end the server with SIGBUS, and what was read cannot change under the checks.
"""

import dataclasses
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.datatypes import Raw, refuse

__all__ = ["CUDA_REFUSED", "Region", "SharedMemory"]

CUDA_REFUSED = (
    "CUDA shared memory is not served: arrays reach the device through jax, which does not open "
    "CUDA IPC handles; register system shared memory, or send the tensors in the request"
)
_FOLDER = Path("/dev/shm")
_MAX_NAME = 255
_MAX_REGIONS = 1024


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """A registered span of one POSIX shared memory object; of one event loop, like its registry."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int
    """-1 when unregistered."""

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes from `offset` on; ServingError outside of the region."""
        self._check(offset, size)
        data = os.pread(self.descriptor, size, self.offset + offset)
        while len(data) < size:  # one call moves at most 2 GiB
            more = os.pread(self.descriptor, size - len(data), self.offset + offset + len(data))
            if not more:
                raise refuse(f"shared memory region {self.name!r} was truncated by its owner")
            data += more
        return data

    def write(self, offset: int, data: Raw) -> None:
        """Put `data` at `offset`; ServingError outside of the region."""
        view = memoryview(data).cast("B")
        self._check(offset, view.nbytes)
        at = self.offset + offset
        try:
            while view:
                written = os.pwrite(self.descriptor, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"shared memory region {self.name!r} cannot be written: {error.strerror}",
            ) from None

    def _check(self, offset: int, size: int) -> None:
        if self.descriptor < 0:
            raise refuse(
                f"shared memory region {self.name!r} was unregistered while the request ran"
            )
        if offset < 0 or size < 0 or offset + size > self.byte_size:
            raise refuse(
                f"shared memory region {self.name!r} has {self.byte_size} bytes; "
                f"{size} bytes at offset {offset} are outside of it"
            )
        if os.fstat(self.descriptor).st_size < self.offset + offset + size:
            raise refuse(f"shared memory region {self.name!r} was truncated by its owner")

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SharedMemory:
    """What clients registered, shared by HTTP and gRPC; to be used in the event loop only.

    A client that may register can read and write whatever the server's user can of the machine's
    shared memory: `prefixes` narrows that to keys that begin with one of them, and with `enabled`
    false nothing is registered.
    """

    def __init__(
        self, *, enabled: bool = True, prefixes: Sequence[str] = (), folder: Path = _FOLDER
    ):
        self._enabled = enabled
        self._prefixes = tuple(prefixes)
        self._folder = folder
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, byte_size: int, offset: int = 0) -> None:
        """Open the object `key` and name `byte_size` bytes of it, from `offset` on, `name`.

        Raises ServingError for a key that is not a name of shared memory, that is not there or may
        not be opened, for a span outside of it, and for a name that is taken.
        """
        self._admit(name, key)
        for what, value in (("byte_size", byte_size), ("offset", offset)):
            if type(value) is not int or not 0 <= value < 2**63:
                raise refuse(f"{what}={value!r} is not a size; it is an integer from 0")
        if byte_size == 0:
            raise refuse("byte_size=0 names no memory; register at least 1 byte")
        descriptor = self._open(key)
        size = os.fstat(descriptor).st_size
        if offset + byte_size > size:
            os.close(descriptor)
            raise refuse(
                f"shared memory {key!r} has {size} bytes; {byte_size} bytes at offset {offset} "
                "are outside of it"
            )
        self._regions[name] = Region(name, key, offset, byte_size, descriptor)

    def _admit(self, name: str, key: str) -> None:
        if not self._enabled:
            raise ServingError(
                ServingCode.UNIMPLEMENTED,
                "shared memory is switched off on this server; send the tensors in the request",
            )
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise refuse(f"a region's name has 1 to {_MAX_NAME} characters")
        if name in self._regions:
            raise ServingError(
                ServingCode.FAILED_PRECONDITION,
                f"shared memory region {name!r} is registered already; unregister it first",
            )
        if len(self._regions) >= _MAX_REGIONS:
            raise ServingError(
                ServingCode.RESOURCE_EXHAUSTED,
                f"{_MAX_REGIONS} shared memory regions are registered; unregister some first",
            )
        if self._prefixes and not (
            isinstance(key, str) and key.removeprefix("/").startswith(self._prefixes)
        ):
            raise ServingError(
                ServingCode.PERMISSION_DENIED,
                f"shared memory {key!r} is not open to clients; its key must begin with "
                f"{' or '.join(self._prefixes)}",
            )

    def _open(self, key: str) -> int:
        """The descriptor of an object of shared memory."""
        bare = key.removeprefix("/") if isinstance(key, str) else ""
        plain = bare.isprintable() and "/" not in bare and bare not in ("", ".", "..")
        if not plain or len(os.fsencode(bare)) > _MAX_NAME or bare.startswith("sem."):
            raise refuse(f"key {key!r} is not a name of shared memory; it is like '/name'")
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(self._folder / bare, flags)
        except OSError as error:
            raise refuse(f"shared memory {key!r} cannot be opened: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise refuse(f"shared memory {key!r} cannot be opened: it is not a plain object")
        return descriptor

    def get(self, name: object) -> Region:
        """The region called `name`; ServingError where there is none."""
        region = self._regions.get(name) if isinstance(name, str) else None
        if region is None:
            raise refuse(f"shared memory region {str(name)[:80]!r} is not registered")
        return region

    def regions(self, name: str = "") -> list[Region]:
        """One region, or all."""
        return [self.get(name)] if name else list(self._regions.values())

    def unregister(self, name: str = "") -> None:
        """Forget one region, or all; one that is not registered is not an error."""
        for gone in [name] if name else list(self._regions):
            region = self._regions.pop(gone, None)
            if region is not None:
                region._close()
