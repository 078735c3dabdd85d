"""Prints decisions of decode engines: one in full, many as a table."""

from dynamo_lite.cli.listing import as_clock, as_time
from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.protocol.decisions import Asked, Decision, QueueSeen

#: Of the lease in JSON.
KEY = "worker"
COLUMNS = ("at", "request", "prompt", "to_compute", "queue", "verdict", "outcome", "took")


def as_text(at: float, lease_id: int, d: Decision) -> str:
    limits, queue = d.thresholds, "not read yet" if d.queue is None else _queue(d.queue)
    tokens = limits.max_prefill_queue_tokens
    lines = [
        f"{d.request_id}  {as_clock(at)}  worker {lease_id:x}",
        f"  verdict  {d.verdict}, {d.reason}",
        f"  prompt   {d.prompt_tokens} tokens, {d.cached_tokens} of them cached here"
        + (f", {d.offloaded_tokens} offloaded" if d.offloaded_tokens else ""),
        f"  queue    {queue}",
        f"  limits   local up to {limits.max_local_prefill_length} tokens to compute, and from"
        f" {limits.max_prefill_queue_size} jobs{f' or {tokens} tokens' if tokens else ''} in the"
        " queue on",
        f"  outcome  {_outcome(d)}",
    ]
    if d.asked is not None:
        if d.asked.detail:
            taken_back = d.asked.outcome == Outcome.TAKEN_BACK.value
            lines.append(f"  {'because' if taken_back else 'writer '}  {d.asked.detail}")
        lines.append(f"  attempt  {d.asked.attempt}")
    return "\n".join(lines)


def _queue(queue: QueueSeen) -> str:
    alive, usable = queue.prefill_workers_alive, queue.prefill_workers
    workers = _count(usable, "prefill worker")
    if alive > usable:
        failed = "the links of the others have failed (`dynamo-lite top`)"
        workers = f"{usable} of {_count(alive, 'live prefill worker')} usable: {failed}"
    ahead = f"{_count(queue.jobs, 'job')} with {_count(queue.tokens, 'token')} to compute"
    return f"{ahead}; {workers}; read {queue.age_s:.2f} s earlier"


def _outcome(d: Decision) -> str:
    if d.asked is None:
        return "computed here"
    if not d.asked.outcome:
        return "under way"
    stages = ", ".join(f"{stage} {as_time(s)}" for stage, s in d.asked.stages_s.items())
    return f"{d.asked.outcome} after {as_time(_took_s(d.asked))}: {stages}"


def cells(at: float, d: Decision) -> list[str]:
    return [
        as_clock(at),
        d.request_id,
        str(d.prompt_tokens),
        str(d.uncached_tokens),
        "?" if d.queue is None else str(d.queue.jobs),
        f"{d.verdict}/{d.reason}",
        "" if d.asked is None else d.asked.outcome or "under way",
        as_time(_took_s(d.asked)) if d.asked is not None and d.asked.stages_s else "",
    ]


def _took_s(asked: Asked) -> float:
    return sum(asked.stages_s.values())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
