"""Engines that join: their records, what a Forwarder makes of them, and how they leave."""

import asyncio
from pathlib import Path

import pytest

from dynamo_lite.runtime.tls import server_context
from tests.builders import eventually
from tests.external import Certificates
from tests.forwarding import TEXT
from tests.joining import Cluster, Running
from tests.scripted import Fault

pytestmark = pytest.mark.usefixtures("no_leaked_tasks")


async def answered(c: Cluster, forwarder: Running) -> None:
    status, answer = await c.ask(forwarder)
    assert status == 200, answer
    assert answer["choices"][0]["text"] == TEXT


async def test_engines_join_and_leave_while_a_forwarder_runs(c: Cluster):
    forwarder = await c.forwarder()
    health = await c.health(forwarder)
    assert health["ok"] is False
    assert "start `dynamo-lite join` beside one" in health["checks"]["engines"]
    assert (await c.ask(forwarder))[0] == 503

    decode = await c.engine("decode")
    first = await c.join(decode)
    await c.counts(forwarder, 0, 1)
    await answered(c, forwarder)
    assert len(decode.legs) == 1

    prefill = await c.engine("prefill")
    joined = await c.join(prefill)
    health = await c.counts(forwarder, 1, 1)
    assert health["engines"][f"127.0.0.1:{decode.port}"]["lease"] == first.lease
    await answered(c, forwarder)
    assert len(prefill.legs) == 1

    await joined.revoke()
    assert await joined.end() == 0
    health = await c.counts(forwarder, 0, 1)
    assert f"127.0.0.1:{prefill.port}" not in health["engines"]
    await answered(c, forwarder)
    assert len(prefill.legs) == 1


@pytest.mark.parametrize("both", [True, False])
async def test_the_engines_of_the_file_and_those_that_join(c: Cluster, both: bool):
    listed, other = await c.engine("decode"), await c.engine("decode")
    forwarder = await c.forwarder(
        engines=[{"url": listed.url, "role": "decode"}], **({"discover": True} if both else {})
    )
    await c.join(other)
    await c.counts(forwarder, 0, 2 if both else 1)
    for _ in range(4):
        await answered(c, forwarder)
    assert [len(listed.legs), len(other.legs)] == ([2, 2] if both else [4, 0])


async def test_a_drained_engine_gets_nothing_new_and_finishes_what_is_open(c: Cluster):
    first, second = await c.engine("decode"), await c.engine("decode")
    forwarder = await c.forwarder()
    joined = await c.join(first)
    await c.counts(forwarder, 0, 1)
    hold = asyncio.Event()
    first.faults.append(Fault(hold=hold))
    first.load = (1, 0)
    asked = asyncio.create_task(c.ask(forwarder))
    await eventually(lambda: first.legs)
    await c.join(second)
    await c.counts(forwarder, 0, 2)
    await joined.revoke()
    await joined.until("draining")
    await c.counts(forwarder, 0, 1)
    for _ in range(3):
        await answered(c, forwarder)
    assert [len(first.legs), len(second.legs)] == [1, 3]
    assert not joined.task.done()
    hold.set()
    status, answer = await asked
    assert (status, answer["choices"][0]["text"]) == (200, TEXT)
    # Running is what its metrics say, whatever became of the answer.
    assert not joined.task.done()
    first.load = (0, 0)
    assert await joined.end() == 0


async def test_a_staged_decode_leg_goes_elsewhere_when_its_engine_drains(c: Cluster):
    """The prefill leg is open when the decode engine that was chosen with it leaves."""
    prefill, first = await c.engine("prefill"), await c.engine("decode")
    forwarder = await c.forwarder()
    await c.join(prefill)
    joined = await c.join(first)
    await c.counts(forwarder, 1, 1)
    hold = asyncio.Event()
    prefill.faults.append(Fault(hold=hold))
    asked = asyncio.create_task(c.ask(forwarder))
    await eventually(lambda: prefill.legs)
    second = await c.engine("decode")
    await c.join(second)
    await c.counts(forwarder, 1, 2)
    await joined.revoke()
    await c.counts(forwarder, 1, 1)
    hold.set()
    assert (await asked)[0] == 200
    assert [len(prefill.legs), len(first.legs), len(second.legs)] == [1, 0, 1]
    assert await joined.end() == 0


