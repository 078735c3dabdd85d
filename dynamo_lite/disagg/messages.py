"""What the scheduler half tells the worker halves each step, and what they answer.

The engine carries these between its own processes.
"""

from dataclasses import dataclass, field

from dynamo_lite.protocol.trace import TraceContext


@dataclass
class DecodeStep:
    """expect: attempt -> request id, of attempts allocated since the last step.

    blocks: attempt -> the blocks that are expected to be written, in order.
    give_up: (attempt, request id) whose KV nobody waits for any more.
    poll: whether any remote write may be under way.
    """

    expect: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    give_up: list[tuple[str, str]] = field(default_factory=list)
    poll: bool = False


@dataclass
class BlockWrite:
    """Blocks of one attempt that are complete after this step.

    local_ids[i] goes to remote_ids[i] of the target engine, if both engines' blocks
    have the same size. Else the tokens of local_ids, without the first `skip_tokens`, fill
    remote_ids one after the other. remote_ids[0] is the attempt's block number `first`.
    last: nothing follows; the write carries the commit. num_blocks: of the whole attempt.
    scheduled, began: when the attempt's first step was, and this one, on this host's
    monotonic clock. trace: of the job, if that is traced.
    """

    attempt: str
    request_id: str
    target_engine: str
    local_ids: list[int]
    remote_ids: list[int]
    last: bool
    num_blocks: int
    scheduled: float
    first: int = 0
    skip_tokens: int = 0
    began: float = 0.0
    trace: TraceContext | None = None


@dataclass
class PrefixRead:
    """A prefix to be read: remote_ids[i] of the target engine into local_ids[i]."""

    attempt: str
    request_id: str
    target_engine: str
    local_ids: list[int]
    remote_ids: list[int]


@dataclass
class LinkTestOrder:
    """Try the way to an engine; see `Preflight`."""

    order: str
    target_engine: str


@dataclass
class PrefillStep:
    """targets: engine id -> its metadata (msgpack), in the first step that needs it, and
    with preflights. The ranks keep it until they are told to forget the engine.

    own: this engine's metadata (msgpack), with every target; empty where the engine
    has one rank, which knows its own.
    forget: engines that have left.
    ended: (attempt, request id, complete) of requests that finished; complete is
    False when the request was stopped early. preempted: attempts whose blocks
    are about to be reused.
    """

    writes: list[BlockWrite] = field(default_factory=list)
    reads: list[PrefixRead] = field(default_factory=list)
    targets: dict[str, bytes] = field(default_factory=dict)
    own: bytes = b""
    forget: list[str] = field(default_factory=list)
    ended: list[tuple[str, str, bool]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    preflights: list[LinkTestOrder] = field(default_factory=list)


@dataclass
class RankResults:
    """Request ids that were settled since the last step.

    sent: no write reads from their blocks any more. received: their KV is here.
    lost: it will not come, or is not what was sent: the engine must compute it.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


@dataclass
class RankLink:
    """What one rank has found of its way to an engine.

    failure: why it cannot be used. lanes: ranks that this one gives KV to. contact_s,
    round_trip_s: of the slowest, see `LinkRecord`.
    """

    failure: str | None
    lanes: int = 0
    contact_s: float = 0.0
    round_trip_s: float = 0.0


@dataclass
class WorkerReport:
    """failures: attempt -> what went wrong in writing it. unknown: engines whose metadata
    a rank should have and has not.

    landed: lost request -> blocks of its attempt that are here all the same, from the
    first one on.

    links: order -> rank -> what that has found.
    """

    failures: dict[str, str] = field(default_factory=dict)
    landed: dict[str, int] = field(default_factory=dict)
    links: dict[str, dict[int, RankLink]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def joined(self, other: "WorkerReport") -> "WorkerReport":
        """Of two ranks: here is what both have."""
        landed = {**self.landed, **other.landed}
        for request_id in self.landed.keys() & other.landed.keys():
            landed[request_id] = min(self.landed[request_id], other.landed[request_id])
        links = {
            order: {**self.links.get(order, {}), **other.links.get(order, {})}
            for order in self.links.keys() | other.links.keys()
        }
        failures = {**self.failures, **other.failures}
        return WorkerReport(failures, landed, links, self.unknown | other.unknown)
