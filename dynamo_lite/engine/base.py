"""The engine seam: what a component needs from its engine.

Implementations: `vllm/` (stock vLLM), `simulation/engine/` (virtual compute) and `null.py` (no
compute, for measuring the runtime). An engine is an async context manager: entering loads it,
leaving frees it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.kv import KvChange
from dynamo_lite.protocol.prefill import EngineStatus, Listen, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata


@dataclass(frozen=True)
class EngineLoad:
    """What the engine's scheduler last reported."""

    running: int = 0
    waiting: int = 0
    #: 0 to 1; share of the blocks that cannot be given to a new request.
    kv_usage: float = 0.0
    #: Whether it has produced any token since its start. Its first steps may compile kernels.
    gave_tokens: bool = False


@dataclass(frozen=True)
class AttemptOutcome:
    """How a prefill engine's work on one attempt ended: no write is in flight any more."""

    attempt: str
    #: "written", "failed", "abandoned", or "died": the engine's process ended, and writes that it
    #: had started may still land.
    outcome: str
    detail: str = ""
    #: End of its last write, by this host's monotonic clock; None if not known.
    written_at: float | None = None


@dataclass(frozen=True)
class LinkReport:
    """The result of a link test."""

    #: Why no KV can be written into the decode engine; None if it can. Other fields: see
    #: `LinkRecord`.
    failure: str | None = None
    lanes: int = 0
    contact_s: float = 0.0
    round_trip_s: float = 0.0


class KvEvents(Protocol):
    """Which blocks an engine holds, by their chain hashes (`policy/kv_chain.py`)."""

    @property
    def block_size_tokens(self) -> int: ...

    def changes(self) -> AsyncIterator[list[KvChange]]:
        """One list per engine step that changed anything, without end. Only one reader."""
        ...

    def held(self) -> Sequence[int]:
        """Blocks that are held after all changes so far."""
        ...

    def cuts(self) -> Sequence[int]:
        """Blocks that are not held, although some of their descendants are."""
        ...


class DecodeEngine(Protocol):
    """Generates, and decides by itself which prompts are prefilled remotely."""

    @property
    def model(self) -> str: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def metadata(self) -> EngineMetadata | None:
        """The KV pool as writers see it; None if the engine takes no remote KV."""
        ...

    @property
    def kv_events(self) -> KvEvents | None:
        """None if the engine does not publish its blocks."""
        ...

    async def describe(self) -> EngineStatus:
        """Asks the engine's own process. Only with metadata.

        Raises Unavailable, DeadlineExceeded or ProtocolError.
        """
        ...

    async def listen(self, listen: Listen) -> None:
        """A prefill worker tests its link. Only with metadata.

        Raises Unavailable or DeadlineExceeded.
        """
        ...

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused when the request is not acceptable to this engine."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown and finished ids are ignored. No delta follows for these requests."""
        ...

    def steps(self) -> AsyncIterator[list[TokenDelta]]:
        """One list per engine step, until the engine is closed. Only one reader.

        Raises EngineDied when the engine process is gone.
        """
        ...


class PrefillEngine(Protocol):
    """Computes prompts and writes their KV into other engines' blocks."""

    @property
    def model(self) -> str: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def metadata(self) -> EngineMetadata | None: ...

    async def describe(self) -> EngineStatus:
        """As `DecodeEngine.describe`."""
        ...

    async def run_prefills(self) -> None:
        """Drives the engine; must run while `prefill` is awaited. Raises EngineDied."""
        ...

    async def prefill(self, job: RemotePrefillRequest, target: EngineMetadata) -> AttemptOutcome:
        """Computes and writes one claimed attempt. Returns when no write is in flight.

        Raises Refused or IncompatiblePeer when nothing was begun.
        """
        ...

    async def preflight(self, target: EngineMetadata) -> LinkReport:
        """Tests the link to a decode engine, which must listen: see `Listen`.

        `run_prefills` must be running. Raises IncompatiblePeer for a target that it must not write
        to; Unavailable, DeadlineExceeded or ProtocolError when this engine could not be reached.
        """
        ...

    def forget(self, engine_ids: Sequence[str]) -> None:
        """These decode engines left: their state may be dropped."""
        ...

    async def abandon(self, attempt: str) -> None:
        """Stops an attempt early; its `prefill` returns "abandoned" (or "written")."""
        ...
