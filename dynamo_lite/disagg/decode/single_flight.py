"""Which prefixes are on their way to a decode engine, and which requests wait for them.

A flight is a leader that is parked until its KV comes. It begins when its blocks
are allocated and ends when the engine hears that the KV came or will not come, or
when the leader ends: at the leader's deadline at the latest. A follower holds no
blocks, and waits for one leader at a time. The engine looks at its prompt again in
every step, as at everything that it cannot schedule; for a follower whose leader
is still parked that costs a look-up here.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dynamo_lite.disagg.counters import FLIGHT_WAIT, FLIGHT_WAIT_SECONDS, Counters
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.policy.disagg import Verdict
from dynamo_lite.policy.single_flight import SingleFlightThresholds, Wait, follow

logger = logging.getLogger(__name__)


@dataclass
class _PendingPrefix:
    """tokens: whose KV is awaited; hashes: of the blocks that the engine will cache."""

    tokens: int
    hashes: list[Hashable]


@dataclass
class _Follower:
    """prefix_tokens: the hit that it waits for. leader: None while it waits for nobody.

    served: whether its last wait ended with that hit.
    """

    leader: str | None = None
    prefix_tokens: int = 0
    began: float = 0.0
    waits: int = 0
    served: bool = False


class SingleFlight:
    """Runs on the engine's thread. now: monotonic.

    hash_block_size: tokens per prefix hash (`Prompt.block_hashes`); None when the
    engine caches no prefixes: then nobody waits.
    """

    def __init__(self, hash_block_size: int | None, stats: Counters, now: Callable[[], float]):
        self._size, self._stats, self._now = hash_block_size, stats, now
        self._flights: dict[str, _PendingPrefix] = {}
        self._leaders: dict[Hashable, dict[str, None]] = {}
        self._followers: dict[str, _Follower] = {}

    def began(self, leader: Prompt, external: int) -> None:
        """The leader is parked until the KV of `external` tokens comes."""
        if self._size is None:
            return
        hashes = list(leader.block_hashes[: self._cacheable(leader)])
        flight = _PendingPrefix(external, hashes)
        self._flights[leader.request_id] = flight
        for key in flight.hashes:
            self._leaders.setdefault(key, {})[leader.request_id] = None

    def ended(self, leader: str) -> None:
        """The engine goes on with it, with its KV or without, or it is over."""
        flight = self._flights.pop(leader, None)
        if flight is None:
            return
        for key in flight.hashes:
            leaders = self._leaders[key]
            del leaders[leader]
            if not leaders:
                del self._leaders[key]

    def waits(self, request_id: str, cached: int) -> bool:
        """Whether the request's leader is still parked."""
        follower = self._followers.get(request_id)
        if follower is None or follower.leader is None:
            return False
        if follower.leader in self._flights:
            return True
        follower.served = cached >= follower.prefix_tokens
        self._end_wait(follower, "hit" if follower.served else "miss")
        return False

    def served(self, request_id: str) -> bool:
        """Whether what the request had waited for was there then."""
        follower = self._followers.get(request_id)
        return follower is not None and follower.served

    def joins(
        self, request: Prompt, cached: int, verdict: Verdict, thresholds: SingleFlightThresholds
    ) -> bool:
        """Whether the request waits from now on, rather than do what its verdict says."""
        if not self._flights:
            return False
        prefix, leader = self._longest(request)
        follower = self._followers.get(request.request_id) or _Follower()
        decision = follow(
            verdict,
            uncached_tokens=request.num_prompt_tokens - cached,
            shared_tokens=prefix - cached,
            leader_tokens=self._flights[leader].tokens if leader else 0,
            waits=follower.waits,
            thresholds=thresholds,
        )
        if not isinstance(decision, Wait):
            return False
        follower.leader, follower.prefix_tokens, follower.began = leader, prefix, self._now()
        follower.waits += 1
        follower.served = False
        self._followers[request.request_id] = follower
        logger.info(
            "request %s waits for the remote prefill of %s: it brings %d of %d tokens",
            request.request_id,
            leader,
            prefix - cached,
            request.num_prompt_tokens - cached,
        )
        return True

    def finished(self, request_id: str) -> None:
        """The request is over, or has been scheduled and will not be asked about again."""
        follower = self._followers.pop(request_id, None)
        if follower is not None and follower.leader is not None:
            self._end_wait(follower, "cancelled")

    @property
    def idle(self) -> bool:
        return not (self._flights or self._leaders or self._followers)

    def _longest(self, request: Prompt) -> tuple[int, str | None]:
        """The longest prefix that is in flight, in tokens, and the shortest flight with it."""
        assert self._size is not None
        # A hash stands for all blocks up to its own, so those in flight come first.
        hashes, end = request.block_hashes, self._cacheable(request)
        count = bisect_left(hashes, True, 0, end, key=lambda known: known not in self._leaders)
        if count == 0:
            return 0, None
        leaders = self._leaders[hashes[count - 1]]
        return count * self._size, min(leaders, key=lambda leader: self._flights[leader].tokens)

    def _cacheable(self, prompt: Prompt) -> int:
        """How many blocks can be hit: the last token is always computed."""
        assert self._size is not None
        return min(len(prompt.block_hashes), (prompt.num_prompt_tokens - 1) // self._size)

    def _end_wait(self, follower: _Follower, outcome: str) -> None:
        follower.leader = None
        self._stats.add(f"{FLIGHT_WAIT}/{outcome}")
        self._stats.append(FLIGHT_WAIT_SECONDS, self._now() - follower.began)
