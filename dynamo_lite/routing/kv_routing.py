"""Which decode worker takes a request: the one that holds its prefix and is not busy.

The best score wins.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.routing.kv_chain import ChainHash, chain_hashes
from dynamo_lite.routing.pickers import Picker, Selection
from dynamo_lite.routing.worker_loads import KvView, OwnRequest, WorkerLoads

#: Why a worker was chosen, in this order: it was the only one; it had the session's last request;
#: no other worker holds more of the prompt; no worker holds any of it; workers that hold more are
#: too busy.
REASONS = ("only", "session", "prefix", "load", "balance")

_MAX_SESSIONS = 65_536


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


class KvPicker(Picker):
    def __init__(self, view: KvView, options: KvRoutingOptions):
        #: Placed requests by reason.
        self.choices: Counter[str] = Counter()
        #: Prompt tokens of all placed requests.
        self.prompt_tokens = 0
        #: Prompt tokens that the chosen workers held or were about to hold.
        self.matched_tokens = 0
        #: May be replaced at any time.
        self.options = options
        #: The placed requests that have not ended.
        self.loads = WorkerLoads(view)
        self._view = view
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
        prompt = request.prompt_token_ids
        if request.output_token_ids:
            prompt = prompt + request.output_token_ids
        hashes = cache(partial(_hashes, request, prompt))
        matched = self._match(members, hashes)
        home = self._sessions.get(request.session) if request.session else None
        candidates = [
            Candidate(
                member,
                matched.get(member.lease_id, 0),
                self.loads.of(member.lease_id),
                len(prompt) if member.lease_id == home else 0,
            )
            for member in members
        ]
        chosen, reason = self._choose(candidates, home)
        self._note(chosen, reason, request.session, len(prompt))
        lease_id, new = chosen.member.lease_id, list[ChainHash]()
        if (index := self._view.index(lease_id)) is not None:
            new = list(hashes(index.block_size)[chosen.matched // index.block_size :])
        self.loads.book(
            request.request_id,
            OwnRequest(lease_id, new, len(prompt), len(prompt) - chosen.matched),
        )
        return Selection(
            chosen.member,
            f"{reason}: it holds {chosen.matched} of {len(prompt)} tokens, and"
            f" {chosen.load} tokens are queued there; {len(candidates)} candidates",
        )

    def answered(self, request_id: str) -> None:
        self.loads.answered(request_id)

    def released(self, request_id: str) -> None:
        self.loads.released(request_id)

    def _match(
        self, members: Sequence[EndpointRecord], hashes: Callable[[int], Sequence[ChainHash]]
    ) -> dict[int, int]:
        """How many of the prompt's first tokens workers hold, or will hold."""
        matched: dict[int, int] = {}
        # An index has workers of one block size.
        views = (self._view.index(member.lease_id) for member in members)
        for index in dict.fromkeys(index for index in views if index is not None):
            size = index.block_size
            found = index.match(hashes(size))
            matched |= {worker: count * size for worker, count in found.items()}
        return matched

    def _choose(self, candidates: Sequence[Candidate], home: int | None) -> tuple[Candidate, str]:
        """Equally good ones take turns."""
        loads = self.loads
        fit = [c for c in candidates if loads.has_room(c.member.lease_id)] or candidates
        turn = {c.member.lease_id: loads.own(c.member.lease_id).turn for c in fit}
        chosen = min(fit, key=lambda c: (-score(c, self.options), turn[c.member.lease_id]))
        if len(candidates) == 1:
            return chosen, "only"
        if chosen.member.lease_id == home:
            return chosen, "session"
        longest = max(c.matched for c in candidates)
        if not longest:
            return chosen, "load"
        return chosen, "prefix" if chosen.matched == longest else "balance"

    def _note(
        self, chosen: Candidate, reason: str, session: str | None, prompt_tokens: int
    ) -> None:
        lease_id = chosen.member.lease_id
        self.choices[reason] += 1
        self.prompt_tokens += prompt_tokens
        self.matched_tokens += chosen.matched
        if session:
            self._sessions[session] = lease_id
            self._sessions.move_to_end(session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)


def _hashes(
    request: GenerateRequest, prompt: Sequence[int], block_size: int
) -> Sequence[ChainHash]:
    """Of the prompt's full blocks."""
    if request.inputs is not None:
        return ()  # no worker publishes blocks that depend on more than tokens
    # The last token is computed in any case.
    return chain_hashes(
        prompt[:-1],
        block_size,
        cache_salt=request.cache_salt,
        adapter=None if request.adapter is None else request.adapter.key,
    )
