"""What workers hold is followed over the simulated process's messaging, too."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.memory import MemoryStore
from dynamo_lite.simulation.servers.messaging import SimMessaging
from tests.contract import test_kv
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_kv, "messaging"))


@pytest.fixture
async def messaging(network: Network) -> AsyncIterator[Messaging]:
    async with SimMessaging(network) as messaging:
        yield messaging


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as store:
        yield store
