"""The Processor's endpoints: OpenAI requests over NATS, answered by the Frontend's app.

One NATS request and one reply; no streaming. Chat template, tokenisation and
detokenisation run in the Frontend's process, or in that of vLLM's Rust frontend.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.vllm.frontend.refusal import error_body

logger = logging.getLogger(__name__)

#: Endpoint name to the app's path.
ENDPOINTS: Mapping[str, str] = {
    "chat/completions": "/v1/chat/completions",
    "completions": "/v1/completions",
}
HEADERS = ((b"host", b"processor"), (b"content-type", b"application/json"))

#: Posts a body to a path; returns the answer's body.
Ask = Callable[[str, bytes], Awaitable[bytes]]

#: How long the app may take to notice that the caller is disconnected.
_DISCONNECT_S = 5.0


class Processor:
    """Passes NATS requests on to the Frontend's HTTP edge."""

    def __init__(self, ask: Ask, *, on_drop: OnDrop = uncounted):
        self._ask, self._on_drop = ask, on_drop

    async def answer(self, endpoint: str, payload: bytes) -> bytes:
        """Returns the edge's JSON response; errors have the form of its error bodies."""
        try:
            request = decode_json(payload, dict[str, Any])
        except ProtocolError as exc:
            self._on_drop(endpoint)
            return _bad_request(f"The request is not a JSON object: {exc}")
        if request.get("stream"):
            return _bad_request("This endpoint does not stream; use HTTP for streams", "stream")
        try:
            answer = await self._ask(ENDPOINTS[endpoint], payload)
        except TimeoutError:
            message = "The HTTP edge did not answer in time"
            return error_body(HTTPStatus.GATEWAY_TIMEOUT, message, "Gateway Timeout")
        except Exception:
            logger.exception("a request of the Processor failed")
            answer = b""
        return answer or error_body(
            HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error", "InternalServerError"
        )


def ask_app(app: Any, api_key: str | None = None) -> Ask:
    """Asks an ASGI app in this process. api_key: the app's key, if it requires one."""
    headers = list(HEADERS)
    if api_key is not None:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))

    async def ask(path: str, body: bytes) -> bytes:
        call = _Call(app, path, headers, body)
        try:
            return await call.body()
        finally:
            await call.disconnect()

    return ask


def ask_server(url: str, timeout_s: float) -> Ask:
    """Asks an HTTP server on this host: few requests, each with one body.

    timeout_s: for a whole answer.
    """

    async def ask(path: str, body: bytes) -> bytes:
        """Raises aiohttp.ClientError, TimeoutError.

        A cancel closes the connection, which aborts the request.
        """
        headers = {name.decode(): value.decode() for name, value in HEADERS}
        limits = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            session.post(f"{url}{path}", data=body, headers=headers) as answer,
        ):
            return await answer.read()

    return ask


class _Call:
    """One POST to an ASGI app in this process.

    vLLM's app runs a request in its own task, which ends on `disconnect`, but not when the
    caller is cancelled.
    """

    def __init__(self, app: Any, path: str, headers: list[tuple[bytes, bytes]], body: bytes):
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": ("processor", 80),
        }
        self._request: bytes | None = body
        self._reply: list[bytes] = []
        self._disconnected = asyncio.Event()
        self._task = asyncio.create_task(app(scope, self._receive, self._send), name=f"call {path}")

    async def body(self) -> bytes:
        """The response's body. An app that raises has sent a 500 response before (Starlette)."""
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (exc := self._task.exception()) is not None:
            logger.error("the app raised on a request of the Processor", exc_info=exc)
        return b"".join(self._reply)

    async def disconnect(self) -> None:
        self._disconnected.set()
        try:
            await asyncio.wait({self._task}, timeout=_DISCONNECT_S)
        finally:
            await end_tasks(self._task)

    async def _receive(self) -> dict[str, Any]:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self._reply.append(message.get("body", b""))


def _bad_request(message: str, param: str | None = None) -> bytes:
    return error_body(HTTPStatus.BAD_REQUEST, message, "BadRequestError", param)
