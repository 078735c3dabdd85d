"""What most contract suites are parametrised by; a suite with its own needs has its own fixture."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.runtime.store import Store
from tests.twins.servers import MemoryMessaging, MemoryStore


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        async with MemoryStore() as memory:
            yield memory
    else:
        async with EtcdStore(request.getfixturevalue("etcd_url")) as etcd:
            yield etcd


@pytest.fixture(params=["memory", "nats"])
async def messaging(request: pytest.FixtureRequest) -> AsyncIterator[Messaging]:
    if request.param == "memory":
        async with MemoryMessaging() as memory:
            yield memory
    else:
        async with NatsMessaging(request.getfixturevalue("nats_url")) as real:
            yield real
