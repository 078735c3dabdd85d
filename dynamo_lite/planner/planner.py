"""The planner as a process: every tick it looks at the load, decides, and acts if it leads."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.planner.acts import Acts
from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.planner.connector import COMPONENTS, Connector, LocalConnector, by_role
from dynamo_lite.planner.kubernetes import KubernetesConnector
from dynamo_lite.planner.observation import Observation, Observed
from dynamo_lite.planner.policy.inputs import Role, Seen
from dynamo_lite.planner.policy.limits import bounds, contradictions
from dynamo_lite.planner.policy.memory import Change, PlannerMemory, Proposal
from dynamo_lite.planner.policy.planner import begun, plan
from dynamo_lite.planner.record import PlannerRecords, settled
from dynamo_lite.planner.roles import LastChanges, manual_counts, roles_seen
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.options import PlannerOptions, subset
from dynamo_lite.protocol.planner import RoleCounts, WantedRecord
from dynamo_lite.runtime.kubernetes import KubernetesApi
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.component_options import ComponentOptions

logger = logging.getLogger(__name__)


def as_text(change: Change) -> str:
    """A change in words."""
    what = "start withdrawn" if change.withdraws else f"{change.by:+}"
    return f"{COMPONENTS[change.role]} {what}: {change.reason}"


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

    def decided(self, proposal: Proposal) -> None:
        for role, one in proposal.roles.items():
            self._workers.labels(COMPONENTS[role], "count").set(one.count)
            wanted = float("nan") if one.wanted is None else one.wanted
            self._workers.labels(COMPONENTS[role], "wanted").set(wanted)
        for held, changes in (("no", proposal.actions), ("yes", proposal.held)):
            for change in changes:
                self._actions.labels(COMPONENTS[change.role], change.kind, held).inc()


class Planner:
    """Component. config: the fields of `PlannerConfig`. connector: None takes the configured."""

    def __init__(
        self,
        config: Mapping[str, Any] | PlannerConfig,
        spec: ProcessSpec,
        connector: Connector | None = None,
    ):
        self._config = msgspec.convert(config, PlannerConfig)
        self._spec = spec
        self._connector = connector
        self._limits = subset(PlannerOptions, self._config)
        self._stack = AsyncExitStack()
        self._memory = PlannerMemory()
        self._proposal = Proposal(hold="it has not looked yet")
        #: What was logged last.
        self._told: object = None
        self._led = False
        #: The last `RoleSeen.others`.
        self._others: dict[Role, int] = {}
        #: Devices of one worker, by component.
        self._devices: dict[str, int] = {}
        self._records: PlannerRecords | None = None
        self._options: ComponentOptions | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Registered last."""
        self._host = host
        self._metrics = PlannerMetrics(host.registry)
        enter = self._stack.enter_async_context
        connector = self._connector or self._open_connector()
        self._options = ComponentOptions(host, self._config, self._apply)
        await enter(self._options.following())
        self._observation = await enter(Observation(host))
        # In a dry run it must not keep another planner from acting.
        records = PlannerRecords(host, elects=not self._config.dry_run)
        self._records = await enter(records)
        self._changes = LastChanges(host.clock.monotonic)
        self._acts = Acts(host, connector, records, lambda: self._observation.members)
        host.spawn(self._run(records, connector), "planner")
        await host.register("plan")
        return {}

    async def drain(self, grace_s: float) -> None:
        """What it has begun needs no planner, but that pods that leave are ended."""

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> Mapping[str, Any]:
        records = self._records
        if records is None or self._options is None:
            return {"ok": False, "checks": {"planner": "not started yet: wait"}}
        return {
            "ok": True,
            "planner": {
                "leads": not records.why_not,
                "hold": self._proposal.hold,
                "roles": [
                    {"component": COMPONENTS[role], **asdict(one)}
                    for role, one in self._proposal.roles.items()
                ],
                "held": [as_text(change) for change in self._proposal.held],
                "manual": dict(records.wanted.manual) if records.wanted else {},
                "limits": asdict(self._limits),
                "devices": self._devices,
                "dry_run": self._config.dry_run,
            },
            "options": self._options.facts(),
        }

    def _open_connector(self) -> Connector:
        options = self._config.kubernetes
        if not options.scales:
            return LocalConnector(Path(self._spec.state_dir))
        api = KubernetesApi(options.url, Path(options.service_account))
        return KubernetesConnector(api, options)

    def _apply(self, values: Values) -> None:
        limits = applied(values, subset(PlannerOptions, self._config))
        if mistakes := contradictions(limits, by_role(self._devices)):
            logger.warning("live options that contradict each other: %s", "; ".join(mistakes))
        self._limits = limits

    async def _run(self, records: PlannerRecords, connector: Connector) -> None:
        while True:
            try:
                await self._tick(records, connector)
            except (DynamoLiteError, TimeoutError) as exc:
                self._metrics.failures.labels("store").inc()
                logger.warning("the planner's tick failed: %s", exc)
            await asyncio.sleep(self._limits.tick_s)

    async def _tick(self, records: PlannerRecords, connector: Connector) -> None:
        observed = await self._observation.look()
        counts = await self._count(connector)
        leads = not records.why_not
        self._metrics.leads.set(leads)
        wanted = records.wanted or WantedRecord()
        settles = leads and bool(counts) and records.wanted is not None
        if settles:
            before, elected = counts, not self._led or self._acts.unsure
            wanted = await records.edit(lambda record: settled(record, before, elected=elected))
            self._acts.unsure = False
            limit_s, left = self._limits.drain_timeout_s, wanted
            wanted = await self._acts.end_leaving(wanted, counts, limit_s)
            if wanted is not left:
                # What has just been ordered is not in these numbers.
                counts = await self._count(connector)
        self._led = leads and (settles or self._led)
        seen = self._seen(records, observed, counts, wanted)
        self._memory, proposal = plan(
            self._memory, seen, self._limits, self._host.clock.monotonic()
        )
        self._show(proposal)
        for change in proposal.actions:
            await self._act(change, counts)
        if not seen.hold and (done := self._reached(seen)):
            await records.edit(lambda record: _without_manual(record, done))

    async def _count(self, connector: Connector) -> Mapping[str, RoleCounts]:
        """Empty if they are not known."""
        try:
            counts = await connector.counts()
            self._devices = {name: each.devices_each for name, each in counts.items()}
            return counts
        except DynamoLiteError as exc:
            self._metrics.failures.labels("counts").inc()
            logger.warning("the numbers of workers are not known: %s", exc)
            return {}

    def _show(self, proposal: Proposal) -> None:
        """Logs it if it acts or what it wants has changed."""
        self._proposal = proposal
        self._metrics.decided(proposal)
        texts = [as_text(change) for change in (*proposal.actions, *proposal.held)]
        kinds = [text.partition(":")[0] for text in texts]
        states = [(role, one.state, one.count, one.wanted) for role, one in proposal.roles.items()]
        if proposal.actions or (proposal.hold, kinds, states) != self._told:
            self._told = proposal.hold, kinds, states
            said = f" ({'would do' if proposal.hold else 'does'}: {'; '.join(texts)})"
            logger.info("%s%s", proposal.reason, said if texts else "")

    def _seen(
        self,
        records: PlannerRecords,
        observed: Observed,
        counts: Mapping[str, RoleCounts],
        wanted: WantedRecord,
    ) -> Seen:
        foreign = self._acts.foreign()
        roles = roles_seen(observed, counts, wanted, foreign, self._changes, self._others)
        self._others |= {role: one.others for role, one in roles.items()}
        manual = manual_counts(wanted, roles, paused=wanted.paused is not None)
        return Seen(
            roles=roles,
            prefill=observed.prefill,
            decode=observed.decode,
            hold=self._hold(records, wanted, bool(manual)),
            manual=manual,
        )

    def _hold(self, records: PlannerRecords, wanted: WantedRecord, manual: bool) -> str:
        if self._config.dry_run:
            return "dry run"
        if why := records.why_not:
            return why
        if records.wanted is None:
            return "paused by a record that cannot be read"
        if not self._led:
            # It has not settled what was before: it was elected during this tick, or has no counts.
            return "it has just been elected"
        if manual or (why := wanted.paused) is None:
            return ""
        return "paused" + (f": {why}" if why else "")

    async def _act(self, change: Change, counts: Mapping[str, RoleCounts]) -> None:
        """A failure ends only this action: the next tick decides again."""
        try:
            if await self._acts.begin(change, counts[COMPONENTS[change.role]]):
                self._memory = begun(self._memory, change)
        except (DynamoLiteError, TimeoutError) as exc:
            self._metrics.failures.labels("order").inc()
            logger.warning("%s was not begun: %s", as_text(change), exc)

    def _reached(self, seen: Seen) -> dict[str, int]:
        """The numbers of an operator that are reached, by component."""
        found: dict[str, int] = {}
        for role, wanted in seen.manual.items():
            one, (least, most) = seen.roles[role], bounds(self._limits, role)
            if not one.under_way and one.count == min(max(wanted, least), most):
                found[COMPONENTS[role]] = wanted
        return found


def _without_manual(record: WantedRecord, reached: Mapping[str, int]) -> WantedRecord:
    left = {name: number for name, number in record.manual.items() if reached.get(name) != number}
    return msgspec.structs.replace(record, manual=left)
