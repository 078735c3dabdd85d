"""The Frontend of a simulation: the shipped client side, and requests instead of HTTP.

Each request runs as a task, as in vLLM's app. Everything that its caller receives is recorded in
a `Story`, which `RequestJudge` checks.
"""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_lite.policy.routing.migration import SamplingFacts, plan
from dynamo_lite.policy.routing.pickers import RoundRobin
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.services.frontend.rotation import Rotation
from tests.simulation.engine.model import sampling_to_bytes
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

    def end(self, how: str, at: float, error: DynamoLiteError | None = None) -> None:
        self.ends.append(how)
        self.ended_at, self.error = at, error or self.error


class SimFrontend:
    """Component. on_story: called with each request at its start."""

    def __init__(self, spec: ProcessSpec, on_story: Callable[[Story], None], shipped: Shipped):
        self._spec, self._on_story, self._shipped = spec, on_story, shipped
        self._stack = AsyncExitStack()
        self._open: dict[str, tuple[Story, asyncio.Future[None]]] = {}
        #: Not OwnedTasks, which log a failure: the loop must hear of it, so that the run fails.
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self.client: FailoverClient | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        namespace, workers = self._spec.namespace, self._spec.watch_component
        enter = self._stack.enter_async_context
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
                members=lambda: health.members_or_all,
                picker=RoundRobin(),
                on_deltas=self._on_deltas,
                on_ended=self._on_ended,
            )
        )
        self._stack.enter_context(
            Rotation(roster, health, client.transport, client.members_changed)
        )
        await host.register("http")
        self._accepting = True
        return {}

    async def drain(self, grace_s: float) -> None:
        self._accepting = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)

    async def close(self) -> None:
        self._accepting = False
        await end_tasks(*self._tasks)
        await self._stack.aclose()

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
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if ask.request_id in self._open:
                story.end("refused: the same id is running", _now())
                return
            self._open[ask.request_id] = story, ended
            await self.client.submit(self._message(ask), movable=plan(_facts(ask)))
            submitted = True
            story.placed_at = _now()
            await ended
        except DynamoLiteError as exc:
            story.end(f"{type(exc).__name__}: {exc}", _now(), exc)
        except asyncio.CancelledError:
            if not story.ends:
                story.end("cancelled", _now())
            if submitted:
                await self.client.abort([ask.request_id])
        finally:
            if self._open.get(ask.request_id, (None,))[0] is story:
                del self._open[ask.request_id]

    def _message(self, ask: Ask) -> GenerateRequest:
        return GenerateRequest(
            request_id=ask.request_id,
            client_id="",
            prompt_token_ids=list(ask.prompt),
            sampling=sampling_to_bytes(ask.sampling),
            arrival_time=0.0,
            priority=_priority(ask),
            timeout_s=self._shipped.timeout_s(ask),
        )

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            found = self._open.get(delta.request_id)
            if found is None:
                continue
            story, ended = found
            if story.ends:
                story.ends.append(f"a delta after its end: {delta}")
                continue
            story.tokens += delta.token_ids
            story.prompts_told += delta.prefill is not None
            if delta.finish_reason is not None:
                story.end(delta.finish_reason, _now())
                if not ended.done():
                    ended.set_result(None)

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        found = self._open.get(request_id)
        if found is not None:
            found[0].end(f"{type(error).__name__}: {error}", _now(), error)
            if not found[1].done():
                found[1].set_result(None)


def _facts(ask: Ask) -> SamplingFacts:
    return SamplingFacts(greedy=ask.sampling.greedy, seeded=ask.sampling.seed is not None)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _priority(ask: Ask) -> int:
    """Mostly 0; the same for the same request id."""
    return (0, 0, 0, -1, 1)[zlib.crc32(ask.request_id.encode()) % 5]
