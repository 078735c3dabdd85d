"""The simulated process's queue does what every queue must."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.queue.base import PrefillQueue, QueueConfig
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.queue import SimQueue
from tests.contract import test_queue
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_queue, "open_queue"))


@pytest.fixture
async def open_queue(network: Network, namespace: str) -> AsyncIterator[test_queue.Opener]:
    stream, subject = names.prefill_stream(namespace), names.prefill_jobs_subject(namespace)
    async with AsyncExitStack() as stack:

        async def open_one(config: QueueConfig = test_queue.DEFAULT) -> PrefillQueue:
            queue = SimQueue(network, stream=stream, subject=subject, config=config)
            return await stack.enter_async_context(queue)

        yield open_one
