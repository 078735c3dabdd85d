"""Questions to a decode engine about what it has decided, and its answers.

Times are durations: the clocks of two hosts differ.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Self

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.generate import Seconds
from dynamo_lite.protocol.options import DecisionThresholds, subset
from dynamo_lite.protocol.prefill import Attempt, EngineId
from dynamo_lite.protocol.records import LeaseId, Natural

Word = Annotated[str, msgspec.Meta(max_length=64)]


class Explain(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions are wanted: the newest `last` of those that fit.

    request_id: as a client knows it, or the engine; empty: of all requests. within_s:
    not older than this.
    """

    request_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    last: Natural = 4096
    within_s: Seconds = 1e9


class QueueSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill queue as the decision saw it. age_s: since it was read.

    prefill_workers: those that respond, and whose link to the engine is not known to be bad;
    prefill_workers_alive: all that respond; None from engines that do not tell.
    tokens: outstanding. wait_s, takes_s: until a job of this prompt was to be begun, and
    to be done, by the rates that had been measured.
    """

    jobs: int
    prefill_workers: int
    age_s: float
    tokens: int = 0
    wait_s: float | None = None
    takes_s: float | None = None
    prefill_workers_alive: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Version:
    #: Of the live options; 0: nothing differs from the configuration file.
    version: int


@dataclass(frozen=True, kw_only=True)
class Followed(DecisionThresholds, _Version):
    """The thresholds of a decision. On the wire `version` stands before them."""

    @classmethod
    def of(cls, version: int, thresholds: DecisionThresholds) -> Self:
        return cls(version=version, **asdict(subset(DecisionThresholds, thresholds)))


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking for a remote prefill.

    outcome: see `policy/instructions.py`; empty while it is under way. stages_s: how long
    its stages took, as far as they came (see `handover_clock.py`). detail: why its writer
    did not write, in its words; empty where another outcome than the writer's ended it.
    """

    attempt: Attempt
    outcome: Word = ""
    stages_s: dict[str, float] = {}
    detail: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, local or remote.

    request_id: the engine's name of it. age_s: since it was decided. queue: None when
    it was not known. local_s, remote_s: what either choice was to take, by the rates that
    had been measured; None without any. computed_s: what it took here.
    """

    request_id: str
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    verdict: Literal["local", "remote"]
    reason: Word
    queue: QueueSeen | None
    thresholds: Followed
    local_s: float | None = None
    remote_s: float | None = None
    local_tokens_per_s: float | None = None
    remote_tokens_per_s: float | None = None
    computed_s: float | None = None
    asked: Asked | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer, oldest first. lease_id: of its worker."""

    engine_id: EngineId
    lease_id: LeaseId
    decisions: list[Decision]


decode_explain: Decoder[Explain] = Decoder(Explain)
decode_explained: Decoder[Explained] = Decoder(Explained)
