"""Canaries: small requests that test idle decode workers.

Decides which worker is tested when, within a budget. A worker that fails a canary is marked
unhealthy, as after missing heartbeats, until it produces tokens again. Canaries use their own
connections, and count neither for the Frontend's admission nor for a router. They go on while NATS
is out of reach, when heartbeats show nothing.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.protocol.errors import DynamoLiteError, Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import MakeTransport
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.config import CanaryOptions

#: A worker that failed a canary is tested again after this time.
_RETRY_S = 2.0
#: While no worker is due, it is checked this often whether one is.
_CHECK_S = 1.0
#: A canary that ends later than this after its timeout means that this process was blocked.
_BLOCKED_S = 0.5
_COMPLETE = frozenset({"stop", "length", "repetition"})

#: Makes a canary from its request id and its timeout in seconds.
MakeCanary = Callable[[str, float], GenerateRequest]


class _Failed(Exception):
    """Why a canary failed."""


class Canaries:
    """Tests idle workers. The process owns `run`.

    The transport is open while `run` runs, and has no other user.
    """

    def __init__(
        self,
        options: CanaryOptions,
        roster: Roster,
        health: HealthMonitor,
        make: MakeCanary,
        make_transport: MakeTransport,
        registry: CollectorRegistry,
    ):
        self._options, self._make = options, make
        self._roster, self._health = roster, health
        self._transport = make_transport(self.take_deltas, self.take_lost)
        #: Lease id to the loop time of its last tokens or canary.
        self._active_at: dict[int, float] = {}
        # Request ids must be unique over all Frontends.
        self._name, self._number = f"canary-{uuid.uuid4().hex[:12]}", 0
        #: The canary in flight: its id, and the future of its end.
        self._in_flight: tuple[str, asyncio.Future[None]] | None = None
        self._count = Counter(
            "dynamo_lite_canaries",
            "Canary requests: ok, failed, or skipped (worker busy, or this process blocked)",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dynamo_lite_canary_seconds", "Duration of successful canaries", registry=registry
        )

    def on_tokens(self, lease_id: int, first: bool) -> None:
        """Notes that the worker has sent tokens for users' requests.

        A canary would show nothing more, and might wait behind them for a free slot.

        first: whether a request received its first token.
        """
        if first:
            self._health.mark_healthy(lease_id)
        if self._health.is_responsive(lease_id):
            self._active_at[lease_id] = _now()

    async def run(self) -> None:
        self._roster.on_change(lambda *_: self._transport.retain(self._roster.members))
        async with self._transport:
            await self._test_all()

    async def _test_all(self) -> None:
        while True:
            member = self._due()
            if member is None:
                await asyncio.sleep(_CHECK_S)
            else:
                await self._test(member)
                await asyncio.sleep(60 / self._options.max_per_minute)

    def _due(self) -> EndpointRecord | None:
        """The due worker that was idle for longest; None if none is due."""
        now = _now()
        members = {m.lease_id: m for m in self._roster.members}
        self._active_at = {lease: self._active_at.get(lease, now) for lease in members}
        due = {lease: at + self._interval_s(lease) for lease, at in self._active_at.items()}
        late = [i for i in members if due[i] <= now and self._health.has_good_heartbeats(i)]
        return members[min(late, key=due.__getitem__)] if late else None

    def _interval_s(self, lease_id: int) -> float:
        interval_s = self._options.interval_s
        return interval_s if self._health.is_responsive(lease_id) else min(interval_s, _RETRY_S)

    async def _test(self, member: EndpointRecord) -> None:
        began = _now()
        try:
            await self._send_canary(member)
        except (DynamoLiteError, TimeoutError, _Failed) as exc:
            busy = isinstance(exc, Refused) and exc.busy
            streams = self._active_at.get(member.lease_id, began) > began
            blocked = _now() - began > self._options.timeout_s + _BLOCKED_S
            if busy or streams or blocked:
                self._count.labels("skipped").inc()
                return
            self._count.labels("failed").inc()
            if self._health.has_good_heartbeats(member.lease_id):
                why = str(exc) or f"timeout after {self._options.timeout_s:g} s"
                self._health.mark_unhealthy(member.lease_id, f"a canary failed: {why}")
        else:
            self._count.labels("ok").inc()
            self._seconds.observe(_now() - began)
            self._health.mark_healthy(member.lease_id)
        finally:
            self._active_at[member.lease_id] = _now()

    async def _send_canary(self, member: EndpointRecord) -> None:
        """Returns after the last token. Raises _Failed, TimeoutError, or an error of `submit`."""
        self._number += 1
        request = self._make(f"{self._name}-{self._number}", self._options.timeout_s)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight = request.request_id, ended
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._transport.submit(member, request)
                await ended
        finally:
            self._in_flight = None
            ended.cancel()
            await self._transport.abort([request.request_id])

    # The transport's callbacks

    def take_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason in _COMPLETE:
                self._end(delta.request_id, None)
            elif delta.finish_reason is not None:
                self._end(delta.request_id, f"finish reason {delta.finish_reason!r}")

    def take_lost(self, request_ids: Sequence[str], why: str) -> None:
        for request_id in request_ids:
            self._end(request_id, why)

    def _end(self, request_id: str, trouble: str | None) -> None:
        if self._in_flight is None or self._in_flight[0] != request_id or self._in_flight[1].done():
            return
        if trouble is None:
            self._in_flight[1].set_result(None)
        else:
            self._in_flight[1].set_exception(_Failed(trouble))


def start_canaries(
    host: Host,
    options: CanaryOptions,
    roster: Roster,
    health: HealthMonitor,
    make: MakeCanary,
) -> Canaries:
    """Starts canaries until the process ends."""
    make_transport = partial(
        RemoteGenerateClient,
        f"{host.lease.id:x}-canary",
        request_timeout_s=options.timeout_s,
        on_drop=host.drops,
        secret=host.secret,
    )
    canaries = Canaries(options, roster, health, make, make_transport, host.registry)
    host.spawn(canaries.run(), "canaries")
    return canaries


def _now() -> float:
    return asyncio.get_running_loop().time()
