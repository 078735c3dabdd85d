"""How long each stage of a remote prefill took, as its decode engine sees it.

    decided ─decide─► asked ─publish─► queued ─pull─► pulled ─claim─► claimed
            ─fill─► received ─resume─► scheduled

Traced requests get spans as well.
"""

from dynamo_lite.disagg.counters import DECISION, Counters, note_child, note_span
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.protocol.trace import TraceContext


def stages_s(prefill: RemotePrefill) -> dict[str, float]:
    """Durations of the stages of a remote prefill that has ended, in seconds.

    Without a commit: the stages that it reached, and `lost` for the time after them.
    """
    if prefill.ended_at is None:
        return {}
    stages = {stage: end - start for stage, (start, end) in _until_claim(prefill).items()}
    if prefill.received_at is None or prefill.claimed_at is None:
        return {**stages, "lost": prefill.ended_at - prefill.decided.at - sum(stages.values())}
    stages["fill"] = prefill.received_at - prefill.claimed_at
    if prefill.scheduled_at is not None:
        stages["resume"] = prefill.scheduled_at - prefill.received_at
    return stages


def report_decision(
    stats: Counters, above: TraceContext | None, prefill: RemotePrefill, now: float
) -> None:
    """Counts a decision, and notes its span. It holds since `now`."""
    decided, kind = prefill.decided, "remote" if prefill.is_remote else "local"
    stats.add(f"{DECISION}/{kind}/{decided.verdict.reason.value}")
    if above is None:
        return
    attributes: dict[str, str | int] = {
        "dynamo_lite.verdict": kind,
        "dynamo_lite.reason": decided.verdict.reason.value,
        "dynamo_lite.prompt_tokens": decided.inputs.prompt_tokens,
        "dynamo_lite.cached_tokens": decided.inputs.cached_tokens,
    }
    if decided.inputs.queue is not None:
        attributes["dynamo_lite.queue_jobs"] = decided.inputs.queue.jobs
    note_child(stats, "decision", above, decided.at, now, attributes)


def report_end(stats: Counters, prefill: RemotePrefill) -> None:
    """Notes the spans of a remote prefill that has ended, and counts its stages if its KV
    came."""
    _note_spans(stats, prefill)
    if prefill.received_at is None:
        return
    for stage, seconds in stages_s(prefill).items():
        stats.add_stage(stage, seconds)


def report_resume(stats: Counters, prefill: RemotePrefill) -> None:
    """Counts how long the engine took to schedule the prompt after its KV came."""
    assert prefill.received_at is not None and prefill.scheduled_at is not None
    stats.add_stage("resume", prefill.scheduled_at - prefill.received_at)
    if prefill.above is not None:
        note_child(stats, "resume", prefill.above, prefill.received_at, prefill.scheduled_at)


def _until_claim(prefill: RemotePrefill) -> dict[str, tuple[float, float]]:
    """Start and end of each stage up to the claim, as far as it was reached."""
    stages = {"decide": (prefill.decided.at, prefill.asked_at)}
    queued_at, pulled_at, claimed_at = _queued_at(prefill), prefill.pulled_at, prefill.claimed_at
    if queued_at is not None:
        stages["publish"] = prefill.asked_at, queued_at
        if pulled_at is not None and claimed_at is not None:
            stages["pull"] = queued_at, pulled_at
            stages["claim"] = pulled_at, claimed_at
    return stages


def _queued_at(prefill: RemotePrefill) -> float | None:
    """A worker may pull the job before the broker has confirmed its push."""
    published, pulled = prefill.published_at, prefill.pulled_at
    if pulled is None:
        return published
    return pulled if published is None else min(published, pulled)


def _note_spans(stats: Counters, prefill: RemotePrefill) -> None:
    trace, above, ended_at = prefill.trace, prefill.above, prefill.ended_at
    if trace is None or above is None:
        return
    assert prefill.outcome is not None and ended_at is not None
    named = {
        "dynamo_lite.attempt": prefill.attempt,
        "dynamo_lite.outcome": prefill.outcome.value,
    }
    if prefill.detail:
        named["dynamo_lite.detail"] = prefill.detail
    note_span(
        stats,
        "remote prefill",
        trace,
        above.span_id,
        prefill.asked_at,
        ended_at,
        attributes=named,
    )
    stages = _until_claim(prefill)
    for stage, name in (("publish", "publish"), ("pull", "queue wait")):
        if stage in stages:
            note_child(stats, name, trace, *stages[stage])
