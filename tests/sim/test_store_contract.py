"""On the simulated etcd the shipped store does what every store must, and so does a roster;
when that etcd dies, hangs or is wiped, it does what it does on the real one."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.store import Store
from tests.contract import test_roster, test_store, test_store_outages
from tests.contract.test_store_outages import EtcdRig, outage
from tests.sim import contract
from tests.sim.servers import SimEtcd
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import ETCD_URL, etcd_options

__all__ = ["outage"]

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: These stop the process itself, by real time.
_REAL_TIME = (
    "test_a_stall_that_is_longer_than_the_lease_costs_it",
    "test_a_suspended_host_has_lost_its_lease",
)

for suite in (test_store, test_roster, test_store_outages):
    globals().update(contract.tests_of(suite, "store", "rig", "etcd_server"))
for name in _REAL_TIME:
    del globals()[name]


@pytest.fixture
async def store(network: Network) -> AsyncIterator[Store]:
    async with EtcdStore(ETCD_URL, **etcd_options(network)) as store:
        yield store


@pytest.fixture
async def etcd_server(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> SimEtcd:
    """The suites' own stores are connected to it, too."""
    network = Network(loop)

    def connect(url: str, **options: Any) -> EtcdStore:
        return EtcdStore(url, **etcd_options(network), **options)

    for suite in (test_store, test_roster, test_store_outages):
        monkeypatch.setattr(suite, "EtcdStore", connect)
    return SimEtcd(network)


@pytest.fixture
async def rig(etcd_server: Any) -> AsyncIterator[EtcdRig]:
    async with test_store_outages.EtcdStore(etcd_server.url) as store:
        yield EtcdRig(etcd_server, store)
