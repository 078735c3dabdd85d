"""Which decode worker takes a request: the one that holds its prefix and is not busy.

Three parts: a filter leaves out workers whose KV cache is full; a score says what each of the
others would save and what is queued there; the best one is taken, or one is drawn. All amounts are
prompt tokens, so a score is about the time to the first token.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dynamo_lite.policy.kv_chain import ChainHash, chain_hashes
from dynamo_lite.policy.kv_index import KvIndex
from dynamo_lite.policy.pending_requests import PendingRequests
from dynamo_lite.policy.routing import Selection
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord

#: Why a worker was chosen: it was the only one; it had the session's last request; no other
#: holds more of the prompt; none holds any of it; those that hold more are too busy; at random.
REASONS = ("only", "session", "prefix", "load", "balance", "lot")

_MAX_SESSIONS = 65_536


@dataclass(frozen=True)
class LoadReport:
    """What a worker reported of its load."""

    requests: int
    #: Of requests without a first token.
    prompt_tokens: int
    kv_usage: float


@dataclass(frozen=True)
class Shard:
    """Where a worker's blocks are indexed."""

    #: In tokens.
    block_size: int
    index: KvIndex


class KvView(Protocol):
    """What is known of the workers, by lease id."""

    def load(self, lease_id: int) -> LoadReport | None:
        """None without a recent report."""
        ...

    def shard(self, lease_id: int) -> Shard | None:
        """None for a worker that does not publish its blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member that may take the request."""

    member: EndpointRecord
    #: Prompt tokens that the member holds, or will hold.
    matched: int
    #: Tokens that it computes before this prompt.
    load: int
    kv_usage: float = 0.0
    #: Prompt tokens that it is assumed to hold at least, because it had the session's last request.
    credit: int = 0


