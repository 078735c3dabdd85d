"""Composes an `Overview` from members, what their processes answer, and links. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from dynamo_lite.protocol.records import EndpointRecord, LinkRecord
from dynamo_lite.runtime.overview.metrics import (
    CounterHistory,
    Samples,
    by_labels,
    quantile,
    summed,
    total,
)
from dynamo_lite.runtime.overview.model import (
    Decisions,
    FailedLink,
    Latency,
    LiveProcess,
    Overview,
    Queue,
    RoleEngines,
    Tokens,
    Transfers,
)

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
#: For the planner: what decode workers ask and wait for, and the work of prefill workers.
ASKED = "dynamo_lite_prefill_asked_tokens_total"
OVERFLOW = "dynamo_lite_prefill_overflow_tokens_total"
OUTSTANDING_JOBS = "dynamo_lite_prefill_outstanding_jobs"
OUTSTANDING_TOKENS = "dynamo_lite_prefill_outstanding_tokens"
WRITTEN_TOKENS = "dynamo_lite_prefill_written_tokens_total"
BUSY_S = "dynamo_lite_prefill_busy_seconds_total"

#: The metrics that are read; all others are skipped.
WANTED = (
    *(DECISIONS, JOBS, BYTES, DEPTH, TOKENS, FREE, BLOCKS, IN_FLIGHT, FORWARDED, ANSWERS, USABLE),
    *(TTFT, ITL, ASKED, OVERFLOW, OUTSTANDING_JOBS, OUTSTANDING_TOKENS, WRITTEN_TOKENS, BUSY_S),
)

#: Verdicts that involve a second engine.
ELSEWHERE = ("remote", "disaggregated")

#: Larger numbers in a process's facts are mistakes, and floats cannot have all of them.
_LARGEST = 2**63

#: Windows of rates and of latencies.
RATE_S = 10.0
LATENCY_S = 60.0


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
    """A process's state.

    ready, starting or draining; unwell: ready but it cannot work; unfit: a prefill worker whose
    KV is valid for no decode worker; silent: no facts.
    """
    state = facts.get("state")
    if state == "ready":
        if facts.get("ok") is not True:
            return "unwell"
        return "unfit" if facts.get("unfit") else "ready"
    return state if state in ("starting", "draining") else "silent"


def compose(
    at: float,
    namespace: str,
    members: Mapping[int, EndpointRecord],
    facts: Mapping[int, Mapping[str, Any]],
    history: CounterHistory,
    links: Iterable[LinkRecord] = (),
    trouble: Iterable[str] = (),
) -> Overview:
    """members: by lease. facts: by lease, those at /health; empty for a process that did not
    respond. history: already has the pages of this moment, with `str(lease_id)` as the source;
    other pages of a process have sources of their own."""
    rate_s, recent = history.window(RATE_S)
    latency_s, lately = history.window(LATENCY_S)
    pages = list(history.latest.values())
    whole = summed(pages)
    workers = [
        _worker(record, facts.get(lease_id, {}), history.latest.get(str(lease_id), {}), at)
        for lease_id, record in members.items()
    ]
    # All tell of the same queue, each some seconds late; what is computed now is known.
    depth, queued = _gauges(pages, DEPTH), _gauges(pages, TOKENS)
    computed = sum(w.running or 0 for w in workers if w.component == "PrefillWorker")
    in_flight = [*_gauges(pages, IN_FLIGHT), *_gauges(pages, FORWARDED)]
    tokens, seconds = total(recent, f"{ITL}_count"), total(recent, f"{ITL}_sum")
    cut_off = sum(one.get("nats_connected") is False for one in facts.values())

    def per_s(amount: float) -> float:
        return amount / rate_s if rate_s else 0.0

    def decisions(counter: str, label: str) -> list[Decisions]:
        grown = by_labels(recent, counter, label, "reason")
        totals = dict.fromkeys(grown, 0.0) | by_labels(whole, counter, label, "reason")
        return [
            Decisions(verdict=key[0], reason=key[1], per_s=per_s(grown.get(key, 0)), total=round(n))
            for key, n in sorted(totals.items(), key=lambda one: (one[0][0] not in ELSEWHERE, one))
        ]

    return Overview(
        at=at,
        namespace=namespace,
        rate_s=round(rate_s, 1),
        latency_s=round(latency_s, 1),
        workers=sorted(
            workers, key=lambda w: (w.component, w.instance is None, w.instance, w.lease)
        ),
        queue=Queue(
            jobs=round(max([*depth, computed])) if depth or computed else None,
            tokens=round(max(queued)) if queued else None,
        ),
        engines=_engines(pages),
        in_flight=round(sum(in_flight)) if in_flight else None,
        decisions=[*decisions(DECISIONS, "verdict"), *decisions(ANSWERS, "how")],
        ttft=_latency(lately, TTFT),
        itl=_latency(lately, ITL),
        tokens=Tokens(per_s=per_s(tokens), mean_s=seconds / tokens if tokens else None),
        transfers=Transfers(
            bytes_per_s=per_s(total(recent, BYTES)),
            jobs_per_s=per_s(total(recent, JOBS, outcome="written")),
            total_bytes=round(total(whole, BYTES)),
            total_jobs=round(total(whole, JOBS, outcome="written")),
        ),
        failed_links=_failed_links(links, members),
        trouble=[
            *trouble,
            *([f"{cut_off} of {len(members)} processes cannot reach NATS"] if cut_off else []),
        ],
    )


def _worker(
    record: EndpointRecord, facts: Mapping[str, Any], samples: Samples, at: float
) -> LiveProcess:
    return LiveProcess(
        component=record.component,
        instance=natural(facts, "instance"),
        lease=f"{record.lease_id:x}",
        state=state_of(facts),
        model=record.model.rstrip("/").rpartition("/")[2],
        running=natural(facts, "running", "jobs", "requests"),
        waiting=natural(facts, "waiting"),
        kv_usage=_kv_usage(facts, samples),
        max_running=natural(facts, "max_running"),
        age_s=round(max(0.0, at - record.started_at), 1) if record.started_at else 0.0,
    )


def _kv_usage(facts: Mapping[str, Any], samples: Samples) -> float | None:
    usage = facts.get("kv_usage")
    free, blocks = samples.get((FREE, ())), samples.get((BLOCKS, ()))
    if not isinstance(usage, int | float):
        usage = 1 - free / blocks if blocks and free is not None else None
    return None if usage is None or abs(usage) >= _LARGEST else min(max(float(usage), 0.0), 1.0)


def natural(facts: Mapping[str, Any], *names: str) -> int | None:
    """The first of these facts that is a non-negative integer of 64 bits; None without one."""
    values = (facts.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and 0 <= v < _LARGEST), None)


def _gauges(pages: Iterable[Samples], name: str) -> list[float]:
    return [page[name, ()] for page in pages if (name, ()) in page]


def _engines(pages: Iterable[Samples]) -> list[RoleEngines]:
    """Several Forwarders may know the same engine."""
    usable: dict[tuple[str, ...], bool] = {}
    for page in pages:
        for key, value in by_labels(page, USABLE, "role", "engine").items():
            usable[key] = usable.get(key, True) and value == 1
    return [
        RoleEngines(
            role=role,
            known=sum(key[0] == role for key in usable),
            usable=sum(key[0] == role and good for key, good in usable.items()),
        )
        for role in sorted({key[0] for key in usable}, reverse=True)
    ]


def _latency(lately: Samples, histogram: str) -> Latency:
    return Latency(
        count=round(total(lately, f"{histogram}_count")),
        p50_s=quantile(lately, histogram, 0.5),
        p95_s=quantile(lately, histogram, 0.95),
    )


def _failed_links(
    links: Iterable[LinkRecord], members: Mapping[int, EndpointRecord]
) -> list[FailedLink]:
    """Those of live processes."""
    return [
        FailedLink(
            prefill=f"{link.prefill_lease_id:x}",
            decode=f"{link.decode_lease_id:x}",
            detail=link.detail,
            next_try=link.next_try,
        )
        for link in sorted(links, key=lambda link: (link.prefill_lease_id, link.engine_id))
        if {link.prefill_lease_id, link.decode_lease_id} <= members.keys()
    ]
