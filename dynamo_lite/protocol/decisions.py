"""Decisions between local and remote prefill: their inputs, questions about them, and the answers.

Times are durations, since the clocks of two hosts differ.
"""

import math
from typing import Annotated, Literal

import msgspec

from dynamo_lite.protocol.codec import Decoder
from dynamo_lite.protocol.generate import Seconds
from dynamo_lite.protocol.options import DisaggOptions
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
    """The prefill queue as a decision sees it."""

    #: Jobs waiting and in flight when the queue was read, plus the engine's own jobs since then.
    jobs: int
    #: Number of workers that respond and have no known failed link to the engine.
    prefill_workers: int
    #: Seconds since the queue was read.
    age_s: float
    #: Tokens to compute of these jobs, estimated from the queue's bytes; at least this engine's.
    tokens: int = 0
    #: Number of all workers that respond.
    prefill_workers_alive: int = 0


class DecisionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision is made from, beside the thresholds, and recorded with."""

    prompt_tokens: int
    #: The engine's own prefix hit. All tokens that are neither cached nor offloaded are computed.
    cached_tokens: int
    #: Tokens beyond these that another KV connector of the engine can load.
    offloaded_tokens: int = 0
    #: None when it was never read.
    queue: QueueSeen | None = None
    #: Time limit of a remote prefill.
    time_left_s: float = math.inf
    #: Whether the prompt's KV depends on its tokens, cache salt and LoRA adapter only.
    transferable: bool = True
    #: Whether this decode worker is leaving.
    leaving: bool = False
    #: Whether the prompt has waited for another request's remote prefill, which brought its prefix.
    prefix_awaited: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a remote prefill."""

    attempt: AttemptId
    #: See `Outcome` in `disagg/attempts/ledger.py`; empty while it is in flight.
    outcome: Word = ""
    #: Duration of each stage that was reached (see `disagg/decode/remote_prefill.py`).
    stages_s: dict[str, float] = {}
    #: Why its writer did not write, as the writer reported it, or why the prefill was taken back;
    #: empty if something else ended it.
    detail: str = ""


class Decision(DecisionInputs, frozen=True, kw_only=True):
    """The decision for one prompt, local or remote."""

    #: The engine's id of the request.
    request_id: str
    #: Since the decision.
    age_s: float
    verdict: Literal["local", "remote"]
    reason: Word
    thresholds: DisaggOptions
    asked: Asked | None = None


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer, oldest decision first."""

    engine_id: EngineId
    #: Of the engine's worker.
    lease_id: LeaseId
    decisions: list[Decision]


decode_explain: Decoder[Explain] = Decoder(Explain)
decode_explained: Decoder[Explained] = Decoder(Explained)
