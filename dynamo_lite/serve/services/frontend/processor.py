"""The Processor's endpoints: OpenAI requests over NATS, answered by the Frontend's app.

One NATS request and one reply; no streaming. Chat template, tokenisation and
detokenisation run in the Frontend's process, or in that of vLLM's Rust frontend.
"""

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx

from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.vllm.frontend.refusal import error_body

logger = logging.getLogger(__name__)

#: Endpoint name to the app's path.
ENDPOINTS: Mapping[str, str] = {
    "chat/completions": "/v1/chat/completions",
    "completions": "/v1/completions",
}


def client_of(edge: Any, api_key: str | None = None) -> httpx.AsyncClient:
    """edge: an ASGI app in this process, or the URL of an HTTP server on this host. api_key: the
    edge's key, if it requires one."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if isinstance(edge, str):
        # Not through a proxy of the environment. The edge limits how many it takes.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url, transport = edge, httpx.AsyncHTTPTransport(verify=False, limits=limits)
    else:
        url, transport = "http://processor", httpx.ASGITransport(edge, raise_app_exceptions=False)
    headers["content-type"] = "application/json"
    return httpx.AsyncClient(transport=transport, base_url=url, headers=headers, timeout=None)


async def relay(
    client: httpx.AsyncClient,
    timeout_s: float,
    endpoint: str,
    payload: bytes,
    on_drop: OnDrop = uncounted,
) -> bytes:
    """The HTTP edge's JSON response to a NATS request; errors have the form of its error bodies.
    timeout_s: for the whole response."""
    try:
        request = decode_json(payload, dict[str, Any])
    except ProtocolError as exc:
        on_drop(endpoint)
        return _bad_request(f"The request is not a JSON object: {exc}")
    if request.get("stream"):
        return _bad_request("This endpoint does not stream; use HTTP for streams", "stream")
    response = b""
    try:
        async with asyncio.timeout(timeout_s):
            response = (await client.post(ENDPOINTS[endpoint], content=payload)).content
    except TimeoutError:
        message = "The HTTP edge did not answer in time"
        return error_body(HTTPStatus.GATEWAY_TIMEOUT, message, "Gateway Timeout")
    except Exception:
        logger.exception("a request of the Processor failed")
    return response or error_body(
        HTTPStatus.INTERNAL_SERVER_ERROR, "Internal server error", "InternalServerError"
    )


def _bad_request(message: str, param: str | None = None) -> bytes:
    return error_body(HTTPStatus.BAD_REQUEST, message, "BadRequestError", param)
