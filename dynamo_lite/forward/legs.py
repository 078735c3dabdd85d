"""The legs of one attempt: they are sent, read, noted, and closed in any case.

An engine aborts a request whose connection is closed before the end of its answer.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from dynamo_lite.forward import headers
from dynamo_lite.forward.client import Answer, Incoming
from dynamo_lite.forward.connection import EngineAnswer
from dynamo_lite.forward.decision_log import RequestNote
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.events import EventReader
from dynamo_lite.forward.failures import Final, LegFailed, LegKind, refused
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.protocols.base import Leg, PrefillAnswer
from dynamo_lite.forward.protocols.one_token import prefill_answer
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.forwarding import LegTaken
from dynamo_lite.runtime.tasks import end_tasks

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: With one of these statuses the decode engine may have failed, not the request.
_RETRIED = frozenset({500, 502, 503, 504})
#: How long after its prefill leg a decode leg that is not streamed depends on the prefill engine.
#: Its first byte comes only after all tokens, so it does not tell when the KV has arrived.
_WHOLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sending:
    """A request to one engine. headers: replace the client's. hidden: of `Leg`."""

    engine: KnownEngine
    leg: LegKind
    data: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    hidden: tuple[str, str] | None = None


def sending(engine: KnownEngine, kind: LegKind, leg: Leg) -> Sending:
    return Sending(engine, kind, msgspec.json.encode(leg.body), leg.headers, leg.hidden)


