"""A Frontend whose Router fails, and what it tells one when NATS is back."""

import asyncio
from typing import cast

import pytest

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import BrokerUnavailable, DeadlineExceeded
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, RequestOutcomes, decode_fates
from dynamo_lite.routing.pickers import RoundRobin
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.serve.services.frontend.router_client import RemoteRouter
from tests.builders import endpoint_record, eventually, generate_request

ROUTER, WORKER = endpoint_record(9, "Router", "pick"), endpoint_record(1)


class Broker:
    """Disconnected while `away`. Its router places every request."""

    connected = True

    def __init__(self) -> None:
        self.away, self.refused = False, 0
        self.frozen = False
        self.notices: list[RequestOutcomes] = []

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        if self.frozen:
            await asyncio.sleep(0)
            raise DeadlineExceeded(subject, timeout_s)
        return encode(Chosen(lease_id=WORKER.lease_id, reason="a test"))

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.away:
            self.refused += 1
            raise BrokerUnavailable("NATS is disconnected")
        self.notices.append(decode_fates(payload))


class Routers:
    members: tuple[EndpointRecord, ...] = (ROUTER,)


class Scene:
    def __init__(self) -> None:
        self.broker = Broker()
        self.remote = RemoteRouter(
            cast("Messaging", self.broker),
            cast("Roster", Routers()),
            namespace="n",
            lease_id=15,
            fallback=RoundRobin(),
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_router_that_many_requests_wait_for_fails_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
):
    scene.broker.frozen = True
    async with scene.remote:
        asked = [scene.remote.pick((WORKER,), generate_request(name)) for name in "abc"]
        chosen = await asyncio.gather(*asked)
    assert [one.member for one in chosen] == [WORKER] * 3
    assert len(caplog.messages) == 1


async def test_an_outcome_that_nats_does_not_take_costs_no_later_one(scene: Scene):
    async with scene.remote:
        for name in ("a", "b"):
            await scene.remote.pick((WORKER,), generate_request(name))
        scene.broker.away = True
        scene.remote.released("a")
        await eventually(lambda: scene.broker.refused)
        scene.broker.away = False
        scene.remote.answered("b")
        scene.remote.released("b")
        await eventually(lambda: scene.broker.notices)
    assert scene.broker.notices == [
        RequestOutcomes(client=15, answered=["b~2"], released=["b~2"]),
    ]
