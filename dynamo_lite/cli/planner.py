"""The planner's records and answers, for `dynamo-lite planner`."""

import contextlib
import os
import pwd
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_lite.cli.listing import (
    Broker,
    Place,
    check_may_write,
    facts_of,
    members,
    open_broker,
)
from dynamo_lite.cli.live_options import Edit, edited, read, replaces
from dynamo_lite.planner.authentic import AuthenticRecords
from dynamo_lite.planner.connector import COMPONENTS, by_role
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.planner.policy.limits import contradictions, refusals
from dynamo_lite.planner.target import Target
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json, encode, encode_json
from dynamo_lite.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    NoResponders,
    ProtocolError,
    StartupError,
    Unavailable,
)
from dynamo_lite.protocol.live_options import applied
from dynamo_lite.protocol.options import PlannerOptions
from dynamo_lite.protocol.planner import (
    ExplainPlan,
    LeaderRecord,
    OperationRecord,
    PauseRecord,
    PlannerReport,
    TargetRecord,
    decode_planner_report,
)
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.clock import SYSTEM_CLOCK
from dynamo_lite.runtime.sealed_records import UNSEALED, RecordSeals
from dynamo_lite.runtime.store import Store

_TRIES = 20
_ANSWER_S = 3.0


@dataclass(frozen=True)
class PlannerState:
    """What `status` shows."""

    #: Lease to what the process reports; empty facts if it does not respond.
    planners: Mapping[int, Mapping[str, Any]]
    leader: LeaderRecord | None
    target: TargetRecord | None
    paused: PauseRecord | None
    operations: list[OperationRecord]
    #: Records that cannot be read or are not authentic.
    malformed: list[str]

    @property
    def led_by(self) -> Mapping[str, Any]:
        """Facts of the planner that leads; empty if it does not respond."""
        return self.planners.get(self.leader.lease_id, {}) if self.leader else {}

    @property
    def shown(self) -> Mapping[str, Any]:
        """Facts of the planner that leads, or of any if none does."""
        return self.led_by or next(iter(self.planners.values()), {})


async def look(store: Store, place: Place, seals: RecordSeals = UNSEALED) -> PlannerState:
    """Without a secret seals are not checked."""
    entries = await store.get_prefix(names.planner_prefix(place.namespace))
    malformed: list[str] = []
    leader_key = names.planner_leader_key(place.namespace)

    def decoded(key: str, kind: type[Any]) -> Any:
        if (data := entries.get(key)) is None:
            return None
        try:
            return decode_json(data if key == leader_key else seals.opened(key, data), kind)
        except ProtocolError as exc:
            malformed.append(f"{key}: {exc}")
            return None

    prefix = names.planner_operations_prefix(place.namespace)
    found = [decoded(key, OperationRecord) for key in entries if key.startswith(prefix)]
    return PlannerState(
        planners=await _planners(place),
        leader=decoded(leader_key, LeaderRecord),
        target=decoded(names.planner_target_key(place.namespace), TargetRecord),
        paused=decoded(names.planner_pause_key(place.namespace), PauseRecord),
        operations=sorted((op for op in found if op is not None), key=lambda op: op.id),
        malformed=malformed,
    )


async def explain(store: Store, place: Place, broker: Broker, last: int) -> PlannerReport:
    """Of the planner that leads, or of any if none does. Raises StartupError without an answer."""
    state = await look(store, place)
    leases = sorted(
        state.planners, key=lambda i: state.leader is None or i != state.leader.lease_id
    )
    async with open_broker(broker) as messaging:
        for lease_id in leases:
            subject = names.endpoint_subject(place.namespace, "Planner", "explain", lease_id)
            try:
                reply = await messaging.request(
                    subject, encode(ExplainPlan(last=last)), timeout_s=_ANSWER_S
                )
                return decode_planner_report(reply)
            except (NoResponders, DeadlineExceeded, ProtocolError):
                continue
    raise StartupError(_NONE if not leases else _SILENT)


async def pause(store: Store, place: Place, reason: str, seals: RecordSeals = UNSEALED) -> None:
    """Raises StartupError where the planner would ignore it: without the graph's secret."""
    record = PauseRecord(by=_whoami(), reason=reason[:1024], at=SYSTEM_CLOCK.wall())
    key = names.planner_pause_key(place.namespace)
    await check_may_write(store, [key], await members(place), seals)
    await store.put(key, seals.sealed(key, encode_json(record)))


async def resume(store: Store, place: Place) -> bool:
    """Returns whether it was paused."""
    return await store.delete(names.planner_pause_key(place.namespace))


