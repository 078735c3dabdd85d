"""One prefill job at its component: claim, compute and write beside the claim's renewals, done.

The claim is a lease on the attempt, which the decode engine extends with each answer. Until when
it holds is in the attempt's cell, which the engine's ranks read. A refusal ends the work: that is
how a decode engine cancels. So does the end of the claim, if no answer comes.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from dynamo_lite.disagg.engine import AttemptOutcome, PrefillEngine
from dynamo_lite.disagg.prefill.peer_links import PeerLink, PeerLinks
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import WIRE_VERSION, encode
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    DynamoLiteError,
    ProtocolError,
    Refused,
    Unavailable,
)
from dynamo_lite.protocol.prefill import (
    NULL_BLOCK,
    Claim,
    ClaimRefused,
    Done,
    FirstToken,
    Held,
    RemotePrefillRequest,
    WriterOutcome,
    decode_claim_reply,
)
from dynamo_lite.protocol.trace import traced
from dynamo_lite.protocol.versions import unsupported
from dynamo_lite.runtime.claim_cells import ClaimCells, OpenCell
from dynamo_lite.runtime.clock import SYSTEM_CLOCK, Clock
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.retry import retry_while_unavailable
from dynamo_lite.runtime.tasks import running
from dynamo_lite.runtime.tracing import Tracer

logger = logging.getLogger(__name__)

#: After which part of the time for which a claim holds it is renewed. A decode engine that sees the
#: keys of this worker go waits for one renewal (`LEAVING_S` of `disagg/attempts/ledger.py`).
RENEWAL = 1 / 12
#: How long a first claim is sent again without an answer, and while the engine does not listen.
_FIRST_S, _ABSENT_S = 3.0, 0.5
#: How long one try waits for its answer. An engine in a long step answers late.
_TRY_S = 1.0
#: Between two tries while the engine does not listen.
_PAUSE_S = 0.05
#: How long the report of an end waits for the broker.
_REPORT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class WriterParts:
    """What all jobs of a prefill worker need."""

    namespace: str
    lease_id: int
    engine: PrefillEngine
    #: Those that the engine's ranks read.
    cells: ClaimCells
    messaging: Messaging
    links: PeerLinks
    clock: Clock = SYSTEM_CLOCK
    on_drop: OnDrop = uncounted
    #: None without tracing.
    tracer: Tracer | None = None
    #: Returns a random id, above 0.
    new_claim: Callable[[], int] = lambda: secrets.randbits(63) or 1
    #: Set when the worker begins to leave.
    leaving: asyncio.Event = field(default_factory=asyncio.Event)


class JobAttempt:
    """The attempt of one pulled job, of which nothing is in the engine before and after `run`."""

    def __init__(self, parts: WriterParts, request: RemotePrefillRequest):
        self._parts, self.request, self._claim = parts, request, parts.new_claim()
        self._now, self._boottime = parts.clock.monotonic, parts.clock.boottime
        self._pulled = self._now()
        #: The job's span, and the one of its decode engine above it; None: it is not traced.
        self._above = None if parts.tracer is None else traced(request.trace_headers)
        self._span = None if self._above is None else self._above.child()
        #: Until when the claim holds, by CLOCK_BOOTTIME, and for how long each answer extends it.
        self._until = self._for_s = 0.0

    async def run(self) -> str:
        """Returns the outcome, as the counter shows it, when it was reported to the decode
        engine."""
        outcome = await self._run()
        self._record(outcome)
        return outcome

    async def _run(self) -> str:
        request, parts = self.request, self._parts
        if parts.leaving.is_set():
            return await self._give_back("abandoned", "this worker leaves", "abandoned")
        if request.wire_version != WIRE_VERSION:
            return await self._give_back("failed", unsupported(request.wire_version), "malformed")
        try:
            known = parts.links.known.get(request.engine_id)
            link = known or await parts.links.look_up(request.engine_id)
            if link is None:
                # The engine's process has ended, or the store has lost its record.
                why = "the store has no record of this engine"
                return await self._give_back("abandoned", why, "engine_gone")
            if link.mark:
                why = f"it cannot be written into: {link.mark}"
                return await self._give_back("failed", why, "unusable")
            _check_blocks(request, link)
        except ProtocolError as exc:  # the engine's record, or the job
            return await self._give_back("failed", str(exc), "malformed")
        except DynamoLiteError as exc:
            return await self._give_back("abandoned", str(exc), "abandoned")
        cell = parts.cells.open(self._claim)
        try:
            answer = await self._ask(cell, self._boottime() + _FIRST_S, absent_s=_ABSENT_S)
            if isinstance(answer, Held):
                ended = await self._compute(cell, link)
            else:
                why = "not answered" if answer is None else f"refused: {answer.reason}"
                ended = AttemptOutcome(request.attempt, "abandoned", f"its claim was {why}")
        finally:
            # Nothing is in flight, or the engine's process is dead or about to end.
            cell.free()
        # Also after a refusal: an earlier answer may have been lost, and the claim would hold.
        await self._report(ended.outcome, ended.detail, self._claim)
        return "refused" if isinstance(answer, ClaimRefused) else ended.outcome

    async def _compute(self, cell: OpenCell, link: PeerLink) -> AttemptOutcome:
        """The claim holds: has the job computed and written, and renews the claim meanwhile."""
        request, parts = self.request, self._parts
        job = request
        if parts.tracer is not None and self._span is not None:
            parts.tracer.record_child("claim", self._span, self._pulled, self._now())
            job = msgspec.structs.replace(job, trace_headers=self._span.headers())
        if not link.reads:
            job = msgspec.structs.replace(job, prefix_block_ids=[])
        try:
            async with running(self._renew(cell), name=f"claim {request.attempt}"):
                ended = await parts.engine.prefill(job, link.target, cell.cell, self._first_token)
        except Refused as exc:  # before the engine has the job
            return AttemptOutcome(request.attempt, "failed", str(exc))
        if ended.outcome == "written":
            link.failures = 0
        return ended

    async def _renew(self, cell: OpenCell) -> None:
        """Repeats the claim until it is refused or has ended. Then no write starts any more, and
        the engine stops its work on the job."""
        while True:
            await asyncio.sleep(self._for_s * RENEWAL)
            answer = await self._ask(cell, self._until)
            if not isinstance(answer, Held):
                cell.hold_until(0.0)
                self._log("stopped", "no answer" if answer is None else answer.reason)
                await self._parts.engine.abandon(self.request.attempt)
                return

    async def _ask(
        self, cell: OpenCell, until: float, absent_s: float | None = None
    ) -> Held | ClaimRefused | None:
        """Sends the claim until it is answered, until `until`, by CLOCK_BOOTTIME. None: it was not.
        absent_s: for how long while the engine does not listen."""
        parts, request = self._parts, self.request
        subject = names.claim_subject(parts.namespace, request.engine_id)
        claim = Claim(attempt=request.attempt, claim=self._claim, writer_lease_id=parts.lease_id)
        absent_until = until if absent_s is None else self._boottime() + absent_s
        while (left_s := until - (asked_at := self._boottime())) > 0:
            timeout_s = min(_TRY_S, left_s)
            try:
                reply = await parts.messaging.request(subject, encode(claim), timeout_s=timeout_s)
                answer = decode_claim_reply(reply)
            except Unavailable:  # the engine does not listen, or NATS is away
                if self._boottime() >= absent_until:
                    return None
                await asyncio.sleep(min(_PAUSE_S, left_s))
                continue
            except ProtocolError as exc:
                parts.on_drop("claim_reply")
                return ClaimRefused(reason=str(exc))
            except DeadlineExceeded:
                continue
            if isinstance(answer, Held):
                self._for_s, self._until = answer.for_s, asked_at + answer.for_s
                cell.hold_until(self._until)
            return answer
        return None

    async def _first_token(self, token_id: int) -> None:
        """Sends the first token of the answer to the decode worker. If it gets lost, the decode
        engine's is sent to the client."""
        request, parts = self.request, self._parts
        if request.first_token is None:
            return
        first = FirstToken(
            request_id=request.request_id,
            attempt=request.attempt,
            token_id=token_id,
            cached_tokens=request.first_token.cached_tokens,
        )
        subject = names.first_token_subject(parts.namespace, request.engine_id)
        try:
            await parts.messaging.publish(subject, encode(first))
        except DynamoLiteError as exc:
            self._log("first token not sent", str(exc))

    async def _give_back(self, outcome: WriterOutcome, why: str, counted: str) -> str:
        """Ends a job that this worker has not claimed. counted: the outcome for the counter."""
        await self._report(outcome, why, 0)
        return counted

    async def _report(self, outcome: WriterOutcome, detail: str, claim: int) -> None:
        """Tells the decode engine that this worker writes nothing more of the attempt. If that gets
        lost, the engine waits for the end of the claim."""
        request, parts = self.request, self._parts
        if outcome != "written":
            # The others are usual: a request was cancelled, or this worker leaves.
            level = logging.WARNING if outcome == "failed" else logging.INFO
            self._log(outcome, detail, level)
        done = Done(attempt=request.attempt, claim=claim, outcome=outcome, detail=detail)
        subject = names.done_subject(parts.namespace, request.engine_id)
        try:
            await retry_while_unavailable(
                lambda: parts.messaging.publish(subject, encode(done)), within_s=_REPORT_S
            )
        except Unavailable as exc:
            self._log("its end could not be reported", str(exc))

    def _record(self, outcome: str) -> None:
        """Records the job's span, if it is traced."""
        job, tracer = self.request, self._parts.tracer
        if tracer is None or self._span is None or self._above is None:
            return
        tracer.record(
            "prefill job",
            self._span,
            self._above.span_id,
            self._pulled,
            self._now(),
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

    def _log(self, what: str, why: str, level: int = logging.INFO) -> None:
        ids = self.request.request_id, self.request.attempt
        logger.log(level, "request %s: attempt %s: %s: %s", *ids, what, why)


def _check_blocks(request: RemotePrefillRequest, link: PeerLink) -> None:
    """Raises ProtocolError unless a job's blocks cover its tokens and are in the pool."""
    target = link.target
    size = target.block_size_tokens
    first, rest = divmod(request.num_computed_tokens, size)
    wanted = -(-len(request.prompt_token_ids) // size) - first
    if rest or wanted <= 0 or len(request.block_ids) != wanted:
        raise ProtocolError(
            f"{len(request.block_ids)} blocks of {size} tokens for tokens"
            f" {request.num_computed_tokens} to {len(request.prompt_token_ids)}"
        )
    if len(request.prefix_block_ids) not in (0, first):
        raise ProtocolError(
            f"{len(request.prefix_block_ids)} blocks of {size} tokens for the first"
            f" {request.num_computed_tokens} tokens"
        )
    others = request.other_groups
    if len(others) != link.groups - 1 or any(len(ids) != wanted for ids in others):
        raise ProtocolError(
            f"{[len(ids) for ids in others]} blocks in the other KV groups, not {wanted} in each of"
            f" {link.groups - 1}"
        )
    if others and request.prefix_block_ids:
        raise ProtocolError("prefix blocks of an engine with several KV groups")
    if others and any(ids[-1] == NULL_BLOCK for ids in (request.block_ids, *others)):
        raise ProtocolError("a KV group does not need the prompt's last block")
    highest = max(chain(request.block_ids, request.prefix_block_ids, *others))
    if highest >= target.num_blocks:
        raise ProtocolError(f"block {highest} is not one of the engine's {target.num_blocks}")
