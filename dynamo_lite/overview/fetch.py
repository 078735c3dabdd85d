"""One small GET of a status server: bounded in time and size, never redirected."""

import asyncio
from urllib.parse import urlsplit

#: vLLM's metrics are the largest answers, some 100 KiB.
_MAX_BYTES = 8 << 20


async def fetch(url: str, *, timeout_s: float) -> bytes | None:
    """The body of a 200, or of a 503 (which a status server that is unwell gives); None when
    there is no such answer."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(url)
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
        return None


async def _get(url: str) -> bytes | None:
    """HTTP/1.0: the body ends with the connection. Raises OSError, ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not url.isascii() or not url.isprintable():
        raise ValueError("not a status server's address")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
        writer.write(request.encode("ascii"))
        answer = await _read_all(reader)
    finally:
        writer.transport.abort()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return body if status in ([b"200"], [b"503"]) else None


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Raises ValueError when it is too much."""
    answer = bytearray()
    while chunk := await reader.read(1 << 16):
        answer += chunk
        if len(answer) > _MAX_BYTES:
            raise ValueError("too much of an answer")
    return bytes(answer)
