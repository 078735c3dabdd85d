"""The events of a leg's stream: whole ones, and errors among them."""

from collections.abc import Awaitable, Callable

import msgspec

from dynamo_lite.forward.client import Answer
from dynamo_lite.forward.engine_answer import TooLarge
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.event_cutter import EventCutter, split
from dynamo_lite.forward.failures import EngineFailed, Final

#: SGLang writes errors as Python does.
_ERRORS = (b'{"error"', b"{'error'")
_ERROR_TYPE = (b"event: error\n", b"event: error\r\n")


class EventReader:
    """Reads whole events. some: returns the next bytes of the leg, empty at the end. begun: bytes
    of the leg that were read before."""

    def __init__(
        self,
        some: Callable[[], Awaitable[bytes]],
        engine: KnownEngine,
        failed: type[EngineFailed],
        begun: bytes = b"",
    ):
        self._some, self._engine, self._failed, self._begun = some, engine, failed, begun
        self._cutter = EventCutter()

    async def next(self) -> bytes:
        """Empty at the end. Raises `failed`, and what `some` raises."""
        try:
            while data := self._begun or await self._some():
                self._begun = b""
                if events := self._cutter.feed(data):
                    return events
        except TooLarge as exc:
            raise self._failed(self._engine, "too_large", f"an event {exc}") from exc
        return self._cutter.flush()

    async def next_without_error(self) -> bytes:
        """As `next`. An error in place of output is raised: `failed`, or Final."""
        events = await self.next()
        for event in split(events):
            if (error := error_of(event)) is not None:
                raise failure(self._failed, self._engine, error)
        return events


def payload_of(event: bytes) -> bytes:
    """The JSON of an event; empty without any."""
    lines = event.split(b"\n")
    return next((line[5:].strip() for line in lines if line.startswith(b"data:")), b"")


def error_of(event: bytes) -> bytes | None:
    """The JSON of an event that is an error; None for any other event."""
    payload = payload_of(event)
    if event.startswith(_ERROR_TYPE) or payload.startswith(_ERRORS):
        return payload
    return None


def failure(failed: type[EngineFailed], engine: KnownEngine, error: bytes) -> EngineFailed | Final:
    """What an error in place of output means. A status below 500 says that the request is wrong,
    not the engine."""
    answer = _as_answer(error)
    if answer is not None and answer.status < 500:
        return Final(answer)
    return failed(engine, "event", answer=answer)


def _as_answer(error: bytes) -> Answer | None:
    """With its status, if it has one."""
    try:
        code = msgspec.json.decode(error)["error"]["code"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if not isinstance(code, int) or not 400 <= code < 600:
        return None
    return Answer(code, {"content-type": "application/json"}, error)
