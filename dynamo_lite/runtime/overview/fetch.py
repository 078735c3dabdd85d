"""GET requests to status servers: bounded in time and size; redirects are not followed.

A certificate must come from an authority that the system trusts, or from one in the file that the
environment's SSL_CERT_FILE names.
"""

import asyncio
import ssl
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

#: Timeout of one request. A stopped process (SIGSTOP) accepts connections and never responds.
TIMEOUT_S = 1.0
#: vLLM's metrics are the largest responses, about 100 KiB.
_MAX_BYTES = 8 << 20
_PORTS = {"http": 80, "https": 443}

_decode_facts = msgspec.json.Decoder(dict[str, Any]).decode


async def fetch_health(status_url: str) -> dict[str, Any]:
    """The facts that a process reports at /health.

    Empty if it does not respond in time, or not with a JSON object.
    """
    body = await fetch(f"{status_url}/health")
    try:
        return {} if body is None else _decode_facts(body)
    except (ValueError, RecursionError):
        return {}


async def fetch(url: str) -> bytes | None:
    """The body of a 200 or 503 response (a status server reports "not ok" with 503).

    None if there is no such response, or `url` is not an http:// or https:// address.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _get(url)
    except (OSError, ValueError, TimeoutError):
        return None


async def _get(url: str) -> bytes | None:
    """Speaks HTTP/1.0: the body ends with the connection. Raises OSError, ValueError."""
    parts = urlsplit(url)
    if (
        parts.scheme not in _PORTS
        or not parts.hostname
        or not url.isascii()
        or not url.isprintable()
    ):
        raise ValueError(f"not an http:// or https:// address: {url!r}")
    # Reading the system's authorities takes tens of milliseconds, the first time.
    tls = await asyncio.to_thread(_trusting) if parts.scheme == "https" else None
    port = parts.port or _PORTS[parts.scheme]
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
        writer.write(request.encode("ascii"))
        response = await _read_all(reader)
    finally:
        writer.transport.abort()
    head, _, body = response.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return body if status in ([b"200"], [b"503"]) else None


@cache
def _trusting() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Raises ValueError if the response is longer than `_MAX_BYTES`."""
    response = bytearray()
    while chunk := await reader.read(1 << 16):
        response += chunk
        if len(response) > _MAX_BYTES:
            raise ValueError(f"response is longer than {_MAX_BYTES} bytes")
    return bytes(response)
