"""An engine's answer to the client, as bytes."""

from collections.abc import Callable

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.attempt import RequestAttempt
from dynamo_lite.forward.client import Client
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.events import Beginning, EventReader, ends_event, failure
from dynamo_lite.forward.failures import Broken, LegFailed
from dynamo_lite.forward.rewriting import Changes


def is_stream(response: EngineAnswer) -> bool:
    return response.content_type == "text/event-stream"


async def relay(
    attempt: RequestAttempt,
    response: EngineAnswer,
    *,
    changes: Changes,
    on_first: Callable[[], None],
) -> None:
    """Passes the whole answer of a decode leg. on_first: called before the first byte.

    Raises LegFailed before the first byte, Broken after it, ClientGone.
    """
    client, head = attempt.job.client, headers.to_client(response.headers)
    if changes.any:
        head.popall("content-length", None)
    if changes.any and not is_stream(response):
        data = changes.whole(await attempt.watched(response.read(), "whole answer"))
        head["content-length"] = str(len(data))
        on_first()
        await client.start(response.status, head)
        await client.write(data)
        return await client.finish()
    # The head is held back until the first output: until then, another engine can be asked.
    data = await _until_output(attempt, response)
    response.shown = True
    on_first()
    await client.start(response.status, head)
    if changes.any:
        await _changed(client, response, changes, data)
    else:
        await _unchanged(client, response, data)
    await client.finish()


async def _until_output(attempt: RequestAttempt, response: EngineAnswer) -> bytes:
    """The first bytes, in a stream up to its first output. Raises LegFailed, Final."""
    data = await attempt.watched(response.read_some(), "first bytes")
    if not is_stream(response):
        return data
    beginning = Beginning()
    while data and not beginning.over(data):
        data = await attempt.watched(response.read_some(), "first bytes")
    if beginning.error is not None:
        raise failure(response, beginning.error)
    return beginning.data


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
        await break_off(client, exc, whole=is_stream(response) and ends_event(last))


async def _changed(client: Client, response: EngineAnswer, changes: Changes, data: bytes) -> None:
    reader = EventReader(response, begun=data)
    try:
        while events := await reader.next():
            await client.write(changes.events(events))
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
