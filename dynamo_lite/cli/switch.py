"""`dynamo-lite switch`: orders a switch from the supervisor of this state directory."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo_lite.cli.drain import DrainChoice, Say, Watch, as_table
from dynamo_lite.cli.listing import Place, find_place, members
from dynamo_lite.cli.own_graph import POLL_S, check_runs, ready_leases
from dynamo_lite.overview.drains import ROLES, GraphSeen, look
from dynamo_lite.policy.scaling.drain import NoVictim, victim
from dynamo_lite.policy.scaling.limits import bounds
from dynamo_lite.policy.scaling.switch_book import times_text
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import Counts, RoleCounts, SupervisorReply, Switch, SwitchState
from dynamo_lite.runtime.supervisor_client import SupervisorClient
from dynamo_lite.services.planner.connector import COMPONENTS


class Switcher:
    """The switches of one command.

    giver, taker: components. Raises ConfigError for what cannot be, StartupError without a graph
    and for a switch that fails, Unavailable, and Refused when an order is not possible.
    """

    def __init__(self, state_dir: Path, giver: str, taker: str, say: Say):
        self._state_dir, self._giver, self._taker, self._say = state_dir, giver, taker, say
        accepted = ", ".join(ROLES)
        mistakes = [f"{n}: accepted: {accepted}" for n in (giver, taker) if n not in ROLES]
        if not mistakes and giver == taker:
            mistakes = [f"{giver}: it has this role already; give two different ones"]
        if mistakes:
            raise ConfigError(mistakes)
        check_runs(state_dir)
        self._place: Place = find_place(state_dir, None, None)
        #: Whether a worker's grace was over before its work.
        self.forced = False

    async def choose(self, number: int, lease_id: int) -> DrainChoice:
        """The worker to switch first. lease_id: 0: the cheapest. number: how many will follow it,
        itself included."""
        async with SupervisorClient(self._state_dir) as supervisor:
            counts = (await supervisor.order(Counts())).counts
        known = ", ".join(counts) or "none"
        mistakes = [
            f"{name}: the supervisor of {self._state_dir} has no such service that can be scaled;"
            f" those: {known}"
            for name in (self._giver, self._taker)
            if name not in counts
        ]
        if mistakes:
            raise ConfigError(mistakes)
        seen = await look(await members(self._place))
        if mistakes := self._too_few(seen, number) + self._limited(seen, counts, number):
            raise ConfigError(mistakes)
        return self._chosen(seen, lease_id)

    async def switch(self, choice: DrainChoice, *, wait_s: float) -> None:
        """wait_s: longest wait; 0: none."""
        lease_id = choice.record.lease_id
        watch = Watch(self._place, choice.record, self._say)
        began = time.monotonic()
        async with SupervisorClient(self._state_dir) as supervisor:
            version = (await supervisor.order(Counts())).version + 1
            order = Switch(
                component=self._giver, lease_id=lease_id, to=self._taker, version=version
            )
            state = _state(await supervisor.order(order), lease_id)
            self._say(f"ordered: {state.successor} gets its place")
        if not wait_s:
            return
        await watch.until_gone(wait_s)
        self.forced |= watch.forced
        await self._until_ready(lease_id, began, wait_s)

    async def _until_ready(self, lease_id: int, began: float, wait_s: float) -> None:
        told = ""
        async with SupervisorClient(self._state_dir) as supervisor:
            while True:
                state = _state(await supervisor.order(Counts()), lease_id)
                text = _as_text(state)
                if text and text != told:
                    self._say(f"{time.monotonic() - began:6.1f}s  {text}")
                    told = text
                if state.phase == "done":
                    return
                if state.phase == "ended":
                    why = f": {state.error}" if state.error else ""
                    raise StartupError(f"{state.successor} was given up{why}")
                if time.monotonic() - began > wait_s:
                    raise StartupError(f"timeout; the supervisor goes on: {text or state.phase}")
                await asyncio.sleep(POLL_S)

    def _too_few(self, seen: GraphSeen, number: int) -> list[str]:
        serving = sum(worker.candidate.serves for worker in seen.workers(self._giver))
        if serving > number:
            return []
        return [
            f"{self._giver}: {serving} can work, and one must stay; `dynamo-lite scale` adds some"
        ]

    def _limited(self, seen: GraphSeen, counts: Mapping[str, RoleCounts], number: int) -> list[str]:
        """What a planner would undo."""
        planners = [facts.get("planner") for facts in seen.facts.values()]
        mistakes: list[str] = []
        for facts in planners:
            if not isinstance(facts, dict) or facts.get("dry_run") or "limits" not in facts:
                continue
            limits = msgspec.convert(facts["limits"], PlannerOptions)
            for role, component in COMPONENTS.items():
                now = counts[component].starting + counts[component].ready
                after = now - number if component == self._giver else now + number
                least, most = bounds(limits, role)
                if component == self._giver and after < least:
                    mistakes.append(f"{after} {component}: the planner's minimum is {least}")
                if component == self._taker and after > most:
                    mistakes.append(f"{after} {component}: the planner's maximum is {most}")
        return list(dict.fromkeys(mistakes))

    def _chosen(self, seen: GraphSeen, lease_id: int) -> DrainChoice:
        """One of this supervisor's processes. Raises ConfigError for another lease."""
        workers = seen.workers(self._giver)
        own = set(ready_leases(self._state_dir, self._giver))
        if lease_id and lease_id not in own:
            known = ", ".join(f"{one:x}" for one in sorted(own)) or "none"
            raise ConfigError(
                [f"{lease_id:x}: no {self._giver} of this supervisor that is ready; those: {known}"]
            )
        wanted = {lease_id} if lease_id else own
        found = victim([w.candidate for w in workers if w.record.lease_id in wanted], force=True)
        if isinstance(found, NoVictim):
            raise StartupError(f"{self._giver}: no process of this supervisor is ready")
        return DrainChoice(
            record=seen.records[found.lease_id],
            reason="as asked" if lease_id else f"{found.reason}: {found.cost.reason}",
            table=as_table(workers, found.lease_id),
        )


def _state(reply: SupervisorReply, lease_id: int) -> SwitchState:
    """Of the switch of this worker. Raises StartupError if the supervisor has forgotten it."""
    for state in reply.switches:
        if state.lease_id == lease_id:
            return state
    raise StartupError(f"the supervisor does not know a switch of {lease_id:x} any more")


def _as_text(state: SwitchState) -> str:
    name = state.successor
    match state.phase:
        case "starting" if state.failures:
            return f"FAILED    {name}: {state.error}; it is tried again"
        case "starting" if state.level == 2:
            return f"SWITCHING {name} with the same engine"
        case "starting":
            why = f"; the engine was not kept: {state.not_kept}" if state.not_kept else ""
            return f"STARTING  {name} on the same devices{why}"
        case "done":
            return f"READY     {name}: {times_text(state)}"
        case _:
            return ""
