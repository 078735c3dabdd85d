"""A simulated NATS server: subjects to subscribers, and the queues that it keeps in memory."""

import contextlib
from collections.abc import Sequence
from typing import Any

from dynamo_lite.protocol.backlog import Lane
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.simulation.loop.process import SimProcess
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.server import Connection, Server
from dynamo_lite.simulation.servers.streams import Streams

PORT = 4222


class NatsServer(Server):
    """Runs as `process` until that dies, and with it every subscription and stream.

    As with NATS every subscriber of a subject gets every message, once per
    subscription, and a request that nobody subscribes to is answered at once.
    """

    loose_answers = frozenset({"push", "ack", "nak", "term", "extend"})

    def __init__(self, network: Network, process: SimProcess, port: int = PORT):
        super().__init__(network, process, port)
        self.streams = Streams(self.loop, process)
        self._subscribers: dict[str, dict[tuple[Connection, int], None]] = {}
        self._inboxes: dict[str, Connection] = {}

    def left(self, connection: Connection) -> None:
        super().left(connection)
        for subject, subscribers in list(self._subscribers.items()):
            for key in [key for key in subscribers if key[0] is connection]:
                self._forget(subject, key)
        for inbox in [i for i, owner in self._inboxes.items() if owner is connection]:
            del self._inboxes[inbox]
        self.streams.left(connection)

    def call(self, connection: Connection, operation: str, arguments: tuple[Any, ...]) -> Any:
        if operation in self.streams:
            return self.streams.call(operation, arguments)
        return super().call(connection, operation, arguments)

    def take(self, connection: Connection, item: Any) -> None:
        if item[0] not in self.streams:
            super().take(connection, item)
            return
        # An answer to a job that wants no confirmation: nobody hears that it failed.
        with contextlib.suppress(DynamoLiteError, LookupError):
            self.streams.call(item[0], item[1:])

    # Messages

    def on_flush(self, connection: Connection) -> None:
        """Everything that was sent before has been heard."""

    def on_inbox(self, connection: Connection, inbox: str) -> None:
        self._inboxes[inbox] = connection

    def on_subscribe(self, connection: Connection, number: int, subject: str) -> None:
        self._subscribers.setdefault(subject, {})[connection, number] = None

    def on_unsubscribe(self, connection: Connection, number: int, subject: str) -> None:
        self._forget(subject, (connection, number))

    def on_publish(
        self, connection: Connection, subject: str, payload: bytes, reply: tuple[str, int] | None
    ) -> None:
        subscribers = self._subscribers.get(subject)
        if subscribers:
            for receiver, number in list(subscribers):
                receiver.send(("message", number, payload, reply), loosely=True)
        elif reply is not None:
            connection.send(("no responders", reply[1]))

    def on_reply(self, connection: Connection, reply: tuple[str, int], payload: bytes) -> None:
        receiver = self._inboxes.get(reply[0])
        if receiver is not None:
            receiver.send(("reply", reply[1], payload), loosely=True)

    def on_pull(
        self,
        connection: Connection,
        number: int,
        stream: str,
        expires_s: float,
        lanes: Sequence[Lane],
    ) -> None:
        self.streams.pull(connection, number, stream, expires_s, lanes)

    def on_stop_pulls(self, connection: Connection) -> None:
        self.streams.left(connection)

    def _forget(self, subject: str, key: tuple[Connection, int]) -> None:
        subscribers = self._subscribers.get(subject)
        if subscribers is not None:
            subscribers.pop(key, None)
            if not subscribers:
                del self._subscribers[subject]
