"""Tells a decode engine's ledger what has happened, and carries out what follows on the network."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from dynamo_lite.disagg.attempts.instructions import CancelWriter, DeleteJob, Instruction
from dynamo_lite.disagg.attempts.ledger import Ledger
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.prefill import CancelAttempt
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OnFailure, OwnedTasks, log_failure

logger = logging.getLogger(__name__)


class LedgerEvents:
    """Runs on the bridge's thread.

    Instructions about blocks are left for the engine's next step. Those for the network are carried
    out here. One that fails is logged, and the others are carried out.

    When the ledger itself fails at an event, its state is unknown, and instructions may be lost
    for which a request waits. So that ends the session, see `running`.
    """

    def __init__(
        self, config: EngineConfig, book: LockedLedger, queue: PrefillQueue, messaging: Messaging
    ):
        self._config, self._book = config, book
        self._queue, self._messaging = queue, messaging
        self._tasks: OwnedTasks | None = None
        self._on_failure: OnFailure = log_failure

    @contextlib.asynccontextmanager
    async def running(self, on_failure: OnFailure = log_failure) -> AsyncIterator[None]:
        """Owns what `start` starts, and waits for its end. on_failure: of an event."""
        async with OwnedTasks() as tasks:
            self._tasks, self._on_failure = tasks, on_failure
            try:
                yield
            finally:  # the roster and the links end later, and may still report changes
                self._tasks, self._on_failure = None, log_failure
            await tasks.join()

    async def apply(
        self, event: Callable[[Ledger], list[Instruction]], about: str, *ids: object
    ) -> None:
        """about: what the event concerns, for the log, a format for `ids`."""
        try:
            with self._book.lock:
                instructions = event(self._book.ledger)
                self._book.leave_for_engine(instructions)
        except Exception as exc:
            # JSON lines take their ids from the arguments.
            logger.error(f"{about}: the ledger failed at this event: %r", *ids, exc)
            task = asyncio.current_task()
            assert task is not None
            self._on_failure(task, exc)
            raise
        await self.carry_out(instructions)

    def apply_soon(
        self, event: Callable[[Ledger], list[Instruction]], about: str, *ids: object
    ) -> None:
        """For callers that cannot wait."""
        self.start(self.apply(event, about, *ids), about % ids)

    def start(self, coro: Coroutine[Any, Any, None], about: str) -> None:
        """Runs it as a task; drops it outside of `running`."""
        if self._tasks is not None:
            self._tasks.start(coro, name=about)
        else:
            coro.close()

    async def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carries out the instructions that need the network, once each. A lost message is
        safe, because no writer gets a claim for a withdrawn attempt."""
        for instruction in instructions:
            try:
                await self._carry_out(instruction)
            except DynamoLiteError as exc:
                logger.warning("instruction %s failed: %s", instruction, exc)
            except Exception:
                logger.exception("instruction %s failed", instruction)

    async def _carry_out(self, instruction: Instruction) -> None:
        config = self._config
        if isinstance(instruction, DeleteJob):
            await self._queue.delete(instruction.sequence)
        elif isinstance(instruction, CancelWriter):
            cancel = CancelAttempt(attempt=instruction.attempt, engine_id=config.engine_id)
            subject = names.cancel_subject(config.namespace, instruction.writer_lease_id)
            await self._messaging.publish(subject, encode(cancel))
