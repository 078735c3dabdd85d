"""An engine that accepts connections and says nothing more, as a process that stands still."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from tests.builders import eventually
from tests.forwarding import TEXT, Rig, rig
from tests.scripted import Fault, ScriptedEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: Of a check; in these tests, engines that answer do so at once.
TIMEOUT_S = 0.5


class Still:
    """Requests to engines in `paths` are held; an empty tuple: all of them."""

    def __init__(self) -> None:
        self.paths: dict[ScriptedEngine, tuple[str, ...]] = {}
        self.goes_on = asyncio.Event()

    async def hold(self, engine: ScriptedEngine, path: str) -> None:
        paths = self.paths.get(engine)
        if paths is not None and (not paths or path in paths):
            await self.goes_on.wait()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Still:
    made, handle = Still(), ScriptedEngine._handle

    async def held(self: ScriptedEngine, request: web.BaseRequest) -> web.StreamResponse:
        await made.hold(self, request.path)
        return await handle(self, request)

    monkeypatch.setattr(ScriptedEngine, "_handle", held)
    return made


@asynccontextmanager
async def quick(protocol: str = "nixl", **options: Any) -> AsyncIterator[Rig]:
    async with (
        asyncio.timeout(30),
        rig(protocol, health_timeout_s=TIMEOUT_S, health_interval_s=0.05, **options) as r,
    ):
        yield r


async def checked(r: Rig, times: int = 4) -> None:
    """Long enough that a silent engine is found to be silent."""
    for _ in range(times):
        await r.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_leg_at_a_silent_engine_goes_to_another_one(still: Still, stream: bool):
    async with quick(decode=2) as r:
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.stream() if stream else r.text())
        await eventually(lambda: r.engines[1].legs > 0, 5)
        await checked(r)
        answer = await asked
        assert answer == TEXT or (isinstance(answer, bytes) and b"[DONE]" in answer)
        assert r.forwarding.stats.failures == {("decode", "broken"): 1}
        assert [len(engine.legs) for engine in r.decode] == [0, 1]
        still.goes_on.set()


@pytest.mark.parametrize("protocol", ["nixl", "moriio-write"])
async def test_a_prefill_leg_at_a_silent_engine_is_given_up(still: Still, protocol: str):
    async with quick(protocol) as r:
        still.paths[r.prefill[0]] = ()
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.engines[0].legs > 0, 5)
        await checked(r)
        assert await asked == TEXT
        assert r.forwarding.stats.failures == {("prefill", "broken"): 1}
        still.goes_on.set()


async def test_without_another_engine_the_failure_is_the_answer(still: Still):
    async with quick() as r:
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.ask())
        await eventually(lambda: r.engines[1].legs > 0, 5)
        await checked(r)
        assert (await asked)[0] == 502
        still.goes_on.set()


async def test_a_leg_at_an_engine_that_has_left_is_given_up_too(still: Still):
    """The process beside the engine is gone with their host, so its record is gone first."""
    async with quick(decode=2) as r, r.monitor:
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.engines[1].legs > 0, 5)
        r.engines.remove(r.engines[1])
        assert await asked == TEXT
        still.goes_on.set()


async def test_an_engine_that_computes_for_long_and_checks_late_keeps_its_legs(still: Still):
    """SGLang's check runs a request, which waits for the computation."""
    async with quick(decode=2) as r:
        still.paths[r.decode[0]] = ("/health", "/v1/completions")
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.engines[1].legs > 0, 5)
        await checked(r, 6)
        assert not r.engines[1].healthy and not asked.done()
        still.goes_on.set()
        assert await asked == TEXT
        assert [len(engine.legs) for engine in r.decode] == [1, 0]


async def test_an_engine_whose_stream_moves_keeps_its_waiting_legs(still: Still):
    async with quick() as r:
        moves = asyncio.Event()
        streamed = _streams(r.decode[0], moves, every_s=TIMEOUT_S / 10)
        moving = asyncio.create_task(r.stream())
        await asyncio.wait_for(streamed.wait(), 5)
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.engines[1].legs > 1, 5)
        await checked(r, 6)
        assert not asked.done() and not moving.done()
        still.goes_on.set()
        moves.set()
        assert await asked == TEXT and b"[DONE]" in await moving
        assert not r.forwarding.stats.failures


async def test_a_stream_that_has_begun_is_not_broken_off_by_silence(still: Still):
    """Part of the answer is shown, so nothing could be repeated; it may still go on."""
    async with quick(decode=2) as r:
        moves = asyncio.Event()
        streamed = _streams(r.decode[0], moves, every_s=None)
        begun = asyncio.create_task(r.stream())
        await asyncio.wait_for(streamed.wait(), 5)
        still.paths[r.decode[0]] = ()
        await checked(r, 6)
        assert not begun.done() and not r.engines[1].healthy
        moves.set()
        assert b"[DONE]" in await begun
        still.goes_on.set()


def _streams(
    engine: ScriptedEngine, ends: asyncio.Event, *, every_s: float | None
) -> asyncio.Event:
    """The engine's next stream has one event, or one every `every_s`, until it ends. Returns what
    is set after the first."""
    began, stream = asyncio.Event(), engine._stream
    event = b"data: " + json.dumps({"id": "x", "choices": []}).encode() + b"\n\n"

    async def moving(request: web.BaseRequest, leg: Any, fault: Fault) -> web.StreamResponse:
        engine._stream = stream  # type: ignore[method-assign]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while not ends.is_set():
            await response.write(event)
            began.set()
            try:
                async with asyncio.timeout(every_s):
                    await ends.wait()
            except TimeoutError:
                continue
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    engine._stream = moving  # type: ignore[method-assign]
    return began
