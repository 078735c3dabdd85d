"""One workflow for all protocols: sanitize, choose, prefill, extract, decode, relay, settle.

This module owns the retries after a failure. They end when the first byte of the answer is on its
way to the client. `orders.py` runs one attempt, `placing.py` chooses its engines, and `protocols/`
has the handover protocols.
"""

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Self

from dynamo_lite.forward import bodies
from dynamo_lite.forward.bodies import ClientRequest, MalformedBody, TooDeep
from dynamo_lite.forward.client import Answer, Client, ClientGone, Incoming, error, send
from dynamo_lite.forward.decision_log import ForwardDecisionLog
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import (
    RETRY_AFTER,
    Broken,
    DecodeFailed,
    EngineFailed,
    Final,
    PrefillFailed,
    failure_answer,
)
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.job import ForwardJob, noted
from dynamo_lite.forward.legs import Legs
from dynamo_lite.forward.merged import MergedOrder
from dynamo_lite.forward.notes import AttemptNote, NotedLegs
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.orders import LegOrders
from dynamo_lite.forward.placing import CannotServe, EnginePlacement, Places
from dynamo_lite.forward.protocols.base import ForwardProtocol, HandoverAttempt, LegOrder, Peer
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.policy.routing.prompt_tokens import PromptTokens
from dynamo_lite.protocol.errors import NoWorkers

logger = logging.getLogger(__name__)

#: More sequences in one request than any engine runs.
MAX_SEQUENCES = 4096
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS"})
#: Stands for an engine that is not chosen yet.
_NO_PEER = Peer(address="", host="", port=0)


TokenizePrompt = Callable[[Incoming, ClientRequest], Awaitable[PromptTokens | None]]


def _unique() -> str:
    return secrets.token_hex(16)


@dataclass(slots=True)
class Stats:
    """Counts since the start."""

    #: Answers by how (`disaggregated`, `alone`, `passed`) and why.
    answered: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Failed legs by leg and kind.
    failures: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    #: Errors that the client got, by status, without errors of engines that are passed on.
    refused: Counter[int] = field(default_factory=Counter[int])
    #: Answers that broke off after their first byte.
    broken: int = 0
    #: Clients that disconnected before the end of their answer.
    gone: int = 0
    #: Fields that clients must not set, and that were removed.
    removed_fields: int = 0
    in_flight: int = 0


