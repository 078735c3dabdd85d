"""The load of each worker as a router knows it, and the workers in the order of their loads.

A worker's load is the sum of our requests to it and those of other routers. It changes with a
request, with a report, and when the last report becomes too old; each moves one worker only.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.pending_requests import PendingRequests

#: What a request in the engine counts as, in addition to its prompt.
REQUEST_LOAD_TOKENS = 32
#: From this share of its KV cache in use on, a worker gets nothing while another one has room.
MAX_KV_USAGE = 0.95


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a worker reported of its load."""

    requests: int
    #: Prompt tokens of requests without a first token.
    prompt_tokens: int
    kv_usage: float
    #: For how many seconds from now the report counts.
    fresh_for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a worker's blocks are indexed."""

    #: Block size in tokens.
    block_size: int
    index: KvIndex


class KvView(Protocol):
    """What is known of the workers, by lease id. `WorkerLoads.reported` is called after a change,
    except when a report becomes too old."""

    def load(self, lease_id: int) -> LoadReport | None:
        """None without a recent report."""
        ...

    def shard(self, lease_id: int) -> Shard | None:
        """None for a worker that does not publish its blocks."""
        ...


#: What workers are ordered by; smaller is better. Two workers never have the same one.
Rank = tuple[int, int, int]


class LoadOrder:
    """Workers, known by any integer, in the order of their load, so that the least loaded one is
    found without looking at all.

    Two sorted lists: workers with room in their KV cache, and those without. Finding a place takes
    O(log n) comparisons. The list then shifts its pointers, which takes microseconds for thousands.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Rank, int]] = {}
        self._roomy: list[tuple[Rank, int]] = []
        self._full: list[tuple[Rank, int]] = []
        self._is_full: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, worker: int) -> bool:
        return worker in self._entries

    def replace(self, workers: Iterable[tuple[int, Rank, bool]]) -> None:
        """These are the workers: each one's name, rank, and whether its KV cache is full."""
        self._entries, self._roomy, self._full, self._is_full = {}, [], [], set()
        for worker, rank, full in workers:
            entry = self._entries[worker] = rank, worker
            (self._full if full else self._roomy).append(entry)
            if full:
                self._is_full.add(worker)
        self._roomy.sort()
        self._full.sort()

    def move(self, worker: int, rank: Rank, full: bool) -> None:
        """The worker, which is known, has another rank, or room for the first or last time."""
        old = self._entries[worker]
        was_full = worker in self._is_full
        if old[0] == rank and was_full == full:
            return
        entries = self._full if was_full else self._roomy
        del entries[bisect_left(entries, old)]
        entry = self._entries[worker] = rank, worker
        insort(self._full if full else self._roomy, entry)
        (self._is_full.add if full else self._is_full.discard)(worker)

    def full(self, worker: int) -> bool:
        return worker in self._is_full

    def count(self, without: Set[int]) -> int:
        """How many workers there are besides these."""
        return len(self._entries) - sum(worker in self._entries for worker in without)

    def any_roomy(self, without: Set[int]) -> bool:
        """Whether there is a worker with room besides these."""
        return any(worker not in without for _, worker in self._roomy)

    def first(
        self, *, full: bool, without: Set[int], among: Collection[int] | None = None
    ) -> int | None:
        """The first of the workers with room, or of the full ones.

        among: only these. A few are looked up one by one; many are met soon on the way through
        the order.
        """
        entries = self._full if full else self._roomy
        if among is None:
            return next((worker for _, worker in entries if worker not in without), None)
        if len(among) ** 2 <= 4 * len(entries):
            known = (
                self._entries[worker]
                for worker in among
                if worker in self._entries
                and worker not in without
                and (worker in self._is_full) == full
            )
            return min(known, default=(None, None))[1]
        return next((w for _, w in entries if w in among and w not in without), None)


@dataclass(slots=True, eq=False)
class MemberLoad:
    """One member, as of now. Written by `WorkerLoads`."""

    member: EndpointRecord
    #: Position in the sequence of the members.
    position: int
    report: LoadReport | None
    shard: Shard | None
    #: Tokens that the worker computes before a new prompt.
    load: int = 0


