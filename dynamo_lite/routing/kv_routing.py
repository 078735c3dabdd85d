"""Which decode worker takes a request: the one that holds its prefix and is not busy.

The best score wins.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
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
        by_lease = {m.lease_id: m for m in members if m.lease_id not in without}
        if not by_lease:
            raise NoWorkers("no live worker")
        prompt = request.prompt_token_ids
        if request.output_token_ids:
            prompt = prompt + request.output_token_ids
        hashes = cache(partial(_hashes, request, prompt))
        matched = self._match(by_lease, hashes)
        home = self._sessions.get(request.session) if request.session else None
        lease_id, reason = self.loads.choose(
            list(by_lease), matched, self.options.kv_weight, home=home, credit=len(prompt)
        )
        held, load = matched.get(lease_id, 0), self.loads.of(lease_id)
        self.choices[reason] += 1
        self.prompt_tokens += len(prompt)
        self.matched_tokens += held
        if request.session:
            self._remember(request.session, lease_id)
        new = list[ChainHash]()
        if (index := self._view.index(lease_id)) is not None:
            new = list(hashes(index.block_size)[held // index.block_size :])
        self.loads.book(
            request.request_id, OwnRequest(lease_id, new, len(prompt), len(prompt) - held)
        )
        return Selection(
            by_lease[lease_id],
            f"{reason}: it holds {held} of {len(prompt)} tokens, and {load} tokens are queued"
            f" there; {len(by_lease)} candidates",
        )

    def answered(self, request_id: str) -> None:
        self.loads.answered(request_id)

    def released(self, request_id: str) -> None:
        self.loads.released(request_id)

    def _match(
        self, workers: Iterable[int], hashes: Callable[[int], Sequence[ChainHash]]
    ) -> dict[int, int]:
        """How many of the prompt's first tokens workers hold, or will hold."""
        matched: dict[int, int] = {}
        # An index has workers of one block size.
        views = map(self._view.index, workers)
        for index in dict.fromkeys(index for index in views if index is not None):
            size = index.block_size
            found = index.match(hashes(size))
            matched |= {worker: count * size for worker, count in found.items()}
        return matched

    def _remember(self, session: str, lease_id: int) -> None:
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
