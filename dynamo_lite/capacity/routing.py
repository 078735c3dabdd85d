"""Which decode worker takes a request: the shipped pickers, on what they would know."""

import heapq
import random
from typing import Any, Protocol

from dynamo_lite.capacity.decode_worker import DecodeWorkerModel
from dynamo_lite.capacity.events import Events
from dynamo_lite.capacity.options import GraphModelOptions
from dynamo_lite.capacity.request import TraceRequest, tokens_of
from dynamo_lite.policy.routing.kv_chain import ChainHash
from dynamo_lite.policy.routing.kv_index import KvIndex
from dynamo_lite.policy.routing.kv_routing import KvPicker, LoadReport, Shard
from dynamo_lite.policy.routing.pickers import Picker, Random, RoundRobin
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport


class RouterModel(Protocol):
    """The calls of the Frontend."""

    def join(self, worker: DecodeWorkerModel) -> None: ...
    def leave(self, worker: DecodeWorkerModel) -> None: ...
    def pick(self, name: str, request: TraceRequest, tried: list[int]) -> DecodeWorkerModel | None:
        """None: there is no worker that was not tried."""
        ...

    def answered(self, name: str) -> None: ...
    def released(self, name: str) -> None: ...
    def stored(self, lease_id: int, hashes: list[ChainHash]) -> None: ...
    def removed(self, lease_id: int, hashes: list[ChainHash]) -> None: ...
    def changes(self, lease_id: int, due_s: float) -> None:
        """The worker's next report, at this time, differs from its last one."""
        ...


def member(lease_id: int) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="capacity",
        lease_id=lease_id,
        transport=EndpointTransport(nats_tcp="none"),
    )


def _asking(name: str, request: TraceRequest, block_tokens: int) -> GenerateRequest:
    """The request for a picker. Only the length of what shares no prefix is looked at."""
    prompt: Any = range(request.prompt_tokens)
    if request.blocks:
        prompt = tokens_of(request.blocks, block_tokens)
        prompt.frombytes(bytes(4 * (request.prompt_tokens - len(prompt))))
    return GenerateRequest(
        request_id=name,
        client_id="",
        prompt_token_ids=prompt,
        sampling=b"",
        arrival_time=0.0,
        session=request.session,
    )


#: For pickers that do not look at the request.
_ANY = _asking("any", TraceRequest(0.0, 1, 1), 1)


class PlainRouter:
    """Round-robin and random: they look at the members only."""

    def __init__(self, picker: Picker):
        self._picker = picker
        self._workers: dict[int, DecodeWorkerModel] = {}
        self._members: dict[int, EndpointRecord] = {}

    def join(self, worker: DecodeWorkerModel) -> None:
        self._workers[worker.lease_id] = worker
        self._members[worker.lease_id] = member(worker.lease_id)

    def leave(self, worker: DecodeWorkerModel) -> None:
        del self._workers[worker.lease_id], self._members[worker.lease_id]

    def pick(self, name: str, request: TraceRequest, tried: list[int]) -> DecodeWorkerModel | None:
        members = [one for lease_id, one in self._members.items() if lease_id not in tried]
        if not members:
            return None
        return self._workers[self._picker.pick(members, _ANY).member.lease_id]

    def answered(self, name: str) -> None:
        self._picker.answered(name)

    def released(self, name: str) -> None:
        self._picker.released(name)

    def stored(self, lease_id: int, hashes: list[ChainHash]) -> None:
        pass

    def removed(self, lease_id: int, hashes: list[ChainHash]) -> None:
        pass

    def changes(self, lease_id: int, due_s: float) -> None:
        pass


class KvRouter:
    """`router: kv`. It also is the picker's view of the workers."""

    def __init__(self, options: GraphModelOptions, events: Events, *, shares_prefixes: bool):
        self._options = options
        self._index = KvIndex(options.max_index_blocks) if shares_prefixes else None
        self._picker = KvPicker(
            self,
            options.routing,
            now=lambda: events.now,
            uniform=random.Random(options.seed).random,
        )
        self._workers: dict[int, DecodeWorkerModel] = {}
        self._members: dict[int, EndpointRecord] = {}
        self._now = lambda: events.now
        #: Reports that will differ from the last ones: their times, and the workers.
        self._due: list[tuple[float, int]] = []
        #: One tuple until the members change: the picker looks at all of another one.
        self._everyone: tuple[EndpointRecord, ...] = ()

    @property
    def choices(self) -> dict[str, int]:
        return dict(self._picker.choices)

    def load(self, lease_id: int) -> LoadReport | None:
        worker = self._workers.get(lease_id)
        return None if worker is None else worker.load()

    def shard(self, lease_id: int) -> Shard | None:
        return None if self._index is None else Shard(self._options.block_tokens, self._index)

    def join(self, worker: DecodeWorkerModel) -> None:
        lease_id = worker.lease_id
        self._workers[lease_id], self._members[lease_id] = worker, member(lease_id)
        self._everyone = tuple(self._members.values())

    def leave(self, worker: DecodeWorkerModel) -> None:
        lease_id = worker.lease_id
        del self._workers[lease_id], self._members[lease_id]
        self._everyone = tuple(self._members.values())
        if self._index is not None:
            self._index.leave(lease_id)

    def pick(self, name: str, request: TraceRequest, tried: list[int]) -> DecodeWorkerModel | None:
        self._hear_reports()
        asked = _asking(name, request, self._options.block_tokens)
        try:
            chosen = self._picker.pick(self._everyone, asked, frozenset(tried)).member
        except NoWorkers:
            return None
        return self._workers[chosen.lease_id]

    def answered(self, name: str) -> None:
        self._picker.answered(name)

    def released(self, name: str) -> None:
        self._picker.released(name)

    def stored(self, lease_id: int, hashes: list[ChainHash]) -> None:
        if self._index is not None and lease_id in self._members:
            self._index.stored(lease_id, hashes)

    def removed(self, lease_id: int, hashes: list[ChainHash]) -> None:
        if self._index is not None:
            self._index.removed(lease_id, hashes)

    def changes(self, lease_id: int, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, lease_id))

    def _hear_reports(self) -> None:
        """All reports that have been made since the last request."""
        while self._due and self._due[0][0] <= self._now():
            _, lease_id = heapq.heappop(self._due)
            if lease_id in self._members:
                self._picker.reported(lease_id)


def make_router(
    options: GraphModelOptions, events: Events, *, shares_prefixes: bool
) -> RouterModel:
    if options.router == "kv":
        return KvRouter(options, events, shares_prefixes=shares_prefixes)
    if options.router == "random":
        return PlainRouter(Random(random.Random(options.seed).randrange))
    return PlainRouter(RoundRobin())
