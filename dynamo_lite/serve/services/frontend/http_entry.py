"""What a request meets around vLLM's app: limits on its head, own pages."""

from collections.abc import Iterable

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dynamo_lite.runtime.pending import PendingConnections
from dynamo_lite.runtime.request_head import RequestHeadDeadline
from dynamo_lite.vllm.http_options import HttpOptions


class OwnPages:
    """ASGI middleware: pages of this process, such as `/live` and `/ready`, on the HTTP port.

    They do not reach the app, so they are cheap and need no API key. HEAD reaches it as GET: vLLM's
    routes do not know it, and uvicorn sends no body in answer to it.
    """

    def __init__(self, app: ASGIApp, pages: Iterable[Route]):
        self._app, self._pages = app, {page.path: page for page in pages}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if (page := self._pages.get(scope["path"])) is not None:
                return await page.handle(scope, receive, send)
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class _Protocol(RequestHeadDeadline, HttpToolsProtocol):
    """uvicorn's protocol with limits on a request's head, whose size the parser does not limit."""

    max_head_bytes: int
    max_headers: int
    _head_bytes = 0
    _refused = False

    def in_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > self.max_head_bytes and not self._refused:
            self._refuse()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.max_headers and not self._refused:
            self._refuse()

    def on_headers_complete(self) -> None:
        # One read may have brought the whole head and a part of the body.
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.max_head_bytes and not self._refused:
            self._refuse()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def _refuse(self) -> None:
        self._refused = True
        self.send_400_response("The request's headers are too many or too large.")


def limited_protocol(options: HttpOptions, pending: PendingConnections) -> type[_Protocol]:
    limits = {"max_head_bytes": options.max_head_bytes, "max_headers": options.max_headers}
    return type("LimitedProtocol", (_Protocol,), limits | {"pending": pending})
