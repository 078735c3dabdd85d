"""A limit on connections that have not shown yet what they are for."""

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
        self._addresses: dict[Hashable, str] = {}
        #: By address; each with the function that closes it.
        self._closing: dict[str, dict[Hashable, Close]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, connection: Hashable, address: str, close: Close) -> None:
        """close: replaces the earlier one of a connection that is pending already. It is called
        after the connection was removed here."""
        known = self._addresses.setdefault(connection, address)
        self._closing.setdefault(known, {})[connection] = close
        if len(self._addresses) > self._most:
            self._refuse_one()

    def discard(self, connection: Hashable) -> None:
        """The connection is in use, or has ended."""
        self._remove(connection)

    def _refuse_one(self) -> None:
        crowd = max(self._closing.values(), key=len)
        close = self._remove(next(iter(crowd)))
        assert close is not None
        self._on_refused()
        close()

    def _remove(self, connection: Hashable) -> Close | None:
        address = self._addresses.pop(connection, None)
        if address is None:
            return None
        crowd = self._closing[address]
        close = crowd.pop(connection)
        if not crowd:
            del self._closing[address]
        return close
