"""The engine seam: what a component needs from its engine.

Implementations: `vllm/` (stock vLLM), and in `tests/` one with virtual compute and one
without. An engine is an async context manager: entering loads it,
leaving frees it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.kv import KvChange
from dynamo_lite.protocol.prefill import FirstToken, RemotePrefillRequest, WriterOutcome
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.request_plane.base import GenerateHandler
from dynamo_lite.routing.kv_publisher import Holdings
from dynamo_lite.runtime.claim_cells import Cell


@dataclass(frozen=True)
class EngineLoad:
    """What the engine's scheduler last reported."""

    running: int = 0
    waiting: int = 0
    #: 0 to 1; share of the blocks that cannot be given to a new request.
    kv_usage: float = 0.0
    #: Whether each of its ranks has produced a token. Their first steps may compile kernels.
    gave_tokens: bool = False
    #: Most requests that it runs at a time; 0: not known.
    max_running: int = 0


@dataclass(frozen=True)
class AttemptOutcome:
    """How a prefill engine's work on one attempt ended. No write is in flight any more."""

    attempt: str
    outcome: WriterOutcome
    detail: str = ""


#: Takes the token that follows a job's prompt.
OnFirstToken = Callable[[int], Awaitable[None]]

#: Takes the id of a decode engine, and why a transfer with it failed.
OnBrokenLink = Callable[[str, str], None]


class KvEvents(Holdings, Protocol):
    """Which blocks an engine holds, by their chain hashes (`routing/kv_chain.py`)."""

    def changes(self) -> AsyncIterator[list[KvChange]]:
        """One list per engine step that changed anything, without end. Only one reader."""
        ...


class Engine(Protocol):
    """What both kinds of engines have."""

    @property
    def model(self) -> str: ...

    @property
    def load(self) -> EngineLoad:
        """A new object after each step that the component has received."""
        ...

    @property
    def metadata(self) -> Sequence[EngineMetadata]:
        """The KV pool of each data-parallel rank as other engines see it; empty if the engine
        exchanges no KV with others."""
        ...

    async def describe(self) -> EngineStatus:
        """Asks the engine's own processes. Only with metadata.

        Raises Unavailable, DeadlineExceeded or ProtocolError.
        """
        ...


class DecodeEngine(Engine, GenerateHandler, Protocol):
    """Generates tokens, and decides which prompts are prefilled remotely."""

    @property
    def kv_events(self) -> KvEvents | None:
        """None if the engine does not publish its blocks."""
        ...

    def first_token(self, first: FirstToken) -> TokenDelta | None:
        """A prefill worker has sampled a request's first token. Returns what is to be sent to the
        client now; `steps` leaves that out then. None for a request that does not run. Only with
        metadata.

        Raises ProtocolError for a token that does not fit.
        """
        ...

    def steps(self) -> AsyncIterator[list[TokenDelta]]:
        """One list per engine step, until the engine is closed. Only one reader.

        Raises EngineDied when the engine process is gone.
        """
        ...


class PrefillEngine(Engine, Protocol):
    """Computes prompts and writes their KV into other engines' blocks."""

    async def run_prefills(self, on_broken_link: OnBrokenLink) -> None:
        """Drives the engine; must run while `prefill` is awaited, which is cancelled when it ends.
        Raises EngineDied.

        on_broken_link: called when the first contact with a decode engine, a write or a read has
        failed, before the attempts end for which it did.
        """
        ...

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        cell: Cell,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        """Computes and writes one attempt. Returns when no write is in flight.

        cell: of the attempt's claim. While it is closed, no write and no read starts; an attempt
        whose cell has closed ends as "abandoned".
        on_first_token: awaited with the first token of the answer, if the job asks for it and
        this engine can sample it. Raises Refused when nothing was begun.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether it computes attempts, or writes them. One that waits for its adapter does not
        count: the engine has nothing to do for it."""
        ...

    def check_peer(self, target: EngineMetadata) -> bool:
        """Whether the target's blocks can also be read. Raises IncompatiblePeer, with both sides
        named, for a decode engine that it must not write to."""
        ...

    async def abandon(self, attempt: str) -> None:
        """Stops an attempt early; its `prefill` returns "abandoned" (or "written")."""
        ...