class Forwarding:
    """Async context manager.

    tokens: finds the tokens of prompts; None: they are not needed. unique: returns 32 new
    hexadecimal digits each time. rng: draws the numbers of rooms.
    """

    def __init__(
        self,
        protocol: ForwardProtocol,
        config: ForwarderConfig,
        placer: Places,
        upstream: Upstream,
        monitor: EngineMonitor,
        *,
        tokens: TokenizePrompt | None = None,
        unique: Callable[[], str] = _unique,
        rng: random.Random | None = None,
    ):
        self.stats = Stats()
        self.decisions = ForwardDecisionLog(config)
        self._tokens = tokens
        self._protocol, self._config, self._placer = protocol, config, placer
        self._unique, self._rng = unique, rng or random.SystemRandom()

        def open_legs(job: ForwardJob) -> Legs:
            return NotedLegs(job.incoming, upstream, monitor, config, job.note)

        answered = self.stats.answered
        self._orders = LegOrders(protocol, placer, open_legs, answered)
        self._merged = MergedOrder(
            protocol, placer, open_legs, answered, timeout_s=config.prefill_timeout_s
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._orders.close()
        await self._merged.close()

    async def generate(self, incoming: Incoming, route: str, data: bytes, client: Client) -> None:
        """A request to generate. Raises ClientGone."""
        try:
            request = bodies.read(route, data, incoming.named)
        except MalformedBody:
            # It goes to an engine, whose error text is better.
            return await self.pass_on(incoming, data, client)
        except TooDeep:
            return await self._refuse(client, _too_deep())
        self.stats.removed_fields += len(request.removed)
        if request.sequences > MAX_SEQUENCES:
            text = f"{request.sequences} sequences in one request; at most {MAX_SEQUENCES}"
            return await self._refuse(client, error(400, "BadRequestError", text))
        if self._tokens is not None:
            request = replace(request, tokens=await self._tokens(incoming, request))
        job = noted(incoming, request, client)
        self.decisions.append(job.note)
        await self._run(job)

    async def pass_on(self, incoming: Incoming, data: bytes, client: Client) -> None:
        """Passes any other request unchanged to one decode engine. Raises ClientGone."""
        removed: tuple[str, ...] = ()
        if data:
            try:
                _, data, removed = bodies.sanitized(data)
            except MalformedBody:
                logger.debug("%s: the body is not a JSON object", incoming.path)
            except TooDeep:
                return await self._refuse(client, _too_deep())
        self.stats.removed_fields += len(removed)
        request = ClientRequest(route="", body={}, data=data, named=incoming.named)
        await self._run(noted(incoming, request, client))

    async def _run(self, job: ForwardJob) -> None:
        self.stats.in_flight += 1
        outcome = "answered"
        try:
            await self._until_answered(job)
        except (ClientGone, asyncio.CancelledError):
            self.stats.gone += 1
            outcome = "client gone"
            raise
        except Final as final:
            await send(job.client, final.answer)
        except Broken as exc:
            self.stats.broken += 1
            outcome = "broken"
            job.note.failed(exc)
            logger.warning("an answer broke off: %s", exc)
        finally:
            self.stats.in_flight -= 1
            job.note.ended(outcome)

    async def _refuse(self, client: Client, answer: Answer) -> None:
        self.stats.refused[answer.status] += 1
        await send(client, answer)

    async def _until_answered(self, job: ForwardJob) -> None:
        """Raises Final, Broken, ClientGone."""
        failure: EngineFailed | None = None
        while True:
            try:
                await self._attempt(job)
                return
            except CannotServe as exc:
                job.note.error = str(exc)
                answer = error(501, "NotImplementedError", str(exc))
            except NoWorkers as exc:
                job.note.error = str(exc)
                answer = _no_engine(exc) if failure is None else failure_answer(failure)
            except PrefillFailed as exc:
                failure, answer = exc, self._after_prefill(job, exc)
            except DecodeFailed as exc:
                failure, answer = exc, self._after_decode(job, exc)
            if answer is not None:
                return await self._refuse(job.client, answer)

    async def _attempt(self, job: ForwardJob) -> None:
        """Raises EngineFailed, NoWorkers, CannotServe, and what `_until_answered` raises."""
        chosen = len(job.tried.choices)
        placement = self._placer.place(job.request, job.tried)
        tokens = placement.prompt_tokens
        if placement.prefill is None:
            job.note.attempts.append(AttemptNote("", placement.alone, chosen, tokens))
            return await self._orders.alone(job, placement)
        attempt = self._new_attempt(job, placement, placement.prefill)
        order = self._protocol.order_for(attempt.prefill)
        job.note.attempts.append(AttemptNote(order.value, "", chosen, tokens, attempt.request_id))
        await self._order(job, order)(job, placement, attempt)

    def _order(
        self, job: ForwardJob, order: LegOrder
    ) -> Callable[[ForwardJob, EnginePlacement, HandoverAttempt], Coroutine[Any, Any, None]]:
        match order:
            case LegOrder.SERIAL:
                return self._orders.serial
            case LegOrder.SINGLE:
                return self._orders.single
            case LegOrder.PARALLEL:
                if self._protocol.first_token_from_prefill and job.request.stream:
                    return self._merged.run
                return self._orders.parallel

    def _new_attempt(
        self, job: ForwardJob, placement: EnginePlacement, prefill: KnownEngine
    ) -> HandoverAttempt:
        count = job.request.sequences if self._protocol.batches else 1
        return HandoverAttempt(
            route=job.request.route,
            unique=self._unique(),
            client_id=job.incoming.client_id,
            rooms=tuple(self._rng.getrandbits(63) for _ in range(count)),
            prefill=prefill.peer,
            decode=_NO_PEER if placement.decode is None else placement.decode.peer,
        )

    def _after_prefill(self, job: ForwardJob, failure: PrefillFailed) -> Answer | None:
        """Returns the answer if there is no retry."""
        self._note(job, failure, "prefill")
        self._placer.prefill_failed(failure)
        if self._config.prefill_failure == "error":
            return failure_answer(failure)
        if self._protocol.decodes_alone:
            job.tried.alone = "prefill_failed"
        else:
            # No decode engine could serve it alone, so the next prefill engine is tried, if there
            # is one.
            job.tried.prefill.add(failure.engine.number)
        return None

    def _after_decode(self, job: ForwardJob, failure: DecodeFailed) -> Answer | None:
        self._note(job, failure, "decode")
        job.failed += 1
        repeatable = bool(job.request.route) or job.incoming.method in _IDEMPOTENT
        # Another engine's answer would be as late, or as large.
        if failure.kind in ("timeout", "too_large") or job.failed >= self._config.max_attempts:
            return failure_answer(failure)
        if not repeatable and failure.kind != "refused":
            return failure_answer(failure)
        # An engine may close a connection that was idle: one such failure does not exclude it.
        if failure.kind != "broken" or job.failed > 1:
            job.tried.decode.add(failure.engine.number)
        return None

    def _note(self, job: ForwardJob, failure: EngineFailed, leg: str) -> None:
        job.note.failed(failure)
        self.stats.failures[leg, failure.kind] += 1
        logger.info("a %s leg has failed: %s", leg, failure)


def _no_engine(why: NoWorkers) -> Answer:
    return error(503, "ServiceUnavailableError", f"{why}; try again later", RETRY_AFTER)


def _too_deep() -> Answer:
    return error(400, "BadRequestError", "the body is nested too deeply")
