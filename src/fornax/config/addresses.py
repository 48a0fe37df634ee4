"""Where the processes beside a run listen, which may change while it runs."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from fornax.config.files import write_whole

__all__ = ["FileAddresses", "is_loopback", "own_address", "read_addresses", "write_addresses"]


class FileAddresses(Sequence[str]):
    """host:port of each, as a file says it now: a process that was lost may have another address.

    As many as there are at first.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; none in one that is not there."""
        self._path = path
        self._known: list[str] = []
        self._read()

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        self._read()
        return self._known[number]

    def _read(self) -> None:
        try:
            found = self._path.read_text(encoding="utf-8").split()
        except OSError:  # the launch has ended
            return
        if len(found) == len(self._known) or not self._known:
            self._known = found


def read_addresses(text: str) -> Sequence[str]:
    """host:port with commas between, or @ and the file that has one per line."""
    if text.startswith("@"):
        return FileAddresses(Path(text[1:]))
    return [each for each in text.split(",") if each]


def write_addresses(path: Path, addresses: Sequence[str]) -> str:
    """Write such a file whole; returns the text that `read_addresses` takes."""
    write_whole(path, "".join(f"{each}\n" for each in addresses))
    return f"@{path.absolute()}"


def own_address(towards: str) -> str:
    """This machine's address, as others that reach `towards` reach it; loopback for loopback."""
    if is_loopback(towards):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether a host, or host:port of an IPv4 address, is of this machine alone."""
    return address == "localhost" or address.startswith("127.")
