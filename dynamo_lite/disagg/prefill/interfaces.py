"""What prefill jobs see of their engine, and of the ways to decode engines."""

from typing import Protocol

from dynamo_lite.engine.base import AttemptOutcome
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata


class Prefiller(Protocol):
    """The part of a prefill engine that jobs need."""

    async def prefill(
        self, job: RemotePrefillRequest, target: EngineMetadata
    ) -> AttemptOutcome: ...

    async def abandon(self, attempt: str) -> None: ...


class JobLinks(Protocol):
    """The part of the links that jobs need; see `Links`."""

    async def usable(self, target: EngineMetadata) -> str | None: ...

    def doubt(self, engine_id: str) -> None: ...
