"""Bytes to messages and back: msgpack on NATS and TCP, JSON in etcd.

Every decoder validates against the message's type. Nothing else is accepted from the network, and
nothing is ever unpickled.

Messages evolve by defaulted fields only. WIRE_VERSION is raised when an old peer would misread a
new message. It is in a member's record, in the `Hello` of a connection, and in a job, which may
outlive its sender. These always contain it: a peer of another version would fill in its own.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from dynamo_lite.protocol.errors import ProtocolError

WIRE_VERSION = 9

#: Largest message accepted from a socket or a subject; see also `MAX_SUBMIT_BYTES`.
MAX_MESSAGE_BYTES = 8 << 20

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def encode_json(record: msgspec.Struct) -> bytes:
    return _json_encoder.encode(record)


class Decoder(Generic[_T]):
    """Decodes msgpack into `T` (a Struct or a tagged union of Structs), of at most `max_bytes`."""

    def __init__(self, message_type: Any, max_bytes: int = MAX_MESSAGE_BYTES):
        self._max_bytes = max_bytes
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def __call__(self, data: bytes | bytearray | memoryview) -> _T:
        """Raises ProtocolError when `data` is not such a message."""
        if len(data) > self._max_bytes:
            raise ProtocolError(f"message of {len(data)} bytes exceeds {self._max_bytes}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"malformed message: {exc}") from exc


def decode_json(data: bytes, record_type: type[_T]) -> _T:
    """Raises ProtocolError when `data` is not a `record_type` in JSON."""
    try:
        return msgspec.json.decode(data, type=record_type)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"malformed record: {exc}") from exc


def decode_all(entries: Mapping[str, bytes], decode: Callable[[bytes], _T]) -> list[_T]:
    """Records of etcd, in the order of their keys. Malformed ones are left out."""
    found: list[_T] = []
    for _, value in sorted(entries.items()):
        with contextlib.suppress(ProtocolError):
            found.append(decode(value))
    return found
