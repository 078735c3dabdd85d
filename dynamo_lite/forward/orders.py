"""One attempt of a request: its legs in the protocol's order, and its answer to the client."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from dynamo_lite.forward.engine_answer import EngineAnswer
from dynamo_lite.forward.engines import EngineLeg, KnownEngine
from dynamo_lite.forward.failures import DecodeFailed, PrefillFailed
from dynamo_lite.forward.input_logprobs import InputLogprobs
from dynamo_lite.forward.job import ForwardJob
from dynamo_lite.forward.legs import Legs, Sending, sending
from dynamo_lite.forward.placing import EnginePlacement, Places
from dynamo_lite.forward.protocols.base import (
    MIN_TOKENS_ROUTES,
    ForwardProtocol,
    HandoverAttempt,
    PrefillAnswer,
)
from dynamo_lite.forward.relay import relay
from dynamo_lite.forward.rewriting import UNCHANGED, Changes, changes_for
from dynamo_lite.runtime.tasks import OwnedTasks, end_tasks

logger = logging.getLogger(__name__)

#: How long a decode engine gets to take over a request after its client has disconnected. The
#: decode engine then tells the prefill engine that the KV is not needed. Otherwise the blocks stay
#: reserved until a lease ends.
LET_GO_S = 1.0


class LegOrders:
    """`close` ends the work that is still done for ended requests.

    answered: counts answers by how and why.
    """

    def __init__(
        self,
        protocol: ForwardProtocol,
        placer: Places,
        open_legs: Callable[[ForwardJob], Legs],
        answered: Counter[tuple[str, str]],
    ):
        self._protocol, self._placer, self._open_legs = protocol, placer, open_legs
        self._answered = answered
        self._over = OwnedTasks()

    async def close(self) -> None:
        await self._over.end()

    async def alone(self, job: ForwardJob, placement: EnginePlacement) -> None:
        """No prefill leg: the decode engine gets the client's own body."""
        engine = placement.decode
        assert engine is not None
        request = job.request
        async with self._open_legs(job) as legs:
            with engine.leg(placement.prompt_tokens) as leg:
                passed = not request.route
                response = await legs.open(
                    Sending(engine, request.data or None), DecodeFailed, passes_errors=passed
                )
                how = ("passed", "") if passed else ("alone", placement.alone)
                await self._relay(job, engine, legs, response, leg, how)
        self._placer.sent(engine, placement)

    async def single(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """The decode engine asks the prefill engine itself."""
        prefill, engine = _pair(placement)
        leg = self._protocol.decode(job.request.body, attempt, None)
        async with self._open_legs(job) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                try:
                    response = await legs.open(sending(engine, leg), DecodeFailed)
                    await self._relay(job, engine, legs, response, counted, also=prompt)
                except DecodeFailed:
                    # The answer does not tell which of the two engines has failed.
                    job.tried.prefill.add(prefill.number)
                    raise
        self._placer.sent(prefill, placement)
        self._placer.sent(engine, placement)

    async def serial(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """The decode leg gets the prefill leg's answer."""
        prefill, protocol = placement.prefill, self._protocol
        assert prefill is not None
        first = protocol.prefill(job.request.body, attempt)
        async with self._open_legs(job) as legs:
            with prefill.leg(placement.uncached_tokens):
                answer = await self._prefill(legs, sending(prefill, first), attempt)
            self._placer.sent(prefill, placement)
            engine = self._decode_engine(job, placement)
            handoff = protocol.extract(answer)
            if handoff is None:
                return await self._without_handoff(job, placement, engine, legs)
            prefill.handed_over()
            second = protocol.decode(job.request.body, attempt, handoff)
            changes = changes_for(second, answer)
            with engine.leg(0) as counted:
                response = await self._hand_over(legs, sending(engine, second))
                await self._relay(job, engine, legs, response, counted, changes=changes)
        self._placer.sent(engine, placement)

    async def parallel(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """Both legs at once. The decode engine's bytes are held back until the prefill leg has
        succeeded, because without its KV they are worthless."""
        prefill, engine = _pair(placement)
        body, protocol = job.request.body, self._protocol
        first = protocol.prefill(body, attempt)
        second = protocol.decode(body, attempt, None)
        joins = protocol.joins_input_logprobs(body, job.request.route)
        logprobs = InputLogprobs() if joins else None
        streams = protocol.prefill_streams and job.request.stream and not joins
        async with self._open_legs(job) as legs:
            with engine.leg(0) as counted, prefill.leg(placement.uncached_tokens) as prompt:
                prefilling = legs.start(
                    self._prefill_watched(
                        job,
                        legs,
                        sending(prefill, first),
                        attempt,
                        streams=streams,
                        on_data=None if logprobs is None else logprobs.read,
                    ),
                    "prefill leg",
                )
                decoding = legs.start(
                    legs.open(sending(engine, second), DecodeFailed), "decode leg"
                )
                await legs.all(prefilling, decoding)
                answer, response = prefilling.result(), decoding.result()
                prompt.answered()
                self._placer.sent(prefill, placement)
                changes = changes_for(second, answer, logprobs)
                await self._relay(job, engine, legs, response, counted, changes=changes)
        self._placer.sent(engine, placement)

    def _decode_engine(self, job: ForwardJob, placement: EnginePlacement) -> KnownEngine:
        """Chooses the decode engine after a serial prefill leg. Raises DecodeFailed, NoWorkers."""
        engine = placement.decode
        if engine is not None and engine.usable:
            return engine
        if engine is not None and self._protocol.names_decode:
            raise DecodeFailed(engine, "refused", engine.trouble)
        return self._placer.place_decode(placement, job.tried)

    async def _without_handoff(
        self, job: ForwardJob, placement: EnginePlacement, engine: KnownEngine, legs: Legs
    ) -> None:
        prefill = placement.prefill
        assert prefill is not None
        logger.info("engine %s has handed nothing over", prefill.name)
        # On other routes the first token may end the sequence, and nothing is left to hand over.
        if job.request.route in MIN_TOKENS_ROUTES:
            if prefill.handed_nothing(asyncio.get_running_loop().time()):
                logger.error("engine %s gets no prefill legs: %s", prefill.name, prefill.misfit)
        with engine.leg(placement.prompt_tokens) as counted:
            response = await legs.open(Sending(engine, job.request.data), DecodeFailed)
            await self._relay(job, engine, legs, response, counted, ("alone", "no_handoff"))
        self._placer.sent(engine, placement)

    async def _hand_over(self, legs: Legs, one: Sending) -> EngineAnswer:
        """Opens the decode leg. If the client disconnects meanwhile, the engine still gets the
        request, and some time to take it over, before its connection is closed."""
        opening = asyncio.create_task(legs.open(one, DecodeFailed), name="decode leg")
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._over.start(_let_go(opening), name="let go")
            raise

    async def _prefill(
        self,
        legs: Legs,
        one: Sending,
        attempt: HandoverAttempt,
        *,
        streams: bool = False,
        on_data: Callable[[bytes], None] | None = None,
    ) -> PrefillAnswer:
        """A prefill leg. Raises PrefillFailed also if another process has answered than the one
        that the decode engine waits for, or an engine of another protocol."""
        answer = await legs.prefill(one, streams=streams, on_data=on_data)
        before, misfit = one.engine.misfit, self._protocol.mismatch(answer)
        one.engine.answered_as(misfit)
        if misfit:
            if not before:
                logger.error("engine %s gets no prefill legs: %s", one.engine.name, misfit)
            raise PrefillFailed(one.engine, "mismatch", misfit)
        if not self._protocol.needs_identity:
            return answer
        learned, expected = self._protocol.learn(answer), attempt.prefill.identity
        one.engine.learned(learned)
        if expected is not None and learned != expected:
            text = "another process or data-parallel rank has answered, or nothing was handed over"
            raise PrefillFailed(one.engine, "unpaired", text)
        return answer

    async def _prefill_watched(
        self,
        job: ForwardJob,
        legs: Legs,
        one: Sending,
        attempt: HandoverAttempt,
        *,
        streams: bool,
        on_data: Callable[[bytes], None] | None,
    ) -> PrefillAnswer:
        """A prefill leg whose KV the decode engine may take over after its end."""
        ends, ids = one.engine.ends, attempt.prefill.engine_ids
        answer = await self._prefill(legs, one, attempt, streams=streams, on_data=on_data)
        legs.stays(one.engine, ends, ids, streams=job.request.stream)
        return answer

    async def _relay(
        self,
        job: ForwardJob,
        engine: KnownEngine,
        legs: Legs,
        response: EngineAnswer,
        leg: EngineLeg,
        how: tuple[str, str] = ("disaggregated", ""),
        *,
        changes: Changes = UNCHANGED,
        also: EngineLeg | None = None,
    ) -> None:
        def on_first() -> None:
            self._answered[how] += 1
            job.note.how, job.note.reason = how
            leg.answered()
            legs.handed_over()
            if also is not None:
                also.answered()
            if job.request.sequences > 1:
                legs.lift_prefill_limit()

        await relay(job.client, legs, engine, response, changes=changes, on_first=on_first)


def _pair(placement: EnginePlacement) -> tuple[KnownEngine, KnownEngine]:
    assert placement.prefill is not None and placement.decode is not None
    return placement.prefill, placement.decode


async def _let_go(opening: "asyncio.Task[EngineAnswer]") -> None:
    try:
        await asyncio.wait({opening}, timeout=LET_GO_S)
    finally:
        # Also when the Forwarder ends meanwhile.
        await end_tasks(opening)
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
