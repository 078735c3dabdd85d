"""The messages between a scheduler half and its worker halves, in each step.

The engine carries them between its own processes.
"""

from dataclasses import dataclass, field

from dynamo_lite.protocol.trace import TraceContext
from dynamo_lite.runtime.claim_cells import Cell

#: Why nothing more is written or read for an attempt.
NOT_HELD = "its claim does not hold any more"


@dataclass
class DecodeStep:
    """To the ranks of a decode engine."""

    #: Request id by attempt, of the attempts that were allocated since the last step.
    expect: dict[str, str] = field(default_factory=dict)
    #: The blocks that will be written, in order, by attempt.
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: Id of the claim by attempt, of the attempts that were claimed since the last step.
    claims: dict[str, int] = field(default_factory=dict)
    #: Attempt and request id of the remote prefills that were given up.
    give_up: list[tuple[str, str]] = field(default_factory=list)
    #: Whether any remote write may be in flight.
    poll: bool = False
    #: Whether the ranks are to wait for KV; only in a step that computes nothing.
    wait: bool = False


@dataclass(frozen=True)
class WritingAttempt:
    """An attempt as the ranks of a prefill engine know it."""

    #: Also the engine's id of its request.
    attempt: str
    target_engine: str
    #: How many blocks will be written.
    num_blocks: int = 0
    #: Of its claim. Nothing is written and nothing read while it is closed.
    cell: Cell = field(default_factory=Cell)
    #: When its first step was scheduled, on this host's monotonic clock.
    scheduled: float = 0.0
    #: Span of the job; None without a trace.
    trace: TraceContext | None = None


@dataclass
class BlockWrite:
    """Blocks of one attempt that are complete after this step.

    If both engines' blocks have the same size, local_ids[i] is written to remote_ids[i] of
    the target engine. Otherwise the tokens of local_ids, without the first `skip_tokens`,
    fill remote_ids in order.
    """

    of: WritingAttempt
    local_ids: list[int]
    remote_ids: list[int]
    #: Whether this is the attempt's last write, which carries the commit.
    last: bool
    #: Number of remote_ids[0] within the attempt.
    first: int = 0
    skip_tokens: int = 0
    #: local_ids and remote_ids of the model's other KV groups. Blocks that are not needed are
    #: left out of all groups.
    other_groups: list[tuple[list[int], list[int]]] = field(
        default_factory=list[tuple[list[int], list[int]]]
    )


@dataclass
class PrefixRead:
    """A prefix to be read: remote_ids[i] of the target engine into local_ids[i]."""

    of: WritingAttempt
    local_ids: list[int]
    remote_ids: list[int]


@dataclass
class PrefillStep:
    """To the ranks of a prefill engine."""

    writes: list[BlockWrite] = field(default_factory=list)
    reads: list[PrefixRead] = field(default_factory=list)
    #: Metadata (msgpack) by engine id, in the step with a job's read and in those in which its
    #: writes begin: the first one, and the first one after a preemption.
    targets: dict[str, bytes] = field(default_factory=dict)
    #: This engine's metadata (msgpack), with every target. Empty if the engine has one rank,
    #: which knows its own.
    own: bytes = b""
    #: Request id and completeness of requests that finished. A request that was stopped early is
    #: not complete.
    ended: list[tuple[str, bool]] = field(default_factory=list)
    #: Requests whose blocks are about to be reused.
    preempted: list[str] = field(default_factory=list)


@dataclass
class RankResults:
    """Requests whose transfer ended since the last step."""

    #: No write reads from their blocks any more.
    sent: set[str] = field(default_factory=set)
    #: Their KV has arrived.
    received: set[str] = field(default_factory=set)
    #: Their KV will not arrive, or its commits do not fit: the engine must compute it.
    lost: set[str] = field(default_factory=set)


@dataclass
class WorkerReport:
    """From the ranks to the scheduler half."""

    #: Why writing failed, by request.
    failures: dict[str, str] = field(default_factory=dict)
    #: Blocks that have arrived of a lost request's attempt, from the first one on, by request.
    landed: dict[str, int] = field(default_factory=dict)
    #: Why a transfer with a decode engine failed, by engine.
    broken: dict[str, str] = field(default_factory=dict)

    def joined(self, other: "WorkerReport") -> "WorkerReport":
        """Combines the reports of two ranks. Of `landed` blocks, those count that both have."""
        landed = {**self.landed, **other.landed}
        for request_id in self.landed.keys() & other.landed.keys():
            landed[request_id] = min(self.landed[request_id], other.landed[request_id])
        return WorkerReport(self.failures | other.failures, landed, self.broken | other.broken)
