"""The generate endpoint between simulated processes: TCP on the simulated network."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.contract import test_generate, test_generate_ends
from tests.contract.generating import Setup, open_setup
from tests.sim import contract
from tests.simulation.network.network import Network

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

globals().update(contract.tests_of(test_generate, "setup", "remote"))
globals().update(contract.tests_of(test_generate_ends, "opened"))


@pytest.fixture
async def opened(network: Network) -> AsyncIterator[test_generate_ends.Open]:
    async with AsyncExitStack() as stack:
        yield lambda **limits: open_setup("tcp", stack, **limits)


@pytest.fixture
async def setup(opened: test_generate_ends.Open) -> Setup:
    return await opened()


@pytest.fixture
def remote(setup: Setup) -> Setup:
    return setup
