"""What is counted of a remote prefill, and its spans.

The stages of a remote prefill, each from the end of the one before:

    decided ─decide─► asked ─queue─► claimed ─fill─► received ─resume─► scheduled

Without a commit the last one is `lost`, from the last stage that was reached.
"""

from dynamo_lite.disagg.counters import Counters, note_child, note_span
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.metrics import DECISION
from dynamo_lite.protocol.trace import TraceContext


def stages_s(prefill: RemotePrefill) -> dict[str, float]:
    """Durations of the stages that a remote prefill has reached, in seconds."""
    start, stages = prefill.decided.at, dict[str, float]()
    for stage, end in list(prefill.times.items()):
        stages[stage] = end - start
        start = end
    return stages


def report_decision(
    stats: Counters, above: TraceContext | None, prefill: RemotePrefill, now: float
) -> None:
    """Counts a decision, and notes its span. It holds since `now`."""
    decided = prefill.decided
    verdict, reason = decided.reason.verdict, decided.reason.value
    stats.add(f"{DECISION}/{verdict}/{reason}")
    if above is None:
        return
    attributes: dict[str, str | int] = {
        "dynamo_lite.verdict": verdict,
        "dynamo_lite.reason": reason,
        "dynamo_lite.prompt_tokens": decided.inputs.prompt_tokens,
        "dynamo_lite.cached_tokens": decided.inputs.cached_tokens,
    }
    if decided.inputs.queue is not None:
        attributes["dynamo_lite.queue_jobs"] = decided.inputs.queue.jobs
    note_child(stats, "decision", above, decided.at, now, attributes)


def report_end(stats: Counters, prefill: RemotePrefill) -> None:
    """Notes the spans of a remote prefill that has ended, and counts its stages if its KV
    came."""
    trace, above, times = prefill.trace, prefill.above, prefill.times
    if "fill" in times:
        for stage, seconds in stages_s(prefill).items():
            stats.add_stage(stage, seconds)
    if trace is None or above is None:
        return
    assert prefill.outcome is not None
    named = {
        "dynamo_lite.attempt": prefill.attempt,
        "dynamo_lite.outcome": prefill.outcome.value,
    }
    if prefill.detail:
        named["dynamo_lite.detail"] = prefill.detail
    asked, *_, ended = times.values()
    note_span(stats, "remote prefill", trace, above.span_id, asked, ended, attributes=named)
    if "queue" in times:
        note_child(stats, "queue wait", trace, asked, times["queue"])


def report_resume(stats: Counters, prefill: RemotePrefill) -> None:
    """Counts the last stage, and notes its span."""
    received, scheduled = prefill.times["fill"], prefill.times["resume"]
    stats.add_stage("resume", scheduled - received)
    if prefill.above is not None:
        note_child(stats, "resume", prefill.above, received, scheduled)
