"""The simulated process's store does what every store must, and so does a roster on it."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.store import Store
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.store import SimStore
from tests.contract import test_roster, test_store
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_store, "store"))
globals().update(contract.tests_of(test_roster, "store"))


@pytest.fixture
async def store(network: Network) -> AsyncIterator[Store]:
    async with SimStore(network) as store:
        yield store
