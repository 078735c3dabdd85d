"""Jobs for prefill workers, from the decode engine that is the test's."""

import asyncio
import itertools
from collections import defaultdict

from dynamo_lite.disagg.queue.base import PrefillQueue
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.prefill import Done
from tests.builders import eventually, prefill_job
from tests.process.null_decode import ENGINE

#: Jobs that are pushed and not over.
OUTSTANDING = 6
_PATIENCE_S = 40.0


class Jobs:
    """The load. `load` and `listen` run in tasks."""

    def __init__(self) -> None:
        #: Lease of the writer by attempt, of jobs that are being written.
        self.holders: dict[str, int] = {}
        #: (attempt, lease of its writer), of claims that were renewed.
        self.renewed: set[tuple[str, int]] = set()
        self.done: asyncio.Queue[Done] = asyncio.Queue()
        self.pushed: set[str] = set()
        #: By attempt.
        self.sequences: dict[str, int] = {}
        #: By attempt: its ends, as (writer, outcome); "given back": it was not claimed.
        self.ended: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)

    async def load(self, queue: PrefillQueue) -> None:
        for number in itertools.count():
            await eventually(lambda: len(self.open) < OUTSTANDING, _PATIENCE_S)
            self.pushed.add(attempt := f"a{number}")
            job = prefill_job(attempt, engine_id=ENGINE)
            self.sequences[attempt] = await queue.push(encode(job), message_id=attempt)

    async def lose(self, queue: PrefillQueue, writer: int) -> set[str]:
        """This worker is dead, and its jobs are not delivered again: as a decode engine, deletes
        them. Returns their attempts."""
        lost = self.of(writer)
        for attempt in lost:
            del self.holders[attempt]
            self.ended[attempt].append((writer, "lost"))
            assert await queue.delete(self.sequences[attempt])
        return lost

    async def listen(self) -> None:
        while True:
            said = await self.done.get()
            outcome = said.outcome if said.claim else "given back"
            self.ended[said.attempt].append((said.writer_lease_id, outcome))

    def ends(self, attempts: set[str]) -> list[tuple[int, str]]:
        return [end for attempt in attempts for end in self.ended[attempt]]

    @property
    def open(self) -> set[str]:
        return self.pushed - self.ended.keys()

    def of(self, writer: int) -> set[str]:
        """What this worker writes."""
        return {attempt for attempt, holder in self.holders.items() if holder == writer}

    async def fresh(self, writer: int) -> set[str]:
        """What this worker has just begun to write, at least one."""
        before = self.of(writer)
        return await eventually(lambda: self.of(writer) - before, _PATIENCE_S)

    async def new_writer(self, *known: int) -> int:
        """The lease of a worker that has begun to write."""
        found: set[int] = await eventually(
            lambda: set(self.holders.values()) - set(known), _PATIENCE_S
        )
        [lease] = found
        return lease
