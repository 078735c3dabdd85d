"""One prompt as a decode engine knows it: the decision about it, and its remote prefill."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.decision.rule import DecisionReason
from dynamo_lite.disagg.engine_api import Block, Prompt
from dynamo_lite.protocol.decisions import DecisionInputs
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.protocol.trace import TraceContext


class Decided(NamedTuple):
    """A verdict by its reason, and everything that it was made from."""

    reason: DecisionReason
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

    A prompt that is computed here has a record as well, without an attempt. A prompt that is
    decided again after a lost remote prefill gets a second record, which takes over the deadline
    of the first. The ledger owns the attempt's state.

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

    #: Prompt tokens that were cached here at the first decision.
    cached_tokens: int = 0

    #: Number of remote prefills that were requested for the prompt, including this one.
    tries: int = 0
    #: When the prompt's first remote prefill was requested.
    since: float = 0.0
    #: Deadline of the prompt's wait for all its remote prefills. None before the first one.
    until: float | None = None

    #: Id of the attempt; empty until the engine asks for a remote prefill.
    attempt: str = ""
    #: The engine's request while it is parked: until the engine learns that the KV came, or will
    #: not come.
    prompt: Prompt | None = None
    #: Number of the prompt's first block that is awaited.
    first_block: int = 0
    #: Tokens that a prefill worker has to compute. Read by `SingleFlight`.
    awaited_tokens: int = 0
    #: Hashes of the awaited blocks that the engine will cache, while it is parked.
    hashes: Sequence[Hashable] = ()
    #: Span of the attempt, and of its request; None without a trace. Read by spans.
    trace: TraceContext | None = None
    above: TraceContext | None = None

    #: When each stage has ended, in order; those that it reached. Read by `explain`, also on the
    #: bridge's thread.
    times: dict[str, float] = field(default_factory=dict[str, float])
    #: The worker that claimed the job; None: none has.
    writer: int | None = None
    #: How it ended; None until then. Read by `explain`, also on the bridge's thread.
    outcome: Outcome | None = None
    #: What its writer reported about a failure, or why the prefill was taken back.
    detail: str = ""

    #: Blocks from `first_block` on whose KV is here on all ranks that have reported; None
    #: without a report.
    landed_blocks: int | None = None
    #: Whether another remote prefill may be requested after this one.
    may_retry: bool = False
    #: Blocks on which the engine has own references while a writer may touch them.
    held: Sequence[Block] = ()

    def next_try(self, decided: Decided) -> "RemotePrefill":
        """The record of the same prompt's next decision, after this remote prefill was lost."""
        return RemotePrefill(
            self.request_id,
            decided,
            cached_tokens=self.cached_tokens,
            tries=self.tries,
            since=self.since,
            until=self.until,
        )


#: Outcomes that the writer caused.
_OF_THE_WRITER = {
    Outcome.WRITER_FAILED,
    Outcome.WRITER_ABANDONED,
    Outcome.WRITER_LOST,
    Outcome.WRITER_SILENT,
}
#: Another prefill worker may be asked; the other answers of `again` say why not.
WRITER_LOST = "writer_lost"


def again(prefill: RemotePrefill, *, others: int, now: float) -> str:
    """Whether another prefill worker may be asked for a prompt whose remote prefill is lost.

    others: usable prefill workers beside the writer. now: monotonic.
    """
    assert prefill.until is not None
    if prefill.outcome not in _OF_THE_WRITER:
        return "not_the_writer"  # another one would end the same way
    if prefill.tries >= prefill.decided.options.max_remote_prefills:
        return "tried"
    if others < 1:
        return "no_other"
    # Late: less time is left than was already spent.
    return "late" if prefill.until - now < now - prefill.since else WRITER_LOST
