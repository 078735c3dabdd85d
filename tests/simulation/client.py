"""The Frontend of a simulation, with requests instead of HTTP, and the invariants of requests.

Each request runs as a task, as in vLLM's app. Everything that its caller receives is recorded in
a `Story`. Each ends once, in time, with the model's tokens or a stated error. None waits for the
broker, or fails because of it.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_lite.disagg.attempts.ledger import AttemptState
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DynamoLiteError, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.request_plane.rotation import rotate
from dynamo_lite.routing.pickers import RoundRobin
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.tasks import end_tasks
from tests.simulation.engine.assembly import SimEngineProcess
from tests.simulation.engine.halves import DecodeHalves
from tests.simulation.engine.model import (
    SimRequest,
    SimRequestStatus,
    first_wrong,
)
from tests.simulation.scenario import Ask
from tests.simulation.shipped import Shipped

#: How long a worker may take to accept a request.
_REQUEST_S = 5.0


@dataclass
class Story:
    """What one caller has received; times are loop time."""

    ask: Ask
    began_at: float
    #: When a worker had accepted the request.
    placed_at: float | None = None
    #: Whether this client and all decode workers had been ready for a while at the start.
    workers_up: bool = False
    tokens: list[int] = field(default_factory=list[int])
    #: How many deltas had the prompt's counts.
    prompts_told: int = 0
    #: Every end that it has received: "length", an error's text, "cancelled".
    ends: list[str] = field(default_factory=list[str])
    error: DynamoLiteError | None = None
    ended_at: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, how: str, at: float, error: DynamoLiteError | None = None) -> None:
        self.ends.append(how)
        self.ended_at, self.error = at, error or self.error
        self.ended.set()


class SimFrontend:
    """Component. on_story: called with each request at its start."""

    def __init__(self, on_story: Callable[[Story], None], shipped: Shipped):
        self._on_story, self._shipped = on_story, shipped
        self._open: dict[str, Story] = {}
        #: Not OwnedTasks, which log a failure: the loop must hear of it, so that the run fails.
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self.client: FailoverClient | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        namespace, workers = host.spec.namespace, host.spec.watch_component
        enter = host.stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, workers, "generate")
        roster = await enter(Roster(host.store, prefix))
        health = await enter(
            HealthMonitor(host.messaging, roster, namespace=namespace, component=workers)
        )
        self.client = client = await enter(
            self._shipped.failover_client(
                self._shipped.transport(
                    partial(
                        RemoteGenerateClient, f"{host.lease.id:x}", request_timeout_s=_REQUEST_S
                    ),
                    host.messaging,
                ),
                picker=RoundRobin(),
                on_deltas=self._on_deltas,
                on_ended=self._on_ended,
            )
        )
        await rotate(host.stack, roster, health, client.transport, client.set_members)
        host.stack.push_async_callback(self._close)
        await host.register("http")
        self._accepting = True
        return {}

    async def drain(self, grace_s: float) -> None:
        self._accepting = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)

    async def _close(self) -> None:
        self._accepting = False
        await end_tasks(*self._tasks)

    def health(self) -> dict[str, Any]:
        return {"ok": self._accepting}

    # Callers. Their connections break with this process.

    def ask(self, ask: Ask) -> None:
        """Starts a request, unless this Frontend does not accept any."""
        if not self._accepting:
            return
        story = Story(ask, _now())
        self._on_story(story)
        task = asyncio.create_task(self._run(story), name=f"caller {ask.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if ask.cancel_after_s is not None:
            asyncio.get_running_loop().call_later(ask.cancel_after_s, task.cancel)

    async def _run(self, story: Story) -> None:
        """As vLLM's app: submits, waits for the end, aborts when its caller has disconnected."""
        assert self.client is not None
        ask = story.ask
        submitted = False
        try:
            if ask.request_id in self._open:
                story.end("refused: the same id is running", _now())
                return
            self._open[ask.request_id] = story
            seeded = not ask.sampling.greedy and ask.sampling.seed is not None
            await self.client.submit(self._message(ask), movable=MigrationPlan(replay=seeded))
            submitted = True
            story.placed_at = _now()
            await story.ended.wait()
        except DynamoLiteError as exc:
            story.end(f"{type(exc).__name__}: {exc}", _now(), exc)
        except asyncio.CancelledError:
            if not story.ends:
                story.end("cancelled", _now())
            if submitted:
                await self.client.abort([ask.request_id])
        finally:
            if self._open.get(ask.request_id) is story:
                del self._open[ask.request_id]

    def _message(self, ask: Ask) -> GenerateRequest:
        return GenerateRequest(
            request_id=ask.request_id,
            prompt_token_ids=list(ask.prompt),
            sampling=encode(ask.sampling),
            arrival_time=0.0,
            priority=_priority(ask),
            timeout_s=ask.timeout_s,
        )

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            story = self._open.get(delta.request_id)
            if story is None:
                continue
            if story.ends:
                story.ends.append(f"a delta after its end: {delta}")
                continue
            story.tokens += delta.token_ids
            story.prompts_told += delta.prefill is not None
            if delta.finish_reason is not None:
                story.end(delta.finish_reason, _now())

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        story = self._open.get(request_id)
        if story is not None:
            story.end(f"{type(error).__name__}: {error}", _now(), error)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _priority(ask: Ask) -> int:
    """Mostly 0; the same for the same request id."""
    return (0, 0, 0, -1, 1)[zlib.crc32(ask.request_id.encode()) % 5]


