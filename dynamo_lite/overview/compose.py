"""Composes an `Overview` from scraped metrics, published loads and etcd records. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_lite.overview.history import CounterHistory, Window
from dynamo_lite.overview.model import (
    Decisions,
    FailedLink,
    Latency,
    LiveProcess,
    Overview,
    Planned,
    Queue,
    RoleEngines,
    Tokens,
    Transfers,
)
from dynamo_lite.overview.samples import Samples, count, known, quantile, total
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.records import EndpointRecord, LinkRecord

DECISIONS = "dynamo_lite_prefill_decisions_total"
JOBS = "dynamo_lite_prefill_jobs_total"
BYTES = "dynamo_lite_kv_transfer_bytes_total"
DEPTH = "dynamo_lite_prefill_queue_depth"
TOKENS = "dynamo_lite_prefill_queue_tokens"
FREE = "dynamo_lite_kv_blocks_free"
BLOCKS = "dynamo_lite_kv_blocks_total"
IN_FLIGHT = "dynamo_lite_requests_in_flight"
FORWARDED = "dynamo_lite_forward_requests"
ANSWERS = "dynamo_lite_forward_answers_total"
USABLE = "dynamo_lite_forward_engine_usable"
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"

#: The metrics that an overview is made of; all others are skipped.
WANTED = (
    *(DECISIONS, JOBS, BYTES, DEPTH, TOKENS, FREE, BLOCKS, IN_FLIGHT, TTFT, ITL),
    *(FORWARDED, ANSWERS, USABLE),
)

#: Verdicts that involve a second engine.
ELSEWHERE = ("remote", "disaggregated")

#: Larger numbers in a process's facts are mistakes, and floats cannot have all of them.
_LARGEST = 2**63

#: Windows of rates and of latencies.
RATE_S = 10.0
LATENCY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class OverviewInputs:
    """The inputs of one overview."""

    #: Seconds since the epoch.
    at: float
    namespace: str
    members: Iterable[EndpointRecord]
    #: Lease id to the process's facts at /health; empty if it did not respond.
    facts: Mapping[int, Mapping[str, Any]]
    #: Lease id to the load that the process published for routers; stale ones are left out.
    loads: Mapping[int, Load] = field(default_factory=dict)
    links: Iterable[LinkRecord] = ()
    #: Sentences about what cannot be observed now.
    trouble: list[str] = field(default_factory=list)


def processes(members: Iterable[EndpointRecord]) -> dict[int, EndpointRecord]:
    """Maps each lease id to the process's main record.

    A process may have records of components that run inside it; those name no model or come
    later in the alphabet.
    """
    found: dict[int, EndpointRecord] = {}
    for member in sorted(members, key=lambda m: (m.component, not m.model, m.endpoint)):
        found.setdefault(member.lease_id, member)
    return found


def state_of(facts: Mapping[str, Any]) -> str:
    """A process's state from its facts at /health.

    ready, starting or draining; unwell: ready but it cannot work; silent: no facts.
    """
    state = facts.get("state")
    if state == "ready":
        return "ready" if facts.get("ok") is True else "unwell"
    return state if state in ("starting", "draining") else "silent"


def compose(seen: OverviewInputs, history: CounterHistory) -> Overview:
    """Composes the overview.

    history: already has the samples of this moment, with `str(lease_id)` as the source;
    other endpoints of a process have sources of their own.
    """
    recent, lately = history.window(RATE_S), history.window(LATENCY_S)
    latest = list(history.latest.values())
    return Overview(
        at=seen.at,
        namespace=seen.namespace,
        rate_s=round(recent.seconds, 1),
        latency_s=round(lately.seconds, 1),
        workers=_workers(seen, history.latest),
        queue=Queue(jobs=_most(latest, DEPTH), tokens=_most(latest, TOKENS)),
        engines=_engines(latest),
        in_flight=_sum(latest, IN_FLIGHT, FORWARDED),
        decisions=[
            *_decisions(latest, recent, DECISIONS, "verdict"),
            *_decisions(latest, recent, ANSWERS, "how"),
        ],
        ttft=_latency(lately, TTFT),
        itl=_latency(lately, ITL),
        tokens=_tokens(recent),
        transfers=_transfers(latest, recent),
        failed_links=_failed_links(seen),
        planner=_planner(seen),
        trouble=seen.trouble,
    )


def _workers(seen: OverviewInputs, latest: Mapping[str, Samples]) -> list[LiveProcess]:
    found = [
        _worker(
            record,
            seen.facts.get(lease_id, {}),
            seen.loads.get(lease_id),
            latest.get(str(lease_id), {}),
            seen.at,
        )
        for lease_id, record in processes(seen.members).items()
    ]
    return sorted(found, key=lambda w: (w.component, w.instance is None, w.instance, w.lease))


def _worker(
    record: EndpointRecord,
    facts: Mapping[str, Any],
    load: Load | None,
    samples: Samples,
    at: float,
) -> LiveProcess:
    if load is not None:
        running, waiting, kv_usage = load.running, load.waiting, load.kv_usage
    else:
        running = _natural(facts, "running", "jobs", "requests")
        waiting = _natural(facts, "waiting")
        kv_usage = _kv_usage(facts, samples)
    return LiveProcess(
        component=record.component,
        instance=_natural(facts, "instance"),
        lease=f"{record.lease_id:x}",
        state=state_of(facts),
        model=record.model.rstrip("/").rpartition("/")[2],
        running=running,
        waiting=waiting,
        kv_usage=kv_usage,
        kv_tokens=_natural(facts, "kv_tokens"),
        age_s=round(max(0.0, at - record.started_at), 1) if record.started_at else 0.0,
    )


def _kv_usage(facts: Mapping[str, Any], samples: Samples) -> float | None:
    reported = facts.get("kv_usage")
    if isinstance(reported, int | float) and abs(reported) < _LARGEST:
        return min(max(float(reported), 0.0), 1.0)
    free, blocks = known(samples, FREE), known(samples, BLOCKS)
    return min(max(1 - free / blocks, 0.0), 1.0) if blocks and free is not None else None


def _natural(facts: Mapping[str, Any], *names: str) -> int | None:
    """The first of these facts that is a non-negative integer of 64 bits; None without one."""
    values = (facts.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and 0 <= v < _LARGEST), None)


def _most(latest: list[Samples], name: str) -> int | None:
    """The largest value. Several processes report the same queue, each some seconds old."""
    values = _values(latest, name)
    return round(max(values)) if values else None


def _sum(latest: list[Samples], *names: str) -> int | None:
    values = [value for name in names for value in _values(latest, name)]
    return round(sum(values)) if values else None


def _values(latest: list[Samples], name: str) -> list[float]:
    return [value for samples in latest if (value := known(samples, name)) is not None]


def _decisions(latest: list[Samples], recent: Window, counter: str, label: str) -> list[Decisions]:
    """label: that of the verdict."""
    taken = {
        (of.get(label, ""), of.get("reason", ""))
        for samples in (*latest, recent.grown)
        for name, labels in samples
        if name == counter and (of := dict(labels))
    }
    found: list[Decisions] = []
    for verdict, reason in sorted(taken, key=lambda key: (key[0] not in ELSEWHERE, key)):
        labels = {label: verdict, "reason": reason}
        found.append(
            Decisions(
                verdict=verdict,
                reason=reason,
                per_s=recent.per_s(total(recent.grown, counter, **labels)),
                total=round(sum(total(samples, counter, **labels) for samples in latest)),
            )
        )
    return found


def _engines(latest: list[Samples]) -> list[RoleEngines]:
    """Several Forwarders may know the same engine."""
    usable: dict[tuple[str, str], bool] = {}
    for samples in latest:
        for (name, labels), value in samples.items():
            if name == USABLE:
                of = dict(labels)
                key = of.get("role", ""), of.get("engine", "")
                usable[key] = usable.get(key, True) and value == 1
    return [
        RoleEngines(
            role=role,
            known=sum(key[0] == role for key in usable),
            usable=sum(key[0] == role and good for key, good in usable.items()),
        )
        for role in sorted({key[0] for key in usable}, reverse=True)
    ]


def _latency(lately: Window, histogram: str) -> Latency:
    return Latency(
        count=count(lately.grown, histogram),
        p50_s=quantile(lately.grown, histogram, 0.5),
        p95_s=quantile(lately.grown, histogram, 0.95),
    )


def _tokens(recent: Window) -> Tokens:
    number = total(recent.grown, f"{ITL}_count")
    seconds = total(recent.grown, f"{ITL}_sum")
    return Tokens(per_s=recent.per_s(number), mean_s=seconds / number if number else None)


def _transfers(latest: list[Samples], recent: Window) -> Transfers:
    return Transfers(
        bytes_per_s=recent.per_s(total(recent.grown, BYTES)),
        jobs_per_s=recent.per_s(total(recent.grown, JOBS, outcome="written")),
        total_bytes=round(sum(total(samples, BYTES) for samples in latest)),
        total_jobs=round(sum(total(samples, JOBS, outcome="written") for samples in latest)),
    )


def _planner(seen: OverviewInputs) -> Planned | None:
    """The report of the planner that leads; without a leader that of any planner."""
    reports = [
        (record.lease_id, facts)
        for record in seen.members
        if record.component == "Planner"
        and isinstance((facts := seen.facts.get(record.lease_id, {}).get("planner")), dict)
    ]
    if not reports:
        return None
    lease_id, facts = max(reports, key=lambda report: report[1].get("leads") is True)
    try:
        return msgspec.convert({**facts, "lease": f"{lease_id:x}"}, Planned)
    except msgspec.ValidationError:
        return None


def _failed_links(seen: OverviewInputs) -> list[FailedLink]:
    """Those of live processes."""
    live = {member.lease_id for member in seen.members}
    return [
        FailedLink(
            prefill=f"{link.prefill_lease_id:x}",
            decode=f"{link.decode_lease_id:x}",
            detail=link.detail,
            next_try=link.next_try,
        )
        for link in sorted(seen.links, key=lambda link: (link.prefill_lease_id, link.engine_id))
        if {link.prefill_lease_id, link.decode_lease_id} <= live
    ]
