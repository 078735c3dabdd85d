"""The spans of one prefill job, in the trace of its request."""

from dataclasses import dataclass

import msgspec

from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.trace import TraceContext, traced
from dynamo_lite.runtime.tracing.tracer import Tracer, record_child


@dataclass(frozen=True)
class JobTrace:
    """A traced job."""

    tracer: Tracer
    #: The job for the engine: its trace headers name this job's span as the parent.
    request: RemotePrefillRequest
    context: TraceContext
    #: Id of the decode engine's span.
    parent: str
    #: Monotonic time of the pull.
    pulled: float

    def claimed(self, now: float) -> None:
        record_child(self.tracer, "claim", self.context, self.pulled, now)

    def ended(self, outcome: str, now: float) -> None:
        job = self.request
        self.tracer.record(
            "prefill job",
            self.context,
            self.parent,
            self.pulled,
            now,
            kind="consumer",
            attributes={
                "dynamo_lite.attempt": job.attempt,
                "dynamo_lite.outcome": outcome,
                "dynamo_lite.prompt_tokens": len(job.prompt_token_ids),
                "dynamo_lite.cached_tokens": job.num_computed_tokens,
                "gen_ai.request.id": job.request_id,
            },
            error="" if outcome == "written" else outcome,
        )


def trace_job(tracer: Tracer, job: RemotePrefillRequest, pulled: float) -> JobTrace | None:
    """None if the job is not traced."""
    asked = traced(job.trace_headers)
    if asked is None:
        return None
    context = asked.child()
    job = msgspec.structs.replace(job, trace_headers=context.headers())
    return JobTrace(tracer, job, context, asked.span_id, pulled)
