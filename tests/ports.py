"""Ports for servers that a test starts later."""

import socket

from dynamo_lite.serve.processes import free_port

#: Bound, never listening. Servers listen beside them, as they set SO_REUSEADDR.
_RESERVED: list[socket.socket] = []


def reserved_port() -> int:
    """A TCP port that no other call returns, also not in another process, until this one ends."""
    while True:
        port = free_port()
        reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Without SO_REUSEADDR, so that it fails if the port was reserved meanwhile.
            reservation.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _RESERVED.append(reservation)
        return port
