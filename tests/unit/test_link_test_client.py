"""The component's part of a link test whose order is not answered in time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_lite.disagg.prefill.link_test_client import LinkTestClient
from dynamo_lite.protocol.errors import BrokerUnavailable, DeadlineExceeded
from dynamo_lite.runtime.messaging import Messaging
from tests.builders import engine_metadata, eventually


class Broker:
    def __init__(self, error: Exception):
        self.error = error

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        raise self.error


@pytest.mark.parametrize(
    ("error", "wakes"),
    [(DeadlineExceeded("request", 2.0), 1), (BrokerUnavailable("NATS is disconnected"), 0)],
)
async def test_an_engine_that_may_have_the_order_is_woken(error: Exception, wakes: int):
    """An idle engine would keep a test that nobody awaits, and stay in its role for it."""
    woken: list[bool] = []

    async def wake() -> None:
        woken.append(True)

    config: Any = SimpleNamespace(lease_id=1, namespace="n", engine_id="p")
    client = LinkTestClient(config, cast("Messaging", Broker(error)), wake)
    with pytest.raises(type(error)):
        await client.test(engine_metadata("d"))
    await eventually(lambda: len(woken) == wakes)
    client.close()
