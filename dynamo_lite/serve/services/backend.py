"""What a worker runs on: engine, queue and claim cells.

`VllmBackend` opens the real ones; a simulation passes its own to the components.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dynamo_lite.disagg.engine import DecodeEngine, PrefillEngine
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueOptions
from dynamo_lite.runtime.claim_cells import ClaimCells
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import PrefillWorkerConfig, VllmWorkerConfig


class WorkerBackend(Protocol):
    async def prepare(self) -> None:
        """Everything that takes long and needs no other process."""
        ...

    def open_cells(self, host: Host, config: PrefillWorkerConfig) -> ClaimCells: ...

    def open_queue(
        self, host: Host, options: QueueOptions
    ) -> AbstractAsyncContextManager[PrefillQueue]: ...

    def open_decode_engine(
        self, host: Host, config: VllmWorkerConfig
    ) -> AbstractAsyncContextManager[DecodeEngine]: ...

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, cells: ClaimCells
    ) -> AbstractAsyncContextManager[PrefillEngine]: ...
