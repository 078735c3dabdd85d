"""Notes about a request in flight, for `dynamo-lite explain`.

The parts that do the work are wrapped: `NotedClient` sees the answer, `NotedLegs` the legs.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from multidict import CIMultiDict

from dynamo_lite.forward.client import Client, Incoming
from dynamo_lite.forward.engine_answer import EngineAnswer
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.failures import EngineFailed, Final, PrefillFailed
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.legs import Legs, Sending
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import ChosenEngine
from dynamo_lite.forward.protocols.base import PrefillAnswer
from dynamo_lite.forward.upstream import Upstream

#: Monotonic seconds.
Now = Callable[[], float]
NOW: Now = time.monotonic

#: The id of an answer is near its beginning, whatever the engine and the route. In a text of the
#: answer the quotes would be escaped.
_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,256})"')
_HEAD_BYTES = 2048


@dataclass(slots=True)
class LegNote:
    """One leg. Times are those of `NOW`."""

    leg: str
    engine: str
    began_at: float
    head_at: float | None = None
    ended_at: float | None = None
    status: int = 0
    failure: str = ""

    def ended(self) -> None:
        if self.ended_at is None:
            self.ended_at = NOW()


@dataclass(slots=True)
class AttemptNote:
    """One attempt. first_choice: how many choices were made before it."""

    order: str
    alone: str
    first_choice: int
    prompt_tokens: int
    #: Unique id of the attempt, which also pairs its legs.
    unique: str = ""
    legs: list[LegNote] = field(default_factory=list[LegNote])
    failure: str = ""


@dataclass(slots=True)
class RequestNote:
    """One request to generate."""

    route: str
    client_id: str
    #: Those of `Tried`.
    choices: list[ChosenEngine]
    at: float = field(default_factory=NOW)
    attempts: list[AttemptNote] = field(default_factory=list[AttemptNote])
    #: Its first answer's id.
    answer_id: str = ""
    how: str = ""
    reason: str = ""
    status: int = 0
    first_byte_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    #: Why no engine could be asked.
    error: str = ""

    def known_as(self, request_id: str) -> bool:
        return request_id in self.ids or request_id == self.answer_id

    @property
    def ids(self) -> list[str]:
        """The ids of the request, except that of its answer."""
        found = [self.client_id, *(attempt.unique for attempt in self.attempts)]
        return [one for one in dict.fromkeys(found) if one and one != self.answer_id]

    def failed(self, why: Exception) -> None:
        """The last attempt has failed."""
        if self.attempts:
            self.attempts[-1].failure = str(why)

    def ended(self, outcome: str) -> None:
        self.ended_at, self.outcome = NOW(), outcome


class NotedClient:
    """Implements `Client`: passes an answer on, and notes its status and id."""

    def __init__(self, client: Client, note: RequestNote):
        self._client, self._note = client, note
        # A stream has thousands of these, so they are the client's own.
        self.push, self.drained = client.push, client.drained

    @property
    def started(self) -> bool:
        return self._client.started

    async def start(self, status: int, headers: Mapping[str, str] | CIMultiDict[str]) -> None:
        self._note.status = status
        await self._client.start(status, headers)

    async def write(self, data: bytes) -> None:
        if data and self._note.first_byte_at is None:
            self._note.first_byte_at = NOW()
            if found := _ID.search(data, 0, _HEAD_BYTES):
                self._note.answer_id = found[1].decode(errors="replace")
        await self._client.write(data)

    async def finish(self) -> None:
        await self._client.finish()

    def abort(self) -> None:
        self._client.abort()


class NotedLegs(Legs):
    """Notes each leg of an attempt."""

    def __init__(
        self,
        incoming: Incoming,
        upstream: Upstream,
        monitor: EngineMonitor,
        config: ForwarderConfig,
        note: RequestNote,
    ):
        super().__init__(incoming, upstream, monitor, config)
        self._notes = note.attempts[-1].legs

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for leg in self._notes:
            leg.ended()

    async def prefill(
        self, one: Sending, *, streams: bool, on_data: Callable[[bytes], None] | None = None
    ) -> PrefillAnswer:
        try:
            answer = await super().prefill(one, streams=streams, on_data=on_data)
        except PrefillFailed as exc:
            self._failed(one.engine, exc)
            raise
        if not streams:
            for leg in self._notes:
                if leg.leg == "prefill":
                    leg.ended()
        return answer

    async def open(
        self, one: Sending, failed: type[EngineFailed], *, passes_errors: bool = False
    ) -> EngineAnswer:
        kind = "prefill" if failed is PrefillFailed else "decode"
        leg = LegNote(kind, one.engine.name, NOW())
        self._notes.append(leg)
        try:
            response = await super().open(one, failed, passes_errors=passes_errors)
        except Final as exc:
            leg.status = exc.answer.status
            leg.ended()
            raise
        except EngineFailed as exc:
            leg.status = exc.answer.status if exc.answer is not None else 0
            leg.failure = exc.kind
            leg.ended()
            raise
        leg.status, leg.head_at = response.status, NOW()
        return response

    def _failed(self, engine: KnownEngine, failure: PrefillFailed) -> None:
        for leg in self._notes:
            if leg.engine == engine.name and leg.leg == "prefill" and not leg.failure:
                leg.failure = failure.kind
                leg.ended()
