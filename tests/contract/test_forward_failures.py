"""What a Forwarder does when an engine or a client fails, at each point of a request."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dynamo_lite.forward.attempt import RequestAttempt
from dynamo_lite.forward.decision_log import RequestNote
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.forwarding import LegTaken
from tests.builders import eventually
from tests.forwarding import COMPLETION, TEXT, Rig, rig
from tests.scripted import (
    CHAT,
    COMPLETIONS,
    HANDOVERS,
    MESSAGES,
    RESPONSES,
    Fault,
    ScriptedEngine,
    anything,
    says,
)

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

#: Protocols whose decode engine can do without a prefill engine, with a prefill leg of ours.
FALLING_BACK = sorted(
    name
    for name, protocol in PROTOCOLS.items()
    if protocol.decodes_alone and protocol.order != "single"
)
PARALLEL = [name for name, protocol in PROTOCOLS.items() if protocol.order == "parallel"]
TWO_LEGS = sorted({*FALLING_BACK, *PARALLEL})
#: Whose decode engine cannot.
PAIRS = ("sglang", "neuron-dynamic")
STREAMED = {**COMPLETION, "stream": True}
LENGTH = "This model's maximum context length is 8 tokens. However, ..."
#: Of a prefill engine that takes shorter prompts than the decode engine.
TOO_LONG = Fault("status", 400, body={"error": {"message": LENGTH, "code": 400}})


async def warm(r: Rig) -> None:
    """After this, a push sends both legs at once."""
    assert await r.text() == TEXT
    for engine in (*r.prefill, *r.decode):
        engine.legs.clear()


async def until(legs: int, engine: ScriptedEngine) -> None:
    await eventually(lambda: len(engine.legs) >= legs, 5)


async def aborted(leg: Any) -> None:
    async with asyncio.timeout(5):
        await leg.aborted.wait()


@contextlib.asynccontextmanager
async def slow(engine: ScriptedEngine | None, **fault: Any) -> AsyncIterator[None]:
    """The engine's next leg waits until the block ends. None: no engine's."""
    hold = asyncio.Event()
    if engine is not None:
        engine.faults.append(Fault(hold=hold, **fault))
    try:
        yield
    finally:
        hold.set()


@contextlib.contextmanager
def handover_begins() -> Iterator[asyncio.Event]:
    """Set when the Forwarder has a prefill engine's answer, or the first token in it."""
    begun, leg_ends = asyncio.Event(), RequestNote.leg_ends
    begins = RequestAttempt.begins

    def ends(note: RequestNote, taken: LegTaken, failure: str = "") -> None:
        leg_ends(note, taken, failure)
        begun.set()

    def first(one: RequestAttempt) -> None:
        begins(one)
        begun.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestNote, "leg_ends", ends)
        patch.setattr(RequestAttempt, "begins", first)
        yield begun


async def broken_off(r: Rig, *, until: bytes = b"", then: asyncio.Event | None = None) -> bytes:
    """A stream that breaks off: what the client gets. then: is set when it has this much."""
    shown = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with asyncio.timeout(10), r.session.post(f"{r.url}{COMPLETIONS}", json=STREAMED) as a:
            async for part in a.content.iter_any():
                shown += part
                if then is not None and until in shown:
                    then.set()
    assert r.parts.stats.ended["broken"] == 1
    return shown


def begins(engine: ScriptedEngine, hold: asyncio.Event) -> None:
    """The engine's streams begin, and say nothing more until then, but for a comment."""

    async def stream(request: web.BaseRequest, leg: Any, fault: Fault) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if engine.keep_alive:
            await response.write(engine.keep_alive + b"\n\n")
        await hold.wait()
        return response

    engine.stream = stream  # type: ignore[method-assign]


# The prefill engine fails.


@pytest.mark.parametrize("name", TWO_LEGS)
async def test_a_prefill_4xx_is_the_clients_and_is_not_repeated(name: str):
    async with rig(name) as r:
        await warm(r)
        # Else the decode engine of a parallel protocol might answer first.
        async with slow(r.decode[0]):
            r.prefill[0].faults.append(Fault("status", 422, body={"error": {"mine": 1}}))
            assert await r.ask() == (422, {"error": {"mine": 1}})
        assert len(r.prefill[0].legs) == 1


