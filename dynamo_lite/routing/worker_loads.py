"""The load of each worker as a router knows it, and which worker is best for a prompt.

A load is our requests to a worker, and those of other routers.

Reports and KV events only show a request once it is running. Until then the next choice must know
of it: requests with the same prefix should follow it, and others should see that the worker is
busier.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from dynamo_lite.protocol.kv import Load
from dynamo_lite.routing.kv_chain import ChainHash
from dynamo_lite.routing.kv_index import KvIndex

#: What a request in the engine counts as, in addition to its prompt.
REQUEST_LOAD_TOKENS = 32
#: From this share of its KV cache in use on, a worker gets nothing while another one has room.
MAX_KV_USAGE = 0.95
#: Requests that no report has shown for this time have ended: the message that said so was lost.
#: Longer than a worker stands still before it gets no requests (`serve/services/engine_probe.py`).
LOST_S = 40.0


class KvView(Protocol):
    """What is known of the workers, by lease id."""

    def load(self, lease_id: int, /) -> Load | None:
        """None without a recent report."""
        ...

    def index(self, lease_id: int, /) -> KvIndex | None:
        """Where its blocks are; None for a worker that does not publish its blocks."""
        ...


@dataclass(slots=True)
class OwnRequest:
    """One request of this router that has not ended."""

    worker: int
    #: The prompt's blocks that the worker did not hold; empty after the first token.
    hashes: Sequence[ChainHash]
    #: Length of the prompt; 0 after the first token.
    prompt_tokens: int
    #: Prompt tokens that have to be computed; 0 after the first token.
    prefill_tokens: int
    #: Workers take turns in each kind of requests by themselves.
    kind: str = ""


@dataclass(slots=True)
class OwnLoad:
    """The requests of this router at one worker, and what its reports say beside them."""

    requests: int = 0
    #: Sums of those fields of `OwnRequest`.
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    #: When it was last chosen, by kind, as a number that grows.
    turns: dict[str, int] = field(default_factory=dict[str, int])
    #: Requests and tokens of other routers, by its last report.
    others: tuple[int, int] = (0, 0)
    #: It reports fewer requests than ours: since when, and how many fewer at least.
    missing: tuple[float, int] | None = None


class WorkerLoads:
    """Requests are known by their ids; unknown ids are ignored.

    Requests in a worker's report that are not ours belong to other routers. Their cache hits are
    not known, so all of their prompt tokens count. lost_s: `LOST_S`; infinite where the end of each
    request is known.
    """

    def __init__(self, view: KvView, lost_s: float = LOST_S):
        self._view, self._lost_s = view, lost_s
        self._requests: dict[str, OwnRequest] = {}
        self._own: defaultdict[int, OwnLoad] = defaultdict(OwnLoad)
        self._turn = 0

    @property
    def requests(self) -> Collection[str]:
        """Ids of those that have not ended."""
        return self._requests.keys()

    def own(self, lease_id: int) -> OwnLoad:
        """Read-only."""
        return self._own[lease_id]

    def of(self, lease_id: int) -> int:
        """Tokens that the worker computes before a new prompt."""
        ours = self._own[lease_id]
        requests, tokens = ours.requests, ours.prefill_tokens
        if self._view.load(lease_id) is not None:
            requests, tokens = requests + ours.others[0], tokens + ours.others[1]
        return tokens + requests * REQUEST_LOAD_TOKENS

    def choose(
        self,
        workers: Sequence[int],
        matched: Mapping[int, int],
        kv_weight: float,
        *,
        home: int | None = None,
        credit: int = 0,
        kind: str = "",
    ) -> tuple[int, str]:
        """The best one of at least one worker, and why (`REASONS` of `kv_routing.py`).

        matched: how many of the prompt's tokens workers hold, or will hold. home: counts as if it
        held `credit` tokens at least. Equally good ones take turns.
        """

        def rank(worker: int) -> tuple[float, int]:
            held = max(matched.get(worker, 0), credit if worker == home else 0)
            turn = self._own[worker].turns.get(kind, 0)
            return self.of(worker) - kv_weight * held, turn

        chosen = min(list(filter(self._has_room, workers)) or workers, key=rank)
        if len(workers) == 1:
            return chosen, "only"
        if chosen == home:
            return chosen, "session"
        longest = max(matched.get(worker, 0) for worker in workers)
        if not longest:
            return chosen, "load"
        return chosen, "prefix" if matched.get(chosen, 0) == longest else "balance"

    def _has_room(self, lease_id: int) -> bool:
        report = self._view.load(lease_id)
        return report is None or report.kv_usage < MAX_KV_USAGE

    def book(self, request_id: str, request: OwnRequest) -> None:
        """Counts a request that is sent to its worker, replacing any earlier one of this id.

        The index has its blocks at once. If the request ends without a token, it loses those that
        the worker has not published meanwhile.
        """
        self.released(request_id)
        self._turn += 1
        self._requests[request_id] = request
        own = self._own[request.worker]
        own.turns[request.kind] = self._turn
        own.requests += 1
        own.prompt_tokens += request.prompt_tokens
        own.prefill_tokens += request.prefill_tokens
        if (index := self._view.index(request.worker)) is not None:
            index.promised(request.worker, request.hashes)

    def answered(self, request_id: str) -> None:
        """The request's first token has arrived."""
        if (request := self._requests.get(request_id)) is not None:
            self._prefill_ended(request, computed=True)

    def released(self, request_id: str) -> None:
        """The request has ended, or its worker did not accept it."""
        if (request := self._requests.pop(request_id, None)) is None:
            return
        self._prefill_ended(request, computed=False)
        self._own[request.worker].requests -= 1

    def _prefill_ended(self, request: OwnRequest, *, computed: bool) -> None:
        if (index := self._view.index(request.worker)) is not None:
            index.settled(request.worker, request.hashes, computed=computed)
        own = self._own[request.worker]
        own.prompt_tokens -= request.prompt_tokens
        own.prefill_tokens -= request.prefill_tokens
        request.prompt_tokens = request.prefill_tokens = 0
        request.hashes = ()

    def reported(self, lease_id: int, now: float) -> None:
        """The worker has reported a new load."""
        if (report := self._view.load(lease_id)) is not None:
            ours, requests = self._own[lease_id], report.running + report.waiting
            self._release_lost(lease_id, ours.requests - requests, now)
            ours.others = (
                max(0, requests - ours.requests),
                max(0, report.prefill_tokens - ours.prompt_tokens),
            )

    def left(self, lease_id: int) -> None:
        """The worker is no member any more."""
        self._release_oldest(lease_id, self._own[lease_id].requests)
        del self._own[lease_id]

    def _release_lost(self, lease_id: int, missing: int, now: float) -> None:
        """missing: how many more requests are ours than the worker reports.

        Some are on their way to it. What is missing all the time has ended. If others than these
        are the oldest, the next report shows them as requests of others.
        """
        ours = self._own[lease_id]
        since, least = ours.missing or (now, missing)
        least = min(least, missing)
        if least > 0 and now - since >= self._lost_s:
            self._release_oldest(lease_id, least)
            since, least = now, missing - least
        ours.missing = (since, least) if least > 0 else None

    def _release_oldest(self, lease_id: int, count: int) -> None:
        ours = (name for name, request in self._requests.items() if request.worker == lease_id)
        for request_id in list(islice(ours, count)):
            self.released(request_id)
