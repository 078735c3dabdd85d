"""One HTTP port for all processes of a service."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.address import host_port
from dynamo_lite.serve.config import ServiceConfig


def http_address(service: ServiceConfig) -> tuple[str, int] | None:
    """Host and port of the service's HTTP server; None if it has none."""
    host, port = service.options.get("host"), service.options.get("port")
    return (host, port) if isinstance(host, str) and isinstance(port, int) else None


@contextlib.contextmanager
def shared_port(service: ServiceConfig) -> Iterator[ServiceConfig]:
    """Keeps the HTTP port of a service with several processes while the context is open.

    The result has the real port in place of 0, so that a restarted process gets the same one.
    Raises StartupError when the port is in use.
    """
    address = http_address(service)
    if address is None or service.workers < 2:
        yield service
        return
    with _reserved(*address) as port:
        yield replace(service, options={**service.options, "port": port})


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """A port that only processes of this user can listen on, with SO_REUSEPORT.

    The socket never listens, so it gets no connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            # Only now: with SO_REUSEPORT before, two graphs could bind the same port and would
            # get each other's connections. And with SO_REUSEADDR any program could bind it,
            # because this socket does not listen.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError as exc:
            raise StartupError(
                f"cannot reserve {host_port(host, port)} for several processes: {exc.strerror}"
            ) from exc
        yield sock.getsockname()[1]
