"""An engine that accepts connections and says nothing more, as a process that stands still."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from dynamo_lite.forward import engines, health
from dynamo_lite.forward.engines import KnownEngine
from tests.builders import eventually
from tests.forwarding import TEXT, Rig, rig
from tests.scripted import CHAT, Fault, ScriptedEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: Of a check. Only engines that are held are checked again, so it does not matter how fast the
#: others answer.
TIMEOUT_S = 1.0
#: Of a check that an engine must answer in time.
GENEROUS_S = 3.0
SHOWN = {"id": "x", "choices": []}
ROLE = {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


class Still:
    """Requests to engines in `paths` are held; an empty tuple: all of them. asked: requests by
    engine and path."""

    def __init__(self) -> None:
        self.paths: dict[ScriptedEngine, tuple[str, ...]] = {}
        self.asked: Counter[tuple[ScriptedEngine, str]] = Counter()
        self.goes_on = asyncio.Event()

    async def hold(self, engine: ScriptedEngine, path: str) -> None:
        self.asked[engine, path] += 1
        paths = self.paths.get(engine)
        if paths is not None and (not paths or path in paths):
            await self.goes_on.wait()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Still:
    made, handle = Still(), ScriptedEngine.handle

    async def held(self: ScriptedEngine, request: web.BaseRequest) -> web.StreamResponse:
        await made.hold(self, request.path)
        return await handle(self, request)

    monkeypatch.setattr(ScriptedEngine, "handle", held)
    return made


@asynccontextmanager
async def quick(
    protocol: str = "nixl", *, timeout_s: float = TIMEOUT_S, **options: Any
) -> AsyncIterator[Rig]:
    """All engines are healthy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "CHECK_S", timeout_s)
        patch.setattr(engines, "SILENCE_S", 2 * timeout_s)
        async with asyncio.timeout(90), rig(protocol, health_interval_s=0.05, **options) as r:
            while not all(engine.usable for engine in r.engines.all):
                await r.check()
            yield r


async def waits(engine: KnownEngine, legs: int = 1) -> None:
    await eventually(lambda: len(engine.on_end) >= legs, 30)


async def fails(r: Rig, engine: KnownEngine, times: int) -> None:
    """That many checks of the engine in a row. Its silence is over after the second one."""
    before = engine.failures
    while engine.failures < before + times:
        await r.engines.check(engine)


@pytest.mark.parametrize(
    ("protocol", "leg", "decode"),
    [
        ("nixl", "decode", 2),
        ("nixl", "streamed decode", 2),
        ("nixl", "decode", 1),
        ("nixl", "prefill", 1),
        ("moriio-write", "prefill", 1),
    ],
)
async def test_a_leg_at_a_silent_engine_is_given_up(
    still: Still, protocol: str, leg: str, decode: int
):
    """A decode leg then goes to another engine, if there is one."""
    async with quick(protocol, decode=decode) as r:
        silent = r.engines.all[0 if leg == "prefill" else 1]
        still.paths[(r.prefill if leg == "prefill" else r.decode)[0]] = ()
        asked = asyncio.create_task(r.ask() if leg != "streamed decode" else r.stream())
        await waits(silent)
        while not asked.done():
            await r.engines.check(silent)
        answer = await asked
        if isinstance(answer, bytes):
            assert b"[DONE]" in answer
        else:
            assert answer[0] == (502 if leg == "decode" and decode == 1 else 200)
        assert r.parts.stats.failures == {(leg.split()[-1], "broken"): 1}
        if decode == 2:
            assert [len(engine.legs) for engine in r.decode] == [0, 1]
        still.goes_on.set()


async def test_a_slow_page_of_metrics_delays_no_check(monkeypatch: pytest.MonkeyPatch):
    read, checked = asyncio.Event(), asyncio.Event()

    async def check(upstream: object, engine: KnownEngine) -> None:
        await read.wait()
        checked.set()

    async def read_load(engine: KnownEngine) -> None:
        read.set()
        await asyncio.Event().wait()

    async with rig(decode=2) as r:
        await r.check()
        monkeypatch.setattr(health, "check", check)
        monkeypatch.setattr(r.engines, "read_load", read_load)
        async with r.parts:
            await asyncio.wait_for(checked.wait(), 30)


