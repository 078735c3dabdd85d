"""Listening sockets."""

import socket

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound, not yet listening TCP socket. Raises StartupError naming the address.

    shared: other processes of this user may listen on the same port (SO_REUSEPORT); the kernel
    gives each new connection to one of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise StartupError(f"cannot listen on {host_port(host, port)}: {exc.strerror}") from exc
    listener.setblocking(False)
    return listener
