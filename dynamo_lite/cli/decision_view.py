"""Prints decisions: one in full, many as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_lite.cli.decisions import PastDecision
from dynamo_lite.cli.listing import as_clock, as_time, table
from dynamo_lite.policy.attempts.instructions import Outcome
from dynamo_lite.protocol.decisions import Decision, QueueSeen

_COLUMNS = ("at", "request", "prompt", "to_compute", "queue", "verdict", "outcome", "took")

_WORDS = {
    "long": "long enough for a prefill worker, and the queue has room",
    "short": "the prompt is short",
    "cached": "few tokens are uncached: the prefix is cached on this worker",
    "single_flight": "it waited for another request's remote prefill of the same prefix",
    "queue_full": "too many jobs in the queue",
    "queue_tokens": "too many outstanding tokens in the queue",
    "too_late": "a remote prefill would have missed its deadline",
    "queue_unknown": "the last view of the queue was stale",
    "no_prefill_worker": "no prefill worker is available",
    "leaving": "this worker was draining",
    "not_transferable": "its KV depends on more than its tokens, or must not be cached",
}


def as_json(taken: Sequence[PastDecision]) -> list[dict[str, Any]]:
    return [
        {"at": t.at, "worker": f"{t.lease_id:x}", **msgspec.to_builtins(t.decision)} for t in taken
    ]


def as_text(taken: PastDecision) -> str:
    d = taken.decision
    uncached = d.prompt_tokens - d.cached_tokens
    followed = d.thresholds
    lines = [
        f"{d.request_id}  {as_clock(taken.at)}  worker {taken.lease_id:x}",
        f"  verdict     {d.verdict}, {d.reason}: {_WORDS.get(d.reason, d.reason)}",
        f"  prompt      {d.prompt_tokens} tokens: {d.cached_tokens} cached here,"
        f" {uncached} to compute",
        f"  thresholds  local up to {followed.max_local_prefill_length} uncached tokens, and with"
        f" {followed.max_prefill_queue_size} jobs{_or_tokens(d)} or more in the queue (options"
        f" version {followed.version})",
        f"  queue       {_queue(d)}",
    ]
    if d.computed_s is not None:
        lines.append(f"  computed    here in {as_time(d.computed_s)}")
    if d.asked is not None:
        outcome = d.asked.outcome or "under way"
        lines.append(f"  attempt     {d.asked.attempt}: {outcome}{_stages(d.asked.stages_s)}")
        if outcome == Outcome.TAKEN_BACK.value:
            waited_s = sum(d.asked.stages_s.values())
            lines.append(f"  taken back  after {as_time(waited_s)}: {d.asked.detail}")
        elif d.asked.detail:
            lines.append(f"  its writer  {d.asked.detail}")
    return "\n".join(lines)


def as_table(taken: Sequence[PastDecision]) -> str:
    return table(_COLUMNS, [_cells(t.at, t.decision) for t in taken])


def _cells(at: float, d: Decision) -> list[str]:
    return [
        as_clock(at),
        d.request_id,
        str(d.prompt_tokens),
        str(d.prompt_tokens - d.cached_tokens),
        "?" if d.queue is None else str(d.queue.jobs),
        f"{d.verdict}/{d.reason}",
        "" if d.asked is None else d.asked.outcome or "under way",
        _took(d),
    ]


def _queue(d: Decision) -> str:
    if d.queue is None:
        return "unknown"
    jobs = _count(d.queue.jobs, "job")
    wait = "" if d.queue.wait_s is None else f", a wait of about {as_time(d.queue.wait_s)}"
    ahead = f" with {_count(d.queue.tokens, 'token')} to compute{wait}"
    return f"{jobs}{ahead}; {_workers(d.queue)}; seen {d.queue.age_s:.2f} s earlier"


def _workers(queue: QueueSeen) -> str:
    alive, usable = queue.prefill_workers_alive, queue.prefill_workers
    if alive <= usable:
        return _count(usable, "prefill worker")
    failed = "the links of the others have failed (`dynamo-lite ps --links`)"
    return f"{usable} of {_count(alive, 'live prefill worker')} usable: {failed}"


def _or_tokens(d: Decision) -> str:
    tokens = d.thresholds.max_prefill_queue_tokens
    return f" or {tokens} tokens" if tokens else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _stages(stages_s: Mapping[str, float]) -> str:
    stages = ", ".join(f"{stage} {as_time(seconds)}" for stage, seconds in stages_s.items())
    return f" after {stages}" if stages else ""


def _took(d: Decision) -> str:
    if d.asked is not None and d.asked.stages_s:
        return as_time(sum(d.asked.stages_s.values()))
    return "" if d.computed_s is None else as_time(d.computed_s)
