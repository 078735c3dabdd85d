"""The orders in which an attempt's legs are sent, and how the answer passes to the client."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.attempt import RequestAttempt
from dynamo_lite.forward.client import Client
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.events import EventReader, ends_event
from dynamo_lite.forward.failures import Broken, Final, LegFailed
from dynamo_lite.forward.first_token import FirstTokenMerge
from dynamo_lite.forward.protocols.base import Leg, LegOrder


async def alone(one: RequestAttempt) -> None:
    """No prefill leg: the decode engine gets the client's own body."""
    await _relay(one, await one.open(one.placement.decode, "decode"))


async def single(one: RequestAttempt) -> None:
    """The decode engine asks the prefill engine itself."""
    leg = one.parts.protocol.decode(one.job.request.body, one.ids, None)
    try:
        await _relay(one, await one.open(one.placement.decode, "decode", leg), leg)
    except LegFailed:
        # The answer does not tell which of the two engines has failed.
        one.job.tried.prefill.add(one.prefill.number)
        raise


async def serial(one: RequestAttempt) -> None:
    """The decode leg gets the prefill leg's answer."""
    protocol = one.parts.protocol
    handoff = protocol.extract(await one.prefilled())
    if handoff is None:
        raise LegFailed(one.prefill, "prefill", "unpaired", "it has handed nothing over")
    if protocol.staged:
        one.parts.placer.place_decode(one.placement, one.job.tried)
    engine = one.placement.decode
    if not engine.usable:
        raise LegFailed(engine, "decode", "refused", engine.trouble)
    leg = protocol.decode(one.job.request.body, one.ids, handoff)
    await _relay(one, await one.open(engine, "decode", leg), leg)


async def parallel(one: RequestAttempt) -> None:
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
    if one.merge is None:
        await _relay(one, decoding.result(), leg)
    else:
        await _joined(one, one.merge, decoding.result(), leg)


async def _relay(one: RequestAttempt, response: EngineAnswer, leg: Leg | None = None) -> None:
    """Passes the whole answer of a decode leg. leg: None: it has no id to hide.

    Raises LegFailed before the first byte, Broken after it, ClientGone.
    """
    client, head = one.job.client, headers.to_client(response.headers, response.engine.name)
    changes = leg if leg is not None and leg.hidden is not None else None
    # The head is held back until the first output: until then, another engine can be asked.
    reader = EventReader(response)
    if response.is_stream:
        data = await reader.until_output()
    else:
        data = await (response.read_some() if changes is None else response.read())
    response.shown = True
    one.begins()
    if changes is None:
        await client.start(response.status, head)
        await _unchanged(client, response, data + reader.rest())
    else:
        head.popall("content-length", None)
        await client.start(response.status, head)
        await _changed(client, reader, changes.shows, data)
    await client.finish()


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
        await break_off(client, exc, whole=response.is_stream and ends_event(last))


async def _changed(
    client: Client, reader: EventReader, change: Callable[[bytes], bytes], events: bytes
) -> None:
    """Event by event. events: those that have arrived."""
    try:
        while events:
            await client.write(change(events))
            events = await reader.next()
    except (LegFailed, ValueError, RecursionError) as exc:
        await break_off(client, exc, whole=True)


async def break_off(client: Client, why: object, *, whole: bool) -> NoReturn:
    """Ends an answer that cannot be completed, so that no client takes it for complete.

    whole: the client got whole events only, so that it can read one more. Raises Broken.
    """
    if whole:
        failed = {"message": "the engine failed", "type": "InternalServerError", "code": 500}
        await client.write(b"data: " + msgspec.json.encode({"error": failed}) + b"\n\n")
    client.abort()
    raise Broken(str(why))


async def _joined(
    one: RequestAttempt, merge: FirstTokenMerge, response: EngineAnswer, leg: Leg
) -> None:
    """The first token comes from the prefill engine, and all others from the decode engine:
    `first_token.py` joins them. Raises Broken, ClientGone."""
    client = one.job.client
    one.begins()
    head = headers.to_client(response.headers, response.engine.name)
    head.popall("content-length", None)
    await client.start(response.status, head)
    await client.write(one.first_events)
    reader = EventReader(response)
    try:
        events = await reader.until_output()
    except (LegFailed, Final) as exc:
        await break_off(client, exc, whole=True)
    response.shown = True
    await _changed(client, reader, lambda new: merge.from_decode(leg.shows(new)), events)
    await client.finish()


ORDERS: Mapping[LegOrder, Callable[[RequestAttempt], Coroutine[Any, Any, None]]] = {
    "serial": serial,
    "parallel": parallel,
    "single": single,
    "alone": alone,
}
