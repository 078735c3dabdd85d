"""The pages of `/dashboard`.

The page asks for the graph once per second; all viewers share one look per second, and without a
viewer there is none. Other origins get nothing: no CORS headers, and a content policy that allows
only the page's own script and style.
"""

import asyncio
import ipaddress
from functools import cache
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from dynamo_lite.runtime.overview.observer import Observer

PATH = "/dashboard"
OVERVIEW = "/dashboard/overview"

_FILES = {
    PATH: ("dashboard.html", "text/html"),
    f"{PATH}/": ("dashboard.html", "text/html"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
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

#: Shortest time between two looks.
_PERIOD_S = 0.9


class Dashboard:
    """any_name: whether the page is served under any host name. Otherwise the Host header must
    have an address or `localhost`, because an attacker could point a name of his page to this
    server, and his script would have the same origin (DNS rebinding).
    """

    def __init__(self, observer: Observer, *, any_name: bool, period_s: float = _PERIOD_S):
        self._observer, self._any_name, self._period_s = observer, any_name, period_s
        self._looking = asyncio.Lock()
        self._next_at = 0.0
        self._overview = b""

    @property
    def pages(self) -> list[Route]:
        return [Route(path, self._page) for path in (*_FILES, OVERVIEW)]

    async def _page(self, request: Request) -> Response:
        answer = await self._answer(request)
        answer.headers.update(_GUARDS)
        return answer

    async def _answer(self, request: Request) -> Response:
        path, headers = request.scope["path"], request.headers
        if not self._any_name and not _is_own_name(headers.get("host", "")):
            return PlainTextResponse("use the server's IP address or localhost in the URL\n", 421)
        if path == OVERVIEW:
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                return PlainTextResponse("pages of other sites may not read this\n", 403)
            return Response(await self._newest(), media_type="application/json")
        name, media_type = _FILES[path]
        return Response(_content(name), media_type=media_type)

    async def _newest(self) -> bytes:
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if now >= self._next_at:
                self._overview = msgspec.json.encode(await self._observer.look())
                self._next_at = now + self._period_s
            return self._overview


def _is_own_name(host: str) -> bool:
    """Whether a Host header (with or without a port) has an address or `localhost`."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


@cache
def _content(name: str) -> bytes:
    return (
        files("dynamo_lite.serve.services.frontend.dashboard").joinpath("static", name).read_bytes()
    )
