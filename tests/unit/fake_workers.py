"""Decode workers that exist in the test only, as a RemoteGenerateClient would reach them.

Every request gets a token per step. A token tells its prompt, its position in the
answer and, where `own_tokens` is set, the worker that made it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from dynamo_lite.protocol.errors import DynamoLiteError, NoResponders, Refused, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest, LogprobRows, PrefillCounts, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.routing.pickers import RoundRobin
from tests.builders import endpoint_record, generate_request

STEP_S = 1.0
ANSWER_TOKENS = 8


def request_of(request_id: str, **changes: Any) -> GenerateRequest:
    """Its prompt is made from its id, so that answers cannot be mixed up unseen."""
    prompt = [sum(request_id.encode()), 2, 3]
    return generate_request(request_id, **({"prompt_token_ids": prompt} | changes))


def token(request: GenerateRequest, position: int, worker: int = 0) -> int:
    return (worker * 1000 + request.prompt_token_ids[0]) * 1000 + position


def answer_to(request: GenerateRequest) -> list[int]:
    return [token(request, position) for position in range(ANSWER_TOKENS)]


def rows_of(token_ids: Sequence[int]) -> LogprobRows:
    """One candidate per token: itself."""
    ids = b"".join(token_id.to_bytes(8, "little") for token_id in token_ids)
    return LogprobRows(len(token_ids), 1, ids, bytes(4 * len(token_ids)), bytes(8 * len(token_ids)))


@dataclass
class Worker:
    """`refusal` is what a request gets instead of an acceptance."""

    lease_id: int
    listed: bool = True
    dead: bool = False
    own_tokens: bool = False
    tokens_per_step: int = 1
    accepts_after_s: float = 0.0
    answer_tokens: int = ANSWER_TOKENS
    logprobs: bool = True
    refusal: DynamoLiteError | None = None
    asked: list[GenerateRequest] = field(default_factory=list)
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)

    def step(self, wire_id: str) -> TokenDelta:
        request, position = self.running[wire_id], self.given[wire_id]
        end = min(position + self.tokens_per_step, self.answer_tokens)
        token_ids = [
            token(request, i, self.lease_id if self.own_tokens else 0) for i in range(position, end)
        ]
        self.given[wire_id] = end
        first = position == len(request.output_token_ids)
        return TokenDelta(
            request_id=wire_id,
            token_ids=token_ids,
            finish_reason="length" if end == self.answer_tokens else None,
            prefill=PrefillCounts(len(request.prompt_token_ids), 0, 0) if first else None,
            logprobs=rows_of(token_ids) if self.logprobs and token_ids else None,
            prompt_logprobs=(
                rows_of(request.prompt_token_ids) if self.logprobs and first else None
            ),
        )


class FakeWorkers:
    """A RemoteGenerateClient. ends: (request id, how), as the client under test reported them."""

    def __init__(self, count: int):
        self.workers = {i: Worker(i) for i in range(1, count + 1)}
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.ends: list[tuple[str, str]] = []
        self.errors: dict[str, DynamoLiteError] = {}
        self.client: FailoverClient | None = None
        self.owner: dict[str, Worker] = {}  # of accepted attempts
        self.deaf: set[str] = set()  # attempts of which the client reads nothing any more
        self.pumps: set[asyncio.Task[None]] = set()
        self.closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True
        for pump in self.pumps:
            pump.cancel()

    def members(self) -> list[EndpointRecord]:
        return [
            endpoint_record(worker.lease_id) for worker in self.workers.values() if worker.listed
        ]

    # What the client under test calls back

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
            if delta.finish_reason is not None:
                self.ends.append((delta.request_id, delta.finish_reason))

    def on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self.ends.append((request_id, type(error).__name__))
        self.errors[request_id] = error

    def tokens(self, request_id: str) -> list[int]:
        return [i for delta in self.deltas.get(request_id, []) for i in delta.token_ids]

    # RemoteGenerateClient

    def connected(self, on_deltas: OnDeltas, on_lost: OnLost) -> Self:
        """The MakeTransport of the client under test."""
        self._on_deltas, self._on_lost = on_deltas, on_lost
        return self

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        worker = self.workers[member.lease_id]
        worker.asked.append(request)
        if worker.dead:
            raise NoResponders(f"worker {worker.lease_id} is not there")
        if worker.accepts_after_s:
            await asyncio.sleep(worker.accepts_after_s)
        if worker.dead or self.closed:
            raise Unavailable("the worker's stream broke")
        if worker.refusal is not None:
            raise worker.refusal
        wire_id = request.request_id
        if wire_id in self.owner or wire_id in self.deaf:
            raise Refused(f"{wire_id} was used before", elsewhere=False)
        self.owner[wire_id] = worker
        worker.running[wire_id] = request
        worker.given[wire_id] = len(request.output_token_ids)
        pump = asyncio.create_task(self._pump(worker, wire_id), name=f"pump {wire_id}")
        self.pumps.add(pump)
        pump.add_done_callback(self.pumps.discard)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for wire_id in request_ids:
            if (worker := self.owner.get(wire_id)) is not None:
                worker.running.pop(wire_id, None)

    def retain(self, members: Iterable[EndpointRecord]) -> None: ...

    def is_connected(self, member: EndpointRecord) -> bool:
        return member.lease_id in self.workers

    def drop(self, member: EndpointRecord, why: str) -> None:
        """The worker continues its requests, because it gets no message."""
        self._lose(self.workers[member.lease_id], why)

    # What happens to workers

    def kill(self, lease_id: int) -> None:
        worker = self.workers[lease_id]
        worker.dead, worker.listed = True, False
        self._lose(worker, "connection lost")
        worker.running.clear()

    def start(self, lease_id: int) -> None:
        self.workers[lease_id] = Worker(lease_id)
        self.changed()

    def changed(self) -> None:
        assert self.client is not None
        self.client.set_members(self.members())

    def running(self) -> dict[int, list[str]]:
        return {i: list(worker.running) for i, worker in self.workers.items() if worker.running}

    def _lose(self, worker: Worker, why: str) -> None:
        lost = [i for i in worker.running if i not in self.deaf]
        self.deaf.update(lost)
        if lost:
            self._on_lost(lost, why)

    async def _pump(self, worker: Worker, wire_id: str) -> None:
        """The answer, a step at a time; also to a client that has given the worker up."""
        while True:
            await asyncio.sleep(STEP_S)
            if worker.dead or wire_id not in worker.running:
                return
            delta = worker.step(wire_id)
            if delta.finish_reason is not None:
                del worker.running[wire_id]
            self._on_deltas([delta])


@asynccontextmanager
async def cluster(
    workers: int = 2, **options: Any
) -> AsyncIterator[tuple[FakeWorkers, FailoverClient]]:
    """Workers 1 to `workers`, and a client of them."""
    async with FakeWorkers(workers) as fake:
        fake.client = client = FailoverClient(
            fake.connected,
            picker=RoundRobin(),
            on_deltas=fake.on_deltas,
            on_ended=fake.on_ended,
            **options,
        )
        fake.changed()
        async with client:
            yield fake, client


async def steps(count: float) -> None:
    """Ends between two steps of the workers."""
    await asyncio.sleep(count * STEP_S + STEP_S / 2)


async def to_the_end(client: FailoverClient) -> None:
    await asyncio.sleep(60)
    assert repr(client) == "<FailoverClient requests=0 attempts=0 tasks=0>"
