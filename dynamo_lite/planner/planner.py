"""The planner as a process: every tick it looks at the load, decides, and acts if it leads."""

import asyncio
import logging
from collections import Counter as Tally
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.planner import drains
from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.planner.connector import (
    COMPONENTS,
    Connector,
    Counted,
    LocalConnector,
    by_role,
)
from dynamo_lite.planner.kubernetes import KubernetesConnector
from dynamo_lite.planner.observation import Observation, Observed
from dynamo_lite.planner.operations import Operations
from dynamo_lite.planner.policy.drain import NoVictim, victim
from dynamo_lite.planner.policy.inputs import Role, Seen
from dynamo_lite.planner.policy.limits import bounds, contradictions
from dynamo_lite.planner.policy.memory import (
    Action,
    AddWorkers,
    PlannerMemory,
    Proposal,
    RemoveWorker,
    WithdrawStart,
)
from dynamo_lite.planner.policy.planner import begun, plan
from dynamo_lite.planner.records import PlannerRecords
from dynamo_lite.planner.roles import LastChanges, manual_counts, reached, roles_seen
from dynamo_lite.planner.target import Target
from dynamo_lite.planner.under_way import UnderWay
from dynamo_lite.protocol.errors import DynamoLiteError, Unavailable
from dynamo_lite.protocol.live_options import Values, applied
from dynamo_lite.protocol.options import PlannerOptions, subset
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.kubernetes import KubernetesApi
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.component_options import ComponentOptions

logger = logging.getLogger(__name__)

_KINDS: Mapping[type[Action], str] = {
    AddWorkers: "add",
    RemoveWorker: "remove",
    WithdrawStart: "withdraw",
}


