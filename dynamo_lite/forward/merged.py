"""The order in which the first token comes from the prefill engine, and all others from the decode
engine (`first_token.py` joins them)."""

import asyncio
import logging

from dynamo_lite.forward import headers
from dynamo_lite.forward.attempt import RequestAttempt
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Client
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.events import LIMIT_BYTES, Beginning, EventReader
from dynamo_lite.forward.failures import Final, LegFailed
from dynamo_lite.forward.first_token import FirstTokenMerge, MalformedEvent
from dynamo_lite.forward.protocols.base import PrefillAnswer
from dynamo_lite.forward.protocols.one_token import plain
from dynamo_lite.forward.relay import break_off
from dynamo_lite.forward.rewriting import Changes, changes_for
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

#: How long a decode leg without needed tokens may run, so that it receives its KV.
_SETTLE_S = 30.0

_Opening = asyncio.Task[EngineAnswer]


async def merged(one: RequestAttempt) -> None:
    """Both legs at once."""
    prefill, engine, protocol = one.prefill, one.placement.decode, one.parts.protocol
    body, client = one.job.request.body, one.job.client
    first, second = protocol.prefill(body, one.ids), protocol.decode(body, one.ids, None)
    merge, ends = FirstTokenMerge(_limit(one.job.request)), prefill.ends
    with engine.leg(0), prefill.leg(one.placement.uncached_tokens) as computed:
        decoding = one.start(one.open(engine, "decode", second), "decode leg")
        prefilling = one.start(one.open(prefill, "prefill", first), "prefill leg")
        limit_s = one.parts.config.prefill_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                changes = changes_for(first, PrefillAnswer())
                await _first_tokens(one, prefilling, decoding, merge, changes)
        except (LegFailed, Final) as exc:
            await _fail(client, exc)
        except MalformedEvent as exc:
            await _fail(client, LegFailed(prefill, "prefill", "malformed", str(exc)))
        except TimeoutError:
            await _fail(client, LegFailed(prefill, "prefill", "timeout", f"after {limit_s:g} s"))
        computed()
        one.sent(prefill)
        if merge.over:
            one.leave_open(decoding)
            one.parts.over.start(_read_out(decoding), name="rest of a decode leg")
            await client.write(merge.end())
            return await client.finish()
        one.stays(ends, streams=True)
        try:
            await _other_tokens(one, decoding, merge, changes_for(second, PrefillAnswer()))
        except (LegFailed, Final, MalformedEvent) as exc:
            await end_tasks(decoding)  # the client's end would interrupt it later
            await break_off(client, f"decode leg: {exc}", whole=True)
        await client.finish()
    one.sent(engine)


async def _first_tokens(
    one: RequestAttempt,
    prefilling: _Opening,
    decoding: _Opening,
    merge: FirstTokenMerge,
    changes: Changes,
) -> None:
    """The whole prefill leg. What comes before the first token is held back: until then, another
    engine can be asked. Raises LegFailed, Final, MalformedEvent."""
    await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
    if not prefilling.done():
        decoding.result()
        await asyncio.wait({prefilling})
    response = prefilling.result()
    client, held, reader = one.job.client, b"", EventReader(response)
    while events := await reader.next_without_error():
        held += merge.from_prefill(changes.events(events))
        if not held or not (merge.begun or len(held) > LIMIT_BYTES):
            continue
        if not client.started:
            if decoding.done():
                decoding.result()  # raises its failure while another engine can be asked
            one.begins("disaggregated")
            head = headers.to_client(response.headers)
            head.popall("content-length", None)
            response.shown = True
            await client.start(200, head)
        shown, held = held, b""
        await client.write(shown)
    if not client.started:
        raise LegFailed(response.engine, "prefill", "unpaired", "no token")


async def _other_tokens(
    one: RequestAttempt, decoding: _Opening, merge: FirstTokenMerge, changes: Changes
) -> None:
    """The whole decode leg. Raises LegFailed, Final, MalformedEvent."""
    await one.all(decoding)
    response = decoding.result()
    reader = EventReader(response)
    events = await one.watched(_until_output(reader), "first events")
    one.handed_over()
    while events:
        if shown := merge.from_decode(changes.events(events)):
            response.shown = True
            await one.job.client.write(shown)
        events = await reader.next()


async def _until_output(reader: EventReader) -> bytes:
    """The events of the decode leg up to its first output. Raises LegFailed."""
    beginning = Beginning()
    while (events := await reader.next()) and not beginning.over(events):
        pass
    return beginning.data


async def _fail(client: Client, failure: LegFailed | Final) -> None:
    """Raises the failure before the client's first byte, Broken after it."""
    if client.started:
        await break_off(client, failure, whole=True)
    raise failure


def _limit(request: ClientRequest) -> int | None:
    """The client's limit on tokens."""
    for key in ("max_completion_tokens", "max_tokens"):
        value = plain(request.body.get(key))
        if isinstance(value, int):
            return value
    return None


async def _read_out(decoding: _Opening) -> None:
    """Reads a leg without needed tokens to its end. The decode engine must receive the KV, or
    the prefill engine would keep it."""
    try:
        async with asyncio.timeout(_SETTLE_S):
            response = await decoding
            try:
                await response.read()
            finally:
                response.close()
    except (TimeoutError, LegFailed, Final) as exc:
        logger.debug("the rest of a decode leg: %s", exc)
    finally:
        await end_tasks(decoding)