async def test_a_stream_of_which_nothing_was_shown_goes_to_another_engine(still: Still):
    """Its first events have no output, so they are held back."""
    async with quick(decode=2) as r:
        begun = streams(r.decode[0], asyncio.Event(), every_s=None, event=ROLE)
        asked = asyncio.create_task(r.stream(route=CHAT))
        await asyncio.wait_for(begun.wait(), 30)
        still.paths[r.decode[0]] = ()
        while not asked.done():
            await r.engines.check(r.engines.all[1])
        shown = await asked
        assert b"[DONE]" in shown and shown.count(b'"role"') == 1
        assert r.parts.stats.failures == {("decode", "broken"): 1}
        assert [len(engine.legs) for engine in r.decode] == [1, 1]
        still.goes_on.set()


async def test_a_leg_at_an_engine_that_has_left_is_given_up_too(still: Still):
    """The process beside the engine is gone with their host, so its record is gone first."""
    async with quick(decode=2, timeout_s=GENEROUS_S) as r, r.parts:
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.text())
        await waits(r.engines.all[1])
        r.engines.remove(r.engines.all[1])
        assert await asked == TEXT
        still.goes_on.set()


async def test_an_engine_that_computes_for_long_and_checks_late_keeps_its_legs(still: Still):
    """SGLang's check runs a request, which waits for the computation."""
    async with quick(decode=2, timeout_s=GENEROUS_S) as r:
        models = still.asked[r.decode[0], "/v1/models"]
        still.paths[r.decode[0]] = ("/health", "/v1/completions")
        asked = asyncio.create_task(r.text())
        await waits(r.engines.all[1])
        await fails(r, r.engines.all[1], 3)
        assert still.asked[r.decode[0], "/v1/models"] > models
        assert not r.engines.all[1].healthy and not asked.done()
        still.goes_on.set()
        assert await asked == TEXT
        assert [len(engine.legs) for engine in r.decode] == [1, 0]


async def test_an_engine_whose_stream_moves_keeps_its_waiting_legs(still: Still):
    async with quick() as r:
        moves = asyncio.Event()
        streamed = streams(r.decode[0], moves, every_s=TIMEOUT_S / 20)
        moving = asyncio.create_task(r.stream())
        await asyncio.wait_for(streamed.wait(), 30)
        still.paths[r.decode[0]] = ()
        asked = asyncio.create_task(r.text())
        await waits(r.engines.all[1], 2)
        await fails(r, r.engines.all[1], 5)
        assert not asked.done() and not moving.done()
        still.goes_on.set()
        moves.set()
        assert await asked == TEXT and b"[DONE]" in await moving
        assert not r.parts.stats.failures


async def test_a_stream_that_has_begun_is_not_broken_off_by_silence(still: Still):
    """Part of the answer is shown, so nothing could be repeated; it may still go on."""
    async with quick(decode=2) as r:
        moves = asyncio.Event()
        streamed = streams(r.decode[0], moves, every_s=None)
        begun = asyncio.create_task(r.stream())
        await asyncio.wait_for(streamed.wait(), 30)
        await eventually(lambda: r.answered, 30)
        models = still.asked[r.decode[0], "/v1/models"]
        still.paths[r.decode[0]] = ()
        await fails(r, r.engines.all[1], 4)
        assert still.asked[r.decode[0], "/v1/models"] > models
        assert not begun.done() and not r.engines.all[1].healthy
        moves.set()
        assert b"[DONE]" in await begun
        still.goes_on.set()


def streams(
    engine: ScriptedEngine,
    ends: asyncio.Event,
    *,
    every_s: float | None,
    event: dict[str, Any] = SHOWN,
) -> asyncio.Event:
    """The engine's next stream has one event, or one every `every_s`, until it ends. Returns what
    is set after the first."""
    began, stream = asyncio.Event(), engine.stream
    data = b"data: " + json.dumps(event).encode() + b"\n\n"

    async def moving(request: web.BaseRequest, leg: Any, fault: Fault) -> web.StreamResponse:
        engine.stream = stream  # type: ignore[method-assign]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while not ends.is_set():
            await response.write(data)
            began.set()
            try:
                async with asyncio.timeout(every_s):
                    await ends.wait()
            except TimeoutError:
                continue
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    engine.stream = moving  # type: ignore[method-assign]
    return began