@dataclass
class CancelWatch:
    """Aborts in decode engines, and the cancels that they cause."""

    #: Virtual time.
    now: Callable[[], float]
    #: Returns when the caller of a request has cancelled it, or None.
    began_at: Callable[[SimRequest], float | None]
    counts: Counter[str]
    #: Longest time of a cancel from a caller to a prefill worker, without the wait of its engine,
    #: which aborts between two steps.
    longest_s: float = 0.0
    #: Attempts with a cancel in flight: when it began, and the engine that was asked to abort.
    _under_way: dict[str, tuple[float, SimEngineProcess]] = field(
        default_factory=dict[str, tuple[float, SimEngineProcess]]
    )

    def aborting(self, engine: SimEngineProcess, waited_s: Mapping[str, float]) -> None:
        """To be called before requests are aborted. waited_s: by their ids, for the engine."""
        halves = engine.halves
        if not isinstance(halves, DecodeHalves):
            return
        for request_id, waited in waited_s.items():
            request = engine.scheduler.requests.get(request_id)
            if request is None:
                self.counts["abort over"] += 1
                continue
            attempt, state = halves.stage(request)
            self.counts[f"abort {_place(request, state)}"] += 1
            if state is AttemptState.HELD and attempt is not None and halves.writes(attempt):
                self.counts["cancels sent to writers"] += 1
                began = self.began_at(request)
                self._under_way[attempt] = self.now() if began is None else began + waited, engine

    def ended(self, attempt: str) -> float | None:
        """The renewal of the attempt's claim was refused, or its writer is done. Returns how long
        that took; None if it was not cancelled, or has ended before."""
        found = self._under_way.pop(attempt, None)
        if found is None:
            return None
        took_s = self.now() - found[0]
        self.counts["cancels that reached writers"] += 1
        self.longest_s = max(self.longest_s, took_s)
        return took_s

    def died(self, engine: SimEngineProcess) -> None:
        """It refuses no claim any more, also if it has left in peace. Its writers notice that at
        their next transfer or at the end of their claim."""
        self._under_way = {a: one for a, one in self._under_way.items() if one[1] is not engine}

    @property
    def under_way(self) -> list[str]:
        """Attempts with a cancel that has not reached the writer."""
        return list(self._under_way)


def _place(request: SimRequest, state: AttemptState | None) -> str:
    """The attempt's state in the ledger; without one, the request's state in the engine."""
    if state is not None:
        return state.value
    return "between" if request.status is SimRequestStatus.PARKED else request.status.value


