"""A decode engine's scheduler half, with the clock that it reads."""

from collections.abc import AsyncIterator

import pytest

from tests.builders import ManualClock
from tests.unit.decode_engine import Decode


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def decode(clock: ManualClock) -> AsyncIterator[Decode]:
    decode = Decode(clock)
    async with decode.queue:
        yield decode
        await decode.network()
