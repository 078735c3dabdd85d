"""Requests that this router has given to workers and that have not ended.

Loads and KV events only show a request once it is running. Until then the next choice must know of
it: requests with the same prefix should follow it, and all others should see that the worker is
busier.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_lite.routing.kv_chain import ChainHash
from dynamo_lite.routing.kv_index import KvIndex

#: Blocks of a prompt are kept this long after the first token; then the worker itself reports them.
LINGER_S = 1.0
#: Most different blocks of all prompts that wait for a first token.
_MAX_BLOCKS = 1_000_000


@dataclass(slots=True)
class _PendingRequest:
    """One request at one worker."""

    worker: int
    hashes: Sequence[ChainHash]
    #: Length of the prompt; 0 after the first token.
    prompt_tokens: int
    #: Prompt tokens that have to be computed; 0 after the first token.
    prefill_tokens: int


@dataclass(slots=True)
class PendingWork:
    """The pending requests of one worker."""

    requests: int = 0
    #: Prompt tokens of requests without a first token.
    prompt_tokens: int = 0
    #: Tokens of these prompts that have to be computed.
    prefill_tokens: int = 0
    #: How many requests bring each block.
    expected: dict[ChainHash, int] = field(default_factory=dict[ChainHash, int])

    @property
    def empty(self) -> bool:
        return not self.requests and not self.expected


class PendingRequests:
    """Requests are known by their ids; unknown ids are ignored. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._requests: dict[str, _PendingRequest] = {}
        self._work: dict[int, PendingWork] = {}
        self._expected = KvIndex(_MAX_BLOCKS)
        self._lingering: deque[tuple[float, int, Sequence[ChainHash]]] = deque()

    def __repr__(self) -> str:
        return f"<PendingRequests requests={len(self._requests)} lingering={len(self._lingering)}>"

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, worker: int) -> PendingWork:
        """Read-only."""
        return self._work.get(worker) or PendingWork()

    def match(self, hashes: Sequence[ChainHash]) -> dict[int, int]:
        """How many of the first blocks workers will hold after their pending requests; see
        `KvIndex.match`."""
        return self._expected.match(hashes)

    def book(
        self,
        request_id: str,
        worker: int,
        hashes: Sequence[ChainHash],
        *,
        prompt_tokens: int,
        prefill_tokens: int,
        now: float,
    ) -> None:
        """Assigns the request to `worker`, replacing any earlier assignment."""
        self._drop_lingering(now)
        self.released(request_id)
        self._requests[request_id] = _PendingRequest(worker, hashes, prompt_tokens, prefill_tokens)
        work = self._work.setdefault(worker, PendingWork())
        work.requests += 1
        work.prompt_tokens += prompt_tokens
        work.prefill_tokens += prefill_tokens
        expected = work.expected
        for key in hashes:
            expected[key] = expected.get(key, 0) + 1
        self._expected.stored(worker, hashes)

    def answered(self, request_id: str, now: float) -> None:
        """The request's first token has arrived."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._computed(request)
        if request.hashes:
            self._lingering.append((now + LINGER_S, request.worker, request.hashes))
            request.hashes = ()

    def released(self, request_id: str) -> None:
        """The request has ended, or its worker did not accept it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._computed(request)
        self._work[request.worker].requests -= 1
        self._expect_no_longer(request.worker, request.hashes)

    def _computed(self, request: _PendingRequest) -> None:
        work = self._work[request.worker]
        work.prompt_tokens -= request.prompt_tokens
        work.prefill_tokens -= request.prefill_tokens
        request.prompt_tokens = request.prefill_tokens = 0

    def _drop_lingering(self, now: float) -> None:
        while self._lingering and self._lingering[0][0] <= now:
            _, worker, hashes = self._lingering.popleft()
            self._expect_no_longer(worker, hashes)

    def _expect_no_longer(self, worker: int, hashes: Sequence[ChainHash]) -> None:
        work = self._work[worker]
        gone: list[ChainHash] = []
        for key in hashes:
            work.expected[key] -= 1
            if not work.expected[key]:
                del work.expected[key]
                gone.append(key)
        self._expected.removed(worker, gone)
        if work.empty:
            del self._work[worker]
            self._expected.leave(worker)
