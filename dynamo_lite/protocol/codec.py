"""Bytes to messages and back: msgpack on NATS and TCP, JSON in etcd.

Every decoder validates against the message's type. Nothing else is accepted from the network, and
nothing is ever unpickled. Messages about who may write into which blocks are sealed: a digest in
front of them shows that they arrived unchanged. One wrong field in an otherwise valid message could
destroy the KV of other requests. A seal is no signature.

A message that has `wire_version` always contains it (no `omit_defaults`): a peer of another version
would fill in its own.

Messages evolve by defaulted fields only. WIRE_VERSION is raised when an old peer would misread a
new message.
"""

import hashlib
from typing import Any, Generic, TypeVar

import msgspec

from dynamo_lite.protocol.errors import ProtocolError

WIRE_VERSION = 9

#: Largest message accepted from a socket or a subject.
MAX_MESSAGE_BYTES = 8 << 20

_SEAL_BYTES = 8

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def encode_sealed(message: msgspec.Struct) -> bytes:
    data = _encoder.encode(message)
    return _seal(data) + data


def encode_json(record: msgspec.Struct) -> bytes:
    return _json_encoder.encode(record)


class Decoder(Generic[_T]):
    """Decodes msgpack into `T` (a Struct or a tagged union of Structs)."""

    def __init__(self, message_type: Any):
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def __call__(self, data: bytes | bytearray | memoryview) -> _T:
        """Raises ProtocolError when `data` is not such a message."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise ProtocolError(f"malformed message: {exc}") from exc


class SealedDecoder(Decoder[_T]):
    """Decodes the output of `encode_sealed`."""

    def __call__(self, data: bytes | bytearray | memoryview) -> _T:
        if len(data) > MAX_MESSAGE_BYTES:
            return super().__call__(data)
        seal, message = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
        if seal != _seal(message):
            raise ProtocolError("malformed message: its seal is broken")
        return super().__call__(message)


def _seal(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_SEAL_BYTES).digest()


def decode_json(data: bytes, record_type: type[_T]) -> _T:
    """Raises ProtocolError when `data` is not a `record_type` in JSON."""
    try:
        return msgspec.json.decode(data, type=record_type)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise ProtocolError(f"malformed record: {exc}") from exc
