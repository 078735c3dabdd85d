"""What workers hold is followed over the simulated NATS server, too."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.contract import test_kv
from tests.sim import contract
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_kv, "messaging"))


@pytest.fixture
async def messaging(nats_url: str) -> AsyncIterator[Messaging]:
    async with NatsMessaging(nats_url) as messaging:
        yield messaging


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as store:
        yield store
