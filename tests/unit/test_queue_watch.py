"""What a decode engine knows of the prefill queue."""

import asyncio

from dynamo_lite.disagg.decode.queue_watch import QueueView, QueueWatch
from dynamo_lite.runtime.tasks import running
from tests.builders import loop_time
from tests.twins.queue import MemoryBroker, MemoryQueue
from tests.unit.virtual import virtual

PERIOD_S = 0.25


@virtual
async def test_tokens_follow_from_the_size_of_what_was_pushed_here():
    watch = QueueWatch(loop_time)
    queue = MemoryQueue(MemoryBroker(), stream="s", subject="s.jobs")
    async with queue, running(watch.watch(queue), name="watch"):
        await queue.push(bytes(3000), message_id="m")

        async def seen() -> QueueView:
            await asyncio.sleep(PERIOD_S + 0.05)
            assert watch.view is not None and watch.view.jobs == 1
            return watch.view

        assert (await seen()).tokens == 750, "four bytes for each"
        watch.pushed += 10 * [(1000, 2000)]
        assert (await seen()).tokens == 1500
        watch.pushed += 10 * [(100, 2000)]  # most of these prompts are in the engine's cache
        assert (await seen()).tokens == 150
