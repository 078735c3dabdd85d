"""A limit on the connections that have not shown yet what they are for."""

from collections.abc import Callable, Hashable

#: Closes a connection. Its result is not used.
Close = Callable[[], object]


class PendingConnections:
    """Connections in their TLS handshake, or without a Hello or a request's head, oldest first.

    With more than `most` of them one is closed: the oldest of the address that has the most. So
    a client that opens many of them displaces its own, and no other client's. on_refused: called
    for each.
    """

    def __init__(self, most: int, on_refused: Callable[[], None] = lambda: None):
        self._most, self._on_refused = most, on_refused
        #: Address, and the function that closes it.
        self._connections: dict[Hashable, tuple[str, Close]] = {}
        self._by_address: dict[str, dict[Hashable, None]] = {}

    def add(self, connection: Hashable, address: str, close: Close) -> None:
        """close: replaces the earlier one of a connection that is pending already. It is called
        after the connection was removed here."""
        if connection in self._connections:
            address = self._connections[connection][0]
        self._connections[connection] = address, close
        self._by_address.setdefault(address, {})[connection] = None
        if len(self._connections) > self._most:
            oldest = next(iter(max(self._by_address.values(), key=len)))
            _, close = self._connections[oldest]
            self.discard(oldest)
            self._on_refused()
            close()

    def discard(self, connection: Hashable) -> None:
        """The connection is in use, or has ended."""
        if (known := self._connections.pop(connection, None)) is not None:
            crowd = self._by_address[known[0]]
            del crowd[connection]
            if not crowd:
                del self._by_address[known[0]]