def as_text(action: Action) -> str:
    """An action in words."""
    component = COMPONENTS[action.role]
    if isinstance(action, AddWorkers):
        return f"{component} +{action.size}: {action.reason}"
    if isinstance(action, WithdrawStart):
        return f"{component} start withdrawn: {action.reason}"
    which = "a starting one" if action.starting else "one"
    return f"{component} -1 ({which}): {action.reason}"


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
        self._operations = Counter(
            "dynamo_lite_planner_operations",
            "Changes that have ended, by outcome: done, failed, withdrawn, refused, late",
            ["component", "kind", "outcome"],
            registry=registry,
        )
        self.failures = Counter(
            "dynamo_lite_planner_failures",
            "Ticks in which something could not be asked or ordered, by what: counts, store",
            ["what"],
            registry=registry,
        )
        self._ended: Tally[tuple[str, str, str]] = Tally()

    def decided(self, proposal: Proposal) -> None:
        for role, one in proposal.roles.items():
            self._workers.labels(COMPONENTS[role], "count").set(one.count)
            wanted = float("nan") if one.wanted is None else one.wanted
            self._workers.labels(COMPONENTS[role], "wanted").set(wanted)
        for held, actions in (("no", proposal.actions), ("yes", proposal.held)):
            for action in actions:
                self._actions.labels(COMPONENTS[action.role], _KINDS[type(action)], held).inc()

    def ended(self, tally: Tally[tuple[str, str, str]]) -> None:
        """tally: of all operations that have ended since the start."""
        for key, number in tally.items():
            if number > self._ended[key]:
                self._operations.labels(*key).inc(number - self._ended[key])
        self._ended = Tally(tally)


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
        #: Devices of one worker, by component.
        self._devices: dict[str, int] = {}
        self._records: PlannerRecords | None = None
        self._options: ComponentOptions | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Registered last."""
        self._host = host
        self._metrics = PlannerMetrics(host.registry)
        enter = self._stack.enter_async_context
        self._connected = connector = self._connector or self._open_connector()
        self._options = ComponentOptions(host, self._config, self._apply)
        await enter(self._options.following())
        self._observation = await enter(Observation(host))
        # In a dry run it must not keep another planner from acting.
        elects = not self._config.dry_run
        records = PlannerRecords(host, elects=elects)
        self._records = await enter(records)
        namespace, by = self._spec.namespace, f"{host.lease.id:x}"
        self._target = Target(host.store, namespace, by, host.clock)
        self._changes = LastChanges(host.clock.monotonic)
        self._under_way = UnderWay(host.store, namespace, host.clock, host.drops)
        self._operations = Operations(
            self._under_way,
            host.store,
            namespace,
            connector,
            self._target,
            self._records.may_act,
            host.clock,
            lambda: self._observation.members.values(),
            self._least,
            host.certificates,
        )
        host.spawn(self._run(connector), "planner")
        await host.register("plan")
        return {}

    async def drain(self, grace_s: float) -> None:
        """What is under way stays recorded: the next planner goes on with it."""

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> Mapping[str, Any]:
        records = self._records
        if records is None or self._options is None:
            return {"ok": False, "checks": {"planner": "not started yet: wait"}}
        target = records.target
        return {
            "ok": True,
            "planner": {
                "leads": records.leads,
                "hold": self._proposal.hold,
                "roles": [
                    {"component": COMPONENTS[role], **asdict(one)}
                    for role, one in self._proposal.roles.items()
                ],
                "held": [as_text(action) for action in self._proposal.held],
                "operations": len(self._under_way),
                "manual": dict(target.manual) if target else {},
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

    def _least(self, component: str) -> int:
        return bounds(self._limits, drains.ROLES[component])[0]

    def _apply(self, values: Values) -> None:
        limits = applied(values, subset(PlannerOptions, self._config))
        if mistakes := contradictions(limits, by_role(self._devices)):
            logger.warning("live options that contradict each other: %s", "; ".join(mistakes))
        self._limits = limits

    async def _run(self, connector: Connector) -> None:
        while True:
            try:
                await self._tick(connector)
            except DynamoLiteError as exc:
                self._metrics.failures.labels("store").inc()
                logger.warning("the planner's tick failed: %s", exc)
            await asyncio.sleep(self._limits.tick_s)

    async def _tick(self, connector: Connector) -> None:
        records, operations = self._records, self._operations
        assert records is not None
        await self._follow_leadership(records.leads)
        observed = await self._observation.look()
        number = await self._count(connector)
        if self._led and number is not None:
            await operations.advance(number)
            # What has just been ordered is not in these numbers.
            number = await self._count(connector)
        seen = self._seen(observed, number)
        now = self._host.clock.monotonic()
        self._memory, proposal = plan(self._memory, seen, self._limits, now)
        self._show(proposal)
        for action in proposal.actions:
            assert number is not None
            if await self._act(action, number):
                self._memory = begun(self._memory, action)
        if not seen.hold and (done := reached(records.target, seen, self._limits)):
            await self._target.reached(done)

    async def _follow_leadership(self, leads: bool) -> None:
        if leads and not self._led:
            await self._under_way.load()
            logger.info("leads")
        elif self._led and not leads:
            self._under_way.forget()
        self._led = leads
        self._metrics.leads.set(leads)

    async def _count(self, connector: Connector) -> Counted | None:
        try:
            number = await connector.counts()
            self._devices = {name: each.devices_each for name, each in number.roles.items()}
            return number
        except DynamoLiteError as exc:
            self._metrics.failures.labels("counts").inc()
            logger.warning("the numbers of workers are not known: %s", exc)
            return None

    def _show(self, proposal: Proposal) -> None:
        """Logs it if it acts or what it wants has changed."""
        self._proposal = proposal
        self._metrics.decided(proposal)
        self._metrics.ended(self._under_way.ended)
        texts = [as_text(action) for action in (*proposal.actions, *proposal.held)]
        kinds = [text.partition(":")[0] for text in texts]
        states = [(role, one.state, one.count, one.wanted) for role, one in proposal.roles.items()]
        if proposal.actions or (proposal.hold, kinds, states) != self._told:
            self._told = proposal.hold, kinds, states
            said = f" ({'would do' if proposal.hold else 'does'}: {'; '.join(texts)})"
            logger.info("%s%s", proposal.reason, said if texts else "")

    def _seen(self, observed: Observed, number: Counted | None) -> Seen:
        assert self._records is not None
        roles = {}
        if number is not None:
            self._changes.note(self._records.target)
            members = self._observation.members
            roles = roles_seen(observed, number, self._under_way, members, self._changes)
        records = self._records
        manual = manual_counts(records.target, roles, paused=bool(records.paused))
        return Seen(
            roles=roles,
            prefill=observed.prefill,
            decode=observed.decode,
            hold=self._hold(bool(manual)),
            manual=manual,
        )

    def _hold(self, manual: bool) -> str:
        assert self._records is not None
        if self._config.dry_run:
            return "dry run"
        if why := self._records.why_not:
            return why
        if not self._led:
            # It was elected during this tick, and has not looked for what is under way.
            return "it has just been elected"
        return "" if manual else self._records.paused

    # What is done

    async def _act(self, action: Action, number: Counted) -> bool:
        """Returns whether it was begun. A failure ends only this action: the next tick decides
        again."""
        component = COMPONENTS[action.role]
        try:
            if isinstance(action, AddWorkers):
                await self._operations.add(component, action.size, number, action.reason)
            elif isinstance(action, WithdrawStart):
                await self._operations.withdraw(action.operation)
            elif action.starting and not self._may_end_starting(action.overdue):
                return False
            else:
                chosen = None if action.starting else await self._victim(action.role)
                if chosen is None and not action.starting:
                    return False
                limit = self._limits.drain_timeout_s
                await self._operations.remove(component, chosen, number, action.reason, limit)
            return True
        except Unavailable as exc:
            self._metrics.failures.labels("store").inc()
            logger.warning("%s was not begun: %s", as_text(action), exc)
            return False

    def _may_end_starting(self, overdue: bool) -> bool:
        """If the victim is not chosen, a start that succeeds meanwhile costs one that serves. So
        only one that takes too long is ended: a ReplicaSet ends pods that are not ready first."""
        return self._connected.chooses_victim or overdue

    async def _victim(self, role: Role) -> EndpointRecord | None:
        """The one to remove; see `planner/policy/drain.py`."""
        component, members = COMPONENTS[role], self._observation.members
        hosts = {m.host for m in members.values() if m.component == component}
        fit = self._connected.removable(component, hosts)
        spared = self._under_way.foreign | self._under_way.victims(members)
        seen = await drains.look(members.values(), self._host.certificates)
        workers = seen.workers(component)
        among = {w.record.lease_id for w in workers if w.record.host in fit} - spared
        found = victim([worker.candidate for worker in workers], among=among)
        if isinstance(found, NoVictim):
            logger.warning("no %s is removed: %s", component, found.reason)
            return None
        logger.info("%s %x is removed: %s", component, found.lease_id, found.reason)
        return members.get(found.lease_id)
