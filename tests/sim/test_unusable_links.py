"""Whole clusters in which a prefill worker cannot write into a decode worker."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.records import LinkRecord
from dynamo_lite.services import prefill_worker
from dynamo_lite.simulation.engine.model import VOCABULARY, Sampling
from dynamo_lite.simulation.loop.loop import VirtualLoop
from dynamo_lite.simulation.loop.trace import Trace, log_to
from dynamo_lite.simulation.play import play_scenario
from dynamo_lite.simulation.scenario import Ask, Fault, FaultKind, Scenario
from dynamo_lite.simulation.shipped import Shipped
from dynamo_lite.simulation.world import NAMESPACE, World


def asks(at_s: float, count: int) -> tuple[Ask, ...]:
    """Long prompts, one after the other."""
    rng = random.Random(at_s)
    return tuple(
        Ask(
            at_s=at_s + 0.2 * number,
            client=0,
            request_id=f"r{at_s:g}-{number}",
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(80)),
            sampling=Sampling(max_tokens=4),
            timeout_s=30.0,
        )
        for number in range(count)
    )


def cut(for_s: float) -> Fault:
    """From before the first contact on; NATS and etcd are reached by both."""
    return Fault(at_s=0.0, kind=FaultKind.CUT, target="prefill-0", other="decode-0", for_s=for_s)


def scenario(**changed: Any) -> Scenario:
    fields: dict[str, Any] = {
        "seed": 5,
        "profile": "links",
        "decode": 1,
        "prefill": 1,
        "clients": 1,
        "num_blocks": 256,
        "lease_ttl_s": 5.0,
        "remote_prefill_timeout_s": 6.0,
        "ack_wait_s": 2.0,
        "max_jobs": 8,
        "slowest_write_s": 0.05,
        "token_s": 0.001,
        "quiet_at_s": 0.0,
    }
    return Scenario(**{**fields, **changed})


def test_prompts_are_local_while_the_only_link_is_bad_and_remote_when_it_works():
    played = play_scenario(
        scenario(faults=(cut(30.0),), asks=(*asks(8.0, 5), *asks(100.0, 5)), quiet_at_s=105.0)
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == 10
    assert counts["decision/local/no_prefill_worker"] == 5
    assert counts["decision/remote/long"] == counts["remote/committed"] == 5


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6, 8, 9])
def test_a_fit_worker_does_what_is_asked_for_whoever_pulls_it(seed: int):
    """prefill-0 can write into decode-1 only, so it pulls jobs, also those for decode-0."""
    played = play_scenario(
        scenario(
            seed=seed,
            decode=2,
            prefill=2,
            max_jobs=64,
            faults=(cut(60.0),),
            asks=asks(8.0, 20),
            quiet_at_s=60.0,
        )
    )
    counts = played.counts
    assert played.violations == []
    assert counts["request length"] == counts["remote/committed"] == 20
    assert counts["attempt written"] == 20, "none was begun in vain"
    # Jobs that no other worker had pulled in time were requested again, and do not count as tries.
    again = counts.get("remote/writer_unusable", 0)
    assert counts["decision/remote/long"] == 20 + again
    assert counts.get("resume/writer_lost", 0) == again
    assert "remote/writer_failed" not in counts and "remote/deadline" not in counts


class Cluster:
    """A decode and a prefill worker. To be used from within the loop."""

    def __init__(self, loop: VirtualLoop):
        self.world = World(loop, scenario(), Shipped())

    async def start(self) -> None:
        self.world.start()
        await self.until(lambda: self.world.ready.keys() >= {"decode-0", "prefill-0"}, within_s=5.0)

    async def until(self, condition: Callable[[], bool], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def restart(self, within_s: float) -> None:
        """The prefill worker; until it is ready again."""
        self.world.slots["prefill-0"].terminate()
        await self.until(lambda: "prefill-0" not in self.world.ready, within_s=5.0)
        await self.until(lambda: "prefill-0" in self.world.ready, within_s)

    def pause_decode_engine(self) -> None:
        engine = self.world.slots["decode-0"].engine
        assert engine is not None
        engine.pause()

    def resume_decode_engine(self) -> None:
        engine = self.world.slots["decode-0"].engine
        assert engine is not None
        engine.resume()

    def link(self) -> LinkRecord | None:
        """The prefill worker's, as the store has it."""
        host = self.world.slots["prefill-0"].host
        assert host is not None
        entries = self.world.etcd.data.matching(names.links_prefix(NAMESPACE))
        found = [decode_json(value, LinkRecord) for value in entries.values()]
        return next((link for link in found if link.prefill_lease_id == host.lease.id), None)

    async def stop(self) -> None:
        for kind in ("client-0", "decode-0", "prefill-0"):
            await self.world.stop([kind], 40.0)
        assert self.world.judge.violations == []


def run(script: Callable[[Cluster], Any]) -> Trace:
    """Returns what was logged, and more."""
    trace = Trace(on=True)

    async def main(loop: VirtualLoop) -> None:
        cluster = Cluster(loop)
        await cluster.start()
        await script(cluster)
        await cluster.stop()

    with VirtualLoop(5, trace=trace) as loop, log_to(trace, logging.INFO):
        loop.run_until_complete(main(loop))
        assert loop.failures == []
    return trace


def test_a_prefill_worker_is_ready_when_its_links_are_tried():
    async def script(cluster: Cluster) -> None:
        await cluster.restart(within_s=5.0)
        link = cluster.link()
        assert link is not None and link.ok

    run(script)


def test_a_hung_decode_engine_has_a_failed_link_when_a_prefill_worker_is_ready():
    async def script(cluster: Cluster) -> None:
        cluster.pause_decode_engine()
        await cluster.restart(within_s=29.0)
        link = cluster.link()
        assert link is not None and not link.ok
        cluster.resume_decode_engine()

    run(script)


def test_a_start_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_worker, "_FIRST_TESTS_S", 1.0)

    async def script(cluster: Cluster) -> None:
        cluster.pause_decode_engine()
        await cluster.restart(within_s=5.0)
        assert cluster.link() is None
        cluster.resume_decode_engine()

    trace = run(script)
    assert any("not tested within 1 s" in line for line in trace.text())
