"""The shipped messaging on the simulated NATS server does what it does on the real one, and what
workers hold is followed over it."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.contract import test_fuzz_nats, test_kv, test_messaging
from tests.sim import contract
from tests.sim.servers import SimNats
from tests.twins.servers import MemoryStore

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_messaging, "messaging", "nats_server"))
globals().update(contract.tests_of(test_fuzz_nats, "nats_url"))
globals().update(contract.tests_of(test_kv, "messaging"))
few_handlers = test_messaging.few_handlers


@pytest.fixture
async def messaging(nats_url: str, few_handlers: None) -> AsyncIterator[Messaging]:
    async with NatsMessaging(nats_url) as messaging:
        yield messaging


@pytest.fixture
def other_nats_server(nats_server: SimNats) -> SimNats:
    return SimNats(nats_server.network, "other", 4223)


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as store:
        yield store
