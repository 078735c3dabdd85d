"""What a prefill worker says to decode engines about its jobs: claims, and how they ended."""

import logging
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.disagg.prefill import claiming
from dynamo_lite.engine.base import AttemptOutcome
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import ProtocolError, Unavailable
from dynamo_lite.protocol.prefill import (
    Claim,
    ClaimRefused,
    Granted,
    RemotePrefillRequest,
    WriterDone,
)
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.drops import OnDrop
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.messaging import Messaging

logger = logging.getLogger(__name__)

#: For one answer; see `claiming.ask`.
_CLAIM_S = 2.0
#: How long the end of a job waits for the broker.
_TELL_S = 5.0
#: Two hosts' wall clocks that differ by more than this are reported.
_CLOCK_SKEW_S = 5.0


class Claims:
    """held: attempt -> number of its claim, of every claim that was sent and may have been
    granted, until its job is over.

    A job may come to this worker again, but only one delivery of it is worked on at a time,
    and each claim has a higher number than all before. So the end of a delivery holds for all
    claims made so far.
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
    ):
        self._namespace, self._lease_id = namespace, lease_id
        self._messaging, self._on_drop = messaging, on_drop
        self._wall, self._now = clock.wall, clock.monotonic
        self._log_limit = LogLimit(every_s=60.0)
        self._clock_differences = Counter(
            "dynamo_lite_prefill_clock_differences",
            f"Claims granted by a decode worker whose host's clock differs from this host's by"
            f" more than {_CLOCK_SKEW_S:g} s",
            registry=registry,
        )
        self.held: dict[str, int] = {}
        self._number = 0

    async def ask(
        self, request: RemotePrefillRequest, held_s: float, wanted: Callable[[], bool]
    ) -> ClaimRefused | None:
        """None when granted. The caller takes the attempt out of `held` when its job is over.

        held_s: since the job was pulled. wanted: see `claiming.ask`. Raises NoResponders: not
        granted; DeadlineExceeded, BrokerUnavailable or ProtocolError: it may have been granted.
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
        asked, asked_wall = self._now(), self._wall()
        try:
            answer = await claiming.ask(
                self._messaging, subject, claim, timeout_s=_CLAIM_S, wanted=wanted
            )
        except ProtocolError:
            self._on_drop("claim_reply")
            raise
        if isinstance(answer, ClaimRefused):
            return answer
        self._compare_clocks(request.engine_id, answer, asked_wall, self._now() - asked)
        return None

    async def tell_end(
        self,
        engine_id: str,
        request_id: str | None,
        ended: AttemptOutcome,
        granted: float | None = None,
    ) -> bool:
        """From here on no write of this attempt by the claims so far comes from this worker.

        Waits a few seconds for the broker. Returns whether the message was sent. It may get
        lost after that; then the engine waits until its own deadline. request_id: where it is
        known, for the log. granted: when its claim was.
        """
        took_s = None
        if granted is not None and ended.written_at is not None:
            took_s = max(0.0, ended.written_at - granted)
        done = msgspec.structs.replace(
            msgspec.convert(ended, WriterDone, from_attributes=True),
            writer_lease_id=self._lease_id,
            took_s=took_s,
            number=self._number,
        )
        subject = names.writer_done_subject(self._namespace, engine_id)
        try:
            await self._messaging.wait_connected(_TELL_S)
            await self._messaging.publish(subject, encode_sealed(done))
        except Unavailable as exc:
            about = request_id, ended.attempt, exc
            logger.warning("request %s: attempt %s: its end is not told: %s", *about)
            return False
        return True

    def _compare_clocks(
        self, engine_id: str, granted: Granted, asked_wall: float, round_trip_s: float
    ) -> None:
        """Reports hosts whose clocks differ. Nothing in the protocol depends on them; logs,
        traces and whoever reads a job's deadline do."""
        if granted.granted_at is None:
            return
        ahead_s = granted.granted_at - (asked_wall + round_trip_s / 2)
        if abs(ahead_s) <= _CLOCK_SKEW_S + round_trip_s / 2:
            return
        self._clock_differences.inc()
        if self._log_limit.allow() is not None:
            logger.warning(
                "the clock of the host of engine %s is %.1f s %s this host's: check that both"
                " hosts synchronise their clocks (NTP); prefills go on, but logs and traces of"
                " the two do not line up",
                engine_id,
                abs(ahead_s),
                "ahead of" if ahead_s > 0 else "behind",
            )
