"""Which decode worker takes a request: the one that holds its prefix and is not busy.

The best score wins, and the members are not all looked at. Of the members that hold equally much of
the prompt only the least loaded one can win, and of the others the least loaded one of all. So a
choice takes as long as there are different lengths of held prefixes, not as there are members.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_chain import ChainHash, chain_hashes
from dynamo_lite.routing.pickers import Selection
from dynamo_lite.routing.worker_loads import KvView, LoadReport, Shard, WorkerLoads

__all__ = ("REASONS", "KvPicker", "KvView", "LoadReport", "Shard", "WorkerChoice")

#: Why a worker was chosen, in this order: it was the only one; it had the session's last request;
#: no other worker holds more of the prompt; no worker holds any of it; workers that hold more are
#: too busy.
REASONS = ("only", "session", "prefix", "load", "balance")

_MAX_SESSIONS = 65_536

#: For one prompt: numbers of held tokens, and the workers that hold that many.
_Levels = Sequence[tuple[int, Collection[int]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member that may take the request. Amounts are prompt tokens."""

    member: EndpointRecord
    #: What the member holds, or will hold.
    matched: int
    #: What it computes before this prompt.
    load: int
    #: What it is assumed to hold at least, because it had the session's last request.
    credit: int = 0


def score(candidate: Candidate, options: KvRoutingOptions) -> float:
    """Higher is better."""
    held = max(candidate.matched, candidate.credit)
    return options.kv_weight * held - candidate.load


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The chosen worker, as it was scored."""

    worker: Candidate
    #: One of `REASONS`.
    reason: str
    #: Number of candidates.
    candidates: int


class KvPicker:
    """A Picker. now: monotonic seconds."""

    def __init__(self, view: KvView, options: KvRoutingOptions, *, now: Callable[[], float]):
        #: Placed requests by reason.
        self.choices: Counter[str] = Counter()
        #: Prompt tokens of all placed requests.
        self.prompt_tokens = 0
        #: Prompt tokens that the chosen workers held or were about to hold.
        self.matched_tokens = 0
        #: May be replaced at any time.
        self.options = options
        self._now = now
        self._loads = WorkerLoads(view, now, options)
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        prompt = request.prompt_token_ids
        if request.output_token_ids:
            prompt = prompt + request.output_token_ids

        def hashes(block_size: int) -> Sequence[ChainHash]:
            # The last token is computed in any case.
            return chain_hashes(prompt[:-1], block_size, cache_salt=request.cache_salt)

        choice = self.place(
            members, request.request_id, len(prompt), hashes, request.session, without
        )
        worker = choice.worker
        return Selection(
            worker.member,
            f"{choice.reason}: it holds {worker.matched} of {len(prompt)} tokens, and"
            f" {worker.load} tokens are queued there; {choice.candidates} candidates",
        )

    def place(
        self,
        members: Sequence[EndpointRecord],
        request_id: str,
        prompt_tokens: int,
        hashes: Callable[[int], Sequence[ChainHash]],
        session: str | None = None,
        without: Set[int] = frozenset(),
    ) -> WorkerChoice:
        """`pick` without the prompt itself.

        members: the same tuple as in the last call, unless they have changed; otherwise all of
        them are looked at. hashes: returns those of the prompt's full blocks of a size in tokens.
        Raises NoWorkers if all members are left out.
        """
        loads = self._loads
        loads.update(members, self.options)
        candidates = loads.order.count(without)
        if not candidates:
            raise NoWorkers("no live worker")
        by_size: dict[int, Sequence[ChainHash]] = {}
        levels = self._match(hashes, by_size)
        home = self._sessions.get(session) if session else None
        chosen, reason = self._choose(levels, prompt_tokens, home, without)
        if candidates == 1:
            reason = "only"
        self._note(chosen, reason, session, prompt_tokens)
        shard = loads.workers[chosen.member.lease_id].shard
        loads.pending.book(
            request_id,
            chosen.member.lease_id,
            by_size.get(shard.block_size, ()) if shard else (),
            prompt_tokens=prompt_tokens,
            prefill_tokens=prompt_tokens - chosen.matched,
            now=self._now(),
        )
        return WorkerChoice(chosen, reason, candidates)

    def reported(self, lease_id: int) -> None:
        """The worker has reported a new load, or what it holds is indexed elsewhere."""
        self._loads.reported(lease_id)

    def answered(self, request_id: str) -> None:
        self._loads.pending.answered(request_id, self._now())

    def released(self, request_id: str) -> None:
        self._loads.pending.released(request_id)

    def _match(
        self,
        hashes: Callable[[int], Sequence[ChainHash]],
        by_size: dict[int, Sequence[ChainHash]],
    ) -> _Levels:
        """Who holds the prompt's first blocks, or will hold them; the longest first. A worker may
        be named more than once.

        by_size: is filled with the prompt's hashes, by block size.
        """
        levels: list[tuple[int, Collection[int]]] = []
        for shard in self._loads.shards:
            size = shard.block_size
            if size not in by_size:
                by_size[size] = hashes(size)
                for count, workers in self._loads.pending.levels(by_size[size]):
                    levels.append((count * size, workers))
            for count, workers in shard.index.levels(by_size[size]):
                levels.append((count * size, workers))
        levels.sort(key=lambda level: -level[0])
        return levels

    def _candidate(
        self, lease_id: int, levels: _Levels, prompt_tokens: int, home: int | None
    ) -> Candidate:
        worker = self._loads.workers[lease_id]
        matched = next((tokens for tokens, holders in levels if lease_id in holders), 0)
        credit = prompt_tokens if lease_id == home else 0
        return Candidate(worker.member, matched, worker.load, credit)

    def _choose(
        self, levels: _Levels, prompt_tokens: int, home: int | None, without: Set[int]
    ) -> tuple[Candidate, str]:
        """Only the least loaded workers can win: of all workers, and of each level."""
        order = self._loads.order
        full = not order.any_roomy(without)
        finalists = {order.first(full=full, without=without)}
        longest = 0
        for tokens, holders in levels:
            first = order.first(full=full, without=without, among=holders)
            finalists.add(first)
            if tokens > longest and (
                first is not None
                or order.first(full=not full, without=without, among=holders) is not None
            ):
                longest = tokens
        if home is not None and home in order and home not in without and order.full(home) == full:
            finalists.add(home)
        found = [
            self._candidate(lease_id, levels, prompt_tokens, home)
            for lease_id in finalists
            if lease_id is not None
        ]
        best = min(found, key=self._rank)
        return best, _reason(best, home, longest)

    def _rank(self, candidate: Candidate) -> tuple[float, int, int]:
        """The smallest wins. Equally good ones take turns."""
        lease_id = candidate.member.lease_id
        position = self._loads.workers[lease_id].position
        return -score(candidate, self.options), self._loads.turn(lease_id), position

    def _note(
        self, chosen: Candidate, reason: str, session: str | None, prompt_tokens: int
    ) -> None:
        lease_id = chosen.member.lease_id
        self.choices[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.matched_tokens += chosen.matched
        self._loads.chosen(lease_id)
        if session:
            self._sessions[session] = lease_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)


def _reason(chosen: Candidate, home: int | None, longest: int) -> str:
    """longest: how much of the prompt any candidate holds."""
    if chosen.member.lease_id == home:
        return "session"
    if not longest:
        return "load"
    return "prefix" if chosen.matched == longest else "balance"
