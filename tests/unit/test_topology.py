"""Answers of the broker about a queue's consumers that a single real server never gives."""

from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.errors import ServiceUnavailableError

from dynamo_lite.disagg.queue.base import QueueConfig
from dynamo_lite.disagg.queue.topology import Topology, consumer_name
from dynamo_lite.protocol.queue import Lane


class Client:
    """Answers each request with `data`."""

    def __init__(self, data: bytes):
        self._data = data

    async def request(self, subject: str, **_: Any) -> Any:
        assert subject == "$JS.API.CONSUMER.LIST.s"
        return SimpleNamespace(data=self._data)


async def consumers(data: bytes) -> Any:
    return await Topology("s", "s.jobs", QueueConfig()).consumers(Client(data))  # type: ignore[arg-type]


async def test_a_consumer_whose_server_does_not_respond_is_not_a_lost_one():
    name = consumer_name(Lane.LONG)
    answer = f'{{"consumers": [], "missing": ["{name}"]}}'
    with pytest.raises(ServiceUnavailableError, match=name):
        await consumers(answer.encode())


@pytest.mark.parametrize("answer", [b'{"consumers": null}', b'{"consumers": [], "missing": null}'])
async def test_a_stream_without_consumers_has_lost_them(answer: bytes):
    assert await consumers(answer) == {}
