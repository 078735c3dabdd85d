"""The orders in which an attempt's legs are sent; `merged.py` has that of a first token from the
prefill engine."""

import asyncio
import logging
from collections.abc import Callable

from dynamo_lite.forward.attempt import RequestAttempt
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.protocols.base import MIN_TOKENS_ROUTES, Leg, PrefillAnswer
from dynamo_lite.forward.relay import relay
from dynamo_lite.forward.rewriting import UNCHANGED, Changes, changes_for
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

#: How long a decode engine gets to take over a request after its client has disconnected. The
#: decode engine then tells the prefill engine that the KV is not needed. Otherwise the blocks stay
#: reserved until a lease ends.
_LET_GO_S = 1.0


async def alone(one: RequestAttempt) -> None:
    """No prefill leg: the decode engine gets the client's own body."""
    request, placement = one.job.request, one.placement
    how = ("alone", placement.alone) if request.route else ("passed", "")
    await _alone(one, placement.decode, how)


async def _alone(one: RequestAttempt, engine: KnownEngine, how: tuple[str, str]) -> None:
    with engine.leg(one.placement.prompt_tokens) as computed:
        response = await one.open(engine, "decode", one.job.request.data)
        await _relay(one, response, computed, how=how)
    one.sent(engine)


async def single(one: RequestAttempt) -> None:
    """The decode engine asks the prefill engine itself."""
    prefill, engine = one.prefill, one.placement.decode
    leg = one.parts.protocol.decode(one.job.request.body, one.ids, None)
    with prefill.leg(one.placement.uncached_tokens) as computed, engine.leg(0):
        prefill.asked()
        try:
            response = await one.open(engine, "decode", leg)
            await _relay(one, response, computed)
        except LegFailed:
            # The answer does not tell which of the two engines has failed.
            one.job.tried.prefill.add(prefill.number)
            raise
    one.sent(prefill)
    one.sent(engine)


async def serial(one: RequestAttempt) -> None:
    """The decode leg gets the prefill leg's answer."""
    prefill, protocol = one.prefill, one.parts.protocol
    with prefill.leg(one.placement.uncached_tokens):
        answer = await _checked_prefill(one)
    one.sent(prefill)
    engine = _decode_engine(one)
    handoff = protocol.extract(answer)
    if handoff is None:
        _handed_nothing(one)
        return await _alone(one, engine, ("alone", "no_handoff"))
    prefill.empty_legs = 0
    second = protocol.decode(one.job.request.body, one.ids, handoff)
    with engine.leg(0) as computed:
        response = await _hand_over(one, engine, second)
        await _relay(one, response, computed, changes=changes_for(second, answer))
    one.sent(engine)


async def parallel(one: RequestAttempt) -> None:
    """Both legs at once. The decode engine's bytes are held back until the prefill leg has
    succeeded, because without its KV they are worthless."""
    prefill, engine, protocol = one.prefill, one.placement.decode, one.parts.protocol
    stream = one.job.request.stream
    second = protocol.decode(one.job.request.body, one.ids, None)

    async def prefilled() -> PrefillAnswer:
        """The decode engine may take over the KV after the leg's end."""
        ends = prefill.ends
        answer = await _checked_prefill(one, streams=protocol.prefill_streams and stream)
        one.stays(ends, streams=stream)
        return answer

    with engine.leg(0), prefill.leg(one.placement.uncached_tokens) as computed:
        prefilling = one.start(prefilled(), "prefill leg")
        decoding = one.start(one.open(engine, "decode", second), "decode leg")
        await one.all(prefilling, decoding)
        computed()
        one.sent(prefill)
        changes = changes_for(second, prefilling.result())
        await _relay(one, decoding.result(), computed, changes=changes)
    one.sent(engine)


def _decode_engine(one: RequestAttempt) -> KnownEngine:
    """The decode engine after a serial prefill leg. Raises LegFailed, NoWorkers."""
    engine, protocol = one.placement.decode, one.parts.protocol
    if engine.usable and not protocol.staged:
        return engine
    if protocol.names_decode:
        raise LegFailed(engine, "decode", "refused", engine.trouble)
    return one.parts.placer.place_decode(one.placement, one.job.tried)


async def _checked_prefill(one: RequestAttempt, *, streams: bool = False) -> PrefillAnswer:
    """A prefill leg. Raises LegFailed also if another process has answered than the one that
    the decode engine waits for, or an engine of another protocol."""
    engine, protocol = one.prefill, one.parts.protocol
    engine.asked()
    answer = await one.prefilled(streams=streams)
    misfit = protocol.mismatch(answer)
    if engine.answered(misfit):
        logger.error("engine %s gets no prefill legs: %s", engine.name, misfit)
    if misfit:
        raise LegFailed(engine, "prefill", "mismatch", misfit)
    if protocol.learn is None:
        return answer
    learned, expected = protocol.learn(answer), one.ids.prefill.identity
    engine.learned(learned)
    if expected is not None and learned != expected:
        text = "another process or data-parallel rank has answered, or nothing was handed over"
        raise LegFailed(engine, "prefill", "unpaired", text)
    return answer


def _handed_nothing(one: RequestAttempt) -> None:
    prefill = one.prefill
    logger.info("engine %s has handed nothing over", prefill.name)
    # On other routes the first token may end the sequence, and nothing is left to hand over.
    if one.job.request.route in MIN_TOKENS_ROUTES and prefill.handed_nothing():
        logger.error("engine %s gets no prefill legs: %s", prefill.name, prefill.misfit)


async def _hand_over(one: RequestAttempt, engine: KnownEngine, leg: Leg) -> EngineAnswer:
    """Opens the decode leg. If the client disconnects meanwhile, the engine still gets the
    request, and some time to take it over, before its connection is closed."""
    opening = asyncio.create_task(one.open(engine, "decode", leg), name="decode leg")
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        one.parts.over.start(_let_go(opening), name="let go")
        raise


async def _let_go(opening: "asyncio.Task[EngineAnswer]") -> None:
    try:
        await asyncio.wait({opening}, timeout=_LET_GO_S)
    finally:
        # Also when the Forwarder ends meanwhile.
        await end_tasks(opening)
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()


async def _relay(
    one: RequestAttempt,
    response: EngineAnswer,
    computed: Callable[[], None],
    *,
    how: tuple[str, str] = ("disaggregated", ""),
    changes: Changes = UNCHANGED,
) -> None:
    """computed: of `KnownEngine.leg`, where the prompt is computed."""

    def on_first() -> None:
        one.begins(*how)
        computed()
        one.handed_over()
        if one.job.request.sequences > 1:
            one.lift_prefill_limit()

    await relay(one, response, changes=changes, on_first=on_first)
