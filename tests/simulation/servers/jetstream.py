"""JetStream of a simulated NATS server: work-queue streams in its memory, and their consumers.

It does what the prefill queue asks of JetStream: streams with a cap that refuse new
messages, de-duplication by message id, durable consumers with explicit acks, pull
requests for one message. `jetstream_api.py` reads the requests.
"""

import datetime
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.loop.process import SimHandle

if TYPE_CHECKING:
    from tests.simulation.servers.nats_server import NatsServer

_NS = 1e9


def status(code: int, text: str = "") -> bytes:
    """Headers that are a status of the server's own, such as 503 for no responders."""
    return f"NATS/1.0 {code} {text}".rstrip().encode() + b"\r\n\r\n"


def _time_text(wall_s: float) -> str:
    """A time as in JetStream's answers: RFC 3339 in UTC."""
    when = datetime.datetime.fromtimestamp(wall_s, datetime.UTC)
    return when.isoformat().replace("+00:00", "Z")


@dataclass
class Message:
    """A stored message."""

    sequence: int
    subject: str
    #: As they were published.
    headers: bytes
    payload: bytes
    #: Loop time.
    expires_at: float


class SimStream:
    """Messages in their order until they are acknowledged, deleted or too old."""

    def __init__(self, config: Mapping[str, Any], server: "NatsServer"):
        #: As the client sent it.
        self.config = config
        #: Wall time of the server.
        self.created = _time_text(server.process.wall())
        self.name: str = config["name"]
        self.consumers: dict[str, Consumer] = {}
        self.server = server
        self._max_messages: int = config.get("max_msgs") or -1
        self._max_age_s: float = (config.get("max_age") or 0) / _NS
        self._window_s: float = (config.get("duplicate_window") or 0) / _NS
        self.last_sequence: int = max(config.get("first_seq") or 1, 1) - 1
        self._messages: dict[int, Message] = {}
        self._ids: dict[str, tuple[int, float]] = {}  # -> sequence, when it is forgotten

    @property
    def messages(self) -> Mapping[int, Message]:
        """By sequence; those that are not too old."""
        now = self._now()
        for old in [each for each in self._messages.values() if each.expires_at <= now]:
            self.remove(old.sequence)
        return self._messages

    def store(
        self,
        subject: str,
        headers: bytes,
        payload: bytes,
        message_id: str | None,
        life_s: float | None,
    ) -> tuple[int, bool] | None:
        """The message's sequence, and whether it was there already; None: the stream is full."""
        now = self._now()
        known = self._known(message_id, now)
        if known is not None:
            return known, True
        if 0 <= self._max_messages <= len(self.messages):
            return None
        self.last_sequence += 1
        sequence = self.last_sequence
        expires_at = now + min(life_s or math.inf, self._max_age_s or math.inf)
        self._messages[sequence] = Message(sequence, subject, headers, payload, expires_at)
        if message_id is not None:
            self._ids[message_id] = sequence, now + self._window_s
        for consumer in self.consumers.values():
            if subject == consumer.subject:
                consumer.add(sequence)
        return sequence, False

    def remove(self, sequence: int) -> bool:
        """Returns whether the message was there."""
        found = self._messages.pop(sequence, None) is not None
        for consumer in self.consumers.values():
            consumer.forget(sequence)
        return found

    def consumer(self, config: Mapping[str, Any]) -> "Consumer":
        """The durable consumer of this configuration, which is made if it is not there."""
        name: str = config["durable_name"]
        if name not in self.consumers:
            consumer = self.consumers[name] = Consumer(self, config)
            for message in self.messages.values():
                if message.subject == consumer.subject:
                    consumer.add(message.sequence)
        return self.consumers[name]

    def _known(self, message_id: str | None, now: float) -> int | None:
        while self._ids:
            oldest = next(iter(self._ids))
            if self._ids[oldest][1] > now:
                break
            del self._ids[oldest]
        return self._ids[message_id][0] if message_id in self._ids else None

    def _now(self) -> float:
        return self.server.network.loop.time()


@dataclass(eq=False)
class _Request:
    """A pull request for one message."""

    inbox: str
    #: Ends it.
    timer: SimHandle


class Consumer:
    """Hands out the messages of one subject, each of them once, one per pull request, oldest
    request first."""

    def __init__(self, stream: SimStream, config: Mapping[str, Any]):
        assert config["max_deliver"] == 1, "messages that are delivered again are not simulated"
        self.config = config
        self._stream, self._server = stream, stream.server
        self._loop = self._server.network.loop
        self.name: str = config["durable_name"]
        self.subject: str = config["filter_subject"]
        self.new: dict[int, None] = {}  # not delivered
        self._requests: deque[_Request] = deque()

    def add(self, sequence: int) -> None:
        self.new[sequence] = None
        self._serve()

    def forget(self, sequence: int) -> None:
        self.new.pop(sequence, None)

    def ask(self, inbox: str, expires_s: float | None) -> None:
        """A pull request. expires_s: None: it does not wait."""
        if expires_s is None:
            if not self._hand_out(inbox):
                self._server.tell(inbox, b"", status(404, "No Messages"))
            return
        request = _Request(inbox, self._loop.call_later(expires_s, lambda: self._expire(request)))
        self._requests.append(request)
        self._serve()

    def acknowledge(self, sequence: int) -> None:
        """Also as the end of one that was terminated: in a work queue both remove it."""
        self._stream.remove(sequence)

    def _serve(self) -> None:
        while self._requests:
            request = self._requests[0]
            if self._server.interested(request.inbox) and not self._hand_out(request.inbox):
                return
            self._requests.popleft().timer.cancel()

    def _hand_out(self, inbox: str) -> bool:
        """Delivers the next message, if there is one."""
        messages = self._stream.messages  # reading them drops those that are too old
        sequence = next(iter(self.new), None)
        if sequence is None:
            return False
        del self.new[sequence]
        message = messages[sequence]
        wall_ns = int(self._server.process.wall() * _NS)
        ack = (
            f"$JS.ACK.{self._stream.name}.{self.name}.1.{sequence}"
            f".{sequence}.{wall_ns}.{len(self.new)}"
        )
        self._server.deliver(inbox, message.subject, ack, message.headers, message.payload)
        return True

    def _expire(self, request: _Request) -> None:
        self._requests.remove(request)
        self._server.tell(request.inbox, b"", status(408, "Request Timeout"))
