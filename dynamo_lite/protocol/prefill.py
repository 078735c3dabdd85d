"""Messages of a remote prefill.

A remote prefill is one *attempt*: a fresh id per try of a request. Each message about an attempt
names it; one about an attempt that is not current is refused or ignored, never applied. The decode
engine is in the message, in its subject, or is the receiver. Messages between a worker and its own
engine name no attempt.
"""

from typing import Annotated, Literal

import msgspec

from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.generate import Count, RequestId, Seconds, Timestamp, TokenId
from dynamo_lite.protocol.grant import AttemptId, BlockId, EngineId, Grant, GrantId
from dynamo_lite.protocol.records import EngineMetadata, LeaseId, Natural, Positive


class FirstTokenSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's first token is sampled. The defaults are greedy."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    #: 0: all tokens.
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    #: Of the random generator; None for a greedy request.
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class FirstTokenWanted(msgspec.Struct, frozen=True, kw_only=True):
    """In a job: the prefill worker is asked for the first token of the answer, too."""

    sampling: FirstTokenSampling
    #: The last token of the prompt.
    last_token_id: TokenId
    #: Prompt tokens in the decode engine's prefix cache. The writer sends the number back.
    cached_tokens: Count = 0


class RemotePrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The job on the prefill queue."""

    engine_id: EngineId
    request_id: RequestId
    attempt: AttemptId
    #: The tokens whose KV is wanted, from position 0: the prompt without its last token, which the
    #: decode engine computes itself.
    prompt_token_ids: list[TokenId]
    #: How many of them the decode engine holds already (a multiple of its block size).
    num_computed_tokens: Annotated[int, msgspec.Meta(ge=0)]
    #: The decode engine's blocks for the positions from num_computed_tokens on, in order.
    block_ids: list[BlockId]
    #: Its blocks for the positions before. The granted writer may read them until it is done. Empty
    #: if the engine does not guarantee their contents.
    prefix_block_ids: list[BlockId] = []
    #: Seconds since the epoch by the decode host's clock, for people who read a job. No other host
    #: compares it with its own clock: the decode engine refuses claims after the deadline by its
    #: own monotonic clock.
    deadline: Timestamp
    priority: int = 0
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    #: None: the first token is not wanted. A worker need not send it: the decode engine computes
    #: it in any case.
    first_token: FirstTokenWanted | None = None
    wire_version: int = WIRE_VERSION

    @property
    def tokens_to_compute(self) -> int:
        """Those that the decode engine does not hold."""
        return len(self.prompt_token_ids) - self.num_computed_tokens


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine, before its first write."""

    attempt: AttemptId
    writer_lease_id: LeaseId
    #: Seconds since the worker pulled the job.
    held_s: Seconds = 0.0
    #: Higher than in every earlier claim of this worker.
    number: Natural = 0


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt is wanted. Its blocks stay reserved until the writer is done."""

    #: The writer checks it, and writes nothing without it.
    grant: Grant | None = None


class ClaimRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This worker must not write the attempt now."""

    reason: str
    #: Another worker, or a later try, may be granted it.
    elsewhere: bool = False


