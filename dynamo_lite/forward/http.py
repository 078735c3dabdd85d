"""The Forwarder's HTTP server."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from dynamo_lite.forward import bodies, headers, workflow
from dynamo_lite.forward.attempt import ForwardJob, ForwardParts
from dynamo_lite.forward.client import Answer, Client, ClientGone, error
from dynamo_lite.forward.decision_log import RequestNote
from dynamo_lite.forward.failures import Final
from dynamo_lite.forward.protocols.base import SGLANG_GENERATE, VLLM_ROUTES
from dynamo_lite.runtime.address import local_url
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.tls import server_context
from dynamo_lite.runtime.web_server import WebServer

logger = logging.getLogger(__name__)

_MAX_FIELD_BYTES = 16 << 10
_MAX_HEADERS = 128
#: How long a refused body is still read, so that its client reads the answer.
_LINGER_S = 2.0
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: How long a client's connection stays open without a request.
_KEEP_ALIVE_S = 75.0
#: Of a form's content type.
_PLAIN_CHARSET = re.compile(r';\s*charset="?(?:utf-8|us-ascii)"?(?=\s*(?:;|$))')
#: How long a request's body may take to arrive.
BODY_S = 60.0
#: Limit on the bytes of all bodies that are arriving, in largest bodies.
_ARRIVING = 8
_CLOSE = {"connection": "close"}
#: Routes that generate, with any protocol.
_GENERATE = VLLM_ROUTES | {SGLANG_GENERATE}

Reply = Callable[[], Answer]


def reply(facts: Mapping[str, Any]) -> Answer:
    """facts: with `ok`."""
    head = {"content-type": "application/json"}
    return Answer(200 if facts.get("ok") else 503, head, msgspec.json.encode(facts))


class ForwardServer(WebServer):
    """Async context manager. own: what is answered here, by path. shared: other processes listen on
    the same port. on_drop: called with "http" for a connection that is closed because too many have
    no request, or for what is no HTTP."""

    def __init__(
        self,
        parts: ForwardParts,
        own: Mapping[str, Reply],
        *,
        shared: bool = False,
        on_drop: OnDrop = uncounted,
    ):
        """Raises StartupError, ConfigError."""
        config, tls = parts.config, None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = server_context(Path(config.tls_cert), Path(config.tls_key))
        sock = bind(config.host, config.port, shared=shared)
        self.port = sock.getsockname()[1]
        self.url = local_url(config.host, self.port, tls=tls is not None)
        self._parts, self._config, self._own = parts, config, own
        #: Bytes of bodies that are arriving.
        self._held = 0
        super().__init__(
            self._handle,
            sock,
            None if tls is None else lambda: tls,
            on_drop=lambda: on_drop("http"),
            keepalive_timeout=_KEEP_ALIVE_S,
            lingering_time=_LINGER_S,
            max_line_size=_MAX_FIELD_BYTES,
            max_field_size=_MAX_FIELD_BYTES,
            max_headers=_MAX_HEADERS,
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        client = Client(request, self._config.idle_timeout_s)
        try:
            await self._answer(request, client)
        except ClientGone:
            # The connection is closed, but aiohttp still requires a response.
            logger.debug("the client of %s has disconnected", request.path)
        except Exception:
            logger.exception("a request to %s failed", request.path)
            if client.started:
                client.abort()
            else:
                await client.send(error(500, "InternalServerError", "the Forwarder failed"))
        return client.response or web.Response(status=500)

    async def _answer(self, request: web.BaseRequest, client: Client) -> None:
        path = request.raw_path
        if request.method not in _METHODS or not path.startswith("/"):
            refusal = error(405, "MethodNotAllowed", "expected a path and a usual method")
            return await client.send(refusal)
        if request.path in self._own and request.method in ("GET", "HEAD"):
            return await client.send(self._own[request.path]())
        generates = request.method == "POST" and request.path in _GENERATE
        client_id = headers.client_id(request.headers)
        try:
            asked = bodies.read(request.path if generates else "", await self._body(request))
            note = client.note = RequestNote(asked.route, client_id, self._config)
            job = ForwardJob(
                method=request.method,
                path=path,
                headers=headers.to_engine(request.headers),
                client_id=client_id,
                request=asked,
                client=client,
                note=note,
            )
            await workflow.answer(self._parts, job, headers.prefillers(request.headers))
        except Final as refused:
            await workflow.refuse(self._parts, client, refused.answer)

    async def _body(self, request: web.BaseRequest) -> bytes:
        """Raises Final, ClientGone."""
        if not request.can_read_body:
            return b""
        # Of several headers the engine may take another one.
        encoding = ",".join(request.headers.getall("content-encoding", ()))
        if encoding.lower() not in ("", "identity"):
            # An encoded body cannot be read, so forbidden fields could not be removed from it.
            text = f"content-encoding {encoding!r} is not accepted: send the body as it is"
            raise Final(error(415, "UnsupportedMediaType", text))
        kind = ",".join(request.headers.getall("content-type", ())).lower()
        if "multipart" in kind and kind.count("charset") != len(_PLAIN_CHARSET.findall(kind)):
            # The names of a form's fields could be written otherwise.
            text = f"a form in another charset than UTF-8 is not accepted: {kind!r}"
            raise Final(error(415, "UnsupportedMediaType", text))
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise Final(self._too_large())
        await _continue(request)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                while part := await request.content.readany():
                    size += len(part)
                    self._held += len(part)
                    if size > self._config.max_body_bytes:
                        raise Final(self._too_large())
                    if self._held > _ARRIVING * self._config.max_body_bytes:
                        text = "too many large requests are arriving: try again later"
                        raise Final(error(503, "ServiceUnavailableError", text, _CLOSE))
                    parts.append(part)
        except TimeoutError as exc:
            text = f"the request's body did not arrive within {BODY_S:g} s"
            raise Final(error(408, "RequestTimeout", text, _CLOSE)) from exc
        except (web.RequestPayloadError, ConnectionError) as exc:
            raise ClientGone from exc
        finally:
            self._held -= size
        return b"".join(parts)

    def _too_large(self) -> Answer:
        text = (
            f"The request's body has more than {self._config.max_body_bytes} bytes, which is the"
            " limit here (the Forwarder's `max-body-bytes`)"
        )
        return error(413, "RequestEntityTooLarge", text, _CLOSE)


async def _continue(request: web.BaseRequest) -> None:
    """aiohttp's low-level server leaves `Expect: 100-continue` to its handler."""
    expects = request.headers.get("expect", "").lower() == "100-continue"
    if expects and request.version >= HttpVersion11 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