class Rated(Protocol):
    """What a filter and a score read of a candidate; the fields are those of `Candidate`."""

    @property
    def matched(self) -> int: ...
    @property
    def load(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def credit(self) -> int: ...


R = TypeVar("R", bound=Rated)


def with_room(candidates: Sequence[R], max_kv_usage: float) -> Sequence[R]:
    """The candidates whose KV cache is not full; all, if all are full."""
    return [c for c in candidates if c.kv_usage < max_kv_usage] or candidates


def score(candidate: Rated, options: KvRoutingOptions) -> float:
    """Higher is better."""
    held = max(candidate.matched, candidate.credit)
    return options.kv_weight * held - options.load_weight * candidate.load


def draw(scores: Sequence[float], scale: float, chance: float) -> int:
    """A position, with probability proportional to exp(score / scale). chance: in [0, 1)."""
    highest = max(scores)
    weights = [math.exp((value - highest) / scale) for value in scores]
    left = chance * sum(weights)
    for position, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return position
    return len(scores) - 1


class KvPicker:
    """A Picker. uniform: returns numbers in [0, 1). now: monotonic seconds."""

    def __init__(
        self,
        view: KvView,
        options: KvRoutingOptions,
        *,
        now: Callable[[], float],
        uniform: Callable[[], float],
    ):
        #: Placed requests by reason.
        self.choices: Counter[str] = Counter()
        #: Of all placed requests.
        self.prompt_tokens = 0
        #: Those of them that the chosen workers held or were about to hold.
        self.matched_tokens = 0
        #: May be replaced at any time.
        self.options = options
        self._view = view
        self._now, self._uniform = now, uniform
        self._pending = PendingRequests()
        self._others: dict[int, tuple[int, int]] = {}
        self._turns: dict[int, int] = {}
        self._turn = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def pick(self, members: Sequence[EndpointRecord], request: GenerateRequest) -> Selection:
        if not members:
            raise NoWorkers("no live worker")
        self._forget_others(members)
        prompt = request.prompt_token_ids
        if request.output_token_ids:
            prompt = prompt + request.output_token_ids
        hashes: dict[int, list[ChainHash]] = {}
        matched = self._matched(members, prompt, request.cache_salt, hashes)
        home = self._sessions.get(request.session) if request.session else None
        candidates = [
            self._candidate(m, matched.get(m.lease_id, 0), len(prompt) if m.lease_id == home else 0)
            for m in members
        ]
        chosen, reason = self._choose(candidates, len(prompt), home)
        self._note(chosen, reason, request, len(prompt))
        shard = self._view.shard(chosen.member.lease_id)
        self._pending.book(
            request.request_id,
            chosen.member.lease_id,
            hashes.get(shard.block_size, ()) if shard else (),
            prompt_tokens=len(prompt),
            prefill_tokens=len(prompt) - chosen.matched,
            now=self._now(),
        )
        return Selection(
            chosen.member,
            f"{reason}: it holds {chosen.matched} of {len(prompt)} tokens, and"
            f" {chosen.load} tokens are queued there; {len(members)} candidates",
        )

    def reported(self, lease_id: int) -> None:
        """The worker has reported a new load. Requests in it that are not ours belong to other
        routers.

        Their cache hits are not known, so all of their prompt tokens count.
        """
        if (report := self._view.load(lease_id)) is not None:
            ours = self._pending.of(lease_id)
            self._others[lease_id] = (
                max(0, report.requests - ours.requests),
                max(0, report.prompt_tokens - ours.prompt_tokens),
            )

    def answered(self, request_id: str) -> None:
        self._pending.answered(request_id, self._now())

    def released(self, request_id: str) -> None:
        self._pending.released(request_id)

    def _matched(
        self,
        members: Sequence[EndpointRecord],
        prompt: list[int],
        cache_salt: str | None,
        hashes: dict[int, list[ChainHash]],
    ) -> dict[int, int]:
        """Tokens by lease id. hashes: is filled with those of the prompt, by block size."""
        matched: dict[int, int] = {}
        indexes: dict[int, int] = {}  # the block size of each that was looked at
        for member in members:
            shard = self._view.shard(member.lease_id)
            if shard is None or id(shard.index) in indexes:
                continue
            size = indexes[id(shard.index)] = shard.block_size
            if size not in hashes:
                # The last token is computed in any case.
                hashes[size] = chain_hashes(prompt[:-1], size, cache_salt=cache_salt)
                for worker, count in self._pending.match(hashes[size]).items():
                    matched[worker] = max(matched.get(worker, 0), count * size)
            for worker, count in shard.index.match(hashes[size]).items():
                matched[worker] = max(matched.get(worker, 0), count * size)
        return matched

    def _candidate(self, member: EndpointRecord, matched: int, credit: int) -> Candidate:
        """Its load is the sum of our requests and those of other routers."""
        ours = self._pending.of(member.lease_id)
        requests, tokens, usage = ours.requests, ours.prefill_tokens, 0.0
        if (report := self._view.load(member.lease_id)) is not None:
            others = self._others.get(member.lease_id, (0, 0))
            requests, tokens, usage = requests + others[0], tokens + others[1], report.kv_usage
        load = tokens + requests * self.options.request_load_tokens
        return Candidate(member, matched, load, usage, credit)

    def _choose(
        self, candidates: Sequence[Candidate], prompt_tokens: int, home: int | None
    ) -> tuple[Candidate, str]:
        if len(candidates) == 1:
            return candidates[0], "only"
        options = self.options
        fit = with_room(candidates, options.max_kv_usage)
        scores = [score(c, options) for c in fit]
        best = min(
            range(len(fit)),
            key=lambda i: (-scores[i], self._turns.get(fit[i].member.lease_id, 0)),
        )
        if options.temperature > 0:
            drawn = draw(scores, options.temperature * max(prompt_tokens, 1), self._uniform())
            if scores[drawn] < scores[best]:
                return fit[drawn], "lot"
            best = drawn
        chosen = fit[best]
        longest = max(c.matched for c in candidates)
        if chosen.member.lease_id == home:
            return chosen, "session"
        if not longest:
            return chosen, "load"
        return chosen, "prefix" if chosen.matched == longest else "balance"

    def _note(
        self, chosen: Candidate, reason: str, request: GenerateRequest, prompt_tokens: int
    ) -> None:
        lease_id = chosen.member.lease_id
        self.choices[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.matched_tokens += chosen.matched
        self._turn += 1
        self._turns[lease_id] = self._turn
        if request.session:
            self._sessions[request.session] = lease_id
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def _forget_others(self, members: Sequence[EndpointRecord]) -> None:
        """Removes entries of workers that have left, once there are many."""
        if len(self._turns) + len(self._others) > 4 * len(members) + 16:
            live = {member.lease_id for member in members}
            self._turns = {k: v for k, v in self._turns.items() if k in live}
            self._others = {k: v for k, v in self._others.items() if k in live}