class WorkerLoads:
    """now: monotonic seconds."""

    def __init__(self, view: KvView, now: Callable[[], float], options: KvRoutingOptions):
        self.pending = PendingRequests(self._place)
        self.order = LoadOrder()
        self.workers: dict[int, MemberLoad] = {}
        self._view, self._now, self._options = view, now, options
        self._members: Sequence[EndpointRecord] | None = None
        #: When each worker was last chosen, as a number that grows.
        self._turns: dict[int, int] = {}
        self._turn = 0
        #: Requests and tokens of other routers, by their workers' last reports.
        self._others: dict[int, tuple[int, int]] = {}
        #: Where the workers' blocks are indexed, by the index: the shard, and how many workers.
        self._shards: dict[int, tuple[Shard, int]] = {}
        #: When the workers' reports become too old; the heap has one entry for each worker, which
        #: may be earlier.
        self._due: dict[int, float] = {}
        self._dues: list[tuple[float, int]] = []

    @property
    def shards(self) -> Iterable[Shard]:
        """The shards of all workers, each index once."""
        return [shard for shard, _ in self._shards.values()]

    def update(self, members: Sequence[EndpointRecord], options: KvRoutingOptions) -> None:
        """These are the members and the options from now on.

        It costs next to nothing if `members` is the same tuple as in the last call.
        """
        if members is not self._members or options is not self._options:
            self._options = options
            # Another kind of sequence may have been changed since.
            self._members = members if isinstance(members, tuple) else None
            self._rebuild(members)
        self._drop_old_reports()

    def turn(self, lease_id: int) -> int:
        """Grows each time a worker is chosen; 0 for one that never was."""
        return self._turns.get(lease_id, 0)

    def chosen(self, lease_id: int) -> None:
        self._turn += 1
        self._turns[lease_id] = self._turn
        self._place(lease_id)

    def reported(self, lease_id: int) -> None:
        """The worker has reported a new load. Requests in it that are not ours belong to other
        routers.

        Their cache hits are not known, so all of their prompt tokens count.
        """
        report = self._view.load(lease_id)
        if report is not None:
            ours = self.pending.of(lease_id)
            self._others[lease_id] = (
                max(0, report.requests - ours.requests),
                max(0, report.prompt_tokens - ours.prompt_tokens),
            )
        if (worker := self.workers.get(lease_id)) is not None:
            self._see(worker, report)
            self._index(worker, self._view.shard(lease_id))
            self._place(lease_id)

    def _rebuild(self, members: Sequence[EndpointRecord]) -> None:
        self._forget_others(members)
        self._due, self._dues, self._shards = {}, [], {}
        self.workers = {
            member.lease_id: MemberLoad(member, position, None, None)
            for position, member in enumerate(members)
        }
        for lease_id, worker in self.workers.items():
            self._see(worker, self._view.load(lease_id))
            self._index(worker, self._view.shard(lease_id))
        self.order.replace(
            (lease_id, *self._rank(lease_id, worker)) for lease_id, worker in self.workers.items()
        )

    def _place(self, lease_id: int) -> None:
        """Puts the worker where it belongs in the order."""
        if (worker := self.workers.get(lease_id)) is not None:
            self.order.move(lease_id, *self._rank(lease_id, worker))

    def _rank(self, lease_id: int, worker: MemberLoad) -> tuple[Rank, bool]:
        """Its place in the order, and whether its KV cache is full. Updates its load."""
        ours, report = self.pending.of(lease_id), worker.report
        requests, tokens, usage = ours.requests, ours.prefill_tokens, 0.0
        if report is not None:
            others = self._others.get(lease_id, (0, 0))
            requests, tokens, usage = requests + others[0], tokens + others[1], report.kv_usage
        worker.load = load = tokens + requests * REQUEST_LOAD_TOKENS
        return (load, self.turn(lease_id), worker.position), usage >= MAX_KV_USAGE

    def _see(self, worker: MemberLoad, report: LoadReport | None) -> None:
        worker.report = report
        if report is not None and report.fresh_for_s < math.inf:
            lease_id, due = worker.member.lease_id, self._now() + report.fresh_for_s
            if lease_id not in self._due:
                heapq.heappush(self._dues, (due, lease_id))
            self._due[lease_id] = due

    def _drop_old_reports(self) -> None:
        now = self._now()
        while self._dues and self._dues[0][0] < now:
            _, lease_id = heapq.heappop(self._dues)
            due = self._due.pop(lease_id)
            if due >= now:  # a newer report has come since
                self._due[lease_id] = due
                heapq.heappush(self._dues, (due, lease_id))
                continue
            self._see(self.workers[lease_id], self._view.load(lease_id))
            self._place(lease_id)

    def _index(self, worker: MemberLoad, shard: Shard | None) -> None:
        if shard == worker.shard:
            return
        for changed, by in ((worker.shard, -1), (shard, 1)):
            if changed is not None:
                _, count = self._shards.pop(id(changed.index), (changed, 0))
                if count + by:
                    self._shards[id(changed.index)] = changed, count + by
        worker.shard = shard

    def _forget_others(self, members: Sequence[EndpointRecord]) -> None:
        """Removes entries of workers that have left, once there are many."""
        if len(self._turns) + len(self._others) > 4 * len(members) + 16:
            live = {member.lease_id for member in members}
            self._turns = {k: v for k, v in self._turns.items() if k in live}
            self._others = {k: v for k, v in self._others.items() if k in live}
