"""What strangers try: messages that are noise or tampered with, odd answers, a process's ports."""

import asyncio
import contextlib
import math
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

_NATS = b'CONNECT {"verbose":true}\r\nSUB > 1\r\nPUB x_engine.e1.cancel 1\r\nx\r\nPING\r\n'
_RANGE = b'{"key":"AA==","range_end":"AA=="}'
#: To NATS, status servers and etcd.
MESSAGES = (
    _NATS,
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"POST /v3/lease/leases HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v3/kv/range HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(_RANGE), _RANGE),
)

#: What a field is replaced with.
_ODD: tuple[Any, ...] = (
    None, True, "", "x", "\n", "a" * 70, "../..", "e.*", b"", b"\xff" * 9, [], {}, [[]],
    0, 1, -1, 7, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 0.5, 1e300, math.inf, math.nan,
)  # fmt: skip


class Spoiler:
    """Tampers with messages, as drawn from `rng`. pool: other valid messages to take parts
    from."""

    def __init__(self, rng: Random, pool: list[bytes] | None = None):
        self._rng = rng
        self._pool = pool if pool is not None else []

    def spoil(self, message: bytes) -> bytes:
        """Perhaps still a message; perhaps even the same."""
        return self._rng.choice((self._noise, self._bits, self._cut, self._fields))(message)

    def _noise(self, _message: bytes) -> bytes:
        return self._rng.randbytes(self._rng.choice((0, 1, 4, 30, 300)))

    def _bits(self, message: bytes) -> bytes:
        damaged = bytearray(message)
        for _ in range(self._rng.choice((1, 1, 2, 8)) if damaged else 0):
            damaged[self._rng.randrange(len(damaged))] ^= 1 << self._rng.randrange(8)
        return bytes(damaged)

    def _cut(self, message: bytes) -> bytes:
        at = self._rng.randint(0, len(message))
        return self._rng.choice((message[:at], message[at:], message + message[:at], message * 2))

    def _fields(self, message: bytes) -> bytes:
        """Well-formed, with a field or two changed, dropped or taken from another message."""
        json = message[:1] == b"{"
        codec = msgspec.json if json else msgspec.msgpack
        try:
            value = codec.decode(message)
            for _ in range(self._rng.randint(1, 2)):
                value = self._change(value, json)
            return codec.encode(value)
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError):
            return self._bits(message)

    def _change(self, value: Any, json: bool) -> Any:
        """One place in `value`, at any depth, is changed."""
        if isinstance(value, dict) and value and self._rng.random() < 0.9:
            key = self._rng.choice(sorted(value, key=str))
            changed = dict(value)
            if self._rng.random() < 0.1:
                del changed[key]
            else:
                changed[key] = self._change(value[key], json)
            return changed
        if isinstance(value, list) and value and self._rng.random() < 0.8:
            at = self._rng.randrange(len(value))
            return [*value[:at], self._change(value[at], json), *value[at + 1 :]]
        return self._other(value, json)

    def _other(self, value: Any, json: bool) -> Any:
        if isinstance(value, int) and self._rng.random() < 0.5:
            return value + self._rng.choice((-1, 1, 16, 1 << 20))
        if self._pool and not json and self._rng.random() < 0.3:
            return self._borrowed(value)
        odd = self._rng.choice(_ODD)
        return repr(odd) if json and isinstance(odd, bytes) else odd

    def _borrowed(self, value: Any) -> Any:
        """A field of the same type out of another message: another attempt's id, say."""
        try:
            other = msgspec.msgpack.decode(self._rng.choice(self._pool))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return value
        fields = other.values() if isinstance(other, dict) else ()
        same = [field for field in fields if type(field) is type(value)]
        return self._rng.choice(same) if same else value


def _untrusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def tell(place: tuple[str, int], message: bytes, *, tls: bool) -> bytes:
    """The server's output until it disconnects, or sends nothing for half a second."""
    heard = b""
    with contextlib.suppress(OSError):
        plain = socket.create_connection(place, timeout=5)
        with _untrusting().wrap_socket(plain) if tls else plain as connection:
            connection.sendall(message)
            connection.settimeout(0.5)
            while part := connection.recv(1 << 16):
                heard += part
    return heard


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    inodes: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    }


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[str]:
    """A server that says this, or nothing, whatever it is asked. Yields its URL."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
