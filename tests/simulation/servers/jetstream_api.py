"""JetStream's streams and messages to it, by subject: requests to its API, acks, jobs."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation.servers.jetstream import Consumer, SimStream

if TYPE_CHECKING:
    from tests.simulation.servers.nats_server import NatsServer

API = "$JS.API."
_ACK = "$JS.ACK."
_NS = 1e9

_Answer = Mapping[str, Any]


class _Refused(Exception):
    """An error answer. code: as HTTP's. number: JetStream's own error code."""

    def __init__(self, code: int, number: int, text: str):
        super().__init__(text)
        self.answer = {"error": {"code": code, "err_code": number, "description": text}}


_NO_STREAM = (404, 10059, "stream not found")
_NAME_IN_USE = (400, 10058, "stream name already in use with a different configuration")
_NO_MESSAGE = (400, 10043, "sequence not found")
_FULL = (503, 10077, "maximum messages exceeded")


def header(headers: bytes, name: str) -> str | None:
    """The value of one header of `NATS/1.0` headers."""
    for line in headers.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip() == name.encode():
            return value.strip().decode(errors="surrogateescape")
    return None


class JetStream:
    """The streams of one server. Takes what is published to JetStream's subjects and to theirs.

    A subject that it does not know has no subscriber, as on a server without that feature.
    """

    def __init__(self, server: "NatsServer"):
        self._server = server
        self._streams: dict[str, SimStream] = {}
        #: By the subjects that they store.
        self._by_subject: dict[str, SimStream] = {}
        self._requests: dict[str, Callable[[list[str], bytes], _Answer]] = {
            "CONSUMER.DURABLE.CREATE.": self._create_consumer,
            "STREAM.INFO.": self._stream_info,
            "STREAM.CREATE.": self._create_stream,
            "STREAM.DELETE.": self._delete_stream,
            "STREAM.MSG.DELETE.": self._delete_message,
        }

    def payloads(self, name: str) -> list[bytes]:
        """The payloads of all messages of a stream; empty if there is no such stream."""
        stream = self._streams.get(name)
        return [] if stream is None else [m.payload for m in stream.messages.values()]

    def take(self, subject: str, reply: str, headers: bytes, payload: bytes) -> bool:
        """Returns whether anything here takes the subject."""
        if subject.startswith("$JS."):
            if subject.startswith(_ACK):
                return self._acknowledge(subject, reply, payload)
            return subject.startswith(API) and self._request(subject[len(API) :], reply, payload)
        stream = self._by_subject.get(subject)
        if stream is None:
            return False
        self._store(stream, subject, reply, headers, payload)
        return True

    def _store(
        self, stream: SimStream, subject: str, reply: str, headers: bytes, payload: bytes
    ) -> None:
        life = (header(headers, "Nats-TTL") or "").removesuffix("s")
        message_id = header(headers, "Nats-Msg-Id")
        stored = stream.store(subject, headers, payload, message_id, float(life) if life else None)
        answer: _Answer = {**_Refused(*_FULL).answer, "stream": stream.name, "seq": 0}
        if stored is not None:
            answer = {"stream": stream.name, "seq": stored[0], "duplicate": stored[1]}
        if reply:
            self._server.deliver(reply, reply, "", b"", msgspec.json.encode(answer))

    def _acknowledge(self, subject: str, reply: str, payload: bytes) -> bool:
        """subject: the reply of a delivered message (see `Consumer`)."""
        tokens = subject[len(_ACK) :].split(".")
        stream = self._streams.get(tokens[0])
        consumer = stream.consumers.get(tokens[1]) if stream is not None else None
        if consumer is None:
            return False
        assert not reply and payload in (b"", b"+ACK", b"+TERM"), "not simulated"
        consumer.acknowledge(int(tokens[3]))
        return True

    # The API

    def _request(self, what: str, reply: str, payload: bytes) -> bool:
        if what.startswith("CONSUMER.MSG.NEXT."):
            return self._pull(what.split("."), reply, payload)
        for name, answer in self._requests.items():
            if what.startswith(name):
                arguments = what[len(name) :].split(".")
                try:
                    reply_data = answer(arguments, payload)
                except _Refused as exc:
                    reply_data = exc.answer
                self._server.tell(reply, msgspec.json.encode(reply_data))
                return True
        raise NotImplementedError(f"{what} is not simulated")

    def _pull(self, words: list[str], reply: str, payload: bytes) -> bool:
        stream = self._streams.get(words[3])
        consumer = stream.consumers.get(words[4]) if stream is not None else None
        if consumer is None:
            return False
        wanted = msgspec.json.decode(payload)
        assert wanted.get("batch", 1) == 1, "several messages at a time are not simulated"
        consumer.ask(reply, None if wanted.get("no_wait") else wanted["expires"] / _NS)
        return True

    def _stream_info(self, names: list[str], _: bytes) -> _Answer:
        return _stream_facts(self._stream(names[0]))

    def _create_stream(self, names: list[str], payload: bytes) -> _Answer:
        config = msgspec.json.decode(payload)
        stream = self._streams.get(names[0])
        if stream is not None:
            if stream.config != config:
                raise _Refused(*_NAME_IN_USE)
            return _stream_facts(stream)
        kind = (config["retention"], config["storage"], config["discard"])
        assert kind == ("workqueue", "memory", "new"), f"{kind} streams are not simulated"
        assert not self._by_subject.keys() & set(config["subjects"]), "streams overlap"
        stream = self._streams[names[0]] = SimStream(config, self._server)
        self._by_subject |= dict.fromkeys(config["subjects"], stream)
        return {**_stream_facts(stream), "did_create": True}

    def _delete_stream(self, names: list[str], _: bytes) -> _Answer:
        stream = self._stream(names[0])
        del self._streams[stream.name]
        for subject in stream.config["subjects"]:
            del self._by_subject[subject]
        return {"success": True}

    def _delete_message(self, names: list[str], payload: bytes) -> _Answer:
        stream = self._stream(names[0])
        sequence = msgspec.json.decode(payload)["seq"]
        if sequence not in stream.messages:
            raise _Refused(*_NO_MESSAGE)
        stream.remove(sequence)
        return {"success": True}

    def _create_consumer(self, names: list[str], payload: bytes) -> _Answer:
        stream = self._stream(names[0])
        return _consumer_facts(stream, stream.consumer(msgspec.json.decode(payload)["config"]))

    def _stream(self, name: str) -> SimStream:
        stream = self._streams.get(name)
        if stream is None:
            raise _Refused(*_NO_STREAM)
        return stream


def _stream_facts(stream: SimStream) -> _Answer:
    messages = stream.messages
    return {
        "config": stream.config,
        "created": stream.created,
        "state": {
            "messages": len(messages),
            "bytes": sum(len(message.payload) for message in messages.values()),
            "first_seq": next(iter(messages), stream.last_sequence + 1),
            "last_seq": stream.last_sequence,
            "consumer_count": len(stream.consumers),
        },
    }


def _consumer_facts(stream: SimStream, consumer: Consumer) -> _Answer:
    return {
        "stream_name": stream.name,
        "name": consumer.name,
        "config": consumer.config,
        "created": stream.created,
    }
