"""Canaries: tiny requests that show whether decode workers that nobody uses still answer.

Owns who is tried when, within a budget, and what follows: a worker that fails one is out
of rotation, as after missed beats, until it answers again. Canaries have connections of
their own, and are no part of what the Frontend admits or a router books.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from dynamo_lite.protocol.errors import BrokerUnavailable, DynamoLiteError, Refused
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane import MakeTransport, RemoteGenerateClient
from dynamo_lite.request_plane.placement import SETTLE_S
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.process.host import Host
from dynamo_lite.services.config import CanaryOptions

#: Whoever has failed is tried again after this long; so often is also looked who is due.
_RETRY_S, _LOOK_S = 2.0, 1.0
#: A canary that ends so much after its time shows that this process was held up itself.
_HELD_UP_S = 0.5
_COMPLETE = frozenset({"stop", "length", "repetition"})

#: Request id and time in seconds to a canary.
MakeCanary = Callable[[str, float], GenerateRequest]


class _Failed(Exception):
    """How a canary came to nothing."""


class Canaries:
    """`run` sends them, over a transport that lasts as long and serves only them."""

    def __init__(
        self,
        options: CanaryOptions,
        roster: Roster,
        health: HealthMonitor,
        messaging: Messaging,
        make: MakeCanary,
        make_transport: MakeTransport,
        registry: CollectorRegistry,
    ):
        self._options, self._make = options, make
        self._roster, self._health, self._messaging = roster, health, messaging
        self._transport = make_transport(self.take_deltas, self.take_lost)
        self._heard: dict[int, float] = {}  # when it gave tokens last, or was tried
        # Workers know the requests of all Frontends by their ids.
        self._name, self._number = f"canary-{uuid.uuid4().hex[:12]}", 0
        self._changes = 0  # of the connection with the broker
        self._settled_at = 0.0  # when all have found their way back to it
        self._waiting: tuple[str, asyncio.Future[None]] | None = None
        self._count = Counter(
            "dynamo_lite_canaries",
            "Canary requests: ok; failed; or skipped, since the worker or the broker had no"
            " room for them",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "dynamo_lite_canary_seconds", "How long good canaries took", registry=registry
        )

    def heard(self, lease_id: int, first: bool) -> None:
        """Requests of users have got tokens from this worker; `first`: one its first one.

        While it streams a canary shows no more, and might wait behind them for room.
        """
        if first:
            self._health.mark_healthy(lease_id)
        if self._health.is_responsive(lease_id):
            self._heard[lease_id] = _now()

    async def run(self) -> None:
        self._roster.on_change(lambda *_: self._retain())
        async with self._transport:
            with self._messaging.watch_connection(self._on_connection):
                await self._try_all()

    async def _try_all(self) -> None:
        while True:
            member = self._due()
            if member is None:
                await asyncio.sleep(_LOOK_S)
            else:
                await self._try(member)
                await asyncio.sleep(60 / self._options.max_per_minute)

    def _retain(self) -> None:
        self._transport.retain(self._roster.members)

    def _on_connection(self, _connected: bool) -> None:
        self._changes += 1
        self._settled_at = _now() + SETTLE_S

    def _due(self) -> EndpointRecord | None:
        """Of the workers that seem to be well, the one that was silent for longest."""
        now = _now()
        members = {m.lease_id: m for m in self._roster.members}
        self._heard = {lease: self._heard.get(lease, now) for lease in members}
        due = {lease: at + self._pause_s(lease) for lease, at in self._heard.items()}
        late = [i for i in members if due[i] <= now and self._health.beats(i)]
        if not late or not self._messaging.connected or now < self._settled_at:
            return None
        return members[min(late, key=due.__getitem__)]

    def _pause_s(self, lease_id: int) -> float:
        pause_s = self._options.interval_s
        return pause_s if self._health.is_responsive(lease_id) else min(pause_s, _RETRY_S)

    async def _try(self, member: EndpointRecord) -> None:
        began, changes = _now(), self._changes
        try:
            await self._ask(member)
        except (DynamoLiteError, TimeoutError, _Failed) as exc:
            refused = isinstance(exc, Refused) and exc.busy
            streams = self._heard.get(member.lease_id, began) > began
            held_up = _now() - began > self._options.timeout_s + _HELD_UP_S
            cut_off = isinstance(exc, BrokerUnavailable) or changes != self._changes
            if refused or streams or held_up or cut_off:
                self._count.labels("skipped").inc()
                return
            self._count.labels("failed").inc()
            if self._health.beats(member.lease_id):
                why = str(exc) or f"no answer within {self._options.timeout_s:g} s"
                self._health.mark_unhealthy(member.lease_id, f"a canary failed: {why}")
        else:
            self._count.labels("ok").inc()
            self._seconds.observe(_now() - began)
            self._health.mark_healthy(member.lease_id)
        finally:
            self._heard[member.lease_id] = _now()

    async def _ask(self, member: EndpointRecord) -> None:
        """Returns with the last token. Raises _Failed, TimeoutError, or what `submit` does."""
        self._number += 1
        request = self._make(f"{self._name}-{self._number}", self._options.timeout_s)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = request.request_id, ended
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._transport.submit(member, request)
                await ended
        finally:
            self._waiting = None
            ended.cancel()
            await self._transport.abort([request.request_id])

    # The transport's callbacks

    def take_deltas(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason in _COMPLETE:
                self._end(delta.request_id, None)
            elif delta.finish_reason is not None:
                self._end(delta.request_id, f"it ended with {delta.finish_reason!r}")

    def take_lost(self, request_ids: Sequence[str], why: str) -> None:
        for request_id in request_ids:
            self._end(request_id, why)

    def _end(self, request_id: str, trouble: str | None) -> None:
        if self._waiting is None or self._waiting[0] != request_id or self._waiting[1].done():
            return
        if trouble is None:
            self._waiting[1].set_result(None)
        else:
            self._waiting[1].set_exception(_Failed(trouble))


def start_canaries(
    host: Host,
    options: CanaryOptions,
    roster: Roster,
    health: HealthMonitor,
    make: MakeCanary,
) -> Canaries:
    """Tries workers until the process ends."""
    make_transport = partial(
        RemoteGenerateClient,
        host.messaging,
        f"{host.lease.id:x}-canary",
        request_timeout_s=options.timeout_s,
        on_drop=host.drops,
    )
    canaries = Canaries(
        options, roster, health, host.messaging, make, make_transport, host.registry
    )
    host.spawn(canaries.run(), "canaries")
    return canaries


def _now() -> float:
    return asyncio.get_running_loop().time()
