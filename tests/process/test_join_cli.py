"""`dynamo-lite join` as a process of its own, beside a scripted engine."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from dynamo_lite.protocol import names
from tests.builders import eventually
from tests.joining import Cluster
from tests.process.command import revoke_lease, run
from tests.process.joining import Joining
from tests.servers import PrivateServer
from tests.started import PATIENCE_S


def at(c: Cluster, etcd: str = "") -> tuple[str, ...]:
    return "--namespace", c.namespace, "--etcd-url", etcd or c.etcd_url


async def test_the_usual_commands_show_it_and_a_revocation_drains_it(c: Cluster, tmp_path: Path):
    engine = await c.engine("prefill")
    engine.load = (1, 0)
    place = at(c)
    with Joining(engine, *place) as process:
        told = await process.joined()
        listed = await asyncio.to_thread(run, "ps", "--json", *place, "--state-dir", str(tmp_path))
        row = json.loads(listed.stdout)[0]
        assert (row["component"], row["endpoint"], row["state"]) == (
            *("PrefillEngine", "http"),
            "ready",
        )
        assert (row["lease"], row["pid"]) == (told["lease"], process.pid)
        shown = await asyncio.to_thread(run, "top", "--once", *place, "--state-dir", str(tmp_path))
        assert "PrefillEngine-0" in shown.stdout, shown
        revoked = await asyncio.to_thread(revoke_lease, told["lease"], *place)
        assert f"revoked {told['lease']}" in revoked.stdout, revoked
        await c.gone("PrefillEngine")
        assert process.exit_code is None  # the engine has a request
        engine.load = (0, 0)
        assert await process.ended() == 0


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_drains_it(c: Cluster, kind: signal.Signals):
    engine = await c.engine("decode")
    with Joining(engine, *at(c)) as process:
        await process.joined()
        process.signal(kind)
        await c.gone("DecodeEngine")
        assert await process.ended() == 0


async def test_a_stop_while_it_waits_for_its_engine(c: Cluster):
    engine = await c.engine("decode")
    await engine.stop()
    with Joining(engine, *at(c)) as process:
        await asyncio.to_thread(process.wait_line, f"waiting for {engine.url}")
        process.signal(signal.SIGINT)
        assert await process.ended() == 0


async def test_when_it_is_killed_the_engine_leaves_after_the_ttl(c: Cluster):
    engine = await c.engine("decode")
    forwarder = await c.forwarder()
    with Joining(engine, *at(c)) as process:
        await process.joined()
        await c.counts(forwarder, 0, 1)
        process.signal(signal.SIGKILL)
        health = await c.counts(forwarder, 0, 0)
        assert health["engines"] == {}
        assert await c.records() == {}


async def test_a_lost_lease_is_followed_by_a_new_one(c: Cluster, etcd_server: PrivateServer):
    engine = await c.engine("decode")
    with Joining(engine, *at(c, etcd_server.url)) as process:
        first = await process.joined()
        await etcd_server.kill()

        async def silent() -> bool:
            return not await _answers(c, first["status"])

        # Its status server ends with the run that lost its lease.
        await eventually(silent, PATIENCE_S)
        await etcd_server.restart(wiped=True)
        second = await process.joined()
        assert second["lease"] != first["lease"]
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0


async def _answers(c: Cluster, url: str) -> bool:
    try:
        async with c.session.get(f"{url}/live") as answer:
            return answer.status == 200
    except OSError:
        return False


async def test_an_etcd_out_of_reach_at_the_start_is_an_error(c: Cluster):
    engine = await c.engine("decode")
    with Joining(engine, *at(c, "http://127.0.0.1:1")) as process:
        assert await process.ended() == 1


async def test_top_and_explain_show_what_a_forwarder_does(c: Cluster, tmp_path: Path):
    prefill, decode = await c.engine("prefill"), await c.engine("decode")
    forwarder = await c.forwarder()
    for engine in (prefill, decode):
        await c.join(engine)
    await c.counts(forwarder, 1, 1)
    _, answer = await c.ask(forwarder)
    await c.ask(forwarder, n=2)
    where = (*at(c), "--state-dir", str(tmp_path))
    shown = await asyncio.to_thread(run, "top", "--once", "--interval", "0.2", *where)
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "engines prefill 1 of 1 usable, decode 1 of 1 usable" in lines
    assert "disaggregated 0.0 1" in lines and "alone n 0.0 1" in lines
    assert [line.split()[0] for line in lines if line.startswith(("Dec", "Forw", "Pref"))] == [
        "DecodeEngine-0",
        "Forwarder-0",
        "PrefillEngine-0",
    ]
    where += ("--nats-url", c.nats_url)
    told = await asyncio.to_thread(run, "explain", answer["id"], *where)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(answer["id"])
    assert "how: disaggregated\n" in told.stdout
    assert f"engine: '127.0.0.1:{prefill.port}', status: 200" in told.stdout
    [one] = json.loads(
        (await asyncio.to_thread(run, "explain", answer["id"], "--json", *where)).stdout
    )
    assert (one["forwarder"], one["how"]) == (forwarder.lease, "disaggregated")
    listed = await asyncio.to_thread(run, "explain", "--last", "2", *where)
    assert [line.split()[3:5] for line in listed.stdout.splitlines()[1:]] == [
        ["disaggregated", "-"],
        ["alone", "n"],
    ]
    await c.store.put(names.nixl_metadata_key(c.namespace, "dead"), b"")
    unknown = await asyncio.to_thread(run, "explain", "cmpl-unknown", *where)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "dead does not respond" in unknown.stderr
    assert "none of 0 decode engines and 1 Forwarders has a decision of it" in unknown.stderr