class Legs:
    """Async context manager: at its end all legs are closed and all tasks have ended, but for
    those that were left open. note: of the request; its last attempt gets the legs."""

    def __init__(
        self,
        incoming: Incoming,
        upstream: Upstream,
        monitor: EngineMonitor,
        config: ForwarderConfig,
        note: RequestNote,
    ):
        self._incoming, self._upstream = incoming, upstream
        self._monitor, self._config = monitor, config
        self._note = note
        self._taken: dict[LegKind, LegTaken] = {}
        self._responses: list[EngineAnswer] = []
        self._tasks: list[asyncio.Task[Any]] = []
        #: Legs that the caller of `leave_open` ends.
        self._left: list[asyncio.Task[EngineAnswer]] = []
        #: Fails when a prefill leg fails after `prefill` has returned.
        self._rest: asyncio.Future[None] | None = None
        #: The time limit of the rest of a streamed prefill leg, while it is read.
        self._rest_limit: asyncio.Timeout | None = None
        #: Fails when the prefill engine ends while the decode engine may wait for its KV.
        self._handover: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()
        self.handed_over()
        try:
            # A cancel is raised when they have ended.
            await end_tasks(*self._tasks)
        finally:
            self._close()
            for task in (*self._tasks, self._rest, self._handover):
                if task is not None and task.done() and not task.cancelled():
                    task.exception()  # else asyncio would report a second failure as unread
            for taken in self._taken.values():
                self._note.leg_ends(taken)

    def start(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(coro, name=name)
        self._tasks.append(task)
        return task

    def leave_open(self, opening: "asyncio.Task[EngineAnswer]") -> None:
        """This leg outlives the others; the caller ends it."""
        self._tasks.remove(opening)
        self._left.append(opening)

    async def prefill(self, one: Sending, *, streams: bool) -> PrefillAnswer:
        """A whole prefill leg. streams: it ends with the head of its answer; the rest is read
        and dropped, and `all` notices when it fails. Raises LegFailed, Final."""
        try:
            answer = await self._prefill(one, streams)
        except LegFailed as exc:
            self._note.leg_ends(self._taken["prefill"], exc.kind)
            raise
        if not streams:
            self._note.leg_ends(self._taken["prefill"])
        return answer

    async def _prefill(self, one: Sending, streams: bool) -> PrefillAnswer:
        deadline = asyncio.get_running_loop().time() + self._config.prefill_timeout_s
        with self._in_time(one.engine):
            async with asyncio.timeout_at(deadline):
                response = await self.open(one)
                if streams:
                    self._rest = self.start(
                        self._read_out(response, deadline), "rest of the prefill leg"
                    )
                    return PrefillAnswer()
                data = await response.read()
        try:
            return prefill_answer(data)
        except (ValueError, RecursionError) as exc:
            raise LegFailed(one.engine, "prefill", "malformed", type(exc).__name__) from exc

    def lift_prefill_limit(self) -> None:
        """The rest of a streamed prefill leg may last as long as the request. To close it would
        abort the sequences whose KV the decode engine does not have yet."""
        if self._rest_limit is not None and not self._rest_limit.expired():
            self._rest_limit.reschedule(None)

    async def open(self, one: Sending, *, passes_errors: bool = False) -> EngineAnswer:
        """Returns the head of a successful answer, without the leg's hidden id. Raises LegFailed,
        and Final with the engine's answer for a 4xx, or with `passes_errors` for any error."""
        note, taken = self._note, self._note.leg_begins(one.leg, one.engine.name)
        self._taken[one.leg] = taken
        try:
            response = await self._open(one, passes_errors)
        except (Final, LegFailed) as exc:
            taken.status = exc.answer.status if exc.answer is not None else 0
            note.leg_ends(taken, exc.kind if isinstance(exc, LegFailed) else "")
            raise
        note.head_came(taken, response.status)
        return response

    async def _open(self, one: Sending, passes_errors: bool) -> EngineAnswer:
        incoming, engine = self._incoming, one.engine
        try:
            response = await self._upstream.open(
                engine,
                one.leg,
                incoming.method,
                f"{engine.base}{incoming.path}",
                headers.for_leg(incoming.headers, one.headers),
                one.data,
            )
        except LegFailed as exc:
            self._monitor.lost(engine, exc)
            raise
        self._responses.append(response)
        if one.hidden is not None:
            headers.hide(response.headers, *one.hidden)
        status = response.status
        prefill = one.leg == "prefill"
        if status < 300 or (status < 400 and not prefill):
            return response
        body = await response.read()
        head = headers.to_client(response.headers)
        if one.hidden is not None:
            found, shown = one.hidden
            body = body.replace(found.encode(), shown.encode())
            head["content-length"] = str(len(body))
        answer = Answer(status, head, body)
        if 400 <= status < 500:
            raise refused(engine, one.leg, answer)
        if passes_errors or not (prefill or status in _RETRIED):
            raise Final(answer)
        raise LegFailed(engine, one.leg, "status", str(status), answer)

    def stays(
        self, engine: KnownEngine, ends: int, ids: Mapping[int, str], *, streams: bool
    ) -> None:
        """After a prefill leg, until `handed_over`: `all` and `watched` fail if the prefill engine
        ends, or another process than the one with these `engine_ids` is found at its address. The
        decode engine would wait for its KV until a timeout.

        ends: the engine's before the leg. streams: whether the decode leg is streamed.
        """
        loop = asyncio.get_running_loop()
        found = self._handover = loop.create_future()
        until = math.inf if streams else loop.time() + _WHOLE_S
        self._look(found, engine, ends, ids, until)

    def _look(
        self,
        found: asyncio.Future[None],
        engine: KnownEngine,
        ends: int,
        ids: Mapping[int, str],
        until: float,
    ) -> None:
        """By a timer: the end of a task would have to be waited for in every request."""
        loop = asyncio.get_running_loop()
        if engine.ends != ends or engine.replaced(ids):
            text = "the engine has ended or was restarted before its KV was taken over"
            found.set_exception(LegFailed(engine, "prefill", "unpaired", text))
        elif loop.time() < until:
            if self._timer is not None:  # not at once: most handovers do not last that long
                self._monitor.look(engine)
            again = partial(self._look, found, engine, ends, ids, until)
            self._timer = loop.call_later(self._config.health_interval_s, again)

    def handed_over(self) -> None:
        """The decode engine has answered, so it does not wait for the prefill engine any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def all(self, *tasks: asyncio.Task[Any]) -> None:
        """Returns when all have succeeded. The first failure is raised, without waiting for others.

        The failure of the rest of a streamed prefill leg, or of the prefill engine, is raised as
        well, because a decode engine would wait for its KV until the timeout.
        """
        pending = set(tasks)
        while pending:
            watched = {one for one in self._others() if not one.done()}
            done, _ = await asyncio.wait(pending | watched, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            for task in tasks:  # in the order of the arguments: of two the first one counts
                if task in done:
                    task.result()
            for one in self._others():  # more of them, if a prefill leg has just ended
                # An answer that is complete needs no prefill engine any more.
                if one.done() and (pending or one is self._rest):
                    one.result()

    def _others(self) -> list[asyncio.Future[None]]:
        return [one for one in (self._rest, self._handover) if one is not None]

    async def watched(self, coro: Coroutine[Any, Any, T], name: str) -> T:
        """What a part of the decode leg returns. Raises what it raises, and LegFailed as `all`."""
        if self._rest is None and self._handover is None:
            return await coro
        reading = self.start(coro, name)
        try:
            await self.all(reading)
        finally:
            await end_tasks(reading)
        return reading.result()

    def _close(self) -> None:
        # A leg that is left open may have been opened at any time until now.
        left = [
            task.result()
            for task in self._left
            if task.done() and not task.cancelled() and task.exception() is None
        ]
        for response in self._responses:
            if response not in left:
                response.close()

    async def _read_out(self, response: EngineAnswer, deadline: float) -> None:
        """deadline: of the whole leg, in the loop's time. Raises LegFailed, Final."""
        with self._in_time(response.engine):
            try:
                async with asyncio.timeout_at(deadline) as self._rest_limit:
                    reader = EventReader(response)
                    while await reader.next_without_error():
                        pass
            finally:
                self._rest_limit = None
                response.close()  # else it would stay open as long as the decode leg

    @contextmanager
    def _in_time(self, engine: KnownEngine) -> Iterator[None]:
        """Turns the timeout of a prefill leg into LegFailed."""
        try:
            yield
        except TimeoutError as exc:
            detail = f"no whole answer within {self._config.prefill_timeout_s:g} s"
            raise LegFailed(engine, "prefill", "timeout", detail) from exc
