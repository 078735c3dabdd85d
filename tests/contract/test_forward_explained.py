"""A Forwarder's answers about its decisions."""

import asyncio
from typing import Any

import pytest

from dynamo_lite.cli.explain import FORWARDER, Taken, as_table
from dynamo_lite.forward import decision_log
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.forwarding import ForwardAttempt, ForwardDecision
from tests.builders import eventually
from tests.forwarding import TEXT, rig, told
from tests.scripted import Fault

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


def shown(decision: ForwardDecision) -> str:
    past = Taken(FORWARDER, 0.0, 7, decision)
    assert as_table(FORWARDER, [past])
    return past.as_text()


def results(attempt: ForwardAttempt) -> list[tuple[str, int, str]]:
    return [(leg.leg, leg.status, leg.failure) for leg in attempt.legs]


@pytest.mark.parametrize("name", ["nixl", "nixl-push", "sglang", "neuron-dynamic", "kvt-batch"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disaggregated_request_is_explained_leg_by_leg(name: str, stream: bool):
    async with rig(name) as r:
        await r.text()  # after this, a push sends both legs at once
        if stream:
            await r.stream()
        else:
            assert await r.text() == TEXT
        one = told(r)[-1]
        assert (one.how, one.reason, one.status, one.outcome) == (
            *("disaggregated", "", 200),
            "answered",
        )
        assert (one.route, one.protocol) == ("/v1/completions", name)
        [attempt] = one.attempts
        order = PROTOCOLS[name].order
        assert (attempt.order, attempt.alone, attempt.failure) == (order, "", "")
        chosen = {choice.leg: (choice.engine, choice.reason) for choice in attempt.choices}
        prefill, decode = (engine.name for engine in r.engines.all)
        assert chosen == {"prefill": (prefill, "only"), "decode": (decode, "only")}
        assert [choice.leg for choice in attempt.choices] == ["prefill", "decode"]
        legs = {("decode", 200, "")} | ({("prefill", 200, "")} if order != "single" else set())
        assert set(results(attempt)) == legs
        assert all(leg.head_s is not None and leg.took_s is not None for leg in attempt.legs)
        assert one.first_byte_s is not None and one.took_s is not None
        assert one.took_s >= one.first_byte_s > 0
        assert "how: disaggregated\n" in shown(one)


async def test_every_id_that_a_client_may_know_finds_it():
    """Other routes are not kept."""
    async with rig() as r:
        _, answer = await r.ask(headers={"x-request-id": "mine-1"})
        await r.text()
        await r.ask(route="/tokenize")
        [by_own] = told(r, request_id="mine-1")
        [by_answer] = told(r, request_id=answer["id"])
        assert by_own.request_id == by_answer.request_id == answer["id"] == "cmpl-mine-1"
        assert told(r, request_id="cmpl-mine-2") == []
        assert len(told(r)) == 2 and len(told(r, last=1)) == 1 and told(r, last=0) == []
        assert told(r, last=1)[0].request_id != answer["id"]


@pytest.mark.parametrize(
    ("fault", "leg"),
    [
        (Fault("status", 503), ("prefill", 503, "status")),
        (Fault(hold=asyncio.Event()), ("prefill", 0, "timeout")),
    ],
)
async def test_a_failed_prefill_is_explained_with_what_followed(fault: Fault, leg: Any):
    async with rig(prefill_timeout_s=0.2) as r:
        r.prefill[0].faults.append(fault)
        await r.text()
        [one] = told(r)
        assert (one.how, one.reason) == ("alone", "prefill_failed")
        first, second = one.attempts
        assert (first.order, results(first)) == ("serial", [leg])
        assert f"engine {r.engines.all[0].name}: {leg[2]}: " in first.failure
        assert (second.order, second.alone, second.failure) == ("", "prefill_failed", "")
        assert results(second) == [("decode", 200, "")]
        text = shown(one)
        assert "how: alone\n  reason: prefill_failed\n" in text
        assert "leg: prefill, engine" in text and f"failure: {leg[2]}" in text


async def test_the_numbers_of_a_choice():
    async with rig(decode=2, max_local_prefill_length=100) as r:
        prompt = "x" * 2048
        await r.text(prompt=prompt)
        await r.text(prompt=prompt)
        await r.text()
        first, second, third = told(r)
        assert (first.how, first.prompt_tokens, first.cached_tokens) == ("disaggregated", 513, 0)
        assert (second.how, second.reason, second.cached_tokens) == ("alone", "cached", 512)
        assert (third.how, third.reason) == ("alone", "short")
        assert second.max_local_prefill_length == 100
        [choice] = second.attempts[0].choices
        assert (choice.leg, choice.reason, choice.of) == ("decode", "prefix", 2)
        assert (choice.matched_tokens, choice.load_tokens, choice.kv_usage) == (512, 0, 0.0)
        text = shown(second)
        assert "max_local_prefill_length: 100\n" in text and "matched_tokens: 512" in text


async def test_a_request_on_its_way_and_a_client_that_goes():
    async with rig() as r:
        r.prefill[0].faults.append(Fault(hold=asyncio.Event()))
        asked = asyncio.create_task(r.ask())
        await eventually(lambda: r.prefill[0].legs, 5)
        [one] = told(r)
        assert (one.outcome, one.took_s, one.attempts[0].legs[0].took_s) == ("", None, None)
        assert "outcome" not in shown(one)
        asked.cancel()
        await eventually(lambda: told(r)[0].outcome, 5)
        one = told(r)[0]
        assert one.outcome == "client gone"
        assert one.attempts[0].legs[0].took_s is not None


async def test_the_log_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decision_log, "MOST", 3)
    async with rig() as r:
        await r.ask(headers={"x-request-id": "oldest"})
        assert len(told(r, request_id="oldest")) == 1
        for _ in range(3):
            await r.text()
        assert [len(told(r, within_s=s)) for s in (60.0, 0.0)] == [3, 0]
        monkeypatch.setattr(decision_log, "MOST_AT_A_TIME", 2)
        assert len(told(r)) == 2
        assert told(r, request_id="oldest") == []
    with pytest.raises(ProtocolError):
        r.parts.decisions.answer(b"nonsense", 7)
