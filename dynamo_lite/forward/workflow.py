"""One workflow for all protocols: sanitize, choose, prefill, extract, decode, relay, settle.

This module owns the retries after a failure. They end when the first byte of the answer is on its
way to the client. `placing.py` chooses the engines of an attempt, `attempt.py` is one, `orders.py`
sends its legs, and `protocols/` has the handover protocols.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence

from dynamo_lite.forward import bodies, orders
from dynamo_lite.forward.attempt import ForwardJob, ForwardParts, RequestAttempt
from dynamo_lite.forward.client import Answer, Client, ClientGone, Incoming, error
from dynamo_lite.forward.decision_log import ForwardDecisionLog, RequestNote
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import RETRY_AFTER, Broken, Final, LegFailed, failure_answer
from dynamo_lite.forward.placing import CannotServe, EnginePlacement, Tried
from dynamo_lite.forward.protocols.base import HandoverAttempt
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.forwarding import ForwardAttempt

logger = logging.getLogger(__name__)

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS"})

#: Takes HOST:PORT of each. Raises Final.
NamedEngines = Callable[[Sequence[str]], Awaitable[Sequence[KnownEngine]]]


class Forwarding:
    """named: finds the prefill engines that a client has named; None: engines are chosen here."""

    def __init__(self, parts: ForwardParts, named: NamedEngines | None = None):
        self._named = named
        self._parts, self._protocol, self._config = parts, parts.protocol, parts.config
        self.stats = parts.stats
        self.decisions = ForwardDecisionLog()

    async def answer(self, incoming: Incoming, route: str, data: bytes, client: Client) -> None:
        """route: of a request to generate; any other is passed unchanged to one decode engine.
        Raises ClientGone."""
        tried = Tried()
        try:
            request = bodies.read(route, data)
            if self._named is not None and request.route:
                tried.named = await self._named(incoming.named)
        except Final as refused:
            return await self._refuse(client, refused.answer)
        note = client.note = RequestNote(request.route, incoming.client_id, self._config)
        if request.route:
            self.decisions.append(note)
        await self._run(ForwardJob(incoming, request, client, note, tried))

    async def _refuse(self, client: Client, answer: Answer) -> None:
        self.stats.refused[answer.status] += 1
        await client.send(answer)

    async def _run(self, job: ForwardJob) -> None:
        self.stats.in_flight += 1
        outcome = "failed"
        try:
            await self._until_answered(job)
            outcome = "answered"
        except (ClientGone, asyncio.CancelledError):
            outcome = "client gone"
            raise
        except Final as final:
            outcome = "answered"
            await job.client.send(final.answer)
        except Broken as exc:
            outcome = "broken"
            job.note.failed(exc)
            logger.warning("an answer broke off: %s", exc)
        finally:
            self.stats.in_flight -= 1
            self.stats.ended[outcome] += 1
            job.note.ended(outcome)

    async def _until_answered(self, job: ForwardJob) -> None:
        """Raises Final, Broken, ClientGone."""
        failure: LegFailed | None = None
        while True:
            try:
                return await self._attempt(job)
            except CannotServe as exc:
                job.note.no_engine(exc)
                answer = error(501, "NotImplementedError", str(exc))
            except NoWorkers as exc:
                job.note.no_engine(exc)
                text = f"{exc}; try again later"
                answer = error(503, "ServiceUnavailableError", text, RETRY_AFTER)
                if failure is not None:
                    answer = failure_answer(failure)
            except LegFailed as exc:
                failure = exc
                if self._retries(job, exc):
                    continue
                answer = failure_answer(exc)
            return await self._refuse(job.client, answer)

    async def _attempt(self, job: ForwardJob) -> None:
        """Raises LegFailed, NoWorkers, CannotServe, and what `_until_answered` raises."""
        placement, ids = self._parts.placer.place(job.request, job.tried), None
        noted = ForwardAttempt(alone=placement.alone, choices=placement.choices)
        order = orders.alone
        if placement.prefill is not None:
            ids = self._ids(job, placement)
            noted.order = self._protocol.order_for(ids.prefill)
            order = orders.ORDERS[noted.order]
        job.note.tries(noted, placement.prompt_tokens, ids.request_id if ids is not None else "")
        with RequestAttempt(self._parts, job, placement, ids) as attempt:
            await order(attempt)

    def _ids(self, job: ForwardJob, placement: EnginePlacement) -> HandoverAttempt:
        assert placement.prefill is not None
        count = job.request.sequences if self._protocol.batches else 1
        return HandoverAttempt(
            route=job.request.route,
            unique=secrets.token_hex(16),
            client_id=job.incoming.client_id,
            rooms=tuple(secrets.randbits(63) for _ in range(count)),
            prefill=placement.prefill.peer,
            decode=placement.decode.peer,
        )

    def _retries(self, job: ForwardJob, failure: LegFailed) -> bool:
        """Whether another attempt follows. It does not take the engine that has failed."""
        job.note.failed(failure)
        self.stats.failures[failure.leg, failure.kind] += 1
        logger.info("a %s leg has failed: %s", failure.leg, failure)
        engine = failure.engine
        if failure.leg == "prefill":
            if self._protocol.decodes_alone:
                job.tried.alone = "prefill_failed"
            else:
                # No decode engine could serve it alone, so the next prefill engine is tried, if
                # there is one.
                job.tried.prefill.add(engine.number)
            return True
        job.failed += 1
        repeatable = bool(job.request.route) or job.incoming.method in _IDEMPOTENT
        # Another engine's answer would be as late, or as large.
        if failure.kind in ("timeout", "too_large") or job.failed >= self._config.max_attempts:
            return False
        if not repeatable and failure.kind != "refused":
            return False
        # An engine may close a connection that was idle: one such failure does not exclude it.
        if failure.kind != "broken" or job.failed > 1:
            job.tried.decode.add(engine.number)
        return True
