"""Tells a decode engine's ledger what has happened, and carries out what follows on the network."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.policy.instructions import CancelWriter, DeleteJob, Instruction
from dynamo_lite.policy.ledger import Ledger
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import CancelAttempt
from dynamo_lite.queue.base import PrefillQueue
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)


class LedgerEvents:
    """Runs on the bridge's thread.

    Instructions about blocks are left for the engine's next step. Those for the network are carried
    out here, from `connect` on.
    """

    def __init__(self, config: EngineConfig, book: LockedLedger):
        self._config, self._book = config, book
        self._queue: PrefillQueue | None = None
        self._messaging: Messaging | None = None
        self._tasks: asyncio.TaskGroup | None = None

    def connect(self, queue: PrefillQueue, messaging: Messaging) -> None:
        self._queue, self._messaging = queue, messaging

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Owns what `start` starts, and waits for its end."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                yield
            finally:  # the roster and the links end later, and may still report changes
                self._tasks = None

    async def apply(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        with self._book.lock:
            instructions = event(self._book.ledger)
            self._book.leave_for_engine(instructions)
        await self.carry_out(instructions)

    def apply_soon(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        """For callers that cannot wait."""
        self.start(self.apply(event))

    def start(self, coro: Coroutine[Any, Any, None]) -> None:
        """Runs it as a task; drops it outside of `running`."""
        if self._tasks is not None:
            self._tasks.create_task(coro)
        else:
            coro.close()

    async def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carries out the instructions that need the network, once each. A lost message is
        safe, because no writer gets a claim for a withdrawn attempt."""
        for instruction in instructions:
            try:
                if isinstance(instruction, DeleteJob) and self._queue is not None:
                    await self._queue.delete(instruction.sequence)
                elif isinstance(instruction, CancelWriter) and self._messaging is not None:
                    await self._messaging.publish(
                        names.cancel_subject(self._config.namespace, instruction.writer_lease_id),
                        encode_sealed(
                            CancelAttempt(
                                attempt=instruction.attempt, engine_id=self._config.engine_id
                            )
                        ),
                    )
            except DynamoLiteError as exc:
                logger.warning("instruction %s failed: %s", instruction, exc)
