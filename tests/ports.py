"""Ports for programs that take the port to listen on as an argument."""

import atexit
import socket

__all__ = ["held_port"]


def held_port() -> int:
    """A port of this machine that nobody else is given for as long as this process runs.

    It is bound here and not listened at: a connection to it is refused, and a program that names
    it can bind it (`SO_REUSEADDR`, as servers have it), while the kernel hands out others to those
    that ask for any. A port that is released before it is used may be another program's by then.
    """
    holder = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        holder.setsockopt(socket.SOL_SOCKET, option, 1)
    holder.bind(("127.0.0.1", 0))
    atexit.register(holder.close)
    return holder.getsockname()[1]
