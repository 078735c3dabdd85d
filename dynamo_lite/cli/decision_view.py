"""Prints decisions: one in full, many as a table, and what other options would have decided."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from dynamo_lite.cli.decisions import PastDecision
from dynamo_lite.cli.listing import as_clock, as_time, table
from dynamo_lite.policy.attempts.instructions import Outcome
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, QueueView, Remote, Verdict
from dynamo_lite.policy.decision.replay import replay
from dynamo_lite.protocol.decisions import CostsSeen, Decision, QueueSeen
from dynamo_lite.protocol.options import DecisionThresholds

TIMEOUT = "remote-prefill-timeout-s"
#: Option to its field, for those that `replay` knows. Others change the outcome of a decision, not
#: the decision.
DECIDING = {
    option: field.name
    for field in fields(DecisionThresholds)
    if (option := field.name.replace("_", "-")) != TIMEOUT
}

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
    "cheaper": "this side costs less, as learned",
    "crowded": "cheaper here, because the prefill workers are busy",
    "explored": "both sides cost about the same, and this one is measured again",
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
        f"  here        {_here(d)}",
        f"  elsewhere   {_elsewhere(d)}",
    ]
    if d.costs is not None:
        lines += _costs(d.costs)
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


def dry_run(taken: Sequence[PastDecision], edit: Mapping[str, Any]) -> list[str]:
    """Lines that show what these options would have changed in past decisions.

    edit: new values by option (kebab-case); other options stay as they were.
    """
    lines: list[str] = []
    timed = TIMEOUT in edit and any(t.decision.queue and t.decision.queue.wait_s for t in taken)
    if timed or any(option in DECIDING for option in edit):
        lines += _changed_verdicts(taken, edit)
    if TIMEOUT in edit:
        ended = [t for t in taken if t.decision.asked and t.decision.asked.outcome]
        waits = [sum(t.decision.asked.stages_s.values()) for t in ended if t.decision.asked]
        late = sum(waited_s > edit[TIMEOUT] for waited_s in waits)
        took = f"took longer than {edit[TIMEOUT]:g} s"
        lines.append(f"{late} of {len(ended)} remote prefills that ended {took}")
    for option in edit:
        if option not in (*DECIDING, TIMEOUT):
            lines.append(f"{option}: its effect on past decisions cannot be computed")
    return lines


def verdict_with(decision: Decision, edit: Mapping[str, Any]) -> Verdict:
    """The verdict with these options."""
    make = Remote if decision.verdict == "remote" else Local
    followed, queue = decision.thresholds, decision.queue
    # After an earlier attempt less time is left than the timeout; the record lacks how much.
    left_s = 0.0 if decision.reason == "too_late" else followed.remote_prefill_timeout_s
    return replay(
        make(DecisionReason(decision.reason)),
        prompt_tokens=decision.prompt_tokens,
        cached_tokens=decision.cached_tokens,
        queue=queue
        and QueueView(
            queue.jobs,
            queue.prefill_workers,
            read_at=-queue.age_s,
            tokens=queue.tokens,
            wait_s=queue.wait_s,
            takes_s=queue.takes_s,
        ),
        thresholds=replace(
            followed, **{DECIDING[o]: value for o, value in edit.items() if o in DECIDING}
        ),
        now=0.0,
        time_left_s=edit.get(TIMEOUT, left_s),
    )


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


def _changed_verdicts(taken: Sequence[PastDecision], edit: Mapping[str, Any]) -> list[str]:
    moves: Counter[tuple[str, str]] = Counter()
    for t in taken:
        new = verdict_with(t.decision, edit)
        kind = "remote" if isinstance(new, Remote) else "local"
        moves[f"{t.decision.verdict}/{t.decision.reason}", f"{kind}/{new.reason.value}"] += 1
    changed = sum(n for (old, new), n in moves.items() if old.split("/")[0] != new.split("/")[0])
    lines = [f"{changed} of {len(taken)} verdicts would have changed:"]
    for (old, new), count in sorted(moves.items(), key=lambda move: -move[1]):
        lines.append(f"  {count:6}  {old}" + ("" if old == new else f" -> {new}"))
    return lines


def _queue(d: Decision) -> str:
    if d.queue is None:
        return "unknown"
    jobs = _count(d.queue.jobs, "job")
    wait = "" if d.queue.wait_s is None else f", a wait of about {as_time(d.queue.wait_s)}"
    ahead = f" with {_count(d.queue.tokens, 'token')} to compute{wait}"
    return f"{jobs}{ahead}; {_workers(d.queue)}; seen {d.queue.age_s:.2f} s earlier"


def _workers(queue: QueueSeen) -> str:
    alive, usable = queue.prefill_workers_alive, queue.prefill_workers
    if alive is None or alive == usable:
        return _count(usable, "prefill worker")
    failed = "the links of the others have failed (`dynamo-lite ps --links`)"
    return f"{usable} of {_count(alive, 'live prefill worker')} usable: {failed}"


def _or_tokens(d: Decision) -> str:
    tokens = d.thresholds.max_prefill_queue_tokens
    return f" or {tokens} tokens" if tokens else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _here(d: Decision) -> str:
    if d.computed_s is not None:
        return f"took {as_time(d.computed_s)}"
    if d.local_s is None:
        return "unknown: this worker has not computed a prompt yet"
    verb = "" if d.verdict == "local" else "would have taken "
    return f"{verb}about {as_time(d.local_s)}, at {d.local_tokens_per_s:,.0f} tokens/s"


def _elsewhere(d: Decision) -> str:
    if d.asked is not None and d.asked.outcome == "committed":
        return f"took {as_time(sum(d.asked.stages_s.values()))}"
    if d.remote_s is None:
        return "unknown: no remote prefill has completed yet"
    verb = "" if d.verdict == "remote" else "would have taken "
    return f"{verb}about {as_time(d.remote_s)}, at {d.remote_tokens_per_s:,.0f} tokens/s"


def _costs(costs: CostsSeen) -> list[str]:
    band = "unknown" if costs.band_s is None else as_time(costs.band_s)
    here, there = costs.local_s, costs.remote_s
    lines = [
        f"  cost here   {as_time(here + costs.pause_s + costs.behind_s)}: {as_time(here)} to the"
        f" first token, {as_time(costs.pause_s)} of pauses of others,"
        f" {as_time(costs.behind_s)} for prompts behind it",
        f"  elsewhere   {as_time(there + costs.queue_s + costs.memory_s)}: {as_time(there)} to the"
        f" first token, {as_time(costs.queue_s)} for jobs behind it,"
        f" {as_time(costs.memory_s)} for its memory; +- {band}",
        f"  so          by costs {costs.says}, by thresholds {costs.thresholds}",
    ]
    if costs.cost_s is not None:
        regret = "" if costs.regret_s is None else f", a regret of {as_time(costs.regret_s)}"
        lines.append(f"  realised    {as_time(costs.cost_s)}{regret}")
    return lines


def _stages(stages_s: Mapping[str, float]) -> str:
    stages = ", ".join(f"{stage} {as_time(seconds)}" for stage, seconds in stages_s.items())
    return f" after {stages}" if stages else ""


def _took(d: Decision) -> str:
    if d.asked is not None and d.asked.stages_s:
        return as_time(sum(d.asked.stages_s.values()))
    return "" if d.computed_s is None else as_time(d.computed_s)
