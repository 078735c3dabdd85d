"""The planner as a process: every tick it looks at the load, decides, and acts if it leads."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.planner import drains
from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.planner.connector import Connector, LocalConnector
from dynamo_lite.planner.kubernetes import KubernetesConnector
from dynamo_lite.planner.observation import Observation, Observed
from dynamo_lite.planner.policy.drain import victim
from dynamo_lite.planner.policy.inputs import Role, RoleSeen, Seen
from dynamo_lite.planner.policy.limits import bounds
from dynamo_lite.planner.policy.planner import PlannerMemory, Proposal, begun, plan
from dynamo_lite.planner.policy.role import Change
from dynamo_lite.planner.record import PlannerRecords
from dynamo_lite.protocol.errors import DynamoLiteError, Refused, Unavailable
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.options import PlannerOptions, subset
from dynamo_lite.protocol.planner import RoleCounts, WantedRecord, WantedWorkers
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.kubernetes import KubernetesApi
from dynamo_lite.runtime.overview.observer import Observer
from dynamo_lite.runtime.process.component import Host

logger = logging.getLogger(__name__)


def as_text(change: Change) -> str:
    """A change in words."""
    what = "start withdrawn" if change.kind == "withdraw" else f"{change.by:+}"
    return f"{change.role} {what}: {change.reason}"


class PlannerMetrics:
    def __init__(self, registry: CollectorRegistry):
        self.leads = Gauge(
            "dynamo_lite_planner_leads", "1 while this planner may act", registry=registry
        )
        self._workers = Gauge(
            "dynamo_lite_planner_workers",
            "Workers of each component: count (serving or starting) and wanted",
            ["component", "kind"],
            registry=registry,
        )
        self._actions = Counter(
            "dynamo_lite_planner_actions",
            "Changes that were decided: add, remove, withdraw; in a dry run, too",
            ["component", "action", "held"],
            registry=registry,
        )
        self.failures = Counter(
            "dynamo_lite_planner_failures",
            "What could not be asked or ordered: counts, store, order",
            ["what"],
            registry=registry,
        )

    def decided(self, proposal: Proposal, hold: str) -> None:
        for role, one in proposal.roles.items():
            self._workers.labels(role, "count").set(one.count)
            wanted = float("nan") if one.wanted is None else one.wanted
            self._workers.labels(role, "wanted").set(wanted)
        for change in proposal.actions:
            self._actions.labels(change.role, change.kind, "yes" if hold else "no").inc()


class Planner:
    """Component. config: the fields of `PlannerConfig`. connector: None takes the configured."""

    def __init__(
        self, config: Mapping[str, Any] | PlannerConfig, connector: Connector | None = None
    ):
        self._config = msgspec.convert(config, PlannerConfig)
        self._given = connector
        self._limits = subset(PlannerOptions, self._config)
        self._memory = PlannerMemory()
        self._proposal = Proposal()
        #: Why nothing may be done; empty if it may.
        self._held = "it has not looked yet"
        #: What was logged last.
        self._told: object = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Registered last."""
        self._host = host
        self._metrics = PlannerMetrics(host.registry)
        enter = host.stack.enter_async_context
        self._connector = self._given or self._open_connector()
        await enter(host.live_options(self._config, self._apply))
        store, clock = host.store, host.clock
        observer = Observer(store, host.spec.namespace, host.drops, clock.wall, host.certificates)
        self._observer = await enter(observer)
        self._observation = Observation(observer, clock.monotonic)
        # In a dry run it must not keep another planner from acting.
        self._records = PlannerRecords(host, elects=not self._config.dry_run)
        host.spawn(self._run(), "planner")
        await host.register("plan")
        return {}

    async def drain(self, grace_s: float) -> None:
        """What it has begun needs no planner."""

    def health(self) -> Mapping[str, Any]:
        return {
            "ok": True,
            "planner": {
                "leads": not self._records.why_not,
                "hold": self._held,
                "roles": [
                    {
                        "component": role,
                        "count": one.count,
                        "wanted": one.wanted,
                        "reason": one.reason,
                    }
                    for role, one in self._proposal.roles.items()
                ],
                "held": [as_text(one) for one in self._proposal.actions] if self._held else [],
                "limits": asdict(self._limits),
                "dry_run": self._config.dry_run,
            },
        }

    def _open_connector(self) -> Connector:
        options = self._config.kubernetes
        if not options.workloads:
            return LocalConnector(Path(self._host.spec.state_dir))
        api = KubernetesApi(options.url, Path(options.service_account))
        return KubernetesConnector(api, options)

    def _apply(self, values: Values) -> None:
        self._limits = applied(values, subset(PlannerOptions, self._config))

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except (DynamoLiteError, TimeoutError) as exc:
                self._metrics.failures.labels("store").inc()
                logger.warning("the planner's tick failed: %s", exc)
            await asyncio.sleep(self._limits.tick_s)

    async def _tick(self) -> None:
        try:
            await self._records.read()
        except DynamoLiteError as exc:
            # While its lease is good it goes on with what it knows.
            self._metrics.failures.labels("store").inc()
            logger.warning("the planner's records were not read: %s", exc)
        observed = await self._observation.look()
        counts = await self._count()
        self._metrics.leads.set(not self._records.why_not)
        seen = self._seen(observed, counts)
        self._memory, proposal = plan(
            self._memory, seen, self._limits, self._host.clock.monotonic()
        )
        unknown = "" if seen.roles else "the numbers of workers are not known"
        wanted = self._records.wanted or WantedRecord()
        self._show(proposal, self._hold(wanted, bool(seen.manual)) or unknown)
        if self._held:
            return
        for change in proposal.actions:
            await self._act(change, counts[change.role])
        if done := self._reached(seen):
            await self._records.edit(lambda record: _without_manual(record, done))

    async def _count(self) -> Mapping[str, RoleCounts]:
        """Empty if they are not known."""
        try:
            return await self._connector.counts()
        except DynamoLiteError as exc:
            self._metrics.failures.labels("counts").inc()
            logger.warning("the numbers of workers are not known: %s", exc)
            return {}

    def _show(self, proposal: Proposal, hold: str) -> None:
        """Logs it if it acts or what it wants has changed."""
        self._proposal, self._held = proposal, hold
        self._metrics.decided(proposal, hold)
        texts = [as_text(change) for change in proposal.actions]
        kinds = [text.partition(":")[0] for text in texts]
        numbers = [(role, one.count, one.wanted) for role, one in proposal.roles.items()]
        if (texts and not hold) or (hold, kinds, numbers) != self._told:
            self._told = hold, kinds, numbers
            why = [f"{role.word}: {one.reason}" for role, one in proposal.roles.items()]
            logger.info("%s%s", f"held ({hold}): " if hold else "", "; ".join(texts or why))

    def _seen(self, observed: Observed, counts: Mapping[str, RoleCounts]) -> Seen:
        wanted = self._records.wanted or WantedRecord()
        members, owns = self._observer.members, self._connector.owns
        foreign = {lease_id for lease_id, worker in members.items() if not owns(worker)}
        roles: dict[Role, RoleSeen] = {}
        for role in Role:
            if (now := counts.get(role)) is None:
                continue
            last = wanted.roles.get(role)
            # Without NATS no worker is ready for Kubernetes; those that have registered are no
            # starts, which would be withdrawn.
            own = len(observed.serving(role) - foreign)
            moved = min(max(own - now.ready, 0), now.starting)
            starting, ready = now.starting - moved, now.ready + moved
            now = msgspec.structs.replace(now, starting=starting, ready=ready)
            roles[role] = RoleSeen(
                counts=now,
                others=len(observed.serving(role) & foreign),
                changed=last and (last.up, last.at),
            )
        manual = {role: wanted.manual[role] for role in roles if role in wanted.manual}
        if manual and wanted.paused is not None:
            # They are reached, and nothing else is done.
            manual = {role: one.count for role, one in roles.items()} | manual
        return Seen(
            roles=roles,
            prefill=observed.prefill,
            decode=observed.decode,
            manual=manual,
        )

    def _hold(self, wanted: WantedRecord, manual: bool) -> str:
        if self._config.dry_run:
            return "dry run"
        if why := self._records.why_not:
            return why
        if self._records.wanted is None:
            return "paused by a record that cannot be read"
        if manual or (why := wanted.paused) is None:
            return ""
        return "paused" + (f": {why}" if why else "")

    async def _act(self, change: Change, now: RoleCounts) -> None:
        """The record says first what is wanted. A failure ends only this action: the next tick
        looks at what is there, and decides again."""
        chosen: EndpointRecord | None = None
        count = max(now.starting + now.ready + change.by, 0)
        try:
            if change.kind == "remove" and (chosen := await self._victim(change.role)) is None:
                return
            await self._records.edit(lambda record: self._decided(record, change, count))
            async with asyncio.timeout(self._records.may_act()):
                await self._connector.change(change.role, count, chosen)
        except (DynamoLiteError, TimeoutError) as exc:
            self._metrics.failures.labels("order").inc()
            logger.warning("%s was not begun: %s", as_text(change), exc)
            if not (isinstance(exc, Refused) and change.kind == "add"):
                return
        self._memory = begun(self._memory, change)

    def _decided(self, record: WantedRecord, change: Change, count: int) -> WantedRecord:
        if record.paused is not None and not record.manual:
            raise Unavailable("paused")
        before = record.roles.get(change.role)
        if change.kind == "withdraw" and before is not None:
            role = msgspec.structs.replace(before, count=count, reason=change.reason[:1024])
        else:
            role = WantedWorkers(
                count=count,
                up=change.by > 0,
                by=f"{self._host.lease.id:x}",
                reason=change.reason[:1024],
                at=self._host.clock.wall(),
            )
        return msgspec.structs.replace(record, roles={**record.roles, change.role: role})

    async def _victim(self, component: str) -> EndpointRecord | None:
        """The one to remove; see `planner/policy/drain.py`."""
        members = self._observer.members
        workers = (await drains.look(members.values(), self._host.certificates)).workers(component)
        own = {worker.record.lease_id for worker in workers if self._connector.owns(worker.record)}
        found = victim(workers, among=own)
        if found.record is None:
            logger.warning("no %s is removed: %s", component, found.reason)
        else:
            logger.info("%s %x is removed: %s", component, found.record.lease_id, found.reason)
        return found.record

    def _reached(self, seen: Seen) -> dict[str, int]:
        """The numbers of an operator that are reached, by component."""
        found: dict[str, int] = {}
        for role, wanted in seen.manual.items():
            one, (least, most) = seen.roles[role], bounds(self._limits, role)
            enough = one.count in (wanted, min(max(wanted, least), most))
            # While a worker drains, the role could take the device that it frees back.
            if enough and not (one.counts.starting or one.counts.draining):
                found[role] = wanted
        return found


def _without_manual(record: WantedRecord, reached: Mapping[str, int]) -> WantedRecord:
    left = {name: number for name, number in record.manual.items() if reached.get(name) != number}
    return msgspec.structs.replace(record, manual=left)