#: How much later than its deadline a request may end: the next turn of its process.
_LATE_S = 0.1
#: How long a request may take to a worker in a run with no faults but the broker's.
_PLACING_S = 0.1


@dataclass
class RequestJudge:
    """Keeps the story of each request, and checks all of them at the end of the run."""

    #: Virtual time.
    now: Callable[[], float]
    violate: Callable[[str], None]
    counts: Counter[str]
    #: Whether the scenario has no faults but faults of the broker.
    only_broker_fails: bool
    longest_wait_s: float = 0.0
    #: Client and story of each request, in the order of their start.
    _stories: list[tuple[str, Story]] = field(default_factory=list[tuple[str, Story]])

    def begun(self, client: str, story: Story) -> None:
        self._stories.append((client, story))

    def client_died(self, client: str) -> None:
        """The connections of its callers break, which ends their requests."""
        for name, story in self._stories:
            if name == client and not story.ends:
                story.end("client died", self.now())

    def under_way(self) -> list[Story]:
        return [story for _, story in self._stories if not story.ends]

    def judge(self, held_up_s: Callable[[str, float, float], float]) -> None:
        """held_up_s: for how long a client was unable to act between two times."""
        for client, story in self._stories:
            self.counts[f"request {_kind(story)}"] += 1
            for text in _wrongs(story):
                self.violate(f"request {story.ask.request_id} of {client}: {text}")
            if self.only_broker_fails and story.workers_up:
                for text in _held_up(story):
                    self.violate(f"request {story.ask.request_id} of {client}: {text}")
            if story.ended_at is None or story.ends[0] == "client died":
                continue
            waited_s = story.ended_at - story.began_at
            held_up = held_up_s(client, story.began_at, story.ended_at)
            over_s = waited_s - (story.ask.timeout_s + held_up)
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
            if abs(over_s) <= _LATE_S:
                self.counts["requests that ended at their deadline"] += 1
            if over_s > _LATE_S:
                self.violate(
                    f"request {story.ask.request_id} of {client} ended {over_s:.3f} s after its"
                    f" deadline: {story.ends[0]}"
                )

    def cancelled_at(self, request: SimRequest) -> float | None:
        """When the caller of an engine's request left; None if it has not cancelled it."""
        name = request.request_id.partition("~")[0]
        for _, story in reversed(self._stories):
            if story.ask.request_id == name and story.began_at <= request.arrived:
                return story.ended_at if story.ends[:1] == ["cancelled"] else None
        return None


def _kind(story: Story) -> str:
    if story.error is not None:
        return type(story.error).__name__
    return story.ends[0] if story.ends else "without an end"


def _held_up(story: Story) -> list[str]:
    """What went wrong with a request whose workers were up all the time."""
    out: list[str] = []
    placed_at = story.ended_at if story.placed_at is None else story.placed_at
    if placed_at is not None and placed_at - story.began_at > _PLACING_S:
        out.append(f"it waited {placed_at - story.began_at:.3f} s for a worker, and all were up")
    if isinstance(story.error, Unavailable):
        out.append(f"it ended with {story.ends[0]!r}, and all workers were up")
    return out


def _wrongs(story: Story) -> list[str]:
    out: list[str] = []
    ask = story.ask
    if len(story.ends) != 1:
        out.append(f"it ended {len(story.ends)} times: {story.ends}")
    wrong = first_wrong(ask.prompt, ask.sampling, story.tokens)
    if wrong is not None:
        out.append(f"token {wrong} of {len(story.tokens)} is wrong")
    whole, wanted = story.ends[:1] == ["length"], ask.sampling.max_tokens
    if len(story.tokens) > wanted or (whole and len(story.tokens) < wanted):
        out.append(f"{len(story.tokens)} tokens instead of {wanted}")
    if whole:
        if story.prompts_told != 1:
            out.append(f"its prompt was accounted for {story.prompts_told} times")
    elif story.ends and not isinstance(story.error, DynamoLiteError):
        if story.ends[0] not in ("cancelled", "client died", "refused: the same id is running"):
            out.append(f"it ended with {story.ends[0]!r}")
    return out
