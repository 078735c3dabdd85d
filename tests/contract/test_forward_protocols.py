"""Every protocol through the Forwarder, in front of engines that check it strictly."""

import asyncio
import itertools
import json
import re
from typing import Any

import pytest

from dynamo_lite.forward.options import ProtocolName
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.kv import Load
from tests.builders import eventually
from tests.forwarding import COMPLETION, TEXT, rig, told
from tests.scripted import CHAT, MESSAGES, RESPONSES, TOKENS, Fault, Leg, ScriptedEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

NAMES = sorted(PROTOCOLS)
#: Two legs, of which the prefill engine's is sent by the Forwarder.
TWO_LEGS = [name for name in NAMES if PROTOCOLS[name].order != "single"]
TOKENS_OF_TEXT = [" t0", " t1", " t2", " t3"]

#: At least one protocol of each order, and its routes beside completions.
HANDED_OVER = {
    "nixl": {CHAT, RESPONSES, MESSAGES, TOKENS},
    "nixl-push": {CHAT, RESPONSES, MESSAGES, TOKENS},
    # Without `min_tokens` their prefill leg may end with the end of the sequence.
    "mooncake": {CHAT, TOKENS},
    "moriio-write": {CHAT, TOKENS},
    "sglang": {CHAT},
    "neuron-dynamic": {CHAT},
    "kvt-batch": set[str](),
}


def tokens(stream: bytes) -> list[str]:
    """The texts of a stream's events; fails unless it is complete."""
    payloads = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    assert payloads.pop() == b"[DONE]"
    events = [json.loads(payload) for payload in payloads]
    return [choice["text"] for event in events for choice in event["choices"]]


def test_the_option_names_every_protocol():
    assert set(ProtocolName.__args__) == PROTOCOLS.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
async def test_it_answers_as_one_engine_would(name: str):
    async with rig(name) as r:
        for line_end in (b"\n", b"\r\n"):
            for engine in (*r.prefill, *r.decode):
                engine.line_end = line_end
            for _ in range(2):  # a push is serial until its prefill engine is known
                assert await r.text() == TEXT
                assert tokens(await r.stream()) == TOKENS_OF_TEXT
        assert r.answered == {("disaggregated", ""): 8}


