"""Which decode worker takes a request: the shipped picker of `router: kv`, on what it would know.

No prompt shares a prefix with another one, so it chooses by load.
"""

import random
from collections.abc import Set

from benchmarks.capacity.decode import DecodeWorkerModel
from benchmarks.capacity.events import Events
from benchmarks.capacity.load import Request
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.routing.kv_routing import KvPicker

#: Time between two load reports of a worker.
_REPORT_S = 1.0


class Router:
    """It also is the picker's view of the workers."""

    def __init__(self, events: Events, seed: int):
        self._events = events
        self._phase = random.Random(seed).random
        self._picker = KvPicker(self, KvRoutingOptions())
        self._workers: dict[int, DecodeWorkerModel] = {}
        #: One tuple until the members change: the picker looks at all of another one.
        self._members: tuple[EndpointRecord, ...] = ()

    def load(self, lease_id: int) -> Load | None:
        worker = self._workers.get(lease_id)
        return None if worker is None else worker.report

    def index(self, lease_id: int) -> None:
        """No worker publishes its blocks."""

    def join(self, worker: DecodeWorkerModel) -> None:
        self._workers[worker.lease_id] = worker
        self._members = (*self._members, _member(worker.lease_id))
        self._events.at(self._events.now + self._phase() * _REPORT_S, self._report, worker)

    def leave(self, worker: DecodeWorkerModel) -> None:
        del self._workers[worker.lease_id]
        self._picker.loads.left(worker.lease_id)
        self._members = tuple(one for one in self._members if one.lease_id != worker.lease_id)

    def pick(self, number: int, request: Request, tried: Set[int]) -> DecodeWorkerModel | None:
        """None: there is no worker that was not tried."""
        prompt = [0] * request.prompt_tokens
        asked = GenerateRequest(
            request_id=str(number), prompt_token_ids=prompt, sampling=b"", arrival_time=0.0
        )
        try:
            return self._workers[self._picker.pick(self._members, asked, tried).member.lease_id]
        except NoWorkers:
            return None

    def answered(self, number: int) -> None:
        self._picker.answered(str(number))

    def released(self, number: int) -> None:
        self._picker.released(str(number))

    def _report(self, worker: DecodeWorkerModel) -> None:
        if worker.lease_id in self._workers:
            worker.make_report()
            self._picker.loads.reported(worker.lease_id, self._events.now)
            self._events.at(self._events.now + _REPORT_S, self._report, worker)


def _member(lease_id: int) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="capacity",
        lease_id=lease_id,
        transport=EndpointTransport(nats_tcp="none"),
    )