@pytest.mark.parametrize("name", FALLING_BACK)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["status", "too long", "cut", "late"])
async def test_a_failed_prefill_leaves_the_decode_engine_with_the_clients_body(
    name: str, how: str, stream: bool
):
    faults = {"status": Fault("status", 500), "too long": TOO_LONG, "cut": Fault("before_head")}
    async with rig(name, prefill_timeout_s=1.0) as r:
        await warm(r)
        async with slow(r.prefill[0] if how == "late" else None):
            if how in faults:
                r.prefill[0].faults.append(faults[how])
            if stream:
                assert (await r.stream(seed=7)).endswith(b"data: [DONE]\n\n")
            else:
                assert await r.text(seed=7) == TEXT
            if how == "late":
                await aborted(r.prefill[0].legs[0])
        assert r.decode[0].legs[-1].body == {**(STREAMED if stream else COMPLETION), "seed": 7}
        assert r.answered["alone", "prefill_failed"] == 1
        assert len(r.prefill[0].legs) == 1
        if name in PARALLEL:
            # The leg that waited for the KV is closed, not waited for.
            assert len(r.decode[0].legs) == 2
            await aborted(r.decode[0].legs[0])


async def test_a_prefill_engine_that_is_gone_is_not_waited_for():
    async with rig() as r:
        await r.prefill[0].stop()
        for _ in range(2):
            assert await r.text() == TEXT
        # The second request knew: a refused connection is unhealthy until a check passes.
        assert r.answered == {("alone", "prefill_failed"): 1, ("alone", "no_prefill_worker"): 1}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("how", "stream"),
    [
        *itertools.product(("status", "too_long", "late"), (False, True)),
        ("late after its head", True),
    ],
)
async def test_where_no_engine_decodes_alone_the_next_prefill_engine_is_asked(
    name: str, how: str, stream: bool
):
    """A stream's head may come at once, long before its first token."""
    async with rig(name, prefill=2, prefill_timeout_s=0.5) as r:
        bad, hold = r.prefill[0], asyncio.Event()
        if how == "late after its head":
            bad.handover = anything
            begins(bad, hold)
        else:
            faults = {"status": Fault("status"), "too_long": TOO_LONG, "late": Fault(hold=hold)}
            bad.faults.append(faults[how])
        async with asyncio.timeout(5):
            assert (b"[DONE]" in await r.stream()) if stream else (await r.text() == TEXT)
            if how.startswith("late"):
                await bad.legs[0].aborted.wait()
        hold.set()
        kind = "timeout" if how.startswith("late") else how
        assert r.parts.stats.failures == {("prefill", kind): 1}
        assert [len(engine.legs) for engine in r.prefill] == [1, 1]
        rooms = [json.dumps(leg.body.get("bootstrap_room")) for leg in r.decode[0].legs]
        assert name != "sglang" or len(set(rooms)) == len(rooms)
        for engine in r.prefill:
            engine.faults.extend([Fault("status", 500)] * 4)
        assert (await r.ask())[0] == 500


