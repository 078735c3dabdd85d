"""A Frontend whose Router fails, and what it tells one of requests that end without NATS."""

import asyncio
from typing import Any, cast

import pytest

from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import BrokerUnavailable, DeadlineExceeded
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, RequestOutcomes, decode_fates
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
    def __init__(self) -> None:
        self.members: tuple[EndpointRecord, ...] = (ROUTER,)

    def get(self, lease_id: int) -> EndpointRecord | None:
        return next((one for one in self.members if one.lease_id == lease_id), None)


class Scene:
    def __init__(self) -> None:
        self.broker, self.routers = Broker(), Routers()
        self.remote = RemoteRouter(
            cast("Messaging", self.broker),
            cast("Roster", self.routers),
            namespace="n",
            lease_id=15,
            again_s=0.02,
        )

    async def end_while_away(self) -> None:
        """One request is answered and ended, one only answered."""
        for name in ("a", "b"):
            await self.remote.pick((WORKER,), generate_request(name))
        self.broker.away = True
        self.remote.answered("a")
        self.remote.released("a")
        await eventually(lambda: self.broker.refused)
        self.remote.answered("b")

    def told(self, kind: str) -> list[str]:
        names: list[Any] = [name for one in self.broker.notices for name in getattr(one, kind)]
        return [name.partition("~")[0] for name in names]


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


async def test_outcomes_reach_the_router_when_nats_is_back(scene: Scene):
    async with scene.remote:
        await scene.end_while_away()
        await eventually(lambda: scene.broker.refused > 2)
        scene.broker.away = False
        await eventually(lambda: len(scene.told("answered")) == 2)
        scene.remote.released("b")
        await eventually(lambda: len(scene.told("released")) == 2)
    assert (scene.told("answered"), scene.told("released")) == (["a", "b"], ["a", "b"])


async def test_those_for_a_router_that_has_left_are_dropped(scene: Scene):
    async with scene.remote:
        await scene.end_while_away()
        await eventually(lambda: scene.broker.refused > 2)
        scene.routers.members = ()
        refused = scene.broker.refused
        await eventually(lambda: scene.broker.refused > refused)
        scene.broker.away = False
        scene.remote.released("b")
        await eventually(lambda: scene.broker.notices)
    assert (scene.told("answered"), scene.told("released")) == ([], ["b"])
