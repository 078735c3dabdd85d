"""Tells a decode engine's ledger what happens at the engine, and carries out what follows.

The twin of `ledger_events.py` on the engine's thread.
"""

import logging
from collections.abc import Callable, Iterable

from dynamo_lite.disagg.attempts.instructions import (
    CancelWriter,
    DeleteJob,
    Ended,
    GiveUp,
    Hold,
    Instruction,
    Outcome,
    Release,
)
from dynamo_lite.disagg.attempts.ledger import Ledger
from dynamo_lite.disagg.bridge import Bridge
from dynamo_lite.disagg.counters import REMOTE, Counters
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.engine_api import Block, BlockPool
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.protocol.prefill import RemotePrefillRequest

logger = logging.getLogger(__name__)


class EngineEvents:
    """Runs on the engine's thread.

    Instructions about blocks are carried out here. Those for the ranks leave with the next step,
    those for the network go to the bridge.
    """

    def __init__(
        self,
        book: LockedLedger,
        pool: BlockPool,
        prefills: RemotePrefills,
        stats: Counters,
        net: ControlSession,
        bridge: Bridge,
    ):
        self._book, self._pool, self._prefills, self._stats = book, pool, prefills, stats
        self._net, self._bridge = net, bridge
        #: What the next step tells the ranks.
        self._message = DecodeStep()

    def apply(self, event: Callable[[Ledger], list[Instruction]]) -> None:
        """Something has happened at the engine."""
        with self._book.lock:
            instructions = event(self._book.ledger)
        self.carry_out(instructions)

    def carry_out(self, instructions: list[Instruction]) -> None:
        """Carries out instructions that the ledger has just given."""
        self._carry_out_here(instructions)
        network = [i for i in instructions if isinstance(i, DeleteJob | CancelWriter)]
        if network:
            self._bridge.submit(self._net.events.carry_out(network))

    def step(self, jobs: Iterable[RemotePrefillRequest], now: float) -> DecodeStep:
        """A step is scheduled. Applies the ledger's deadlines, and carries out what the bridge's
        thread has left for this step. jobs: of the attempts that were allocated in it."""
        for job in jobs:
            self._message.expect[job.attempt] = job.request_id
            self._message.blocks[job.attempt] = tuple(job.block_ids)
            self._bridge.submit(self._net.push(job))
        with self._book.lock:
            due = self._book.ledger.tick(now)
            left = self._book.take_for_engine()
            self._message.grants = self._book.take_grants()
            # Also when blocks are released: what has arrived for them is taken before their reuse.
            releases = any(isinstance(one, Release) for one in (*left, *due))
            self._message.poll = releases or self._book.awaits_writes
        self._carry_out_here(left)  # the bridge's thread has carried out the others itself
        self.carry_out(due)
        message, self._message = self._message, DecodeStep()
        return message

    @property
    def busy(self) -> bool:
        """Whether the engine must make steps for the ranks or the ledger."""
        return bool(self._message.give_up) or self._book.busy

    def _carry_out_here(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Hold):
                blocks: list[Block] = [self._pool.blocks[i] for i in instruction.block_ids]
                self._pool.touch(blocks)
                self._prefills.hold(instruction.attempt, blocks)
            elif isinstance(instruction, Release):
                self._pool.free_blocks(reversed(self._prefills.release(instruction.attempt)))
            elif isinstance(instruction, GiveUp):
                self._message.give_up.append((instruction.attempt, instruction.request_id))
            elif isinstance(instruction, Ended):
                self._ended(instruction)

    def _ended(self, ended: Ended) -> None:
        request_id, attempt, outcome = ended.request_id, ended.attempt, ended.outcome
        self._stats.add(f"{REMOTE}/{outcome.value}")
        self._prefills.ended(ended)
        if outcome is not Outcome.COMMITTED:
            logger.info("request %s: attempt %s ended: %s", request_id, attempt, outcome.value)