#: An error in a prefill leg's stream, as it may be cut into pieces, or come after other events.
ERROR = b'data: {"error": {"message": "scripted"}}\n\n'
SGLANG_ERROR = b"data: {'error': {'message': 'scripted'}}\n\n"
ROLE = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'
TOKEN = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": " t9"}}]}\n\n'
FAILING = {
    "cut": (),
    "event": (ERROR,),
    "too long": (ERROR.replace(b"scripted", LENGTH.encode() + b'scripted", "code": 400, "x": "'),),
    "split": (SGLANG_ERROR[:9], SGLANG_ERROR[9:]),
    "later, split": (ROLE + ERROR[:4], ERROR[4:-1], ERROR[-1:]),
    "without an end": (ROLE, ERROR[:-2]),
    "after a token": (TOKEN, ERROR),
    "later, CRLF": (ROLE.replace(b"\n", b"\r\n"), ERROR.replace(b"\n", b"\r\n")),
    # The blank line is cut at each place.
    "line ends split, CRLF": (
        *(ROLE[:-2] + b"\r", b"\n", b"\r", b"\n"),
        *(ERROR[:-2] + b"\r\n\r", b"\n"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("how", FAILING)
async def test_a_streamed_prefill_that_fails_after_its_head_is_noticed(name: str, how: str):
    """The decode engine of the pair would wait for its KV until its own timeout."""
    async with rig(name, prefill=2, decode=2) as r:
        bad = r.prefill[0]
        if how == "cut":
            bad.faults.append(Fault("after_head"))
        else:
            says(bad, *FAILING[how])
        async with slow(r.decode[0]):
            # Its leg waits in the decode engine, not in a pair.
            bad.handover = anything
            async with asyncio.timeout(15):
                shown = await r.stream(route=CHAT)
        assert b"[DONE]" in shown and b"scripted" not in shown and b"t9" not in shown
        assert sum(r.parts.stats.failures.values()) == 1
        assert [len(engine.legs) for engine in r.prefill] == [1, 1]


async def test_the_time_of_a_streamed_prefill_is_for_all_its_sequences():
    """Each of them comes in time, all of them do not."""
    async with rig("sglang", prefill_timeout_s=1.0) as r:
        bad = r.prefill[0]
        bad.handover = anything
        says(bad, *[b'data: {"choices": []}\n\n'] * 200)
        async with slow(r.decode[0]), asyncio.timeout(8):
            status, _ = await r.ask(stream=True, prompt=["a", "b", "c"])
        assert status == 504  # no other prefill engine is left
        assert r.parts.stats.failures == {("prefill", "timeout"): 1}


DEEP = b"[" * 100_000 + b"]" * 100_000
UNREADABLE = {
    "no JSON": b"nonsense",
    "deep": b'{"other": ' + DEEP + b"}",
    "deep params": b'{"kv_transfer_params": ' + DEEP + b"}",
    "bytes in params": b'{"kv_transfer_params": {"a": "\xff"}}',
}


@pytest.mark.parametrize("name", ["nixl", "nixl-push", "sglang"])
@pytest.mark.parametrize("what", UNREADABLE)
async def test_a_prefill_answer_that_cannot_be_read_is_a_failed_leg(name: str, what: str):
    async with rig(name, prefill=2 if name == "sglang" else 1) as r:
        await warm(r)

        async def unreadable(request: web.BaseRequest, leg: Any) -> web.StreamResponse:
            return web.Response(body=UNREADABLE[what], content_type="application/json")

        r.prefill[0].answer = unreadable  # type: ignore[method-assign]
        for _ in r.prefill:  # they take turns
            assert await r.text() == TEXT
        assert r.parts.stats.failures == {("prefill", "malformed"): 1}


async def test_a_prefill_engine_without_a_connector_costs_the_handover_only():
    async with rig("nixl") as r:
        r.prefill[0].handover = anything
        hold = asyncio.Event()
        r.decode[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text(prompt="p" * 400))
        await eventually(lambda: r.decode[0].legs, 5)
        # The decode engine computes the prompt: that is load.
        assert r.engines.loads.own(1).prefill_tokens >= 100
        hold.set()
        assert await asked == TEXT
        assert r.engines.loads.own(1).prefill_tokens == r.engines.loads.own(1).requests == 0
        assert r.decode[0].legs[-1].params is None
        assert r.answered == {("alone", "prefill_failed"): 1}
        assert r.parts.stats.failures == {("prefill", "unpaired"): 1}


@pytest.mark.parametrize(("name", "engines"), [("nixl", "nixl-push"), ("nixl-push", "nixl")])
async def test_engines_of_the_other_transfer_mode_get_no_handover(name: str, engines: str):
    """It would end a decode engine, or let it wait for minutes."""
    async with rig(name, prefill=2, decode=2) as r:
        for engine in (*r.prefill, *r.decode):
            engine.handover = HANDOVERS[engines]
        for _ in range(4):
            assert await r.text() == TEXT
        assert all(leg.params is None for engine in r.decode for leg in engine.legs)
        assert r.parts.stats.failures == {("prefill", "unpaired"): 2}
        # Each engine is asked once.
        assert r.answered == {("alone", "prefill_failed"): 2, ("alone", "no_prefill_worker"): 2}
        assert "transfer_mode" in r.engines.all[0].misfit and engines in r.engines.all[0].misfit
        await r.check()
        assert not r.engines.all[0].can_prefill
        # Started again, with the other connector.
        for engine in (*r.prefill, *r.decode):
            await engine.stop()
        await r.check()
        for engine in (*r.prefill, *r.decode):
            engine.handover = HANDOVERS[name]
            await engine.start()
        await r.check()
        assert await r.text() == TEXT
        assert r.answered["disaggregated", ""] == 1


async def test_an_engine_that_does_not_tell_its_transfer_mode_is_used():
    async with rig("nixl") as r:
        ask = r.prefill[0].handover

        async def older(engine: ScriptedEngine, leg: Any) -> dict[str, Any]:
            answer = await ask(engine, leg)
            del answer["kv_transfer_params"]["transfer_mode"]
            return answer

        r.prefill[0].handover = older
        assert await r.text() == TEXT
        assert r.answered == {("disaggregated", ""): 1}


async def test_a_push_of_a_restarted_engine_is_noticed():
    """Between two checks another process came up at the same address."""
    async with rig("nixl-push") as r:
        await warm(r)
        r.prefill[0].engine_id = "another"
        r.decode[0].faults.append(Fault(hold=asyncio.Event()))  # it would wait for ever
        assert await r.text() == TEXT
        assert r.answered["alone", "prefill_failed"] == 1
        assert await r.text() == TEXT
        assert r.answered["disaggregated", ""] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mooncake_engine_that_was_restarted_is_noticed_at_its_next_check(stream: bool):
    """Its answer does not say who it is, and the decode engine waits for the process before."""
    async with rig("mooncake", health_interval_s=0.05) as r:
        await warm(r)
        bad = r.prefill[0]
        bad.bootstrap_ids = {"0": {"engine_id": "another"}}
        async with slow(r.decode[0]):
            asked = asyncio.create_task(r.stream() if stream else r.text())
            await until(1, r.decode[0])
            await eventually(lambda: bool(bad.legs) and bad.legs[0].ended is not None, 5)
            await r.check()
            async with asyncio.timeout(5):
                assert await asked
            await aborted(r.decode[0].legs[0])
        assert r.answered["alone", "prefill_failed"] == 1
        assert r.parts.stats.failures == {("prefill", "broken"): 1}
        assert await r.text() == TEXT
        assert r.answered["disaggregated", ""] == 2


#: Those of which there may be several prefill engines.
WAITING = [name for name in PARALLEL if name != "neuron-static"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WAITING)
async def test_a_prefill_engine_that_ends_after_its_answer_is_not_waited_for(
    name: str, stream: bool
):
    """It stays down, and its answer was complete, so that no connection tells."""
    pair = not PROTOCOLS[name].decodes_alone
    async with rig(name, prefill=1 + pair, health_interval_s=0.05) as r:
        for _ in r.prefill:
            await warm(r)
        await ends_after_its_answer(r, stream)
        assert r.parts.stats.failures == {("prefill", "broken"): 1}
        assert r.answered.get(("alone", "prefill_failed"), 0) == (not pair)


async def ends_after_its_answer(r: Rig, stream: bool) -> None:
    """The decode engine has sent nothing by then. The request is still answered."""
    handover, met = r.decode[0].handover, asyncio.Event()

    async def waits(engine: ScriptedEngine, leg: Any) -> dict[str, Any]:
        answer = await handover(engine, leg)
        if not met.is_set():
            met.set()
            await asyncio.Event().wait()
        return answer

    r.decode[0].handover = waits
    if r.decode[0].keep_alive:  # it waits in its stream
        met.set()
        begins(r.decode[0], asyncio.Event())
    with handover_begins() as begun:
        asked = asyncio.create_task(r.stream() if stream else r.text())
        await met.wait()
        await eventually(lambda: any(one.legs for one in r.prefill), 5)
        one = next(one for one in r.prefill if one.legs)
        await eventually(lambda: one.legs[0].ended is not None, 5)
        async with asyncio.timeout(5):
            await begun.wait()
    await one.stop()
    await r.check()
    async with asyncio.timeout(5):
        assert await asked
    await aborted(r.decode[0].legs[0])


async def test_an_answer_in_one_piece_depends_on_the_prefill_engine_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
):
    """The decode engine has the KV by then."""
    monkeypatch.setattr("dynamo_lite.forward.attempt._WHOLE_S", 0.05)
    async with rig("mooncake", health_interval_s=0.01) as r:
        await warm(r)
        one = r.prefill[0]
        async with slow(r.decode[0]):
            with handover_begins() as begun:
                asked = asyncio.create_task(r.text())
                await until(1, r.decode[0])
                async with asyncio.timeout(5):
                    await begun.wait()
            await asyncio.sleep(0.2)  # four times as long as it depends on the engine
            one.bootstrap_ids = {"0": {"engine_id": "another"}}
            await r.check()
            await one.stop()
            await r.check()
            await asyncio.sleep(0.1)  # ten looks whether it stays
            assert not r.decode[0].legs[0].aborted.is_set()
        assert await asked == TEXT
        assert not r.parts.stats.failures


# Neuron: the first token is the prefill engine's.


async def test_what_fails_after_the_first_token_breaks_the_answer_off():
    """The token is shown already, so neither a status nor another engine's tokens could follow."""
    async with rig("neuron-dynamic", health_interval_s=0.05) as r:
        await warm(r)
        r.decode[0].keep_alive = b": keep-alive"
        with pytest.raises(aiohttp.ClientPayloadError):
            await ends_after_its_answer(r, stream=True)
        assert r.parts.stats.ended["broken"] == 1


async def test_a_first_token_that_is_the_last_is_shown_once():
    async with rig("neuron-dynamic") as r:
        shown = await r.stream(max_tokens=1)
        assert shown.count(b" t0") == 1 and shown.count(b'"length"') == 1


#: Events whose tokens cannot be read.
ODD = {
    "choices": b'{"choices": 5}',
    "index": b'{"choices": [{"index": [0], "text": "x"}]}',
    "text": b'{"choices": [{"index": 0, "text": 7}]}',
    "bytes": b'{"choices": [{"index": 0, "text": "\xff"}]}',
    "deep": b'{"choices": ' + DEEP + b"}",
}


@pytest.mark.parametrize("what", ODD)
async def test_a_token_of_another_form_is_a_failure(what: str):
    """Of the prefill leg; after the first token, of the answer."""
    odd = b"data: " + ODD[what] + b"\n\n", b"data: [DONE]\n\n"
    async with rig("neuron-dynamic", prefill=2) as r:
        given, r.prefill[0].handover = r.prefill[0].handover, anything
        says(r.prefill[0], *odd)
        async with slow(r.decode[0]), asyncio.timeout(15):
            assert b"[DONE]" in await r.stream()
        assert r.parts.stats.failures == {("prefill", "malformed"): 1}
        r.prefill[0].handover = given
        says(r.decode[0], *odd)
        await broken_off(r)


# An answer that has no end.


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("dynamo_lite.forward.failures.MAX_WHOLE_BYTES", 1 << 20)
    return 1 << 20


def large(engine: ScriptedEngine, size: int) -> None:
    """Its answers are larger than that."""
    whole = engine.whole
    engine.whole = lambda leg: {**whole(leg), "more": "x" * size}  # type: ignore[method-assign]


async def test_a_prefill_answer_without_an_end_costs_no_memory(little_room: int):
    async with rig("nixl") as r:
        large(r.prefill[0], 2 * little_room)
        # What passes as bytes may have any size.
        large(r.decode[0], 4 * little_room)
        _, answer = await r.ask()
        assert len(answer["more"]) == 4 * little_room
        assert r.parts.stats.failures == {("prefill", "too_large"): 1}


async def test_a_decode_answer_that_is_too_large_to_be_changed_is_refused(little_room: int):
    """Another engine's would be as large."""
    async with rig("moriio-read", decode=2) as r:
        for engine in r.decode:
            large(engine, 2 * little_room)
        status, answer = await r.ask()
        assert status == 502 and "the decode engine's answer is larger than 1 MiB" in str(answer)
        assert sum(len(engine.legs) for engine in r.decode) == 1


@pytest.mark.parametrize("name", ["moriio-read", "neuron-dynamic"])
async def test_an_event_without_an_end_costs_no_memory(name: str, little_room: int):
    """Where events are changed, each one is buffered."""
    async with rig(name) as r:
        event = json.dumps({"id": "x", "choices": [], "more": "x" * 2 * little_room}).encode()
        events = r.decode[0].events
        r.decode[0].events = lambda leg: [*events(leg), event]  # type: ignore[method-assign]
        await broken_off(r)


# The decode engine fails.


def before_the_clients_first_byte(name: str, fault: Fault, stream: bool) -> bool:
    merged = PROTOCOLS[name].first_token_from_prefill
    return fault.stage != "after_head" or (stream and not merged)


@pytest.mark.parametrize(
    ("name", "fault", "stream"),
    [
        case
        for case in itertools.product(
            sorted(set(PROTOCOLS) - {"neuron-static"}),
            (Fault("status", 500), Fault("before_head"), Fault("after_head")),
            (False, True),
        )
        if before_the_clients_first_byte(*case)
    ],
)
async def test_a_decode_engine_that_fails_is_replaced_with_a_new_prefill(
    name: str, fault: Fault, stream: bool
):
    async with rig(name, prefill=2, decode=2) as r:
        for _ in range(2):
            await warm(r)
        r.decode[0].faults.extend([Fault(fault.stage, fault.status)] * 2)
        if stream:
            assert (await r.stream()).endswith(b"data: [DONE]\n\n")
        else:
            assert await r.text() == TEXT
        ids = [leg.headers.get("x-request-id") for engine in r.prefill for leg in engine.legs]
        assert len(ids) == len(set(ids))
        counts = r.parts.stats.failures.items()
        failures = sum(count for (leg, _), count in counts if leg == "decode")
        assert failures >= 1
        if PROTOCOLS[name].order == "serial":
            assert len(ids) == failures + 1


async def test_a_broken_idle_connection_costs_the_only_decode_engine_nothing():
    async with rig("nixl") as r:
        r.decode[0].faults.append(Fault("before_head"))
        assert await r.text() == TEXT
        assert len(r.prefill[0].legs) == 2


async def test_the_last_decode_error_is_the_clients():
    async with rig("nixl", decode=2) as r:
        for engine in r.decode:
            engine.faults.append(Fault("status", 500, body={"error": {"from": "engine"}}))
        assert await r.ask() == (500, {"error": {"from": "engine"}})


@pytest.mark.parametrize("name", TWO_LEGS)
async def test_a_decode_4xx_is_the_clients_and_the_prefill_leg_is_closed(name: str):
    async with rig(name, decode=1 if name == "neuron-static" else 2) as r:
        await warm(r)
        for engine in r.decode:
            engine.faults.append(Fault("status", 422))
        async with slow(r.prefill[0] if name in PARALLEL else None):
            assert (await r.ask())[0] == 422
            if name in PARALLEL:
                await aborted(r.prefill[0].legs[0])
        assert sum(len(engine.legs) for engine in r.decode) == 1


@pytest.mark.parametrize(
    ("name", "route"),
    [
        *itertools.product(("nixl", "nixl-push"), (COMPLETIONS, CHAT, RESPONSES, MESSAGES)),
        ("sglang", CHAT),
    ],
)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_an_error_before_the_first_output_is_no_answer_yet(
    name: str, route: str, line_end: bytes
):
    """Stock vLLM sends the events that begin a stream, and only then that it has no KV."""
    async with rig(name, decode=2) as r:
        for engine in (*r.prefill, *r.decode):
            engine.line_end, engine.keep_alive = line_end, b": keep-alive"
        end = line_end * 2
        whole = await r.stream(route=route)
        assert whole.endswith(b"data: [DONE]" + end)
        if route == CHAT:  # the events before the first output come with it
            deltas = [json.loads(line[6:]) for line in whole.split(end) if b'"delta"' in line]
            texts = [event["choices"][0]["delta"]["content"] for event in deltas]
            assert texts == ["", " t0", " t1", " t2", " t3"]
        r.decode[0].faults.extend([Fault("no_output")] * 2)
        for _ in range(2):
            shown = await r.stream(route=route)
            assert b"error" not in shown and shown.count(end) == whole.count(end)
        assert sum(r.parts.stats.failures.values()) >= 1
        assert r.answered == {("disaggregated", ""): 3}
        for engine in r.decode:
            engine.faults.extend([Fault("no_output")] * 4)
        status, _ = await r.ask(route=route, stream=True)
        assert status == (500 if route in (CHAT, COMPLETIONS) else 502)


@pytest.mark.parametrize(
    ("name", "line_end"),
    [
        *((name, b"\n") for name in sorted(PROTOCOLS)),
        *((name, b"\r\n") for name in ("nixl", "neuron-dynamic")),
    ],
)
async def test_nothing_is_repeated_after_the_first_byte(name: str, line_end: bytes):
    async with rig(name) as r:
        await warm(r)
        for engine in (*r.prefill, *r.decode):
            engine.line_end = line_end
        seen = asyncio.Event()
        r.decode[0].faults.append(Fault("mid_stream", seen=seen))
        shown = await broken_off(r, until=b" t1", then=seen)
        assert b"[DONE]" not in shown and shown.startswith(b"data: ")
        assert json.loads(shown.splitlines()[-2][6:])["error"]["code"] == 500
        assert len(r.decode[0].legs) == 1


async def test_a_stream_that_changes_has_no_length_any_more():
    """An engine may say how long its stream is; with another id, it is shorter."""
    async with rig("moriio-read") as r:
        decode = r.decode[0]

        async def measured(request: Any, leg: Any, fault: Fault) -> web.StreamResponse:
            events = [b"data: " + event + b"\n\n" for event in decode.events(leg)]
            body = b"".join([*events, b"data: [DONE]\n\n"])
            return web.Response(body=body, content_type="text/event-stream")

        decode.stream = measured  # type: ignore[method-assign]
        shown = await r.stream()
        assert b"prefill_addr" not in shown and shown.endswith(b"data: [DONE]\n\n")


async def test_no_decode_engine_is_503_with_retry_after():
    async with rig("nixl") as r:
        r.decode[0].healthy = False
        for _ in range(2):
            await r.check()
        async with r.session.post(f"{r.url}{COMPLETIONS}", json=COMPLETION) as answer:
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert "127.0.0.1" not in await answer.text()
        r.decode[0].healthy = True
        await r.check()
        assert await r.text() == TEXT


# The client goes.


@pytest.mark.parametrize("name", TWO_LEGS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_during_the_prefill_closes_every_leg(name: str, stream: bool):
    async with rig(name) as r:
        await warm(r)
        async with slow(r.prefill[0]):
            asked = asyncio.create_task(r.stream() if stream else r.text())
            await until(1, r.prefill[0])
            if name in PARALLEL:
                await until(1, r.decode[0])
            asked.cancel()
            for leg in (*r.prefill[0].legs, *r.decode[0].legs):
                await aborted(leg)
        assert r.parts.stats.ended["client gone"] == 1


@pytest.mark.parametrize("name", TWO_LEGS)
async def test_a_client_that_goes_before_the_first_byte_closes_the_decode_leg(name: str):
    """A decode engine that has the request then frees the prefill engine's blocks; one that never
    gets it would leave them to their lease."""
    async with rig(name) as r:
        await warm(r)
        async with slow(r.decode[0]):
            asked = asyncio.create_task(r.text())
            await until(1, r.decode[0])
            asked.cancel()
            await aborted(r.decode[0].legs[0])
        [leg] = r.decode[0].legs
        assert name != "nixl" or leg.params["do_remote_prefill"] is True
