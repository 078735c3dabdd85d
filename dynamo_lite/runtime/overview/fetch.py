"""GET requests to status servers: bounded in time and size; redirects are not followed.

Over HTTPS both sides show a certificate of the graph.
"""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dynamo_lite.runtime.certificates import Certificates

#: Timeout of one request. A stopped process (SIGSTOP) accepts connections and never responds.
TIMEOUT_S = 1.0
#: vLLM's metrics are the largest responses, about 100 KiB.
_MAX_BYTES = 8 << 20
_PORTS = {"http": 80, "https": 443}


async def fetch_health(status_url: str, certificates: Certificates | None = None) -> dict[str, Any]:
    """The facts that a process reports at /health.

    Empty if it does not respond in time, or not with a JSON object.
    """
    body = await fetch(f"{status_url}/health", certificates)
    try:
        return {} if body is None else msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


async def fetch(url: str, certificates: Certificates | None = None) -> bytes | None:
    """The body of a 200 or 503 response (a status server reports "not ok" with 503).

    None if there is no such response, `url` is not an http:// or https:// address, or the server is
    no component of this graph. certificates: of who asks; None: only over HTTP.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _get(url, certificates)
    except (OSError, ValueError, TimeoutError):
        return None


async def _get(url: str, certificates: Certificates | None) -> bytes | None:
    """Speaks HTTP/1.0: the body ends with the connection. Raises OSError, ValueError."""
    parts = urlsplit(url)
    if not (parts.scheme in _PORTS and parts.hostname and url.isascii() and url.isprintable()):
        raise ValueError(f"not an http:// or https:// address: {url!r}")
    tls = None
    if parts.scheme == "https":
        if certificates is None:
            raise ValueError("its certificate cannot be checked")
        tls = certificates.client()
    port = parts.port or _PORTS[parts.scheme]
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls)
    try:
        if certificates is not None and tls is not None:
            if why := certificates.refusal(writer.get_extra_info("ssl_object")):
                raise ValueError(why)
        request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n"
        writer.write(request.encode("ascii"))
        await reader.readexactly(_MAX_BYTES + 1)
        raise ValueError(f"response is longer than {_MAX_BYTES} bytes")
    except asyncio.IncompleteReadError as exc:
        response = exc.partial
    finally:
        writer.transport.abort()
    head, _, body = response.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return body if status in ([b"200"], [b"503"]) else None
