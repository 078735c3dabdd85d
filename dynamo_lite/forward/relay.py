"""An engine's answer to the client, as bytes."""

from collections.abc import Callable

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.client import Answer, Client
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.events import EventReader, ends_event, until_output
from dynamo_lite.forward.failures import Broken, LegFailed
from dynamo_lite.forward.protocols.base import Leg


async def relay(
    client: Client, response: EngineAnswer, leg: Leg | None, on_first: Callable[[], None]
) -> None:
    """Passes the whole answer of a decode leg. leg: None: it has no id to hide. on_first: called
    before the first byte.

    Raises LegFailed before the first byte, Broken after it, ClientGone.
    """
    head = headers.to_client(response.headers)
    changes = leg if leg is not None and leg.hidden is not None else None
    if changes is not None:
        head.popall("content-length", None)
    if changes is not None and not response.is_stream:
        data = changes.shows(await response.read())
        head["content-length"] = str(len(data))
        on_first()
        return await client.send(Answer(response.status, head, data))
    # The head is held back until the first output: until then, another engine can be asked.
    data = await until_output(response)
    response.shown = True
    on_first()
    await client.start(response.status, head)
    if changes is not None:
        await _changed(client, response, changes, data)
    else:
        await _unchanged(client, response, data)
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


async def _changed(client: Client, response: EngineAnswer, leg: Leg, data: bytes) -> None:
    reader = EventReader(response, begun=data)
    try:
        while events := await reader.next():
            await client.write(leg.shows(events))
    except LegFailed as exc:
        await break_off(client, exc, whole=True)


async def break_off(client: Client, why: object, *, whole: bool) -> None:
    """Ends an answer that cannot be completed, so that no client takes it for complete.

    whole: the client got whole events only, so that it can read one more. Raises Broken.
    """
    if whole:
        failed = {"message": "the engine failed", "type": "InternalServerError", "code": 500}
        await client.write(b"data: " + msgspec.json.encode({"error": failed}) + b"\n\n")
    client.abort()
    raise Broken(str(why))
