"""On the simulated etcd the shipped store does what every store must, and so does a roster."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Store
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.etcd_backend import ETCD_URL, etcd_backend
from tests.contract import test_roster, test_store
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_store, "store"))
globals().update(contract.tests_of(test_roster, "store"))


@pytest.fixture
async def store(network: Network) -> AsyncIterator[Store]:
    async with EtcdStore(ETCD_URL, backend=etcd_backend(network)) as store:
        yield store
