"""The oracles of parts that must not slow down with the number of engines and workers.

They follow the same rules and look at everything each time. Tests compare the answers, and
`benchmarks.scale` the times.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_chain import ChainHash, chain_hashes
from dynamo_lite.routing.kv_routing import Candidate, KvView, score
from dynamo_lite.routing.pending_requests import PendingRequests
from dynamo_lite.routing.pickers import Selection
from dynamo_lite.routing.worker_loads import MAX_KV_USAGE, REQUEST_LOAD_TOKENS

_MAX_SESSIONS = 65_536


class StraightforwardPicker:
    """As `KvPicker`: scores every member for every request."""

    def __init__(self, view: KvView, options: KvRoutingOptions, *, now: Callable[[], float]):
        #: Placed requests by reason.
        self.choices: Counter[str] = Counter()
        #: Of all placed requests.
        self.prompt_tokens = 0
        #: Those of them that the chosen workers held or were about to hold.
        self.matched_tokens = 0
        #: May be replaced at any time.
        self.options = options
        self._view = view
        self._now = now
        self._pending = PendingRequests(lambda worker: None)
        self._others: dict[int, tuple[int, int]] = {}
        self._turns: dict[int, int] = {}
        self._turn = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        members = [member for member in members if member.lease_id not in without]
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
        chosen, reason = self._choose(candidates, home)
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
                for count, workers in self._pending.levels(hashes[size]):
                    for worker in workers:
                        matched[worker] = max(matched.get(worker, 0), count * size)
            for worker, count in shard.index.match(hashes[size]).items():
                matched[worker] = max(matched.get(worker, 0), count * size)
        return matched

    def _candidate(self, member: EndpointRecord, matched: int, credit: int) -> Candidate:
        """Its load is the sum of our requests and those of other routers."""
        ours = self._pending.of(member.lease_id)
        requests, tokens = ours.requests, ours.prefill_tokens
        if self._view.load(member.lease_id) is not None:
            others = self._others.get(member.lease_id, (0, 0))
            requests, tokens = requests + others[0], tokens + others[1]
        load = tokens + requests * REQUEST_LOAD_TOKENS
        return Candidate(member, matched, load, credit)

    def _has_room(self, candidate: Candidate) -> bool:
        report = self._view.load(candidate.member.lease_id)
        return report is None or report.kv_usage < MAX_KV_USAGE

    def _choose(self, candidates: Sequence[Candidate], home: int | None) -> tuple[Candidate, str]:
        if len(candidates) == 1:
            return candidates[0], "only"
        fit = [c for c in candidates if self._has_room(c)] or candidates
        chosen = min(
            fit,
            key=lambda c: (-score(c, self.options), self._turns.get(c.member.lease_id, 0)),
        )
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
