"""One workflow for all protocols: sanitize, choose, prefill, extract, decode, relay, settle.

This module owns the retries after a failure, the order of an attempt's legs, and how the answer
passes to the client. Retries end when the first byte of the answer is on its way. `placing.py`
chooses the engines of an attempt, `attempt.py` is one, and `protocols/` has the handover protocols.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.attempt import ForwardJob, ForwardParts, RequestAttempt
from dynamo_lite.forward.client import Answer, Client, ClientGone
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.events import EVENT_ENDS, EventReader
from dynamo_lite.forward.failures import Broken, Final, LegFailed, failure_answer
from dynamo_lite.forward.first_token import FirstTokenMerge
from dynamo_lite.forward.placing import NoEngine
from dynamo_lite.forward.protocols.base import Leg, LegOrder

logger = logging.getLogger(__name__)

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS"})


async def answer(parts: ForwardParts, job: ForwardJob, names: Sequence[str]) -> None:
    """names: of prefill engines, by the client's header; only a sidecar follows them. Raises
    ClientGone, and Final where they are refused."""
    if job.request.route:
        if parts.named is not None:
            job.tried.named = await parts.named(names)
        parts.decisions.append(job.note)
    parts.stats.in_flight += 1
    outcome = "failed"
    try:
        if (refusal := await _until_answered(parts, job)) is not None:
            await refuse(parts, job.client, refusal)
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
        parts.stats.in_flight -= 1
        parts.stats.ended[outcome] += 1
        job.note.ended(outcome)


async def refuse(parts: ForwardParts, client: Client, answer: Answer) -> None:
    parts.stats.refused[answer.status] += 1
    await client.send(answer)


async def _until_answered(parts: ForwardParts, job: ForwardJob) -> Answer | None:
    """Returns an error if no engine is left to try. Raises Final, Broken, ClientGone."""
    failure: LegFailed | None = None
    while failure is None or _retries(parts, job, failure):
        try:
            placement = parts.placer.place(job.request, job.tried)
            with RequestAttempt(parts, job, placement) as attempt:
                return await _ORDERS[attempt.order](attempt)
        except NoEngine as exc:
            job.note.message.error = str(exc)
            return exc.answer if failure is None else failure_answer(failure)
        except LegFailed as exc:
            failure = exc
    return failure_answer(failure)


def _retries(parts: ForwardParts, job: ForwardJob, failure: LegFailed) -> bool:
    """Whether another attempt follows. It does not take the engine that has failed."""
    job.note.failed(failure)
    parts.stats.failures[failure.leg, failure.kind] += 1
    logger.info("a %s leg has failed: %s", failure.leg, failure)
    tried, number = job.tried, failure.engine.number
    if failure.leg == "prefill":
        if parts.protocol.decodes_alone:
            tried.alone = "prefill_failed"
        else:
            # No decode engine could serve it alone: the next prefill engine is tried, if any.
            tried.prefill.add(number)
        return True
    tried.failed += 1
    # Another engine's answer would be as late, or as large.
    if failure.kind in ("timeout", "too_large") or tried.failed >= parts.config.max_attempts:
        return False
    repeatable = bool(job.request.route) or job.method in _IDEMPOTENT
    if not repeatable and failure.kind != "refused":
        return False
    # An engine may close a connection that was idle: one such failure does not exclude it.
    if failure.kind != "broken" or tried.failed > 1:
        tried.decode.add(number)
    return True


async def _alone(one: RequestAttempt) -> None:
    """No prefill leg: the decode engine gets the client's own body."""
    await _relay(one, await one.open(one.placement.decode, "decode"))


async def _single(one: RequestAttempt) -> None:
    """The decode engine asks the prefill engine itself."""
    leg = one.parts.protocol.decode(one.job.request.body, one.ids, None)
    try:
        await _relay(one, await one.open(one.placement.decode, "decode", leg), leg)
    except LegFailed:
        # The answer does not tell which of the two engines has failed.
        one.job.tried.prefill.add(one.prefill.number)
        raise


async def _serial(one: RequestAttempt) -> None:
    """The decode leg gets the prefill leg's answer."""
    protocol = one.parts.protocol
    handoff = protocol.extract(await one.prefilled())
    if handoff is None:
        raise LegFailed(one.prefill, "prefill", "unpaired", "it has handed nothing over")
    if protocol.staged or not (protocol.names_decode or one.placement.decode.usable):
        one.parts.placer.place_decode(one.placement, one.job.tried)
    engine = one.placement.decode
    if not engine.usable:
        raise LegFailed(engine, "decode", "refused", engine.trouble)
    leg = protocol.decode(one.job.request.body, one.ids, handoff)
    await _relay(one, await one.open(engine, "decode", leg), leg)


