"""A prefill worker's messages to decode engines about its jobs: claims and outcomes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.disagg.attempts.grants import GrantFault, GrantWanted, check_grant
from dynamo_lite.disagg.engine import AttemptOutcome
from dynamo_lite.disagg.prefill.job_waits import JobWaits
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import BadGrant, DeadlineExceeded, ProtocolError, Unavailable
from dynamo_lite.protocol.grant import Grant, blocks_digest
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    FirstToken,
    Granted,
    RemotePrefillRequest,
    WriterDone,
    decode_claim_reply,
)
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

#: How often a claim is sent that is not answered.
TRIES = 3


@dataclass(frozen=True)
class HeldGrant:
    """A grant that was checked."""

    id: int
    #: Seconds until it expires.
    left_s: float


class Claims:
    """Sends claims, checks the grants, and reports how attempts ended.

    A job may be delivered to this worker again, but only one delivery of it runs at a time,
    and claim numbers increase. So the report of an end holds for all claims made so far.
    """

    def __init__(
        self,
        *,
        namespace: str,
        lease_id: int,
        messaging: Messaging,
        registry: CollectorRegistry,
        clock: Clock,
        on_drop: OnDrop,
        waits: JobWaits,
    ):
        self._namespace, self._lease_id, self._waits = namespace, lease_id, waits
        self._messaging, self._on_drop = messaging, on_drop
        self._boottime = clock.boottime
        self._bad_grants = Counter(
            "dynamo_lite_prefill_bad_grants",
            "Grants that this worker did not act on, by what was wrong with them",
            ["fault"],
            registry=registry,
        )
        #: Attempt -> number of its claim, for claims that were sent and may be granted. The
        #: caller of `ask` removes an attempt when its job is over.
        self.held: dict[str, int] = {}
        self._number = 0

    async def ask(
        self,
        request: RemotePrefillRequest,
        incarnation: str,
        held_s: float,
        wanted: Callable[[], bool],
    ) -> ClaimRefused | HeldGrant:
        """Claims the job.

        incarnation: engine id in the metadata that its writes will use. held_s: seconds since the
        job was pulled. wanted: see `ask_claim`. Raises NoResponders if it was not granted;
        DeadlineExceeded, BrokerUnavailable or ProtocolError if it may have been; BadGrant if the
        answer's grant is not one for this claim.
        """
        self._number += 1
        self.held[request.attempt] = number = self._number
        claim = Claim(
            attempt=request.attempt,
            writer_lease_id=self._lease_id,
            held_s=held_s,
            number=number,
        )
        subject = names.claim_subject(self._namespace, request.engine_id)
        since = self._boottime()
        try:
            answer = await ask_claim(
                self._messaging, subject, claim, timeout_s=self._waits.claim_s, wanted=wanted
            )
        except ProtocolError:
            self._on_drop("claim_reply")
            raise
        if isinstance(answer, ClaimRefused):
            return answer
        wanted_grant = GrantWanted(
            engine_id=incarnation,
            attempt=request.attempt,
            writer_lease_id=self._lease_id,
            claim=number,
            blocks=blocks_digest(request.block_ids, request.prefix_block_ids),
        )
        return self._checked(answer.grant, wanted_grant, self._boottime() - since)

    def _checked(self, grant: Grant | None, wanted: GrantWanted, elapsed_s: float) -> HeldGrant:
        mismatch = check_grant(grant, wanted, authentic=True, elapsed_s=elapsed_s)
        if mismatch is not None:
            self._bad_grants.labels(mismatch.fault.value).inc()
            raise BadGrant(mismatch.detail)
        assert grant is not None
        return HeldGrant(grant.id, grant.for_s - elapsed_s)

    def expired(self, request: RemotePrefillRequest) -> None:
        """The grant of a claim has expired while its job was under way."""
        self._bad_grants.labels(GrantFault.EXPIRED.value).inc()
        about = request.request_id, request.attempt
        logger.warning("request %s: attempt %s: its grant expired: it writes no more", *about)

    async def report_end(
        self,
        engine_id: str,
        request_id: str | None,
        ended: AttemptOutcome,
    ) -> bool:
        """Promises that this worker writes nothing more of the attempt under its claims so far.

        Waits a few seconds for the broker. Returns whether the message was sent. If it is lost
        after that, the engine waits for its own deadline. request_id: for the log, if known.
        """
        done = msgspec.structs.replace(
            msgspec.convert(ended, WriterDone, from_attributes=True),
            writer_lease_id=self._lease_id,
            number=self._number,
        )
        subject = names.writer_done_subject(self._namespace, engine_id)
        try:
            await self._messaging.wait_connected(self._waits.report_s)
            await self._messaging.publish(subject, encode(done))
        except Unavailable as exc:
            about = request_id, ended.attempt, exc
            logger.warning("request %s: attempt %s: could not report its end: %s", *about)
            return False
        return True

    async def send_first_token(
        self, request: RemotePrefillRequest, token_id: int, cached: int
    ) -> None:
        """Sends the first token of the answer to the decode worker. If it gets lost, the decode
        engine's is sent to the client. cached: prompt tokens in this engine's prefix cache."""
        if request.first_token is None:
            return
        first = FirstToken(
            request_id=request.request_id,
            attempt=request.attempt,
            token_id=token_id,
            cached_tokens=request.first_token.cached_tokens,
            writer_cached_tokens=cached,
        )
        subject = names.first_token_subject(self._namespace, request.engine_id)
        try:
            await self._messaging.publish(subject, encode(first))
        except Unavailable as exc:
            about = request.request_id, request.attempt, exc
            logger.info("request %s: attempt %s: its first token was not sent: %s", *about)


async def ask_claim(
    messaging: Messaging,
    subject: str,
    claim: Claim,
    *,
    timeout_s: float,
    wanted: Callable[[], bool] = lambda: True,
) -> Granted | ClaimRefused:
    """Returns the decode engine's reply. An engine in a long step answers late.

    timeout_s: for each try. wanted: whether the claim is still wanted; if not, it is not tried
    again.

    All tries send the same claim; the engine grants a claim again to the worker that holds it.
    Raises NoResponders if it was not granted. Raises DeadlineExceeded, BrokerUnavailable or
    ProtocolError if it may have been granted: the caller must give it back. A refusal after a
    try that timed out raises DeadlineExceeded: that try may have been granted and withdrawn.
    """
    unanswered: DeadlineExceeded | None = None
    for tried in range(TRIES):
        if unanswered is not None and not wanted():
            break
        now = msgspec.structs.replace(claim, held_s=claim.held_s + tried * timeout_s)
        try:
            reply = await messaging.request(subject, encode(now), timeout_s=timeout_s)
        except DeadlineExceeded:
            unanswered = DeadlineExceeded(f"request to {subject}", (tried + 1) * timeout_s)
            continue
        except Unavailable:
            if unanswered is not None:
                break
            raise
        answer = decode_claim_reply(reply)
        if unanswered is not None and isinstance(answer, ClaimRefused):
            break
        return answer
    assert unanswered is not None
    raise unanswered
