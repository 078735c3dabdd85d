"""The engine seam: what a component needs from the thing that computes.

Implementations: `vllm/` (stock vLLM), `sim/` (virtual compute) and `null` (no
compute, for measuring the runtime). An engine is an async context manager:
entering loads it, leaving frees it.
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
    """What the engine's scheduler last said of itself.

    gave_tokens: whether it has given any since it is up. Its first steps may compile kernels.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1, blocks that cannot be given to a new request
    gave_tokens: bool = False


@dataclass(frozen=True)
class AttemptOutcome:
    """How a prefill engine's work on one attempt ended: no write is under way any more.

    outcome: "written", "failed" or "abandoned"; or "died", of an engine whose process
    ended: what it had started may still land. written_at: the end of its last write, by this
    host's monotonic clock, where that is known.
    """

    attempt: str
    outcome: str
    detail: str = ""
    written_at: float | None = None


@dataclass(frozen=True)
class LinkReport:
    """How a preflight ended. failure: why the decode engine cannot be given KV; else see
    `LinkRecord`."""

    failure: str | None = None
    lanes: int = 0
    contact_s: float = 0.0
    round_trip_s: float = 0.0


class KvEvents(Protocol):
    """Which blocks an engine holds, by their chain hashes (`policy/kv_chain.py`)."""

    @property
    def block_size_tokens(self) -> int: ...

    def changes(self) -> AsyncIterator[list[KvChange]]:
        """One list per engine step that changed anything, without end. One reader."""
        ...

    def held(self) -> Sequence[int]:
        """With all changes so far."""
        ...

    def cuts(self) -> Sequence[int]:
        """Blocks that are not held, though some behind them are."""
        ...


class DecodeEngine(Protocol):
    """Generates; decides by itself which prompts to have prefilled elsewhere."""

    @property
    def model(self) -> str: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def metadata(self) -> EngineMetadata | None:
        """The KV pool as others may write to it; None where it takes no remote KV."""
        ...

    @property
    def kv_events(self) -> KvEvents | None:
        """None where it does not tell what it holds."""
        ...

    async def describe(self) -> EngineStatus:
        """Asks the engine's own process; only where there is metadata.

        Raises Unavailable, DeadlineExceeded or ProtocolError.
        """
        ...

    async def listen(self, listen: Listen) -> None:
        """A prefill worker tries its way; only where there is metadata.

        Raises Unavailable or DeadlineExceeded.
        """
        ...

    async def submit(self, request: GenerateRequest) -> None:
        """Raises Refused when the request is not acceptable to this engine."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Unknown and finished ids are ignored. No delta follows for these."""
        ...

    def steps(self) -> AsyncIterator[list[TokenDelta]]:
        """One list per engine step, until the engine is closed. One reader.

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
        """Computes and writes one claimed attempt; returns when no write is under way.

        Raises Refused or IncompatiblePeer when nothing was begun.
        """
        ...

    async def preflight(self, target: EngineMetadata) -> LinkReport:
        """Tries the way to a decode engine, which must listen: see `Listen`.

        `run_prefills` must be running. Raises IncompatiblePeer for a target that it must
        not write to; Unavailable, DeadlineExceeded or ProtocolError when this engine
        was not heard.
        """
        ...

    def forget(self, engine_ids: Sequence[str]) -> None:
        """These decode engines left: what is kept of them may go."""
        ...

    async def abandon(self, attempt: str) -> None:
        """Stops an attempt early; its `prefill` returns "abandoned" (or "written")."""
        ...
