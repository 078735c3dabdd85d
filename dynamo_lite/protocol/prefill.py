"""Messages of a remote prefill.

A remote prefill is one *attempt*: a fresh id per try of a request. Every
message names (engine_id, attempt); a message about an attempt that is not
current is refused or ignored, never applied.
"""

from typing import Annotated, Literal

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder, SealedDecoder
from dynamo_lite.protocol.generate import RequestId, Seconds, Timestamp, TokenId
from dynamo_lite.protocol.records import EngineMetadata, LeaseId, Natural, Positive

Attempt = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")]
#: It becomes part of subjects and keys.
EngineId = Annotated[str, msgspec.Meta(pattern=rf"^{names.ENGINE_ID}\Z")]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class RemotePrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The job on the prefill queue.

    prompt_token_ids: the tokens whose KV is wanted, from position 0 (the prompt
    without its last token, which the decode engine computes itself).
    num_computed_tokens: how many of them the decode engine holds already
    (a multiple of its block size).
    block_ids: the decode engine's blocks for the positions from
    num_computed_tokens on, in order.
    prefix_block_ids: its blocks for the positions before, which whoever is granted
    the claim may read until it is done; empty where the engine does not vouch for them.
    deadline: seconds since the epoch by the decode host's clock, for people who read a job.
    No other host compares it with its own clock: the decode engine refuses claims that come
    after its deadline by its own monotonic clock.
    """

    engine_id: EngineId
    request_id: RequestId
    attempt: Attempt
    prompt_token_ids: list[TokenId]
    num_computed_tokens: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: list[BlockId]
    prefix_block_ids: list[BlockId] = []
    deadline: Timestamp
    priority: int = 0
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    wire_version: int = WIRE_VERSION


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine, before its first write.

    held_s: since it pulled the job. number: higher than that of every claim which the worker
    has made before.
    """

    attempt: Attempt
    writer_lease_id: LeaseId
    held_s: Seconds = 0.0
    number: Natural = 0


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt is wanted; its blocks stay reserved until the writer is done.

    granted_at: by the wall clock of the engine's host. The worker compares it with its own
    clock to warn of a difference; nothing is decided by it.
    """

    granted_at: Timestamp | None = None


class ClaimRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt must not be written by this worker now.

    elsewhere: another worker, or a later try, may be granted it.
    """

    reason: str
    elsewhere: bool = False


class WriterDone(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine: no write or read of this attempt is or will be under way.

    outcome: "written" (the data and its notification are delivered), "failed",
    "abandoned", or "died": the engine's process ended, and what it had started may
    still land. writer_lease_id: who says so; nobody else's word
    frees blocks that a writer holds. took_s: of what was written, from the granted claim to
    the end of the last write; durations mean the same on all hosts. number: of the last
    claim that it is said of. A job comes again, and words overtake each other: the end of an
    earlier claim says nothing of a later one.
    """

    attempt: Attempt
    outcome: Literal["written", "failed", "abandoned", "died"]
    detail: str = ""
    writer_lease_id: LeaseId = 0
    took_s: Seconds | None = None
    number: Natural = 0


class WriterStays(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker that is leaving, to a decode engine: this attempt I still finish.

    Its keys are gone already; this promise takes the lease's place. It writes
    for at most `for_s` seconds from the moment it sent this, unless it sends
    another one. Only `StayAccepted` binds the decode engine: on any other answer, also an
    empty one, the worker abandons the attempt and writes no longer than it had been
    allowed to. number: of the claim that it means.
    """

    attempt: Attempt
    writer_lease_id: LeaseId
    for_s: Annotated[float, msgspec.Meta(gt=0, le=60)]
    number: Natural = 0


class StayAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt's blocks are held for this writer, and will be while its promise lasts."""


class StayRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The attempt's blocks are not held for this writer: they may be another request's."""

    reason: str


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Decode engine to the writer that holds the claim: stop, then say `WriterDone`."""

    attempt: Attempt
    engine_id: EngineId


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Decode worker to its own engine: ask for no remote prefill any more."""

    lease_id: LeaseId


class LinkTest(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to its own engine: try the way to this decode engine.

    order: names this try; no other one of any worker has the same name.
    """

    order: Attempt
    target: EngineMetadata


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to a decode worker, which passes it on to its engine: poll for
    transfers for `for_s` seconds, also if there is nothing to compute; 0: it is over.

    An engine that makes no steps makes no progress with transfers, either.
    """

    writer_lease_id: LeaseId
    for_s: Annotated[float, msgspec.Meta(ge=0, le=10)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The same `length` bytes, from `offset` on, in each block of several of a rank's regions.

    first, count: of these regions, in the order of the rank's metadata.
    """

    first: Natural
    count: Positive
    offset: Natural
    length: Positive


class Landed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Travels with a write that is not the last one: these blocks are there.

    first, num_blocks: which of the attempt's blocks. sampled: positions in the attempt.
    All else: as in `Committed`.
    """

    attempt: Attempt
    rank: Natural
    first: Natural
    num_blocks: Natural
    sampled: list[Natural] = []
    checksum: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    writers: Positive = 1
    parts: list[Part] = []


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Travels as the NIXL notification of one writing rank's last write into a decode rank.

    rank: the writing one. writers: how many of them write into this decode rank; its
    KV is there when all have committed. parts: what this one brings of each block.
    num_blocks: written by it for the attempt. sampled: positions among them
    whose contents, in these parts, `checksum` covers (see `transfer/digest.py`);
    empty: unchecked.
    """

    attempt: Attempt
    rank: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0)]
    sampled: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    checksum: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    writers: Annotated[int, msgspec.Meta(gt=0)] = 1
    parts: list[Part] = []


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to `describe`.

    free_blocks, total_blocks: of its KV pool; prefix-cached blocks that nobody
    uses count as free. waiting: requests that wait for remote KV. quarantined:
    attempts whose blocks are held back because a writer may still touch them.
    queue_jobs: jobs on the prefill queue as this engine last saw it; None when
    it has not seen it lately. last_step_age_s: since its scheduler began its last
    step. unresponsive_writers: prefill workers that are registered, but silent or
    not able to work. unusable_writers: those that respond, but whose link to this engine
    has failed. options_version: of the live options that its decisions follow.
    """

    metadata: EngineMetadata
    free_blocks: int
    total_blocks: int
    waiting: int = 0
    quarantined: int = 0
    queue_jobs: int | None = None
    last_step_age_s: float | None = None
    unresponsive_writers: int = 0
    options_version: int = 0
    unusable_writers: int = 0


decode_engine_status: Decoder[EngineStatus] = Decoder(EngineStatus)
decode_job: Decoder[RemotePrefillRequest] = SealedDecoder(RemotePrefillRequest)
decode_claim: Decoder[Claim] = SealedDecoder(Claim)
decode_claim_reply: Decoder[Granted | ClaimRefused] = Decoder(Granted | ClaimRefused)
decode_writer_done: Decoder[WriterDone] = SealedDecoder(WriterDone)
decode_writer_stays: Decoder[WriterStays] = SealedDecoder(WriterStays)
decode_stay_reply: Decoder[StayAccepted | StayRefused] = Decoder(StayAccepted | StayRefused)
decode_cancel_attempt: Decoder[CancelAttempt] = SealedDecoder(CancelAttempt)
decode_leave: Decoder[Leave] = SealedDecoder(Leave)
decode_preflight: Decoder[LinkTest] = SealedDecoder(LinkTest)
decode_listen: Decoder[Listen] = SealedDecoder(Listen)
decode_notice: Decoder[Committed | Landed] = SealedDecoder(Committed | Landed)
