"""An engine's answer to the client, as bytes."""

import logging
from collections.abc import Callable

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.beginning import Beginning
from dynamo_lite.forward.client import Client
from dynamo_lite.forward.engine_answer import EngineAnswer
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.event_cutter import ends_event
from dynamo_lite.forward.events import failure
from dynamo_lite.forward.failures import Broken, DecodeFailed
from dynamo_lite.forward.legs import Legs
from dynamo_lite.forward.rewriting import UNCHANGED, Changes

logger = logging.getLogger(__name__)


def is_stream(response: EngineAnswer) -> bool:
    return response.content_type == "text/event-stream"


async def relay(
    client: Client,
    legs: Legs,
    engine: KnownEngine,
    response: EngineAnswer,
    *,
    changes: Changes = UNCHANGED,
    on_first: Callable[[], None],
) -> None:
    """Passes a whole answer. on_first: called before the first byte.

    Raises DecodeFailed or PrefillFailed before the first byte, Broken after it, ClientGone.
    """
    head = headers.to_client(response.headers)
    if changes.any:
        head.popall("content-length", None)
    if changes.any and not is_stream(response):
        data = changes.whole(await legs.whole_answer(engine, response))
        head["content-length"] = str(len(data))
        on_first()
        await client.start(response.status, head)
        await client.write(data)
        return await client.finish()
    # The head is held back until the first output: until then, another engine can be asked.
    data = await _until_output(legs, engine, response)
    response.shown = True
    on_first()
    await client.start(response.status, head)
    if changes.any:
        await _changed(client, legs, engine, response, changes, data)
    else:
        await _unchanged(client, legs, engine, response, data)
    await client.finish()


async def _until_output(legs: Legs, engine: KnownEngine, response: EngineAnswer) -> bytes:
    """The first bytes, in a stream up to its first output. Raises DecodeFailed, PrefillFailed,
    Final."""
    data = await legs.first(engine, response)
    if not is_stream(response):
        return data
    beginning = Beginning()
    while data and not beginning.over(data):
        data = await legs.first(engine, response)
    if beginning.error is not None:
        raise failure(DecodeFailed, engine, beginning.error)
    return beginning.data


async def _unchanged(
    client: Client, legs: Legs, engine: KnownEngine, response: EngineAnswer, data: bytes
) -> None:
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
        await legs.pass_on(engine, response, client, push)
    except DecodeFailed as exc:
        await break_off(client, exc, whole=is_stream(response) and ends_event(last))


async def _changed(
    client: Client,
    legs: Legs,
    engine: KnownEngine,
    response: EngineAnswer,
    changes: Changes,
    data: bytes,
) -> None:
    reader = legs.events(engine, response, begun=data)
    try:
        while events := await reader.next():
            await client.write(changes.events(events))
    except DecodeFailed as exc:
        await break_off(client, exc, whole=True)


async def break_off(client: Client, why: DecodeFailed | str, *, whole: bool) -> None:
    """Ends an answer that cannot be completed, so that no client takes it for complete.

    whole: the client got whole events only, so that it can read one more. Raises Broken.
    """
    if whole:
        failed = {"message": "the engine failed", "type": "InternalServerError", "code": 500}
        await client.write(b"data: " + msgspec.json.encode({"error": failed}) + b"\n\n")
    client.abort()
    raise Broken(str(why))
