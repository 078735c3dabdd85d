"""Questions to a decode engine about its decisions, and the answers.

Times are durations, since the clocks of two hosts differ.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Self

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.generate import Seconds
from dynamo_lite.protocol.options import DecisionThresholds, subset
from dynamo_lite.protocol.prefill import AttemptId, EngineId
from dynamo_lite.protocol.records import LeaseId, Natural

Word = Annotated[str, msgspec.Meta(max_length=64)]


class Explain(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the newest `last` decisions that match."""

    #: The client's or the engine's id of a request; empty: all requests.
    request_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    last: Natural = 4096
    #: Maximum age.
    within_s: Seconds = 1e9


class QueueSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill queue as the decision saw it."""

    jobs: int
    #: Number of workers that respond and have no known failed link to the engine.
    prefill_workers: int
    #: Seconds since the queue was read.
    age_s: float
    #: Number of outstanding tokens.
    tokens: int = 0
    #: Estimated seconds until a job for this prompt would start, from measured rates.
    wait_s: float | None = None
    #: Estimated seconds until it would be complete.
    takes_s: float | None = None
    #: Number of all workers that respond; None from engines that do not report it.
    prefill_workers_alive: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Version:
    #: Version of the live options; 0: nothing differs from the configuration file.
    version: int


@dataclass(frozen=True, kw_only=True)
class Followed(DecisionThresholds, _Version):
    """The thresholds of a decision. On the wire `version` precedes them."""

    @classmethod
    def of(cls, version: int, thresholds: DecisionThresholds) -> Self:
        """The thresholds among `thresholds`, which may be a larger set."""
        return cls(version=version, **asdict(subset(DecisionThresholds, thresholds)))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a remote prefill."""

    attempt: AttemptId
    #: See `policy/attempts/instructions.py`; empty while it is in flight.
    outcome: Word = ""
    #: Duration of each stage that was reached (see `disagg/decode/stages.py`).
    stages_s: dict[str, float] = {}
    #: Why its writer did not write, as the writer reported it, or why the prefill was taken back;
    #: empty if something else ended it.
    detail: str = ""


class CostsSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the learned costs said, in seconds; see `docs/cost-policy.md`."""

    #: The side that the thresholds chose.
    thresholds: Literal["local", "remote"]
    #: local, remote, close, or why they could not be relied on.
    says: Word
    #: Costs here: until the first token, and the pauses of other requests. See `behind_s`.
    local_s: float
    pause_s: float
    #: Costs elsewhere: until the first token, the wait of jobs behind it, and of requests that
    #: lack the memory that it holds.
    remote_s: float
    queue_s: float
    memory_s: float
    #: Uncertainty of the difference; None: unknown.
    band_s: float | None = None
    #: Probability with which this side was taken.
    propensity: float = 1.0
    #: What the side that was taken has cost, and how much less the other side would have cost.
    cost_s: float | None = None
    regret_s: float | None = None
    #: Also a cost here: the wait of prompts that arrive before it is computed.
    behind_s: float = 0.0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for one prompt, local or remote."""

    #: The engine's id of the request.
    request_id: str
    #: Since the decision.
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    verdict: Literal["local", "remote"]
    reason: Word
    #: None when it was not known.
    queue: QueueSeen | None
    thresholds: Followed
    #: Estimated seconds of a local prefill, from measured rates; None without any.
    local_s: float | None = None
    #: Estimated seconds of a remote prefill, likewise.
    remote_s: float | None = None
    local_tokens_per_s: float | None = None
    remote_tokens_per_s: float | None = None
    #: Seconds that the local prefill took.
    computed_s: float | None = None
    asked: Asked | None = None
    #: None without an estimate.
    costs: CostsSeen | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer, oldest decision first."""

    engine_id: EngineId
    #: Of the engine's worker.
    lease_id: LeaseId
    decisions: list[Decision]


decode_explain: Decoder[Explain] = Decoder(Explain)
decode_explained: Decoder[Explained] = Decoder(Explained)
