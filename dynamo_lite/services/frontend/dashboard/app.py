"""Serves `/dashboard`, in front of vLLM's app.

Other origins get nothing: no CORS headers, a content policy that allows only the page's own
script and style, and no event stream for pages of other sites.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files

from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_lite.protocol.errors import Overloaded
from dynamo_lite.runtime.waiting import first_of
from dynamo_lite.services.frontend.dashboard.viewers import Viewers

PATH = "/dashboard"
EVENTS = "/dashboard/events"

_FILES = {
    PATH: ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDS = {
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}

#: A stream ends after this time and the browser opens the next one, so that a client that
#: vanished without a disconnect is not kept longer.
_STREAM_S = 300.0
#: Timeout for sending one event.
_SEND_S = 10.0

#: Closes the connection of the request with this scope.
Disconnect = Callable[[Scope], None]


class Dashboard:
    """ASGI; requests for other paths go to `app`.

    any_name: whether the page is served under any host name. Otherwise the Host header must
    have an address or `localhost`, because an attacker could point a name of his page to this
    server, and his script would have the same origin (DNS rebinding).
    disconnect: called for clients that read no events.
    """

    def __init__(
        self,
        app: ASGIApp,
        viewers: Viewers,
        disconnect: Disconnect,
        *,
        any_name: bool,
        stream_s: float = _STREAM_S,
        send_s: float = _SEND_S,
    ):
        self._app, self._viewers, self._disconnect = app, viewers, disconnect
        self._any_name = any_name
        self._stream_s, self._send_s = stream_s, send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PATH or path.startswith(f"{PATH}/")):
            return await self._app(scope, receive, send)
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        if not self._any_name and not _is_own_name(headers.get("host", "")):
            return await _send_text(
                send, 421, "use the server's IP address or localhost in the URL"
            )
        if scope["method"] not in ("GET", "HEAD"):
            return await _send_text(send, 405, "only GET is allowed", [("allow", "GET, HEAD")])
        if path == EVENTS:
            return await self._answer_events(scope, headers, receive, send)
        if path in (f"{PATH}/", *_FILES):
            return await _send_file(path.rstrip("/"), send, body=scope["method"] == "GET")
        await _send_text(send, 404, "no such page")

    async def _answer_events(
        self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return await _send_text(send, 403, "pages of other sites may not read this")
        # Browsers send no Sec-Fetch-Site over plain HTTP. Requests from other sites have an Origin.
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
            return await _send_text(send, 403, "pages of other sites may not read this")
        if scope["method"] != "GET":
            return await _send_text(send, 405, "only GET is allowed", [("allow", "GET")])
        try:
            with self._viewers.joined():
                await self._stream(scope, receive, send)
        except Overloaded:
            await _send_text(send, 503, "too many viewers", [("retry-after", "10")])

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the client disconnects or stops reading, for `_stream_s` at most."""
        head = {"content-type": "text/event-stream", "x-accel-buffering": "no", **_GUARDS}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(head.items())})
        stuck = False
        try:
            await first_of(
                self._send_frames(send), _disconnected(receive), timeout_s=self._stream_s
            )
        except TimeoutError:
            stuck = True
        if not stuck:
            try:
                async with asyncio.timeout(self._send_s):
                    await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                stuck = True
        if stuck:
            self._disconnect(scope)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._send_s):
                    await _disconnected(receive)

    async def _send_frames(self, send: Send) -> None:
        """Raises TimeoutError when the client does not read."""
        async for frame in self._viewers.frames():
            async with asyncio.timeout(self._send_s):
                body = b"data: " + frame + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})


def _is_own_name(host: str) -> bool:
    """Whether a Host header (with or without a port) has an address or `localhost`."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@cache
def _content(name: str) -> bytes:
    return files("dynamo_lite.services.frontend.dashboard").joinpath("static", name).read_bytes()


async def _send_file(path: str, send: Send, *, body: bool) -> None:
    name, kind = _FILES[path]
    content = _content(name)
    head = {"content-type": kind, "content-length": str(len(content)), **_GUARDS}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(head.items())})
    await send({"type": "http.response.body", "body": content if body else b""})


async def _send_text(
    send: Send, status: int, text: str, more: Iterable[tuple[str, str]] = ()
) -> None:
    body = f"{text}\n".encode()
    head = {"content-type": "text/plain", "content-length": str(len(body)), **_GUARDS}
    headers = _raw((*head.items(), *more))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers]
