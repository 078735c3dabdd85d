"""Which decode worker takes a request: the one that holds its prefix and is not busy.

The best score wins.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The chosen worker, as it was scored."""

    worker: Candidate
    #: One of `REASONS`.
    reason: str
    #: Number of candidates.
    candidates: int


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
        self._view = view
        self._loads = WorkerLoads(view)
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
            if request.inputs is not None:
                return []  # no worker publishes blocks that depend on more than tokens
            # The last token is computed in any case.
            return chain_hashes(
                prompt[:-1],
                block_size,
                cache_salt=request.cache_salt,
                adapter=None if request.adapter is None else request.adapter.key,
            )

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

        hashes: returns those of the prompt's full blocks of a size in tokens. Raises NoWorkers if
        all members are left out.
        """
        members = [member for member in members if member.lease_id not in without]
        if not members:
            raise NoWorkers("no live worker")
        by_size: dict[int, Sequence[ChainHash]] = {}
        matched = self._match(members, hashes, by_size)
        home = self._sessions.get(session) if session else None
        candidates = [
            Candidate(
                member,
                matched.get(member.lease_id, 0),
                self._loads.of(member.lease_id),
                prompt_tokens if member.lease_id == home else 0,
            )
            for member in members
        ]
        chosen, reason = self._choose(candidates, home)
        self._note(chosen, reason, session, prompt_tokens)
        lease_id, new = chosen.member.lease_id, list[ChainHash]()
        if (index := self._view.index(lease_id)) is not None:
            new = list(by_size[index.block_size][chosen.matched // index.block_size :])
        self._loads.book(
            request_id, OwnRequest(lease_id, new, prompt_tokens, prompt_tokens - chosen.matched)
        )
        return WorkerChoice(chosen, reason, len(candidates))

    @property
    def requests(self) -> Collection[str]:
        """Ids of the placed requests that have not ended."""
        return self._loads.requests

    def reported(self, lease_id: int, now: float) -> None:
        """The worker has reported a new load."""
        self._loads.reported(lease_id, now)

    def left(self, lease_id: int) -> None:
        """The worker is no member any more."""
        self._loads.left(lease_id)

    def answered(self, request_id: str) -> None:
        self._loads.answered(request_id)

    def released(self, request_id: str) -> None:
        self._loads.released(request_id)

    def _match(
        self,
        members: Sequence[EndpointRecord],
        hashes: Callable[[int], Sequence[ChainHash]],
        by_size: dict[int, Sequence[ChainHash]],
    ) -> dict[int, int]:
        """How many of the prompt's first tokens workers hold, or will hold.

        by_size: is filled with the prompt's hashes, by block size.
        """
        matched: dict[int, int] = {}
        # An index has workers of one block size.
        views = (self._view.index(member.lease_id) for member in members)
        for index in dict.fromkeys(index for index in views if index is not None):
            size = index.block_size
            if size not in by_size:
                by_size[size] = hashes(size)
            found = index.match(by_size[size])
            matched |= {worker: count * size for worker, count in found.items()}
        return matched

    def _choose(self, candidates: Sequence[Candidate], home: int | None) -> tuple[Candidate, str]:
        """Equally good ones take turns."""
        loads = self._loads
        fit = [c for c in candidates if loads.has_room(c.member.lease_id)] or candidates
        chosen = min(fit, key=lambda c: (-score(c, self.options), loads.turn(c.member.lease_id)))
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
