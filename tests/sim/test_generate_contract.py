"""The generate endpoint between simulated processes: NATS and TCP on the simulated network."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.runtime.nats.messaging import NatsMessaging
from tests.contract import test_generate, test_generate_ends
from tests.contract.generating import Setup, set_up
from tests.sim import contract

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_generate, "setup", "remote", "over_nats"))
globals().update(contract.tests_of(test_generate_ends, "opened"))


@pytest.fixture
async def opened(nats_url: str, namespace: str) -> AsyncIterator[test_generate_ends.Open]:
    async with AsyncExitStack() as stack:
        messaging = await stack.enter_async_context(NatsMessaging(nats_url))
        yield lambda **limits: set_up("sim", stack, messaging, namespace, **limits)


@pytest.fixture
async def setup(opened: test_generate_ends.Open) -> Setup:
    return await opened()


@pytest.fixture
def remote(setup: Setup) -> Setup:
    return setup


@pytest.fixture
def over_nats(setup: Setup) -> Setup:
    return setup
