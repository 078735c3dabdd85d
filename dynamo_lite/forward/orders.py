"""One attempt of a request: its legs in the protocol's order, and its answer to the client."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Client, Incoming
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.decision_log import RequestNote
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.legs import Legs, Sending, sending
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import EnginePlacement, Places, Tried
from dynamo_lite.forward.protocols.base import (
    MIN_TOKENS_ROUTES,
    ForwardProtocol,
    HandoverAttempt,
    PrefillAnswer,
)
from dynamo_lite.forward.relay import relay
from dynamo_lite.forward.rewriting import UNCHANGED, Changes, changes_for
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.runtime.tasks import OwnedTasks, end_tasks

logger = logging.getLogger(__name__)

#: How long a decode engine gets to take over a request after its client has disconnected. The
#: decode engine then tells the prefill engine that the KV is not needed. Otherwise the blocks stay
#: reserved until a lease ends.
_LET_GO_S = 1.0


@dataclass(slots=True, kw_only=True)
class ForwardJob:
    """One request in flight, the client that gets its answer, and the engines that it has tried."""

    incoming: Incoming
    request: ClientRequest
    client: Client
    tried: Tried = field(default_factory=Tried)
    #: For `explain`.
    note: RequestNote
    #: Decode engines that failed.
    failed: int = 0


class LegOrders:
    """answered: counts answers by how and why. over: work that is still done for ended requests;
    its owner ends it."""

    def __init__(
        self,
        protocol: ForwardProtocol,
        config: ForwarderConfig,
        placer: Places,
        upstream: Upstream,
        monitor: EngineMonitor,
    ):
        self.protocol, self.config, self.placer = protocol, config, placer
        self.answered: Counter[tuple[str, str]] = Counter()
        self.over = OwnedTasks()
        self._upstream, self._monitor = upstream, monitor

    def legs(self, job: ForwardJob) -> Legs:
        return Legs(job.incoming, self._upstream, self._monitor, self.config, job.note)

    async def alone(self, job: ForwardJob, placement: EnginePlacement) -> None:
        """No prefill leg: the decode engine gets the client's own body."""
        engine = placement.decode
        assert engine is not None
        request = job.request
        async with self.legs(job) as legs:
            with engine.leg(placement.prompt_tokens) as computed:
                passed = not request.route
                response = await legs.open(
                    Sending(engine, "decode", request.data or None), passes_errors=passed
                )
                how = ("passed", "") if passed else ("alone", placement.alone)
                await self._relay(job, legs, response, computed, how=how)
        self.placer.sent(engine, placement)

    async def single(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """The decode engine asks the prefill engine itself."""
        prefill, engine = pair(placement)
        leg = self.protocol.decode(job.request.body, attempt, None)
        async with self.legs(job) as legs:
            with prefill.leg(placement.uncached_tokens) as computed, engine.leg(0):
                try:
                    response = await legs.open(sending(engine, "decode", leg))
                    await self._relay(job, legs, response, computed)
                except LegFailed:
                    # The answer does not tell which of the two engines has failed.
                    job.tried.prefill.add(prefill.number)
                    raise
        self.placer.sent(prefill, placement)
        self.placer.sent(engine, placement)

    async def serial(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """The decode leg gets the prefill leg's answer."""
        prefill, protocol = placement.prefill, self.protocol
        assert prefill is not None
        first = protocol.prefill(job.request.body, attempt)
        async with self.legs(job) as legs:
            with prefill.leg(placement.uncached_tokens):
                answer = await self._prefill(legs, sending(prefill, "prefill", first), attempt)
            self.placer.sent(prefill, placement)
            engine = self._decode_engine(job, placement)
            handoff = protocol.extract(answer)
            if handoff is None:
                return await self._without_handoff(job, placement, engine, legs)
            prefill.empty_legs = 0
            second = protocol.decode(job.request.body, attempt, handoff)
            changes = changes_for(second, answer)
            with engine.leg(0) as computed:
                response = await self._hand_over(legs, sending(engine, "decode", second))
                await self._relay(job, legs, response, computed, changes=changes)
        self.placer.sent(engine, placement)

    async def parallel(
        self, job: ForwardJob, placement: EnginePlacement, attempt: HandoverAttempt
    ) -> None:
        """Both legs at once. The decode engine's bytes are held back until the prefill leg has
        succeeded, because without its KV they are worthless."""
        prefill, engine = pair(placement)
        body, protocol = job.request.body, self.protocol
        first = protocol.prefill(body, attempt)
        second = protocol.decode(body, attempt, None)
        streams = protocol.prefill_streams and job.request.stream

        async def prefilled(legs: Legs) -> PrefillAnswer:
            """The decode engine may take over the KV after the leg's end."""
            ends, ids = prefill.ends, attempt.prefill.engine_ids
            one = sending(prefill, "prefill", first)
            answer = await self._prefill(legs, one, attempt, streams=streams)
            legs.stays(prefill, ends, ids, streams=job.request.stream)
            return answer

        async with self.legs(job) as legs:
            with engine.leg(0), prefill.leg(placement.uncached_tokens) as computed:
                prefilling = legs.start(prefilled(legs), "prefill leg")
                decoding = legs.start(legs.open(sending(engine, "decode", second)), "decode leg")
                await legs.all(prefilling, decoding)
                answer, response = prefilling.result(), decoding.result()
                computed()
                self.placer.sent(prefill, placement)
                changes = changes_for(second, answer)
                await self._relay(job, legs, response, computed, changes=changes)
        self.placer.sent(engine, placement)

    def _decode_engine(self, job: ForwardJob, placement: EnginePlacement) -> KnownEngine:
        """Chooses the decode engine after a serial prefill leg. Raises LegFailed, NoWorkers."""
        engine = placement.decode
        if engine is not None and engine.usable:
            return engine
        if engine is not None and self.protocol.names_decode:
            raise LegFailed(engine, "decode", "refused", engine.trouble)
        return self.placer.place_decode(placement, job.tried)

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
        with engine.leg(placement.prompt_tokens) as computed:
            response = await legs.open(Sending(engine, "decode", job.request.data))
            await self._relay(job, legs, response, computed, how=("alone", "no_handoff"))
        self.placer.sent(engine, placement)

    async def _hand_over(self, legs: Legs, one: Sending) -> EngineAnswer:
        """Opens the decode leg. If the client disconnects meanwhile, the engine still gets the
        request, and some time to take it over, before its connection is closed."""
        opening = asyncio.create_task(legs.open(one), name="decode leg")
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self.over.start(_let_go(opening), name="let go")
            raise

    async def _prefill(
        self,
        legs: Legs,
        one: Sending,
        attempt: HandoverAttempt,
        *,
        streams: bool = False,
    ) -> PrefillAnswer:
        """A prefill leg. Raises LegFailed also if another process has answered than the one that
        the decode engine waits for, or an engine of another protocol."""
        engine = one.engine
        answer = await legs.prefill(one, streams=streams)
        before, misfit = engine.misfit, self.protocol.mismatch(answer)
        engine.misfit, engine.asked_again_at = misfit, 0.0
        if misfit:
            if not before:
                logger.error("engine %s gets no prefill legs: %s", engine.name, misfit)
            raise LegFailed(engine, "prefill", "mismatch", misfit)
        if self.protocol.learn is None:
            return answer
        learned, expected = self.protocol.learn(answer), attempt.prefill.identity
        engine.learned(learned)
        if expected is not None and learned != expected:
            text = "another process or data-parallel rank has answered, or nothing was handed over"
            raise LegFailed(engine, "prefill", "unpaired", text)
        return answer

    async def _relay(
        self,
        job: ForwardJob,
        legs: Legs,
        response: EngineAnswer,
        computed: Callable[[], None],
        *,
        how: tuple[str, str] = ("disaggregated", ""),
        changes: Changes = UNCHANGED,
    ) -> None:
        """computed: of `KnownEngine.leg`, where the prompt is computed."""

        def on_first() -> None:
            self.begins(job, *how)
            computed()
            legs.handed_over()
            if job.request.sequences > 1:
                legs.lift_prefill_limit()

        await relay(job.client, legs, response, changes=changes, on_first=on_first)

    def begins(self, job: ForwardJob, how: str, reason: str = "") -> None:
        """The client gets its first byte."""
        self.answered[how, reason] += 1
        job.note.message.how, job.note.message.reason = how, reason


def pair(placement: EnginePlacement) -> tuple[KnownEngine, KnownEngine]:
    assert placement.prefill is not None and placement.decode is not None
    return placement.prefill, placement.decode


async def _let_go(opening: "asyncio.Task[EngineAnswer]") -> None:
    try:
        await asyncio.wait({opening}, timeout=_LET_GO_S)
    finally:
        # Also when the Forwarder ends meanwhile.
        await end_tasks(opening)
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
