"""The rules of Neuron's engines, each broken once: the scripted engines must notice.

The rules are those of aws-neuron/upstreaming-to-vllm and of the guide "Disaggregated Inference".
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from tests.scripted import CHAT, COMPLETIONS, HANDOVERS, RESPONSES, Fleet, Handover, ScriptedEngine

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")

ID = "cmpl-0123456789abcdef0123456789abcdef"
OTHER_ID = "cmpl-fedcba9876543210fedcba9876543210"
BODY: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}

Says = tuple[int, Any]


@dataclasses.dataclass
class Pair:
    """One engine of each role, and a second decode engine."""

    fleet: Fleet
    prefill: ScriptedEngine
    decode: ScriptedEngine
    second: ScriptedEngine
    session: aiohttp.ClientSession

    async def leg(
        self, engine: ScriptedEngine, name: str, route: str = COMPLETIONS, **fields: Any
    ) -> Says:
        """Fields of None are left out. Returns the JSON, or the text of a stream."""
        body = {k: v for k, v in (BODY | fields).items() if v is not None}
        if engine is self.prefill and "max_tokens" not in fields:
            body["max_tokens"] = 1
        async with self.session.post(
            f"{engine.url}{route}", json=body, headers={"x-request-id": name}
        ) as answer:
            if answer.content_type == "text/event-stream":
                return answer.status, await answer.text()
            return answer.status, await answer.json()

    async def both(
        self,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        names: tuple[str, str] = (ID, ID),
    ) -> list[Says]:
        """Both legs at once, with these fields beside the usual ones."""
        legs = (
            self.leg(self.prefill, names[0], **(prefill or {})),
            self.leg(self.decode, names[1], **(decode or {})),
        )
        return list(await asyncio.gather(*legs))

    def addressed(self, name: str = ID) -> tuple[str, str]:
        """The ids of a dynamic pair."""
        return f"{name}_{self.decode.address}", f"{name}_{self.prefill.address}"


async def pair_of(handover: Handover) -> AsyncIterator[Pair]:
    fleet = Fleet(pair_s=2.0)  # a leg whose other one does not come is answered soon
    async with AsyncExitStack() as stack:
        prefill, decode, second = [
            await stack.enter_async_context(ScriptedEngine(fleet, role, handover))
            for role in ("prefill", "decode", "decode")
        ]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pair(fleet, prefill, decode, second, session)


@pytest.fixture
async def static() -> AsyncIterator[Pair]:
    async for pair in pair_of(HANDOVERS["neuron-static"]):
        yield pair


@pytest.fixture
async def dynamic() -> AsyncIterator[Pair]:
    async for pair in pair_of(HANDOVERS["neuron-dynamic"]):
        yield pair


def texts(said: list[Says]) -> list[str]:
    assert [status for status, _ in said] == [200, 200], said
    return [answer["choices"][0]["text"] for _, answer in said]


async def test_a_static_pair_has_one_id_and_the_prefill_engine_says_the_first_token(static: Pair):
    assert texts(await static.both()) == [" t0", " t0 t1 t2 t3"]
    with_dashes = "cmpl-01234567-89ab-cdef-0123-456789abcdef"
    assert texts(await static.both(names=(with_dashes, with_dashes)))
    assert static.fleet.violations == []


async def test_a_dynamic_pair_has_the_other_engine_s_address_in_each_id(dynamic: Pair):
    for name in (ID, OTHER_ID):
        said = await dynamic.both(names=dynamic.addressed(name))
        assert texts(said) == [" t0", " t0 t1 t2 t3"]
    assert dynamic.fleet.violations == []


async def test_limits_may_differ_and_what_is_streamed_may_have_options(static: Pair):
    prefill = {"max_completion_tokens": 1, "min_tokens": 1}
    assert texts(await static.both(prefill, {"max_completion_tokens": 3, "min_tokens": 2}))
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    found = await static.both(streamed, streamed, names=(OTHER_ID, OTHER_ID))
    assert [answer.count('"text"') for _, answer in found] == [1, 4]
    assert static.fleet.violations == []


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ({"max_tokens": 4}, {}, "prefill /v1/completions: max_tokens"),
        ({"max_tokens": None}, {}, "prefill /v1/completions: max_tokens"),
        ({"max_completion_tokens": 4}, {}, "prefill /v1/completions: max_completion_tokens"),
        ({"min_tokens": 3}, {"min_tokens": 3}, "prefill /v1/completions: min_tokens"),
        ({"stream_options": {}}, {}, "prefill /v1/completions: stream_options"),
        ({}, {"stream_options": {}}, "decode /v1/completions: stream_options"),
        ({"kv_transfer_params": None}, {"kv_transfer_params": {}}, "decode /v1/completions: kv_t"),
        ({"prompt": "other"}, {}, "the legs differ"),
        ({}, {"temperature": 0.5}, "the legs differ"),
        ({"route": CHAT}, {}, "the legs differ"),
        ({"route": RESPONSES}, {"route": RESPONSES}, "the route has no handover"),
    ],
)
async def test_what_a_leg_may_not_say(
    static: Pair, prefill: dict[str, Any], decode: dict[str, Any], said: str
):
    found = await static.both(prefill, decode)
    assert 500 in [status for status, _ in found]
    assert any(said in one for one in static.fleet.violations), static.fleet.violations


@pytest.mark.parametrize(
    "name",
    ["", "cmpl-1", ID.removeprefix("cmpl-"), ID.upper(), f"{ID}_127.0.0.1:1", f"chat{ID}"],
)
async def test_a_static_id_is_a_uuid_alone(static: Pair, name: str):
    await static.both(names=(name, name))
    assert sorted(static.fleet.violations) == [
        f"{role} /v1/completions: request id {name!r}" for role in ("decode", "prefill")
    ]


@pytest.mark.parametrize("name", ["", ID, f"{ID}_", "cmpl-1_127.0.0.1:1"])
async def test_a_dynamic_id_is_a_uuid_with_an_address(dynamic: Pair, name: str):
    await dynamic.both(names=(name, name))
    assert sorted(dynamic.fleet.violations) == [
        f"{role} /v1/completions: request id {name!r}" for role in ("decode", "prefill")
    ]


async def test_a_dynamic_id_names_an_engine_of_the_other_role(dynamic: Pair):
    own, stranger = dynamic.prefill.address, "127.0.0.1:1"
    for number, peer in enumerate((own, stranger), 1):
        status, _ = await dynamic.leg(dynamic.prefill, f"{ID}_{peer}")
        assert status == 500
        assert len(dynamic.fleet.violations) == number
        assert f"there is no decode engine at {peer}" in dynamic.fleet.violations[-1]
    await dynamic.leg(dynamic.decode, f"{ID}_{dynamic.decode.address}")
    assert "there is no prefill engine at" in dynamic.fleet.violations[-1]


async def test_the_addresses_of_a_dynamic_pair_are_each_other_s(dynamic: Pair):
    """The prefill engine is told of another decode engine than that which asks it."""
    names = f"{ID}_{dynamic.second.address}", f"{ID}_{dynamic.prefill.address}"
    await dynamic.both(names=names)
    assert dynamic.fleet.violations
    assert all("each engine gets the other" in one for one in dynamic.fleet.violations)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_id_is_used_once_in_each_role(static: Pair, role: str):
    assert texts(await static.both())
    engine = static.prefill if role == "prefill" else static.decode
    status, _ = await static.leg(engine, ID)
    assert status == 500
    assert static.fleet.violations == [f"{role} /v1/completions: {role} {ID} is used a second time"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_waits_for_the_end_of_the_other_one_is_noticed(static: Pair, role: str):
    """As a serial workflow would do it: neither engine answers alone."""
    engine = static.prefill if role == "prefill" else static.decode
    status, _ = await static.leg(engine, ID)
    assert status == 500
    missing = "decode" if role == "prefill" else "prefill"
    assert static.fleet.violations == [f"{role} /v1/completions: the {missing} leg has not come"]
