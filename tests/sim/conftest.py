"""Every test of this directory runs in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from dynamo_lite.simulation.loop.loop import VirtualLoop
from dynamo_lite.simulation.network.network import Network
from dynamo_lite.simulation.servers.etcd import EtcdServer
from dynamo_lite.simulation.servers.nats import NatsServer


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
    """With both servers, and no faults."""
    network = Network(loop)
    NatsServer(network, loop.add_process("nats"))
    EtcdServer(network, loop.add_process("etcd"))
    return network
