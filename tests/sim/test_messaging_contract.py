"""The simulated process's messaging does what every messaging must."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.messaging import SimMessaging
from tests.contract import test_messaging
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_messaging, "messaging"))


@pytest.fixture
async def messaging(network: Network) -> AsyncIterator[Messaging]:
    async with SimMessaging(network, max_handlers=2) as messaging:
        yield messaging
