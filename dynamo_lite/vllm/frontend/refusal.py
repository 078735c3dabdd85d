"""Error answers of the HTTP middleware, in vLLM's format."""

import json
from collections.abc import Iterable
from http import HTTPStatus

from starlette.types import Message, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> bytes | None:
    """Returns the first header of this name, which must be in lower case."""
    return next((value for key, value in scope["headers"] if key == name), None)


def error_body(status: HTTPStatus, message: str, kind: str, param: str | None = None) -> bytes:
    error = {"message": message, "type": kind, "param": param, "code": status.value}
    return json.dumps({"error": error}).encode()


def json_head(status: int, body: bytes, others: Headers = ()) -> Message:
    """others: further headers; those about content are dropped."""
    headers = [
        *((key, value) for key, value in others if not key.lower().startswith(b"content-")),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return {"type": "http.response.start", "status": int(status), "headers": headers}


async def refuse(
    send: Send,
    status: HTTPStatus,
    message: str,
    *,
    kind: str = "BadRequestError",
    param: str | None = None,
    headers: Headers = (),
) -> None:
    """Sends an error as the whole response."""
    body = error_body(status, message, kind, param)
    await send(json_head(status, body, headers))
    await send({"type": "http.response.body", "body": body})
