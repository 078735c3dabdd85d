"""Messages of a remote prefill.

A remote prefill is one *attempt*: a fresh id per try of a request. Each message about an attempt
names it; one about an attempt that is not current is refused or ignored, never applied. The decode
engine is in the message, in its subject, or is the receiver. Messages between a worker and its own
engine name no attempt.
"""

from typing import Annotated, Literal

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, Decoder
from dynamo_lite.protocol.generate import Adapter, Count, RequestId, Timestamp, TokenId
from dynamo_lite.protocol.records import LeaseId, Natural, Positive

AttemptId = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")]
#: Part of subjects and keys.
EngineId = Annotated[str, msgspec.Meta(pattern=rf"^{names.ENGINE_ID}\Z")]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
#: vLLM's placeholder for a block that is not needed.
NULL_BLOCK = 0
#: Random, of 63 bits; 0: no claim.
ClaimId = Natural


class FirstTokenWanted(msgspec.Struct, frozen=True, kw_only=True):
    """In a job: the prefill worker is asked for the first token of the greedy answer, too."""

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
    #: Its blocks for the positions before. The writer may read them while its claim holds. Empty
    #: if the engine does not guarantee their contents.
    prefix_block_ids: list[BlockId] = []
    #: `block_ids` of the model's other KV groups: a list for each group after the first. In a job
    #: with them NULL_BLOCK stands where a group needs no block.
    other_groups: list[list[BlockId]] = []
    #: Seconds since the epoch by the decode host's clock, for people who read a job. No other host
    #: compares it with its own clock: the decode engine refuses claims after the deadline by its
    #: own monotonic clock.
    deadline: Timestamp
    priority: int = 0
    cache_salt: str | None = None
    #: With the digest of the decode worker's files.
    adapter: Adapter | None = None
    trace_headers: dict[str, str] | None = None
    #: None: the first token is not wanted. A worker need not send it: the decode engine computes
    #: it in any case.
    first_token: FirstTokenWanted | None = None
    wire_version: int = WIRE_VERSION


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine: may I write this attempt, and may I go on?

    The first one, before anything is computed, makes the worker the attempt's writer. It is
    repeated while the worker works on the attempt: each answer extends the claim, or ends it.
    """

    attempt: AttemptId
    #: Random; the same in all messages of one writer about one attempt. Only the writer knows it.
    claim: Positive
    writer_lease_id: LeaseId


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The claim holds. Each side counts `for_s` by its own clock: the writer starts no write and no
    read later than that after it *sent* the claim; the engine keeps the blocks for as long after it
    *answered*."""

    for_s: Annotated[float, msgspec.Meta(gt=0, le=60)]


class ClaimRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This worker must not write the attempt, or must not write it any more."""

    reason: str


#: How a writer's work on an attempt ended. "written": the data and its notification are delivered.
WriterOutcome = Literal["written", "failed", "abandoned"]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill worker to decode engine: no write or read of this attempt is in flight, and it starts
    none any more."""

    attempt: AttemptId
    #: 0: the worker has not claimed the attempt.
    claim: ClaimId = 0
    outcome: WriterOutcome
    detail: str = ""


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


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The same `length` bytes, from `offset` on, in each block of several regions of a rank."""

    #: First of these regions, in the order of the rank's metadata.
    first: Natural
    #: How many regions.
    count: Positive
    offset: Natural
    length: Positive


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """NIXL notification: this write of one prefill rank into one decode rank has arrived."""

    attempt: AttemptId
    #: That of the claim under which it was written. Under another one than the attempt's it does
    #: not count.
    claim: ClaimId
    #: The writing rank.
    rank: Natural
    #: First of the attempt's blocks that were written, and how many. In the commit: 0, and all.
    first: Natural = 0
    num_blocks: Natural
    #: How many ranks write into this decode rank. Its KV is complete when all have committed.
    writers: Positive = 1
    #: The bytes of each block that this rank writes.
    parts: list[Part] = []
    #: Whether it is the rank's last write, the commit.
    last: bool = False


decode_job: Decoder[RemotePrefillRequest] = Decoder(RemotePrefillRequest)
decode_claim: Decoder[Claim] = Decoder(Claim)
decode_claim_reply: Decoder[Held | ClaimRefused] = Decoder(Held | ClaimRefused)
decode_done: Decoder[Done] = Decoder(Done)
decode_first_token: Decoder[FirstToken] = Decoder(FirstToken)
decode_written: Decoder[Written] = Decoder(Written)
