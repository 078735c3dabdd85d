"""A client in the Frontend's place: sends requests to the live workers, by turns, under load."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.routing.pickers import RoundRobin
from dynamo_lite.runtime.etcd.store import EtcdStore
from dynamo_lite.runtime.members.roster import Roster
from tests.builders import generate_request
from tests.process.null_graph import FIRST_TOKEN, LETTERS

TOKENS = 30


class _CountingClient(RemoteGenerateClient):
    def __init__(self, client_id: str, on_deltas: OnDeltas, on_lost: OnLost):
        super().__init__(client_id, self._count, on_lost)
        self._then = on_deltas
        #: Lease of a worker to the steps in which it gave tokens.
        self.gave: Counter[int] = Counter()
        self._workers: dict[str, int] = {}

    async def submit(self, member: EndpointRecord, request: GenerateRequest) -> None:
        self._workers[request.request_id] = member.lease_id
        await super().submit(member, request)

    def _count(self, deltas: list[TokenDelta]) -> None:
        self.gave[self._workers[deltas[0].request_id]] += 1  # all deltas are of one worker
        self._then(deltas)


class Requests:
    """transport: as of a FailoverClient. members: that are asked, by turns."""

    def __init__(
        self,
        transport: Callable[[OnDeltas, OnLost], RemoteGenerateClient],
        members: Callable[[], Sequence[EndpointRecord]],
    ):
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, asyncio.Future[str]] = {}
        self.client = FailoverClient(
            transport,
            members=members,
            picker=RoundRobin(),
            on_deltas=self._on_deltas,
            on_ended=self._on_ended,
        )

    async def ask(self, request_id: str, tokens: int, prompt: list[int]) -> tuple[list[int], str]:
        """The tokens, and the reason of the end. Raises the error with which the request ends."""
        sampling = msgspec.msgpack.encode({"max_tokens": tokens})
        request = generate_request(request_id, prompt_token_ids=prompt, sampling=sampling)
        self._tokens[request_id] = []
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.client.submit(request, movable=MigrationPlan())
            return self._tokens[request_id], await end
        finally:
            del self._tokens[request_id], self._ends[request_id]

    async def all_ended(self) -> None:
        if self._ends:
            await asyncio.wait(self._ends.values())

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self._ends[delta.request_id].set_result(delta.finish_reason)

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._ends[request_id].set_exception(error)


class Dispatcher:
    """Use `dispatching`."""

    def __init__(self, roster: Roster):
        self.roster = roster
        self.answers = 0
        self._numbers = itertools.count()
        self._requests = Requests(self._transport, lambda: roster.members)
        self.client = self._requests.client
        roster.on_change(lambda *_: self.client.transport.retain(roster.members))

    async def load(self) -> None:
        """Requests one after another, until it is cancelled. Raises the error with which one ends,
        AssertionError for a wrong answer."""
        expected = [FIRST_TOKEN + position % len(LETTERS) for position in range(TOKENS)]
        for number in self._numbers:
            got, _ = await self._requests.ask(f"r{number}", TOKENS, [1, 2, 3])
            assert got == expected
            self.answers += 1

    def _transport(self, on_deltas: OnDeltas, on_lost: OnLost) -> RemoteGenerateClient:
        transport = _CountingClient("front", on_deltas, on_lost)
        self.gave = transport.gave
        return transport


@asynccontextmanager
async def dispatching(etcd_url: str, namespace: str) -> AsyncIterator[Dispatcher]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(EtcdStore(etcd_url))
        prefix = names.endpoint_prefix(namespace, "VllmWorker", "generate")
        roster = await stack.enter_async_context(Roster(store, prefix))
        dispatcher = Dispatcher(roster)
        await stack.enter_async_context(dispatcher.client)
        yield dispatcher
