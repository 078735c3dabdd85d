"""The seams of the generate endpoint.

Implementations of GenerateClient: `client.py` (another process) and `local.py`
(the same process). Both pass `tests/contract/test_generate.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord

#: Takes one engine step's deltas for this frontend.
OnDeltas = Callable[[list[TokenDelta]], None]
#: Takes the ids of accepted requests that will get no further delta, and why.
OnLost = Callable[[list[str], str], None]

#: Reason of the refusal of a request whose stream the worker does not know.
NO_STREAM = "no stream from this client"


class GenerateClient(Protocol):
    """An async context manager; leaving it aborts what still runs, without `on_lost`.

    A request whose `submit` returned ends in exactly one way: a delta with a
    finish_reason, `abort`, or `on_lost`. A request whose `submit` raised runs
    nowhere. Deltas may arrive before `submit` returns.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        """Has `member` run `request`; `request.client_id` is filled in here.

        Raises NoResponders, DeadlineExceeded, Unavailable or Refused. When it
        raises or is cancelled no delta was or will be passed on.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """No delta follows for these. Unknown and finished ids are ignored."""
        ...

    def retain(self, members: Iterable[EndpointRecord]) -> None:
        """These are the live members: what leads to others is closed once idle."""
        ...

    def drop(self, member: EndpointRecord, why: str) -> None:
        """`member` does not respond: what runs there is reported lost, soon and by itself."""
        ...


#: Makes the transport of one owner, who takes its callbacks and enters it.
MakeTransport = Callable[[OnDeltas, OnLost], GenerateClient]


class GenerateHandler(Protocol):
    """What a GenerateServer serves: an engine."""

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...
