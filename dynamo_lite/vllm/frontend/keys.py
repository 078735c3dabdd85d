"""API keys of the HTTP server: if one is set, every route but a few requires it.

vLLM's own middleware only protects a few prefixes, and its app has other routes that
generate text (`/invocations`). Here the open routes are listed, so routes that a new version
adds are protected.
"""

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_lite.vllm.frontend.refusal import header, refuse

#: Paths without a key: health and metrics of the server.
OPEN_PATHS = frozenset({"/health", "/ping", "/live", "/ready", "/metrics", "/version"})


class KeyGuard:
    """ASGI middleware. keys: the accepted ones, at least one. root_path: that of the app."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = ""):
        self._app, self._root_path = app, root_path.rstrip("/")
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._open(scope) or self._has_key(scope):
            return await self._app(scope, receive, send)
        await refuse(
            send,
            HTTPStatus.UNAUTHORIZED,
            "This server asks for an API key: send `Authorization: Bearer KEY`",
            kind="Unauthorized",
            # The body is not read.
            headers=((b"www-authenticate", b"Bearer"), (b"connection", b"close")),
        )

    def _open(self, scope: Scope) -> bool:
        method = scope.get("method")
        if method == "OPTIONS":
            return True
        path: str = scope["path"]
        return method in ("GET", "HEAD") and (
            path in OPEN_PATHS or path.removeprefix(self._root_path) in OPEN_PATHS
        )

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        given = _digest(key.strip())
        # Compares all keys, so that the time does not depend on which one matches.
        return any([secrets.compare_digest(given, wanted) for wanted in self._keys])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
