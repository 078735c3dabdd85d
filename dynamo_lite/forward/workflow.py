"""One workflow for all protocols: sanitize, choose, prefill, extract, decode, relay, settle.

This module owns the retries after a failure. They end when the first byte of the answer is on its
way to the client. `placing.py` chooses the engines of an attempt, `attempt.py` is one, `orders.py`
sends its legs, and `protocols/` has the handover protocols.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from dynamo_lite.forward.attempt import ForwardJob, ForwardParts, RequestAttempt
from dynamo_lite.forward.client import Answer, Client, ClientGone
from dynamo_lite.forward.decision_log import ForwardDecisionLog
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import Broken, Final, LegFailed, failure_answer
from dynamo_lite.forward.orders import ORDERS
from dynamo_lite.forward.placing import NoEngine

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

    async def answer(self, job: ForwardJob, names: Sequence[str]) -> None:
        """names: of prefill engines, by the client's header; only a sidecar follows them. Raises
        ClientGone, and Final where they are refused."""
        if job.request.route:
            if self._named is not None:
                job.tried.named = await self._named(names)
            self.decisions.append(job.note)
        await self._run(job)

    async def refuse(self, client: Client, answer: Answer) -> None:
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
            except NoEngine as exc:
                job.note.message.error = str(exc)
                answer = exc.answer if failure is None else failure_answer(failure)
            except LegFailed as exc:
                failure = exc
                if self._retries(job, exc):
                    continue
                answer = failure_answer(exc)
            return await self.refuse(job.client, answer)

    async def _attempt(self, job: ForwardJob) -> None:
        """Raises LegFailed, NoEngine, and what `_until_answered` raises."""
        placement = self._parts.placer.place(job.request, job.tried)
        with RequestAttempt(self._parts, job, placement) as attempt:
            await ORDERS[attempt.order](attempt)

    def _retries(self, job: ForwardJob, failure: LegFailed) -> bool:
        """Whether another attempt follows. It does not take the engine that has failed."""
        job.note.failed(failure)
        self.stats.failures[failure.leg, failure.kind] += 1
        logger.info("a %s leg has failed: %s", failure.leg, failure)
        tried, number = job.tried, failure.engine.number
        if failure.leg == "prefill":
            if self._protocol.decodes_alone:
                tried.alone = "prefill_failed"
            else:
                # No decode engine could serve it alone, so the next prefill engine is tried, if
                # there is one.
                tried.prefill.add(number)
            return True
        tried.failed += 1
        # Another engine's answer would be as late, or as large.
        if failure.kind in ("timeout", "too_large") or tried.failed >= self._config.max_attempts:
            return False
        repeatable = bool(job.request.route) or job.method in _IDEMPOTENT
        if not repeatable and failure.kind != "refused":
            return False
        # An engine may close a connection that was idle: one such failure does not exclude it.
        if failure.kind != "broken" or tried.failed > 1:
            tried.decode.add(number)
        return True