class WriterDone(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine: no write or read of this attempt is or will be in flight."""

    attempt: AttemptId
    #: "written": the data and its notification are delivered. "died": the engine's process ended,
    #: and writes that it had started may still land.
    outcome: Literal["written", "failed", "abandoned", "died"]
    detail: str = ""
    #: The sender. Blocks that a writer holds are only freed by that writer's message.
    writer_lease_id: LeaseId = 0
    #: Number of the last claim that the message is about. Jobs are delivered again and messages
    #: overtake each other, so the end of an earlier claim does not end a later one.
    number: Natural = 0


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to the decode worker (not its engine): the first token of a request's answer.

    Sent before the KV has arrived, or together with it. It is the token of that prompt and its
    sampling parameters, also if the attempt fails later.
    """

    #: The decode engine's name of the request, from the job.
    request_id: RequestId
    attempt: AttemptId
    token_id: TokenId
    #: From the job.
    cached_tokens: Count = 0
    #: Prompt tokens in the prefill engine's own prefix cache.
    writer_cached_tokens: Count = 0


class WriterStays(msgspec.Struct, frozen=True, kw_only=True):
    """Draining prefill worker to decode engine: I still finish this attempt.

    Its keys are already deleted; this promise replaces the lease. It writes for at most `for_s`
    seconds from the moment it sent this, unless it sends another one. Only `StayAccepted` binds the
    decode engine. On any other answer, also an empty one, the worker abandons the attempt and
    writes no longer than it was allowed to before.
    """

    attempt: AttemptId
    writer_lease_id: LeaseId
    for_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    #: Number of the claim that the promise is about.
    number: Natural = 0


class StayAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt's blocks are held for this writer while its promise lasts."""


class StayRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt's blocks are not held for this writer: they may belong to another request."""

    reason: str


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Decode engine to the writer that holds the claim: stop, then send `WriterDone`."""

    attempt: AttemptId
    engine_id: EngineId


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Decode worker to its own engine: stop asking for remote prefills."""

    lease_id: LeaseId


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The same `length` bytes, from `offset` on, in each block of several regions of a rank."""

    #: First of these regions, in the order of the rank's metadata.
    first: Natural
    #: How many regions.
    count: Positive
    offset: Natural
    length: Positive


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Notification of a write that is not the last one: these blocks are written.

    Fields without a comment are as in `Committed`.
    """

    attempt: AttemptId
    rank: Natural
    #: First of the attempt's blocks that were written.
    first: Natural
    num_blocks: Natural
    writers: Positive = 1
    parts: list[Part] = []
    grant: GrantId = 0


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """NIXL notification of one writing rank's last write into a decode rank."""

    attempt: AttemptId
    #: The writing rank.
    rank: Annotated[int, msgspec.Meta(ge=0)]
    #: Blocks of the attempt that it has written.
    num_blocks: Annotated[int, msgspec.Meta(ge=0)]
    #: Prompt tokens that the prefill engine had in its prefix cache.
    cached_tokens: Count = 0
    #: How many ranks write into this decode rank. Its KV is complete when all have committed.
    writers: Annotated[int, msgspec.Meta(gt=0)] = 1
    #: The bytes of each block that this rank writes.
    parts: list[Part] = []
    #: The grant under which it wrote. A commit under another grant than the attempt's is dropped.
    grant: GrantId = 0


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to `describe`."""

    metadata: EngineMetadata
    #: Blocks of its KV pool. Prefix-cached blocks that no request uses count as free.
    free_blocks: int
    total_blocks: int
    #: Requests that wait for remote KV, and the tokens that prefill workers compute for them.
    waiting: int = 0
    waiting_tokens: int = 0
    #: Withdrawn attempts whose blocks are not reused because a writer may still write.
    quarantined: int = 0
    #: Jobs on the prefill queue as this engine last saw it, and their tokens; None if that was too
    #: long ago.
    queue_jobs: int | None = None
    queue_tokens: int | None = None
    #: Seconds since its scheduler began its last step.
    last_step_age_s: float | None = None
    #: Prefill workers that are registered but unresponsive or unhealthy.
    unresponsive_writers: int = 0
    #: Prefill workers that respond, but whose link to this engine has failed.
    unusable_writers: int = 0
    #: Leases of the prefill workers that may still write into its blocks: they hold the claim of an
    #: attempt that is not over.
    writers: list[LeaseId] = []


decode_engine_status: Decoder[EngineStatus] = Decoder(EngineStatus)
decode_job: Decoder[RemotePrefillRequest] = Decoder(RemotePrefillRequest)
decode_claim: Decoder[Claim] = Decoder(Claim)
decode_claim_reply: Decoder[Granted | ClaimRefused] = Decoder(Granted | ClaimRefused)
decode_writer_done: Decoder[WriterDone] = Decoder(WriterDone)
decode_first_token: Decoder[FirstToken] = Decoder(FirstToken)
decode_writer_stays: Decoder[WriterStays] = Decoder(WriterStays)
decode_stay_reply: Decoder[StayAccepted | StayRefused] = Decoder(StayAccepted | StayRefused)
decode_cancel_attempt: Decoder[CancelAttempt] = Decoder(CancelAttempt)
decode_leave: Decoder[Leave] = Decoder(Leave)
decode_notice: Decoder[Committed | Landed] = Decoder(Committed | Landed)