async def test_what_cannot_be_used_is_named_with_a_reason(c: Cluster):
    decode = await c.engine("decode")
    forwarder = await c.forwarder()
    await c.join(decode)
    await c.counts(forwarder, 0, 1)
    other_model = await c.engine("decode", model="other")
    await c.join(other_model)
    again = await c.join(decode)
    health = await c.healthy(
        forwarder,
        lambda h: (
            h["unused_engines"]
            and "other" in h["engines"].get(f"127.0.0.1:{other_model.port}", {}).get("trouble", "")
        ),
    )
    assert (
        f"127.0.0.1:{decode.port} (decode): it is already known by lease"
        in (health["unused_engines"][again.lease])
    )
    assert health["decode_engines"] == 1
    assert "dynamo_lite_forward_unused_engines 2.0" in await c.metrics(forwarder)
    for _ in range(3):
        await answered(c, forwarder)
    assert [len(decode.legs), len(other_model.legs)] == [3, 0]


async def test_another_model_is_used_once_all_of_the_first_have_left(c: Cluster):
    old, new = await c.engine("decode", model="a"), await c.engine("decode", model="b")
    forwarder = await c.forwarder()
    joined = await c.join(old)
    await c.counts(forwarder, 0, 1)
    await c.join(new)
    await c.healthy(forwarder, lambda h: "serves b" in str(h["engines"]))
    await joined.revoke()
    await c.healthy(forwarder, lambda h: h["ok"] and len(h["engines"]) == 1)
    await answered(c, forwarder)
    assert [len(old.legs), len(new.legs)] == [0, 1]


async def test_a_second_process_for_an_engine_takes_over_without_a_gap(c: Cluster):
    engine = await c.engine("decode")
    forwarder = await c.forwarder()
    first = await c.join(engine)
    await c.counts(forwarder, 0, 1)
    second = await c.join(engine)
    await c.healthy(forwarder, lambda h: h["unused_engines"])
    number = forwarder.component._parts.engines.all[0].number
    await first.revoke()
    health = await c.healthy(forwarder, lambda h: not h["unused_engines"])
    assert health["engines"][f"127.0.0.1:{engine.port}"]["lease"] == second.lease
    assert health["decode_engines"] == 1
    assert forwarder.component._parts.engines.all[0].number == number


async def test_another_model_at_the_address_of_one_that_leaves_is_another_engine(c: Cluster):
    """What was known of the first one is not kept for it."""
    engine = await c.engine("decode", model="a")
    forwarder = await c.forwarder()
    first = await c.join(engine)
    await c.counts(forwarder, 0, 1)
    engine.model = "b"
    await c.join(engine)
    await c.healthy(forwarder, lambda h: h["unused_engines"])
    engines = forwarder.component._parts.engines
    before = engines.all[0]
    await first.revoke()
    await c.healthy(forwarder, lambda h: not h["unused_engines"] and h["ok"])
    after = engines.all[0]
    assert after is not before
    assert (before.models, after.models) == (("a",), ("b",))


async def test_a_joined_engine_with_a_certificate(c: Cluster, certificates: Certificates):
    """Its process and the Forwarder check it, each with a file of its own."""
    tls = server_context(*certificates.files())
    ca = str(certificates.folder / "ca.pem")
    decode, prefill = await c.engine("decode", tls=tls), await c.engine("prefill")
    trusting = await c.forwarder(joined_ca_file=ca)
    wary = await c.forwarder()
    await c.join(decode, ca_file=ca)
    await c.join(prefill)
    await c.counts(trusting, 1, 1)
    await answered(c, trusting)
    health = await c.healthy(wary, lambda h: h["prefill_engines"] == 1 and len(h["engines"]) == 2)
    assert health["decode_engines"] == 0
    await c.healthy(
        wary, lambda h: "certificate" in h["engines"][f"127.0.0.1:{decode.port}"]["trouble"].lower()
    )
    assert len(decode.legs) == 1


async def test_an_unreadable_file_of_authorities_ends_the_start(c: Cluster, tmp_path: Path):
    forwarder = await c.failing_forwarder(joined_ca_file=str(tmp_path / "none.pem"))
    assert f"ca={tmp_path / 'none.pem'} cannot be read" in forwarder
