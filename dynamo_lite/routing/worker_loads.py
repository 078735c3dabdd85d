"""The load of each worker as a router knows it: our requests to it, and those of other routers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.pending_requests import PendingRequests

#: What a request in the engine counts as, in addition to its prompt.
REQUEST_LOAD_TOKENS = 32
#: From this share of its KV cache in use on, a worker gets nothing while another one has room.
MAX_KV_USAGE = 0.95


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a worker's blocks are indexed."""

    #: Block size in tokens.
    block_size: int
    index: KvIndex


class KvView(Protocol):
    """What is known of the workers, by lease id."""

    def load(self, lease_id: int) -> Load | None:
        """None without a recent report."""
        ...

    def shard(self, lease_id: int) -> Shard | None:
        """None for a worker that does not publish its blocks."""
        ...


class WorkerLoads:
    """Requests in a worker's report that are not ours belong to other routers. Their cache hits are
    not known, so all of their prompt tokens count."""

    def __init__(self, view: KvView):
        self.pending = PendingRequests()
        self._view = view
        #: When each worker was last chosen, as a number that grows.
        self._turns: dict[int, int] = {}
        self._turn = 0
        #: Requests and tokens of other routers, by their workers' last reports.
        self._others: dict[int, tuple[int, int]] = {}

    def of(self, lease_id: int) -> int:
        """Tokens that the worker computes before a new prompt."""
        ours = self.pending.of(lease_id)
        requests, tokens = ours.requests, ours.prefill_tokens
        if self._view.load(lease_id) is not None:
            others = self._others.get(lease_id, (0, 0))
            requests, tokens = requests + others[0], tokens + others[1]
        return tokens + requests * REQUEST_LOAD_TOKENS

    def has_room(self, lease_id: int) -> bool:
        report = self._view.load(lease_id)
        return report is None or report.kv_usage < MAX_KV_USAGE

    def turn(self, lease_id: int) -> int:
        """Grows each time a worker is chosen; 0 for one that never was."""
        return self._turns.get(lease_id, 0)

    def chosen(self, lease_id: int) -> None:
        self._turn += 1
        self._turns[lease_id] = self._turn

    def reported(self, lease_id: int) -> None:
        """The worker has reported a new load."""
        if (report := self._view.load(lease_id)) is not None:
            ours = self.pending.of(lease_id)
            self._others[lease_id] = (
                max(0, report.running + report.waiting - ours.requests),
                max(0, report.prefill_tokens - ours.prompt_tokens),
            )

    def forget_others(self, members: Sequence[EndpointRecord]) -> None:
        """Removes entries of workers that have left, once there are many."""
        if len(self._turns) + len(self._others) > 4 * len(members) + 16:
            live = {member.lease_id for member in members}
            self._turns = {k: v for k, v in self._turns.items() if k in live}
            self._others = {k: v for k, v in self._others.items() if k in live}
