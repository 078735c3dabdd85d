"""The interfaces of the generate endpoint.

`client.py` implements GenerateClient; `tests/contract/test_generate.py` tests it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord

#: Takes the deltas of one engine step for this client.
OnDeltas = Callable[[list[TokenDelta]], None]
#: Takes the ids of accepted requests that get no further delta, and the reason.
OnLost = Callable[[list[str], str], None]


class GenerateClient(Protocol):
    """An async context manager. Leaving it aborts running requests, without `on_lost`.

    After `submit` has returned, a request ends in exactly one way: a delta with a
    finish_reason, `abort`, or `on_lost`. If `submit` raises, the request runs on no worker.
    Deltas may arrive before `submit` returns.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        """Submits `request` to `member`, with this client's own `client_id`.

        Raises DeadlineExceeded, Unavailable or Refused. If it raises or is cancelled, no delta of
        the request is passed on, before or after.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cancels requests; no delta of them follows. Unknown and finished ids are ignored."""
        ...

    def retain(self, members: Iterable[EndpointRecord]) -> None:
        """Sets the live members, and connects to them. Connections to other workers are closed
        when they are idle."""
        ...

    def is_connected(self, member: EndpointRecord) -> bool:
        """Whether requests can be sent to it without connecting first."""
        ...

    def drop(self, member: EndpointRecord, why: str) -> None:
        """Disconnects an unresponsive member. `on_lost` reports its requests a little later."""
        ...


#: Makes the transport of one owner. The owner gets the callbacks and enters the context.
MakeTransport = Callable[[OnDeltas, OnLost], GenerateClient]


class GenerateHandler(Protocol):
    """The engine behind a GenerateServer."""

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused when the request is not acceptable to this engine.

        The server aborts a request whose `submit` was cancelled.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown and finished ids are ignored. No delta follows for these requests."""
        ...
