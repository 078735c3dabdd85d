"""Requests that a worker ends or refuses by itself: time, limits, a link that is cut."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from dynamo_lite.protocol.errors import Refused, Unavailable
from dynamo_lite.protocol.options import AdmissionOptions
from dynamo_lite.request_plane.connection import Connection
from dynamo_lite.request_plane.dialing import Dialer
from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.runtime.drops import uncounted
from tests.builders import endpoint_record, eventually, generate_request
from tests.contract.generating import FakeEngine, Outputs, Setup, open_setup, tokens

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

Open = Callable[..., Awaitable[Setup]]


@pytest.fixture(params=["tcp", "tls"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:
        yield lambda **limits: open_setup(request.param, stack, **limits)


async def test_beyond_its_limit_of_requests_a_worker_is_busy(opened: Open):
    setup = await opened(limits=AdmissionOptions(max_in_flight_requests=2, max_queued_tokens=100))
    for request_id in ("a", "b"):
        await setup.client.submit(setup.member, generate_request(request_id))
    with pytest.raises(Refused, match="2 requests") as caught:
        await setup.client.submit(setup.member, generate_request("c"))
    assert caught.value.busy and caught.value.elsewhere
    await setup.client.submit(setup.member, generate_request("moved", moved=True))
    await setup.client.abort(["a", "moved"])
    await eventually(lambda: sorted(setup.engine.aborted) == ["a", "moved"])
    await setup.client.submit(setup.member, generate_request("c"))
    assert setup.server.in_flight == 2


async def test_beyond_its_limit_of_waiting_prompts_a_worker_is_busy(opened: Open):
    limits = AdmissionOptions(max_in_flight_requests=100, max_queued_tokens=8)
    setup = await opened(limits=limits)  # each prompt has 3 tokens
    await setup.client.submit(setup.member, generate_request("a"))
    await setup.client.submit(setup.member, generate_request("b"))
    with pytest.raises(Refused, match="wait") as caught:
        await setup.client.submit(setup.member, generate_request("c"))
    assert caught.value.busy
    setup.server.deliver([tokens("a", 1)])
    await setup.client.submit(setup.member, generate_request("c"))
    setup.engine.refusal = Refused("too long", elsewhere=False)
    setup.server.deliver([tokens("b", 1)])
    for _ in range(3):  # what the engine refuses does not count
        with pytest.raises(Refused, match="too long"):
            await setup.client.submit(setup.member, generate_request("d"))


async def test_a_link_that_is_cut_loses_what_runs_on_it(opened: Open):
    setup = await opened()
    setup.client.drop(setup.member, "nothing runs there")
    for request_id in ("a", "b"):
        await setup.client.submit(setup.member, generate_request(request_id))
    setup.server.deliver([tokens("b", 1, finish="stop")])
    await eventually(lambda: bool(setup.outputs.deltas))
    setup.client.drop(setup.member, "it is silent")
    await eventually(lambda: bool(setup.outputs.lost))
    assert setup.outputs.lost == [(["a"], "it is silent")]
    await eventually(lambda: setup.engine.aborted == ["a"])
    setup.server.deliver([tokens("a", 2)])
    await setup.client.submit(setup.member, generate_request("c"))
    setup.server.deliver([tokens("c", 3, finish="stop")])
    await eventually(lambda: len(setup.outputs.deltas) == 2)
    assert setup.outputs.deltas[1] == tokens("c", 3, finish="stop")


async def test_a_client_that_leaves_with_the_welcome_closes_the_connection():
    outputs = Outputs()
    async with GenerateServer(FakeEngine()) as server:
        member = endpoint_record(stream=server.stream_address)
        dialer = Dialer("front", None, "", uncounted)
        link = Connection(member.transport, dialer, outputs.on_deltas, outputs.on_lost)
        receive = link.frame_received

        def receive_and_leave(payload: bytes) -> None:
            receive(payload)
            link.leave()

        link.frame_received = receive_and_leave
        with pytest.raises(Unavailable):
            await link.opened()
        async with asyncio.timeout(5):
            await asyncio.wait([link.closed])
        assert link.closed.done()
