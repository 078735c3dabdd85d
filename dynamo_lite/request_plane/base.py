"""What the generate endpoint expects of those who use it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta

#: Takes the deltas of one engine step for this client.
OnDeltas = Callable[[list[TokenDelta]], None]
#: Takes the ids of accepted requests that get no further delta, and the reason.
OnLost = Callable[[list[str], str], None]


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