async def set_counts(
    store: Store, place: Place, wanted: Mapping[str, int], seals: RecordSeals = UNSEALED
) -> TargetRecord:
    """Raises ConfigError for numbers that the planner would not reach, StartupError without a
    planner that leads or without the graph's secret, Unavailable after many conflicts with other
    writers."""
    state = await look(store, place, seals)
    if not state.planners:
        raise StartupError(_NONE)
    if all(facts.get("dry_run") for facts in state.planners.values()):
        raise StartupError("the planner runs with dry-run: it would not change anything")
    facts = state.led_by
    if not facts:
        raise StartupError("no planner leads, or it does not respond; `planner status` shows more")
    manual = state.target.manual if state.target is not None else {}
    mistakes = _refusals(facts, wanted, manual)
    if mistakes:
        raise ConfigError(mistakes)
    target = await _target(store, place, state, seals)
    return await _tried(lambda: target.set_manual(wanted, "set by an operator"))


async def unset_counts(
    store: Store, place: Place, components: Collection[str], seals: RecordSeals = UNSEALED
) -> tuple[TargetRecord, Mapping[str, int]]:
    """The planner decides about these components again; none: about all. Returns the record and
    the numbers that were set.

    Raises ConfigError for a component without a number, StartupError without the graph's secret,
    Unavailable after many conflicts.
    """
    state = await look(store, place, seals)
    target = await _target(store, place, state, seals)
    manual = state.target.manual if state.target is not None else {}
    if unknown := [name for name in components if name not in manual]:
        have = ", ".join(manual) or "none"
        raise ConfigError([f"{name}: no number is set; set: {have}" for name in unknown])
    gone = {name: manual[name] for name in (components or manual)}
    return await _tried(lambda: target.unset(list(gone))), gone


async def _target(store: Store, place: Place, state: PlannerState, seals: RecordSeals) -> Target:
    """Raises StartupError where the planner would ignore what it writes."""
    key = names.planner_target_key(place.namespace)
    await check_may_write(store, [key], await members(place), seals)
    seen = [facts.get("newest") for facts in state.planners.values()] if seals.checked else []
    newest = max((version for version in seen if isinstance(version, int)), default=0)
    records = AuthenticRecords(seals, newest=newest)
    return Target(store, place.namespace, _whoami(), SYSTEM_CLOCK, records)


async def _tried(write: Callable[[], Awaitable[TargetRecord]]) -> TargetRecord:
    for _ in range(_TRIES - 1):
        with contextlib.suppress(Unavailable):
            return await write()
    return await write()


async def check_options(
    store: Store, place: Place, edit: Edit, seals: RecordSeals = UNSEALED
) -> None:
    """Raises ConfigError when the planner's options would contradict each other.

    The values of the file and the devices of one worker are those that a live planner reports, or
    the defaults and one. Raises StartupError for an invalid record.
    """
    devices: dict[str, int] = {}
    file: dict[str, Any] = {}
    for facts in (await _all_facts(place)).values():
        file |= facts.get("options", {}).get("file", {})
        devices |= facts.get("planner", {}).get("devices", {})
    replaced = replaces("Planner", edit)
    now = {} if replaced else await read(store, place.namespace, "Planner", seals)
    planned = applied({**file, **edited(now, edit)}, PlannerOptions())
    if mistakes := contradictions(planned, by_role(devices)):
        raise ConfigError([f"Planner: {mistake}" for mistake in mistakes])


def _whoami() -> str:
    """By the process's own user id, since the environment is not reliable."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:256]


_NONE = "no planner runs; graphs.disagg_planner has one"
_SILENT = "no planner answers; if the graph has a secret, name it: --secret-file FILE"


def _refusals(
    facts: Mapping[str, Any], wanted: Mapping[str, int], manual: Mapping[str, int]
) -> list[str]:
    """manual: numbers that were set before, and are not reached yet."""
    roles = {component: role for role, component in COMPONENTS.items()}
    counts = {
        roles[one["component"]]: manual.get(one["component"], one["count"])
        for one in facts["roles"]
    }
    known = [COMPONENTS[role] for role in counts]
    mistakes = [
        f"{component}: the planner has no such role; accepted: {', '.join(known) or 'none'}"
        for component in wanted
        if component not in known
    ]
    if mistakes:
        return mistakes
    devices = by_role(facts["devices"])
    limits = msgspec.convert(facts["limits"], PlannerOptions)
    asked: dict[Role, int] = {roles[component]: number for component, number in wanted.items()}
    return refusals(asked, counts, devices, limits)


async def _planners(place: Place) -> dict[int, Mapping[str, Any]]:
    return {
        lease_id: facts.get("planner", {}) for lease_id, facts in (await _all_facts(place)).items()
    }


async def _all_facts(place: Place) -> dict[int, Mapping[str, Any]]:
    records: list[EndpointRecord] = [r for r in await members(place) if r.component == "Planner"]
    facts = await facts_of(records)
    return {record.lease_id: facts[record.status_url] for record in records}
