"""The shipped queue on the simulated NATS server does what it does on the real one."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from tests.contract import test_queue
from tests.sim import contract
from tests.sim.servers import SimNats

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_queue, "open_queue", "rig", "nats_server"))


@pytest.fixture
async def open_queue(nats_url: str, namespace: str) -> AsyncIterator[test_queue.Opener]:
    async with AsyncExitStack() as stack:

        async def open_one(config: QueueConfig = test_queue.DEFAULT) -> PrefillQueue:
            queue = JetStreamQueue(nats_url, namespace, config)
            return await stack.enter_async_context(queue)

        yield open_one


@pytest.fixture
def rig(nats_server: SimNats) -> test_queue.NatsRig:
    return test_queue.NatsRig(nats_server)
