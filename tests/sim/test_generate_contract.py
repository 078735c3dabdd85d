"""The generate endpoint between simulated processes: NATS and TCP on the simulated network."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.sim.messaging import SimMessaging
from dynamo_lite.sim.network import Network
from tests.contract import test_generate
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_generate, "setup", "remote"))


@pytest.fixture
async def setup(network: Network, namespace: str) -> AsyncIterator[test_generate.Setup]:
    async with AsyncExitStack() as stack:
        messaging = await stack.enter_async_context(SimMessaging(network))
        yield await test_generate.set_up("sim", stack, messaging, namespace)


@pytest.fixture
def remote(setup: test_generate.Setup) -> test_generate.Setup:
    return setup
