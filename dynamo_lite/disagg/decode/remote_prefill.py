"""One prompt as a decode engine knows it: the decision about it, and its remote prefill.

How long each stage of a remote prefill took:

    decided ─decide─► asked ─publish─► queued ─pull─► pulled ─claim─► claimed
            ─fill─► received ─resume─► scheduled
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.counters import DECISION, Counters, note_child, note_span
from dynamo_lite.disagg.decision.rule import Remote, Verdict
from dynamo_lite.disagg.engine_api import Block, Prompt
from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.trace import TraceContext


class Decided(NamedTuple):
    """A verdict, and everything that it was made from."""

    verdict: Verdict
    #: Monotonic seconds.
    at: float
    inputs: DecisionInputs
    options: DisaggOptions


@dataclass(slots=True, eq=False)
class PrefixWait:
    """A prompt's waits for the remote prefills of other requests with the same prefix."""

    #: Request id of the leader; None while the prompt waits for no leader.
    leader: str | None = None
    #: Length of the prefix that the leader's KV brings, in tokens.
    prefix_tokens: int = 0
    #: How many waits the prompt has begun.
    waits: int = 0
    #: Whether the prefix was in the cache when the last wait ended.
    served: bool = False


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """The record of one decision about a prompt, and of the remote prefill that follows from it.

    A prompt that is computed here has a record as well, without an attempt (`is_remote`). A prompt
    that is decided again after a lost remote prefill gets a second record, which takes over the
    limits of the first. The ledger owns the attempt's state.

    `RemotePrefills` writes all fields on the engine's thread, except where a field says
    otherwise. Times are monotonic seconds; None: not reached.
    """

    #: Written once. Read by all.
    request_id: str
    #: The last verdict; final once `allocated`. Read by `explain`, spans and stages.
    decided: Decided
    #: Whether the engine has reserved the prompt's blocks, so that the decision holds.
    allocated: bool = False
    #: `SingleFlight` writes and reads it, until the prompt has its blocks.
    wait: PrefixWait | None = None

    #: Prompt tokens that no engine computes: those that were cached here at the first decision, or
    #: at the prefill engine that has written the rest.
    cached_tokens: int = 0
    #: The latter, as its commit says. They count when the KV is complete.
    writer_cached: int = 0

    #: Tokens that are still to be scheduled for a prompt that is computed here.
    left_tokens: int = 0
    #: Number of the prompt's tokens that are computed here, and since when it waits for them:
    #: since the decision, or since the end of a remote prefill.
    here_tokens: int = 0
    here_at: float = 0.0
    #: Steps scheduled since the last prompt token was.
    steps_since: int = 0
    #: How long the prompt was computed here, in seconds. Read by `explain`, also on the
    #: bridge's thread.
    computed_s: float | None = None

    #: Number of remote prefills that were requested for the prompt, including this one.
    tries: int = 0
    #: The limit of `tries`. Set with the prompt's first remote prefill.
    max_tries: int = 0
    #: When the prompt's first remote prefill was requested.
    since: float = 0.0
    #: Deadline of the prompt's wait for all its remote prefills. None before the first one.
    until: float | None = None

    #: Id of the attempt; empty until the engine asks for a remote prefill.
    attempt: str = ""
    #: The engine's request; None once no other remote prefill can be requested for its rest. Read
    #: by `Resumes`.
    prompt: Prompt | None = None
    #: Number of the prompt's first block that is awaited. Read by `Resumes`.
    first_block: int = 0
    #: Tokens that the engine awaits. Read by `SingleFlight`.
    awaited_tokens: int = 0
    #: Tokens that a prefill worker has to compute.
    job_tokens: int = 0
    #: Whether the engine still waits for the KV, until it learns that the KV came or will not
    #: come. Read by `SingleFlight`.
    parked: bool = False
    #: Hashes of the awaited blocks that the engine will cache, while `parked`.
    hashes: Sequence[Hashable] = ()
    #: Span of the attempt, and of its request; None without a trace. Read by spans.
    trace: TraceContext | None = None
    above: TraceContext | None = None

    #: When the job was handed to the bridge.
    asked_at: float = 0.0
    #: When the broker confirmed the push.
    published_at: float | None = None
    #: When the claimant pulled the job.
    pulled_at: float | None = None
    #: When it was claimed.
    claimed_at: float | None = None
    #: The worker that claimed the job, or gave it back without a claim; None: none has yet.
    writer: int | None = None
    #: When the remote prefill ended for its request.
    ended_at: float | None = None
    #: How it ended; None until then. Read by `explain`, also on the bridge's thread.
    outcome: Outcome | None = None
    #: What its writer reported about a failure, or why the prefill was taken back.
    detail: str = ""
    #: When its KV came.
    received_at: float | None = None
    #: When the engine scheduled the prompt's last token after its KV came.
    scheduled_at: float | None = None

    #: Blocks from `first_block` on whose KV is here on all ranks that have reported; None
    #: without a report. Read by `Resumes`.
    landed_blocks: int | None = None
    #: Whether another remote prefill may be requested after this one. Written by `Resumes`.
    may_retry: bool = False
    #: Blocks on which the engine has own references while a writer may touch them.
    held: Sequence[Block] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the verdict is remote."""
        return isinstance(self.decided.verdict, Remote)

    def next_try(self, decided: Decided) -> "RemotePrefill":
        """The record of the same prompt's next decision, after this remote prefill was lost."""
        return RemotePrefill(
            self.request_id,
            decided,
            cached_tokens=self.cached_tokens,
            tries=self.tries,
            max_tries=self.max_tries,
            since=self.since,
            until=self.until,
        )


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