@pytest.mark.parametrize("name", NAMES)
async def test_many_at_once_over_several_engines(name: str):
    count = 1 if name == "neuron-static" else 2
    async with rig(name, prefill=count, decode=count) as r:
        answers = await asyncio.gather(*(r.text() for _ in range(20)))
        assert answers == [TEXT] * 20
        assert all(len(engine.legs) == 20 // count for engine in r.decode)


@pytest.mark.parametrize("name", NAMES)
async def test_engines_that_restart_are_found_again(name: str):
    async with rig(name) as r:
        assert await r.text() == TEXT
        engine = r.prefill[0]
        await engine.stop()
        await r.check()
        await engine.start()
        engine.engine_id = "another"
        engine.bootstrap_ids = {"0": {"engine_id": "another"}}
        await r.check()
        assert await r.text() == TEXT
        assert r.answered == {("disaggregated", ""): 2}


@pytest.mark.parametrize("name", [n for n in NAMES if PROTOCOLS[n].order == "parallel"])
async def test_parallel_legs_do_not_wait_for_each_other(name: str):
    async with rig(name) as r:
        await r.text()  # after which a push knows its prefill engine
        hold = asyncio.Event()
        r.prefill[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text())
        await eventually(lambda: len(r.decode[0].legs) >= 2, 5)
        assert not asked.done()
        hold.set()
        assert await asked == TEXT


@pytest.mark.parametrize("name", TWO_LEGS)
async def test_the_prefill_leg_asks_for_one_token_of_the_same_prompt(name: str):
    async with rig(name) as r:
        fields: dict[str, Any] = {"max_tokens": 9, "min_tokens": 3, "temperature": 0.5, "x": [1.0]}
        await r.text(**fields)
        first, second = r.prefill[0].legs[0].body, r.decode[0].legs[0].body
        ours = {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
        assert {k: v for k, v in second.items() if k not in ours} == {
            **{"model": "m", "prompt": "hello"},
            **fields,
        }
        if name != "sglang":  # both engines get the same body
            assert first["max_tokens"] == first["min_tokens"] == 1
        assert first["prompt"] == "hello" and first["x"] == [1.0]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/embeddings"])
async def test_clients_cannot_hand_over_by_themselves(route: str):
    """On any route. A body that only an engine's parser might read is refused."""
    async with rig() as r:
        params = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}
        forged = {"kv_transfer_params": params, "bootstrap_host": "10.0.0.9"}
        await r.ask({**COMPLETION, **forged}, route=route)
        assert "10.0.0.9" not in str([leg.body for leg in r.fleet.legs])
        r.fleet.legs.clear()
        odd = b'{"prompt": "p", "temperature": NaN, "kv_transfer_params": {"a": 1}}'
        status, answer = await r.ask(data=odd, route=route)
        assert status == 400 and "strict JSON" in answer["error"]["message"]
        assert r.fleet.legs == [] and r.parts.stats.refused == {400: 1}


@pytest.mark.parametrize(("fields", "reason"), [({"n": 2}, "n"), ({"echo": True}, "echo")])
async def test_what_a_handover_would_corrupt_goes_to_a_decode_engine_alone(
    fields: dict[str, Any], reason: str
):
    async with rig() as r:
        assert await r.text(**fields) == TEXT
        assert r.prefill[0].legs == []
        assert r.answered == {("alone", reason): 1}


async def test_a_batch_has_a_room_for_each_sequence():
    async with rig("sglang") as r:
        assert await r.text(n=3) == TEXT
        assert await r.text(prompt=["a", "b"]) == TEXT
        rooms = [leg.body["bootstrap_room"] for leg in r.decode[0].legs]
        assert [len(set(each)) for each in rooms] == [3, 2]
        status, answer = await r.ask(n=100_000)
        assert status == 400 and "sequences" in answer["error"]["message"]


async def test_sglangs_own_route():
    async with rig("sglang") as r:
        asked = {"text": "hello", "return_logprob": True, "logprob_start_len": -1}
        status, answer = await r.ask(asked, route="/generate")
        assert (status, answer["text"]) == (200, "t")
        status, answers = await r.ask({**asked, "text": ["a", "b"]}, route="/generate")
        assert status == 200 and [one["index"] for one in answers] == [0, 1]
        data = json.dumps({**asked, "stream": True}).encode()
        async with r.session.post(f"{r.url}/generate", data=data) as shown:
            assert (await shown.read()).count(b'"text"') == 2
        assert r.answered == {("disaggregated", ""): 3}
        # Each engine has those of its own tokens of the prompt only.
        status, _ = await r.ask({**asked, "logprob_start_len": 0}, route="/generate")
        assert status == 501 and len(r.fleet.legs) == 6


async def test_engines_without_a_prefill_of_their_own_are_not_asked_for_one():
    async with rig("sglang") as r:
        for fields in ({"echo": True}, {"prompt_logprobs": 1}):
            status, answer = await r.ask(**fields)
            assert status == 501 and "sglang" in answer["error"]["message"]
        status, _ = await r.ask(route="/v1/responses")
        assert status == 501
        assert r.fleet.legs == []


async def test_the_client_keeps_its_request_id_where_nothing_is_paired_by_it():
    for name, exact in (("nixl", True), ("mooncake", True), ("nixl-push", False)):
        async with rig(name) as r:
            await r.ask(headers={"x-request-id": "mine"})
            found = r.decode[0].legs[0].headers["x-request-id"]
            assert (found == "mine") is exact and found.startswith("mine"), name
            await r.ask(headers={"x-request-id": "not one; " + "x" * 200})
            assert "not one" not in r.prefill[0].legs[1].headers["x-request-id"]


@pytest.mark.parametrize(
    ("name", "route"),
    [
        (name, route)
        for name, route in itertools.product(HANDED_OVER, (CHAT, RESPONSES, MESSAGES, TOKENS))
        if PROTOCOLS[name].decodes_alone or route in HANDED_OVER[name]
    ],
)
async def test_each_route_in_each_order(name: str, route: str):
    """What a protocol does not hand over goes to a decode engine alone."""
    fields = {"sampling_params": {"max_tokens": 4}} if route == TOKENS else {}
    async with rig(name) as r:
        for _ in range(2):
            assert await r.text(route=route, **fields) == TEXT
            assert b" t0" in await r.stream(route=route, **fields)
        over = route in HANDED_OVER[name]
        assert r.answered == {("disaggregated", "") if over else ("alone", "route"): 4}
        assert len(r.prefill[0].legs) == (4 if over else 0)


@pytest.mark.parametrize("name", ["nixl", "kvt-staged"])
async def test_a_staged_protocol_takes_the_decode_engine_by_the_load_after_the_prefill_leg(
    name: str,
):
    async with rig(name, decode=2) as r:
        hold = asyncio.Event()
        r.prefill[0].faults.append(Fault(hold=hold))
        asked = asyncio.create_task(r.text())
        await eventually(lambda: r.prefill[0].legs, 5)
        r.engines.reported(r.engines.all[1], Load(9))
        hold.set()
        assert await asked == TEXT
        staged = PROTOCOLS[name].staged
        assert [len(engine.legs) for engine in r.decode] == ([0, 1] if staged else [1, 0])


async def test_a_prefix_goes_where_it_was_sent():
    async with rig("nixl", prefill=3) as r:
        # Fewer than engines: taking turns would spread them.
        prompts = [letter * 4000 for letter in "ab"]
        for _ in range(4):
            for prompt in prompts:
                await r.text(prompt=prompt)
        seen = [{leg.body["prompt"] for leg in engine.legs} for engine in r.prefill]
        assert sorted(map(len, seen)) == [0, 1, 1]


async def test_least_load_counts_what_the_engines_say_and_what_is_on_its_way():
    async with rig("nixl", prefill=1, decode=3) as r:
        r.decode[0].load = (3, 4)
        hold = asyncio.Event()
        async with r.parts:
            await eventually(lambda: r.engines.loads.own(1).others == (7, 0), 5)
        for engine in r.decode:
            engine.faults.extend(Fault(hold=hold) for _ in range(2))
        asked = [asyncio.create_task(r.text()) for _ in range(4)]
        await eventually(lambda: sum(len(engine.legs) for engine in r.decode) >= 4, 5)
        assert [len(engine.legs) for engine in r.decode] == [0, 2, 2]
        hold.set()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("name", ["moriio-read", "moriio-write", "neuron-dynamic", "nixl"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", ["", "prefill", "decode"])
async def test_nothing_that_a_client_gets_names_an_engine(name: str, stream: bool, fails: str):
    """The ids of these legs contain addresses, and vLLM returns them with
    `--enable-request-id-headers`. A decode engine of a bidirectional transfer returns its own."""
    own = {"id": "x", "choices": [], "kv_transfer_params": {"remote_host": "127.0.0.1"}}
    async with rig(name) as r:
        for engine in (*r.prefill, *r.decode):
            engine.returns_ids = True
        handover, events = r.decode[0].handover, r.decode[0].events

        async def returning(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
            return {"kv_transfer_params": {"h": "127.0.0.1"}, **await handover(engine, leg)}

        r.decode[0].handover = returning
        r.decode[0].events = lambda leg: [*events(leg), json.dumps(own).encode()]  # type: ignore[method-assign]
        if fails:
            [engine] = r.prefill if fails == "prefill" else r.decode
            reply, whole = engine.answer, {"error": {"message": "?"}}

            async def refused(request: Any, leg: Leg) -> Any:
                whole["error"]["message"] = f"no {leg.headers['x-request-id']}"
                engine.faults.append(Fault("status", status=422, body=whole))
                return await reply(request, leg)

            engine.answer = refused  # type: ignore[method-assign]
        body = {**COMPLETION, "stream": stream}
        async with r.session.post(f"{r.url}/v1/completions", json=body) as answer:
            shown = await answer.text()
            assert answer.status == (422 if fails else 200)
            assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])
            assert "127.0.0.1" not in str(answer.headers) + shown


async def test_streams_pass_as_bytes():
    async with rig("nixl") as r:
        shown = await r.stream(stream_options={"include_usage": True})
        direct = await r.stream(echo=True, stream_options={"include_usage": True})
        names = [leg.headers.get("x-request-id", "none") for leg in r.decode[0].legs]
        assert shown.replace(names[0].encode(), names[1].encode()) == direct


async def test_a_push_engine_with_data_parallel_ranks_is_asked_leg_by_leg():
    """Each of its ranks has an identity, and any of them may take a leg."""
    async with rig("nixl-push") as r:
        [prefill] = r.prefill
        ids = itertools.cycle(("rank-0", "rank-1"))
        ask = prefill.handover

        async def by_turns(engine: ScriptedEngine, leg: Leg) -> dict[str, Any]:
            engine.engine_id = next(ids)
            return await ask(engine, leg)

        prefill.handover = by_turns
        for _ in range(3):  # until an identity has come back
            assert await r.text() == TEXT
        r.parts.stats.answered.clear()
        for _ in range(6):
            assert await r.text() == TEXT
        assert r.answered == {("disaggregated", ""): 6}
        assert [one.attempts[0].order for one in told(r)[3:]] == ["serial"] * 6
