"""Every test of this directory runs in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from tests.sim.servers import SimNats
from tests.simulation.loop.loop import VirtualLoop
from tests.simulation.network.network import Network
from tests.simulation.servers.etcd import EtcdServer


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], VirtualLoop]]:
    return {"virtual": VirtualLoop}


@pytest.fixture
async def loop() -> AsyncIterator[VirtualLoop]:
    """The running loop; nothing may have failed in it unheard."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualLoop)
    yield running
    assert running.failures == []


@pytest.fixture
async def network(loop: VirtualLoop) -> Network:
    """With etcd, and no faults; `nats_server` and `nats_url` add NATS."""
    network = Network(loop)
    EtcdServer(network, loop.add_process("etcd"))
    return network


@pytest.fixture
async def nats_server(network: Network) -> SimNats:
    return SimNats(network)


@pytest.fixture
def nats_url(nats_server: SimNats) -> str:
    return nats_server.url
