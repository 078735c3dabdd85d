"""A simulated NATS server: connections, subscriptions, and who gets which message."""

import asyncio
from typing import Any

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from tests.simulation.loop.process import SimProcess
from tests.simulation.network.network import Network
from tests.simulation.servers import nats_protocol as wire
from tests.simulation.servers.jetstream import JetStream
from tests.simulation.servers.jetstream_api import API, JetStreamApi
from tests.simulation.servers.nats_subjects import Subjects

PORT = 4222
#: For clients; names do not matter in the simulated network.
URL = f"nats://nats:{PORT}"
_VERSION = "2.12.0"
_NO_RESPONDERS = wire.status(503)


class NatsServer:
    """Runs as `process` until that dies, and with it every subscription and stream.

    As with NATS every subscriber of a subject gets every message, once per subscription. A
    request to a subject without subscribers is answered at once. Messages from and to clients may
    be lost, late or duplicated, depending on the network's weather. What the server sends on its
    own (PONG, a status, an answer of JetStream's API) is always delivered.
    """

    def __init__(self, network: Network, process: SimProcess, port: int = PORT):
        self.network = network
        self.process = process
        self.jetstream = JetStream(process, self)
        self._api = JetStreamApi(self.jetstream, self)
        self.subjects: Subjects[_Subscription] = Subjects()
        self.clients: dict[_Client, None] = {}
        self._unsent: dict[_Client, None] | None = None
        process.run(network.create_server, lambda: _Client(self), "nats", port)

    def publish(self, message: wire.Publish, sender: "_Client") -> None:
        """What a client has published arrives."""
        subject, reply, headers, payload = message
        taken = self._api.take(subject, reply, headers, payload)
        for subscription in self.subjects.matching(subject):
            subscription.deliver(subject, reply, headers, payload)
            taken = True
        if not taken and reply and sender.no_responders:
            for subscription in self.subjects.matching(reply):
                if subscription.client is sender:
                    subscription.tell(reply, "", _NO_RESPONDERS, b"")

    # What JetStream asks of the server

    def interested(self, subject: str) -> bool:
        return bool(self.subjects.matching(subject))

    def tell(self, subject: str, payload: bytes, headers: bytes = b"") -> None:
        """Sends a message of the server's own."""
        for subscription in self.subjects.matching(subject):
            subscription.tell(subject, "", headers, payload)

    def deliver(self, inbox: str, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Sends a message to the subscribers of `inbox`, which shows them `subject`."""
        for subscription in self.subjects.matching(inbox):
            subscription.deliver(subject, reply, headers, payload)

    # Sending

    def send(self, client: "_Client", frame: bytes) -> None:
        """What one turn of the server sends to a client arrives in one piece."""
        if self._unsent is None:
            client.write((frame,))
        else:
            self._unsent[client] = None
            client.unsent.append(frame)

    def begin(self) -> None:
        self._unsent = {}

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, None
        for client in unsent or ():
            client.write(client.unsent)
            client.unsent = []


class _Subscription:
    """left: messages until it ends; None: it does not end by itself."""

    def __init__(self, client: "_Client", subject: str, sid: str):
        self.client = client
        self.subject = subject
        self._sid = sid
        self.left: int | None = None
        self.delivered = 0

    def deliver(self, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Delivers a message, subject to the network's weather."""
        self.client.network.as_the_weather_is(self.tell, subject, reply, headers, payload)

    def tell(self, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        self.client.send(wire.message(subject, self._sid, reply, headers, payload))
        self.delivered += 1
        if self.left is not None and self.delivered >= self.left:
            self.client.unsubscribe(self._sid)


class _Client(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: NatsServer):
        self._server = server
        self.network = server.network
        self._reader = wire.CommandReader(MAX_MESSAGE_BYTES)
        self._subscriptions: dict[str, _Subscription] = {}
        self._transport: Any = None
        self._verbose = False
        #: Whether it requested a status for requests to subjects without subscribers.
        self.no_responders = False
        self.unsent: list[bytes] = []

    def __repr__(self) -> str:
        return f"<NATS client {self._transport!r}>"

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._server.clients[self] = None
        facts = {
            "server_id": str(self._server.process),
            "version": _VERSION,
            "proto": 1,
            "headers": True,
            "max_payload": MAX_MESSAGE_BYTES,
            "jetstream": True,
        }
        transport.write(wire.info(facts))

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.clients.pop(self, None)
        for sid in list(self._subscriptions):
            self.unsubscribe(sid)

    def data_received(self, data: bytes) -> None:
        broken = False
        self._server.begin()
        try:
            for command in self._reader.feed(data):
                self._obey(command)
        except wire.BrokenProtocol as exc:
            self.send(wire.error(str(exc)))
            broken = True
        finally:
            self._server.flush()
        if broken:
            self._transport.close()

    def send(self, frame: bytes) -> None:
        if self in self._server.clients:
            self._server.send(self, frame)

    def write(self, frames: "list[bytes] | tuple[bytes]") -> None:
        self._transport.write(b"".join(frames))

    def unsubscribe(self, sid: str) -> None:
        subscription = self._subscriptions.pop(sid, None)
        if subscription is not None:
            self._server.subjects.remove(subscription.subject, subscription)

    def _obey(self, command: wire.Command) -> None:
        match command:
            case wire.Publish():
                self._publish(command)
            case wire.Ping():
                self.send(wire.PONG)
            case wire.Pong():
                return
            case wire.Subscribe(subject, queue, sid):
                if queue:
                    raise wire.BrokenProtocol("queue groups are not simulated")
                self.unsubscribe(sid)
                subscription = self._subscriptions[sid] = _Subscription(self, subject, sid)
                self._server.subjects.add(subject, subscription)
            case wire.Unsubscribe(sid, limit):
                self._limit(sid, limit)
            case wire.Connect():
                self._verbose = command.verbose
                self.no_responders = command.no_responders
        if self._verbose and not isinstance(command, wire.Ping):
            self.send(wire.OK)

    def _publish(self, message: wire.Publish) -> None:
        server = self._server
        if message.subject.startswith(API):
            server.publish(message, self)
        else:
            self.network.as_the_weather_is(server.publish, message, self)

    def _limit(self, sid: str, limit: int) -> None:
        subscription = self._subscriptions.get(sid)
        if subscription is not None and subscription.delivered < limit:
            subscription.left = limit
        else:
            self.unsubscribe(sid)
