"""The Processor's endpoints: OpenAI requests over NATS, answered by the same app.

Chat template, tokenisation and detokenisation run in the Frontend's process;
these endpoints give the other members of a graph the whole of it as one
request and one reply. Streams are HTTP's.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from dynamo_lite.components.config import ProcessorConfig

#: Endpoint name to the app's path.
ENDPOINTS: Mapping[str, str] = {
    "chat/completions": "/v1/chat/completions",
    "completions": "/v1/completions",
}


class Processor:
    """Async context manager. app: the ASGI app. api_key: what the app asks for, if anything."""

    def __init__(self, config: ProcessorConfig, app: Any, *, api_key: str | None = None):
        self._config = config
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=False),
            base_url="http://processor",
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        )

    async def __aenter__(self) -> "Processor":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def answer(self, endpoint: str, payload: bytes) -> bytes:
        """The JSON reply to a JSON request; errors in the form of the app's own bodies."""
        try:
            request = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError) as exc:
            return _error(400, f"The request is not JSON: {exc}")
        if not isinstance(request, dict):
            return _error(400, "The request must be a JSON object")
        if request.get("stream"):
            return _error(400, "This endpoint does not stream; ask over HTTP", param="stream")
        timeout_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.post(
                    ENDPOINTS[endpoint],
                    content=payload,
                    headers={"content-type": "application/json"},
                )
        except TimeoutError:
            return _error(504, f"No answer within {timeout_s:g} s")
        return response.content


_ERROR_TYPES = {400: "BadRequestError", 504: "GatewayTimeoutError"}


def _error(code: int, message: str, param: str | None = None) -> bytes:
    error = {"message": message, "type": _ERROR_TYPES[code], "param": param, "code": code}
    return msgspec.json.encode({"error": error})
