"""A simulated NATS server: its protocol, subscriptions, and who gets which message."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import nats.aio.client

from dynamo_lite.protocol.codec import MAX_MESSAGE_BYTES
from tests.simulation.loop.process import SimProcess
from tests.simulation.network.network import Network
from tests.simulation.servers.jetstream import status
from tests.simulation.servers.jetstream_api import API, JetStream

T = TypeVar("T")

# nats-py pauses between its attempts by the machine's clock; the loop's may be virtual.
_LOOP_TIME = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
nats.aio.client.time = _LOOP_TIME  # pyright: ignore

PORT = 4222
#: For clients; names do not matter in the simulated network.
URL = f"nats://nats:{PORT}"
_CRLF = b"\r\n"
#: As regular expressions.
_WILDCARDS = {"*": r"[^.]+", ">": ".+"}


class Command(NamedTuple):
    """words: of its line; subjects may be any bytes, and go out as they came in. body: behind the
    line, or what CONNECT has behind its name."""

    words: list[str]
    body: bytes = b""


class CommandReader:
    """Cuts the byte stream of one client into commands."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Command]:
        """The commands that `data` completes."""
        data = self._rest + data
        commands: list[Command] = []
        at = 0
        while (end := data.find(_CRLF, at)) >= 0:
            line = data[at:end].decode(errors="surrogateescape")
            words = line.split()
            begin = behind = end + 2
            if words[:1] in (["PUB"], ["HPUB"]):
                behind += int(words[-1]) + 2
                if len(data) < behind:
                    break
                commands.append(Command(words, data[begin : behind - 2]))
            elif words[:1] == ["CONNECT"]:
                commands.append(Command(words[:1], line[len("CONNECT") :].encode()))
            else:
                commands.append(Command(words))
            at = behind
        self._rest = data[at:]
        return commands


class Subjects(Generic[T]):
    """Subscribers by subject; `*` stands for one token, a last `>` for one or more.

    Subscribers of one pattern come in the order in which they were added.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        #: Subscribers to patterns with a wildcard.
        self._wild: dict[T, re.Pattern[str]] = {}

    def add(self, pattern: str, subscriber: T) -> None:
        words = [_WILDCARDS.get(token, re.escape(token)) for token in pattern.split(".")]
        if any(token in _WILDCARDS for token in pattern.split(".")):
            self._wild[subscriber] = re.compile(r"\.".join(words))
        else:
            self._exact.setdefault(pattern, {})[subscriber] = None

    def remove(self, pattern: str, subscriber: T) -> None:
        if self._wild.pop(subscriber, None) is None:
            del self._exact[pattern][subscriber]

    def matching(self, subject: str) -> list[T]:
        wild = (one for one, pattern in self._wild.items() if pattern.fullmatch(subject))
        return [*self._exact.get(subject, ()), *wild]


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
        self.jetstream = JetStream(self)
        self.subjects: Subjects[_Subscription] = Subjects()
        process.run(network.create_server, lambda: _Client(self), "nats", port)

    def publish(
        self, sender: "_Client", subject: str, reply: str, headers: bytes, payload: bytes
    ) -> None:
        """What a client has published arrives."""
        taken = self.jetstream.take(subject, reply, headers, payload)
        for subscription in self.subjects.matching(subject):
            subscription.deliver(subject, reply, headers, payload)
            taken = True
        if not taken and reply and sender.no_responders:
            for subscription in self.subjects.matching(reply):
                if subscription.client is sender:
                    subscription.tell(reply, "", status(503), b"")

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


class _Subscription:
    """Of one client to one subject."""

    def __init__(self, client: "_Client", subject: str, sid: str):
        self.client = client
        self.subject = subject
        self._sid = sid

    def deliver(self, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Delivers a message, subject to the network's weather."""
        self.client.network.as_the_weather_is(self.tell, subject, reply, headers, payload)

    def tell(self, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        """Sends MSG, or HMSG where there are headers."""
        words = [subject, self._sid, *([reply] if reply else [])]
        words = ["HMSG", *words, str(len(headers))] if headers else ["MSG", *words]
        line = " ".join([*words, str(len(headers) + len(payload))])
        head = line.encode(errors="surrogateescape")
        self.client.send(b"".join((head, _CRLF, headers, payload, _CRLF)))


class _Client(asyncio.Protocol):
    """One client's connection."""

    transport: asyncio.Transport

    def __init__(self, server: NatsServer):
        self._server = server
        self.network = server.network
        self._reader = CommandReader()
        self._subscriptions: dict[str, _Subscription] = {}
        #: Whether it requested a status for requests to subjects without subscribers.
        self.no_responders = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        facts = {
            "server_id": str(self._server.process),
            "version": "2.12.0",
            "proto": 1,
            "headers": True,
            "max_payload": MAX_MESSAGE_BYTES,
            "jetstream": True,
        }
        transport.write(b"INFO " + msgspec.json.encode(facts) + _CRLF)

    def connection_lost(self, exc: Exception | None) -> None:
        for sid in list(self._subscriptions):
            self.unsubscribe(sid)

    def data_received(self, data: bytes) -> None:
        for command in self._reader.feed(data):
            self._obey(command)

    def send(self, frame: bytes) -> None:
        self.transport.write(frame)

    def unsubscribe(self, sid: str) -> None:
        subscription = self._subscriptions.pop(sid, None)
        if subscription is not None:
            self._server.subjects.remove(subscription.subject, subscription)

    def _obey(self, command: Command) -> None:
        body = command.body
        match command.words:
            case ["PUB", subject, _]:
                self._publish(subject, "", b"", body)
            case ["PUB", subject, reply, _]:
                self._publish(subject, reply, b"", body)
            case ["HPUB", subject, *reply, size, _]:
                headers, payload = body[: int(size)], body[int(size) :]
                self._publish(subject, "".join(reply), headers, payload)
            case ["PING"]:
                self.send(b"PONG\r\n")
            case ["SUB", subject, sid]:  # queue groups are not simulated
                self.unsubscribe(sid)
                subscription = self._subscriptions[sid] = _Subscription(self, subject, sid)
                self._server.subjects.add(subject, subscription)
            case ["UNSUB", sid]:
                self.unsubscribe(sid)
            case ["CONNECT"]:
                self.no_responders = bool(msgspec.json.decode(body).get("no_responders"))
            case words:
                raise NotImplementedError(f"{words} is not simulated")

    def _publish(self, subject: str, reply: str, headers: bytes, payload: bytes) -> None:
        publish = self._server.publish
        if subject.startswith(API):
            publish(self, subject, reply, headers, payload)
        else:
            self.network.as_the_weather_is(publish, self, subject, reply, headers, payload)
