"""Which headers pass in which direction."""

import re
from collections.abc import Iterable

from multidict import CIMultiDict, CIMultiDictProxy

#: RFC 9110, section 7.6.1, and what older proxies use.
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection"),
        *("proxy-authenticate", "proxy-authorization"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
#: Names prefill engines; only a sidecar follows it.
PREFILLER_HEADER = "x-prefiller-host-port"
#: Set by the Forwarder, or only for a proxy: a client must not choose engines or ranks. Compression
#: is not requested, because compressed answers could not be read here.
_NOT_FOR_ENGINES = frozenset(
    {
        *("host", "content-length", "expect", "accept-encoding", "x-data-parallel-rank"),
        *(PREFILLER_HEADER, "x-data-parallel-host-port"),
    }
)
_VALID_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


def to_engine(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The client's headers for a leg."""
    dropped = _dropped(headers.getall("connection", ()))
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in dropped and low not in _NOT_FOR_ENGINES
    )


def to_client(headers: CIMultiDict[str], engine: str) -> CIMultiDict[str]:
    """An engine's headers for the client. engine: its HOST:PORT, which a redirect to another path
    of it contains, and clients may not be able to reach."""
    dropped = _dropped(headers.getall("connection", ()))
    kept = CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in dropped
    )
    origin, at, path = kept.get("location", "").partition(engine)
    if at and origin in ("http://", "https://") and path.startswith("/"):
        # Two slashes would begin the name of another host.
        kept["location"] = "/" + path.lstrip("/\\")
    return kept


def hide(headers: CIMultiDict[str], found: str, shown: str) -> None:
    """Replaces a text in all values. Engines may return the request id of their leg."""
    changed = [(name, value.replace(found, shown)) for name, value in headers.items()]
    headers.clear()
    headers.extend(changed)


def client_id(headers: CIMultiDictProxy[str]) -> str:
    """The client's X-Request-Id; empty if there is none or engines could misread it."""
    given = headers.get("x-request-id", "")
    return given if _VALID_ID.fullmatch(given) else ""


def prefillers(headers: CIMultiDictProxy[str]) -> tuple[str, ...]:
    """The prefill engines that a client has named, in its order, unchecked."""
    values = headers.getall(PREFILLER_HEADER, ())
    parts = (part.strip() for value in values for part in value.split(","))
    return tuple(part for part in parts if part)


def _dropped(connection: Iterable[str]) -> frozenset[str]:
    """The hop-by-hop headers, with those that `Connection` names."""
    named = {part.strip().lower() for value in connection for part in value.split(",")}
    return _HOP_BY_HOP | named if named - _HOP_BY_HOP else _HOP_BY_HOP
