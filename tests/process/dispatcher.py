"""A client in the Frontend's place: sends requests to the live workers, by turns, under load."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from dynamo_lite.policy.routing.migration import Continue
from dynamo_lite.policy.routing.pickers import RoundRobin
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
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


class Dispatcher:
    """Use `dispatching`."""

    def __init__(self, roster: Roster):
        self.roster = roster
        self.answers = 0
        self._numbers = itertools.count()
        self._tokens: dict[str, list[int]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        self.client = FailoverClient(
            self._transport,
            members=lambda: roster.members,
            picker=RoundRobin(),
            on_deltas=self._on_deltas,
            on_ended=self._on_ended,
        )
        roster.on_change(lambda *_: self.client.transport.retain(roster.members))

    async def generate(self) -> None:
        """One request. Raises the error with which it ends, AssertionError for a wrong answer."""
        request_id = f"r{next(self._numbers)}"
        self._tokens[request_id] = []
        ended = self._ended[request_id] = asyncio.get_running_loop().create_future()
        request = generate_request(
            request_id, sampling=msgspec.msgpack.encode({"max_tokens": TOKENS})
        )
        await self.client.submit(request, movable=Continue(reason="test"))
        await ended
        expected = [FIRST_TOKEN + position % len(LETTERS) for position in range(TOKENS)]
        assert self._tokens.pop(request_id) == expected
        self.answers += 1

    async def load(self) -> None:
        """Requests one after another, until it is cancelled."""
        while True:
            await self.generate()

    def _transport(self, on_deltas: OnDeltas, on_lost: OnLost) -> RemoteGenerateClient:
        transport = _CountingClient("front", on_deltas, on_lost)
        self.gave = transport.gave
        return transport

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self._ended.pop(delta.request_id).set_result(None)

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._ended.pop(request_id).set_exception(error)


@asynccontextmanager
async def dispatching(etcd_url: str, namespace: str) -> AsyncIterator[Dispatcher]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(EtcdStore(etcd_url))
        prefix = names.endpoint_prefix(namespace, "VllmWorker", "generate")
        roster = await stack.enter_async_context(Roster(store, prefix))
        dispatcher = Dispatcher(roster)
        await stack.enter_async_context(dispatcher.client)
        yield dispatcher
