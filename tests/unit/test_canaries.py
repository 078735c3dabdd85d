"""Who is tried by canaries, when, and what follows; in virtual time."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self

from prometheus_client import CollectorRegistry

from dynamo_lite.protocol.errors import DynamoLiteError, Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.services.config import CanaryOptions
from dynamo_lite.services.frontend.canaries import Canaries
from tests.builders import loop_time
from tests.unit.fake_workers import request_of
from tests.unit.test_rotation import A, B, Frontend
from tests.unit.virtual import virtual

#: What a worker does with a canary: how it ends ("" never), or what it raises.
Fate = str | DynamoLiteError


class Transport:
    """Answers a canary after a second."""

    def __init__(self) -> None:
        self.closed = False
        self.fates: dict[int, Fate] = {}
        self.asked: list[tuple[float, int]] = []
        self.aborted: list[str] = []

    def connected(self, on_deltas: OnDeltas, on_lost: OnLost) -> Self:
        """The MakeTransport of the canaries."""
        self._on_deltas, self._on_lost = on_deltas, on_lost
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        self.asked.append((loop_time(), member.lease_id))
        fate = self.fates.get(member.lease_id, "length")
        if isinstance(fate, DynamoLiteError):
            raise fate
        stranger = TokenDelta(request_id="another", token_ids=[1], finish_reason="error")
        self._on_deltas([stranger])
        if fate == "lost":
            self._later(lambda: self._on_lost([request.request_id], "its worker hung up"))
        elif fate:
            delta = TokenDelta(request_id=request.request_id, token_ids=[1], finish_reason=fate)
            self._later(lambda: self._on_deltas([delta]))

    def _later(self, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(1.0, what)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def retain(self, members: object) -> None:
        pass

    def is_connected(self, member: EndpointRecord) -> bool:
        raise AssertionError("canaries connect when they send")

    def drop(self, member: EndpointRecord, why: str) -> None:
        raise AssertionError("canaries drop no worker")

    def of(self, lease_id: int) -> list[float]:
        return [at for at, asked in self.asked if asked == lease_id]


class Stand:
    def __init__(self, frontend: Frontend, options: CanaryOptions):
        self.frontend, self.health = frontend, frontend.health
        self.transport, self.registry = Transport(), CollectorRegistry()
        self.canaries = Canaries(
            options,
            frontend.roster,
            frontend.health,
            lambda request_id, timeout_s: request_of(request_id, timeout_s=timeout_s),
            self.transport.connected,
            self.registry,
        )

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for outcome in ("ok", "failed", "skipped"):
            labels = {"outcome": outcome}
            found[outcome] = int(
                self.registry.get_sample_value("dynamo_lite_canaries_total", labels) or 0
            )
        return +found


@contextlib.asynccontextmanager
async def stand(**options: float) -> AsyncIterator[Stand]:
    """Two workers that beat, and canaries every 10 s."""
    filled = CanaryOptions(**({"interval_s": 10.0, "max_per_minute": 60} | options))  # type: ignore[arg-type]
    async with Frontend().open() as frontend:
        stand = Stand(frontend, filled)
        task = asyncio.create_task(stand.canaries.run())
        try:
            yield stand
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert stand.transport.closed


@virtual
async def test_each_idle_worker_is_tried_once_per_interval() -> None:
    async with stand() as it:
        await asyncio.sleep(62)
        for lease_id in (A, B):
            tried = it.transport.of(lease_id)
            assert 4 <= len(tried) <= 6
            assert all(b - a >= 10 for a, b in itertools.pairwise(tried))
        assert it.counts() == {"ok": len(it.transport.asked)}
        assert it.registry.get_sample_value("dynamo_lite_canary_seconds_count")


@virtual
async def test_who_answers_users_is_not_tried() -> None:
    async with stand() as it:
        for _ in range(12):
            await asyncio.sleep(5)
            it.canaries.on_tokens(A, True)
        assert it.transport.of(A) == [] and it.transport.of(B)


@virtual
async def test_who_streams_is_not_blamed_for_a_canary_that_waits() -> None:
    async with stand(timeout_s=4.0) as it:
        it.transport.fates[A] = ""
        while not it.transport.of(A):
            await asyncio.sleep(0.1)
        for _ in range(10):
            await asyncio.sleep(0.5)
            it.canaries.on_tokens(A, False)
        assert it.counts()["skipped"] == 1 and it.health.is_responsive(A)


@virtual
async def test_tokens_of_old_requests_heal_nobody() -> None:
    async with stand() as it:
        it.transport.fates[A] = "error"
        while it.health.is_responsive(A):
            await asyncio.sleep(0.1)
        it.canaries.on_tokens(A, False)
        assert not it.health.is_responsive(A)


@virtual
async def test_the_budget_holds_for_all_workers_together() -> None:
    async with stand(interval_s=1.0, max_per_minute=6) as it:
        await asyncio.sleep(121)
        assert 8 <= len(it.transport.asked) <= 13
        assert abs(len(it.transport.of(A)) - len(it.transport.of(B))) <= 1


@virtual
async def test_a_canary_that_hangs_ends_at_its_deadline_and_its_worker_is_out() -> None:
    async with stand(timeout_s=4.0) as it:
        it.transport.fates[A] = ""
        while it.health.is_responsive(A):
            await asyncio.sleep(0.1)
        [began] = it.transport.of(A)
        assert 4.0 <= loop_time() - began < 4.2
        assert it.transport.aborted[-1].startswith("canary-")
        assert it.health.trouble(A) == "a canary failed: timeout after 4 s"
        assert [m.lease_id for m in it.health.members_or_all] == [B]
        await asyncio.sleep(11)
        assert [lease for lease, _, _ in it.frontend.transport.dropped] == [A], "as after silence"
        assert not it.health.is_responsive(A), "good beats do not heal it"
        it.transport.fates[A] = "stop"
        began = loop_time()
        while not it.health.is_responsive(A):
            await asyncio.sleep(0.1)
        assert loop_time() - began < 10, "it is tried more often than the others"
        assert it.health.trouble(A) == ""


@virtual
async def test_an_answer_to_a_user_heals_too() -> None:
    async with stand() as it:
        for fate in ("error", "abort", "lost", Refused("gone", elsewhere=True)):
            it.transport.fates[A] = fate
            while it.health.is_responsive(A):
                await asyncio.sleep(0.1)
            assert "a canary failed" in it.health.trouble(A)
            it.canaries.on_tokens(A, True)
            assert it.health.is_responsive(A)


@virtual
async def test_nobody_is_blamed_for_a_full_worker() -> None:
    async with stand() as it:
        for lease_id in (A, B):
            it.transport.fates[lease_id] = Refused("full", elsewhere=True, busy=True)
        await asyncio.sleep(30)
        assert it.transport.asked
        assert it.counts() == {"skipped": len(it.transport.asked)}
        assert it.health.is_responsive(A) and it.health.is_responsive(B)


@virtual
async def test_an_outage_of_the_broker_stops_no_canary() -> None:
    """Heartbeats show nothing then: a worker that hangs is found by its canary alone."""
    async with stand(timeout_s=4.0) as it:
        it.frontend.messaging.set_connected(False)
        it.transport.fates[A] = ""
        await asyncio.sleep(30)
        assert [m.lease_id for m in it.health.members_or_all] == [B]
        it.transport.fates[A] = "length"
        await asyncio.sleep(15)
        assert it.health.is_responsive(A) and it.health.is_responsive(B)
        assert it.counts()["failed"] and it.counts()["ok"] and not it.counts()["skipped"]


@virtual
async def test_who_does_not_beat_is_not_tried() -> None:
    async with stand() as it:
        await it.frontend.stop(A)
        while it.health.is_responsive(A):
            await asyncio.sleep(0.1)
        began = loop_time()
        await asyncio.sleep(40)
        assert all(at < began for at in it.transport.of(A)) and it.transport.of(B)
