"""The NATS client protocol as a server sees it: commands come in, frames go out."""

from typing import NamedTuple

import msgspec

_CRLF = b"\r\n"

PONG = b"PONG\r\n"
OK = b"+OK\r\n"


class BrokenProtocol(Exception):
    """The client sent an invalid command. The text is that of the -ERR line."""


class Connect(msgspec.Struct, frozen=True):
    verbose: bool = False
    no_responders: bool = False


class Ping(NamedTuple):
    pass


class Pong(NamedTuple):
    pass


class Subscribe(NamedTuple):
    """queue: the queue group; empty without one."""

    subject: str
    queue: str
    sid: str


class Unsubscribe(NamedTuple):
    """UNSUB."""

    sid: str
    #: The subscription ends after this many messages since its start; 0: now.
    limit: int


class Publish(NamedTuple):
    """reply: empty without one. headers: the bytes as the client sent them, or empty."""

    subject: str
    reply: str
    headers: bytes
    payload: bytes


Command = Connect | Ping | Pong | Subscribe | Unsubscribe | Publish

_PING, _PONG = Ping(), Pong()


class CommandReader:
    """Cuts the byte stream of one client into commands.

    max_payload: in bytes, headers included.
    """

    def __init__(self, max_payload: int):
        self._max_payload = max_payload
        self._rest = b""

    def feed(self, data: bytes) -> list[Command]:
        """The commands that `data` completes. Raises BrokenProtocol."""
        if self._rest:
            data = self._rest + data
        commands: list[Command] = []
        at = 0
        while (end := data.find(_CRLF, at)) >= 0:
            words = data[at:end].split()
            name = words[0] if words else b""
            if name == b"PUB" or name == b"HPUB":
                begin = end + 2
                behind = begin + self._size(words)
                if len(data) < behind + 2:
                    break
                commands.append(_publish(words, data[begin:behind]))
                at = behind + 2
            else:
                commands.append(_command(name, words, data[at:end]))
                at = end + 2
        self._rest = data[at:]
        return commands

    def _size(self, words: list[bytes]) -> int:
        size = int(words[-1]) if words[-1].isdigit() else -1
        if size < 0:
            raise BrokenProtocol("Unknown Protocol Operation")
        if size > self._max_payload:
            raise BrokenProtocol("Maximum Payload Violation")
        return size


def _publish(words: list[bytes], body: bytes) -> Publish:
    """words: PUB SUBJECT [REPLY] SIZE, or HPUB SUBJECT [REPLY] HEADERS_SIZE SIZE."""
    try:
        subject = _text(words[1])
        if words[0] == b"PUB":
            return Publish(subject, _text(words[2]) if len(words) == 4 else "", b"", body)
        size = int(words[-2])
        reply = _text(words[2]) if len(words) == 5 else ""
        return Publish(subject, reply, body[:size], body[size:])
    except (IndexError, ValueError) as exc:
        raise BrokenProtocol("Unknown Protocol Operation") from exc


def _text(word: bytes) -> str:
    """Subjects may be any bytes; they go out as they came in."""
    return word.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _command(name: bytes, words: list[bytes], line: bytes) -> Command:
    try:
        match name.upper():
            case b"PING":
                return _PING
            case b"PONG":
                return _PONG
            case b"SUB":
                queue = _text(words[2]) if len(words) == 4 else ""
                return Subscribe(_text(words[1]), queue, _text(words[-1]))
            case b"UNSUB":
                return Unsubscribe(_text(words[1]), int(words[2]) if len(words) == 3 else 0)
            case b"CONNECT":
                return msgspec.json.decode(line[len(name) :], type=Connect)
            case _:
                raise BrokenProtocol("Unknown Protocol Operation")
    except (IndexError, ValueError, msgspec.DecodeError) as exc:
        raise BrokenProtocol("Unknown Protocol Operation") from exc


def info(facts: dict[str, object]) -> bytes:
    return b"INFO " + msgspec.json.encode(facts) + _CRLF


def error(text: str) -> bytes:
    return f"-ERR '{text}'\r\n".encode()


def message(subject: str, sid: str, reply: str, headers: bytes, payload: bytes) -> bytes:
    """MSG, or HMSG where there are headers."""
    to = f"{subject} {sid} {reply} " if reply else f"{subject} {sid} "
    if headers:
        size = len(headers)
        head = _bytes(f"HMSG {to}{size} {size + len(payload)}\r\n")
        return b"".join((head, headers, payload, _CRLF))
    return b"".join((_bytes(f"MSG {to}{len(payload)}\r\n"), payload, _CRLF))


def status(code: int, text: str = "") -> bytes:
    """Headers that are a status of the server's own, such as 503 for no responders."""
    return f"NATS/1.0 {code} {text}".rstrip().encode() + b"\r\n\r\n"


def header(headers: bytes, name: str) -> str | None:
    """The value of one header of `NATS/1.0` headers."""
    for line in headers.split(_CRLF):
        key, colon, value = line.partition(b":")
        if colon and key.strip() == name.encode():
            return _text(value.strip())
    return None