async def _parallel(one: RequestAttempt) -> None:
    """Both legs at once. The decode engine's bytes are held back until the prefill leg has
    succeeded, because without its KV they are worthless."""
    protocol, request = one.parts.protocol, one.job.request
    # The legs of a tool call cannot be joined: each engine draws an id for it.
    if protocol.first_token_from_prefill and request.stream and "tools" not in request.body:
        one.merge = FirstTokenMerge()
    one.depends()
    leg = protocol.decode(request.body, one.ids, None)
    try:
        async with asyncio.TaskGroup() as legs:
            legs.create_task(one.prefilled(), name="prefill leg")
            opened = one.open(one.placement.decode, "decode", leg)
            decoding = legs.create_task(opened, name="decode leg")
    except BaseExceptionGroup as failed:
        # The other leg was cancelled: the first failure counts.
        raise failed.exceptions[0] from failed
    await _relay(one, decoding.result(), leg)


async def _relay(one: RequestAttempt, response: EngineAnswer, leg: Leg | None = None) -> None:
    """Passes the whole answer of a decode leg, after a first token of the prefill leg. leg: None:
    it has no id to hide.

    Raises LegFailed before the first byte, Broken after it, ClientGone.
    """
    client, merge, reader = one.job.client, one.merge, EventReader(response)
    head = headers.to_client(response.headers, response.engine.name)
    changes: list[Callable[[bytes], bytes]] = []
    if leg is not None and leg.hidden is not None:
        changes.append(leg.shows)
    if merge is not None:
        changes.append(merge.from_decode)
    if changes:
        head.popall("content-length", None)

    async def begin() -> None:
        one.begins()
        await client.start(response.status, head)

    if merge is not None:
        await begin()
        await client.write(one.first_events)
    # Else the head is held back until the first output: until then, another engine can be asked.
    data = await _beginning(client, response, reader, whole=bool(changes))
    response.shown = True
    if not client.started:
        await begin()
    if changes:
        await _changed(client, reader, changes, data)
    else:
        await _unchanged(client, response, data + reader.rest())
    await client.finish()


async def _beginning(
    client: Client, response: EngineAnswer, reader: EventReader, *, whole: bool
) -> bytes:
    """Of a stream, the events up to the first output. whole: another answer has to be changed."""
    try:
        if response.is_stream:
            return await reader.until_output()
        return await (response.read() if whole else response.read_some())
    except (LegFailed, Final) as exc:
        if not client.started:
            raise
        await _break_off(client, exc, whole=True)


async def _unchanged(client: Client, response: EngineAnswer, data: bytes) -> None:
    """data: the bytes that have arrived; empty if the answer has ended."""
    last = data

    def push(data: bytes) -> bool:
        nonlocal last
        last = data if len(data) > 2 else last[-2:] + data  # a blank line may come in pieces
        return client.push(data)

    if not data:
        return
    await client.write(data)
    try:
        await response.pass_on(push, client.drained)
    except LegFailed as exc:
        await _break_off(client, exc, whole=response.is_stream and last.endswith(EVENT_ENDS))


async def _changed(
    client: Client, reader: EventReader, changes: Sequence[Callable[[bytes], bytes]], events: bytes
) -> None:
    """Event by event. events: those that have arrived."""
    try:
        while events:
            for change in changes:
                events = change(events)
            await client.write(events)
            events = await reader.next()
    except (LegFailed, ValueError, RecursionError) as exc:
        await _break_off(client, exc, whole=True)


async def _break_off(client: Client, why: object, *, whole: bool) -> NoReturn:
    """Ends an answer that cannot be completed, so that no client takes it for complete.

    whole: the client got whole events only, so that it can read one more. Raises Broken.
    """
    if whole:
        failed = {"message": "the engine failed", "type": "InternalServerError", "code": 500}
        await client.write(b"data: " + msgspec.json.encode({"error": failed}) + b"\n\n")
    client.abort()
    raise Broken(str(why))


_ORDERS: Mapping[LegOrder, Callable[[RequestAttempt], Coroutine[Any, Any, None]]] = {
    "serial": _serial,
    "parallel": _parallel,
    "single": _single,
    "alone": _alone,
}
