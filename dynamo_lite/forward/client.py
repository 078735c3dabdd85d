"""The client's side of one request, as the workflow sees it."""

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from multidict import CIMultiDict

from dynamo_lite.forward.named import NOTHING, Named


class ClientGone(Exception):
    """The client has disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request without its body."""

    method: str
    #: Path with the query, encoded; begins with a slash.
    path: str
    #: Of `headers.to_engine`.
    headers: CIMultiDict[str]
    #: Of `headers.client_id`.
    client_id: str
    #: Engines that its headers name; only a sidecar follows them.
    named: Named = NOTHING


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str] | CIMultiDict[str] = field(default_factory=CIMultiDict[str])
    body: bytes = b""


class Client(Protocol):
    """Takes one answer. All methods raise ClientGone."""

    @property
    def started(self) -> bool:
        """Whether the head of the answer was sent. After that no retry is possible."""
        ...

    async def start(self, status: int, headers: Mapping[str, str] | CIMultiDict[str]) -> None: ...

    def write(self, data: bytes, /) -> Coroutine[Any, Any, None]:
        """Returns when the client has room for more."""
        ...

    def push(self, data: bytes) -> bool:
        """As `write` after another `write`, but at once. Returns whether the client has room for
        more; if not, the caller awaits `drained`."""
        ...

    async def drained(self) -> None: ...

    async def finish(self) -> None: ...

    def abort(self) -> None:
        """Closes the connection without the answer's end, so that the client sees that the
        answer is incomplete. Bytes that were written before are still delivered if the client
        can tell."""
        ...


async def send(client: Client, answer: Answer) -> None:
    await client.start(answer.status, answer.headers)
    await client.write(answer.body)
    await client.finish()


def error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> Answer:
    """An error answer in the form of vLLM's own errors."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    own = {"content-type": "application/json", **(headers or {})}
    return Answer(status, own, msgspec.json.encode(body))
