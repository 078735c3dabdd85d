"""A decode engine's scheduler half, with the clock that it reads."""

from collections.abc import AsyncIterator

import pytest

from dynamo_lite.protocol import names
from tests.builders import NAMESPACE, ManualClock
from tests.unit.decode_engine import WRITER, Decode


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def decode(clock: ManualClock) -> AsyncIterator[Decode]:
    decode = Decode(clock)
    subject = names.cancel_subject(NAMESPACE, WRITER)
    async with decode.queue, decode.messaging.serve(subject, decode.take_cancel):
        yield decode
        await decode.network()
