"""What this router has given to workers and has not heard the end of.

Loads and KV events tell of a request when it is under way, and until then the next
request must know of it: others with the same prefix should follow it, and all others
should see that the worker is busier.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_lite.policy.kv_chain import ChainHash
from dynamo_lite.policy.kv_index import KvIndex

#: So long after a first token the blocks of its prompt are known from the worker itself.
LINGER_S = 1.0
#: Different blocks of all prompts that wait for a first token.
_MAX_BLOCKS = 1_000_000


@dataclass(slots=True)
class _PendingRequest:
    """prompt_tokens, and prefill_tokens of them that have to be computed: 0 once there is a
    first token."""

    worker: int
    hashes: Sequence[ChainHash]
    prompt_tokens: int
    prefill_tokens: int


@dataclass(slots=True)
class PendingWork:
    """One worker. prompt_tokens, prefill_tokens: of requests without a first token.

    expected: how many bookings count on each block.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    expected: dict[ChainHash, int] = field(default_factory=dict[ChainHash, int])

    @property
    def empty(self) -> bool:
        return not self.requests and not self.expected


class PendingRequests:
    """Requests are known by their ids, and unknown ones are ignored. `now`: monotonic seconds."""

    def __init__(self) -> None:
        self._booked: dict[str, _PendingRequest] = {}
        self._accounts: dict[int, PendingWork] = {}
        self._expected = KvIndex(_MAX_BLOCKS)
        self._lingering: deque[tuple[float, int, Sequence[ChainHash]]] = deque()

    def __repr__(self) -> str:
        return f"<Bookings requests={len(self._booked)} lingering={len(self._lingering)}>"

    def __len__(self) -> int:
        return len(self._booked)

    def of(self, worker: int) -> PendingWork:
        """To read only."""
        return self._accounts.get(worker) or PendingWork()

    def match(self, hashes: Sequence[ChainHash]) -> dict[int, int]:
        """How many of the first blocks each worker will hold by what it was given."""
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
        """The worker is given the request; whoever had it before, has not."""
        self._settle(now)
        self.released(request_id)
        self._booked[request_id] = _PendingRequest(worker, hashes, prompt_tokens, prefill_tokens)
        account = self._accounts.setdefault(worker, PendingWork())
        account.requests += 1
        account.prompt_tokens += prompt_tokens
        account.prefill_tokens += prefill_tokens
        expected = account.expected
        for key in hashes:
            expected[key] = expected.get(key, 0) + 1
        self._expected.stored(worker, hashes)

    def answered(self, request_id: str, now: float) -> None:
        """Its first token is there."""
        booking = self._booked.get(request_id)
        if booking is None:
            return
        self._computed(booking)
        if booking.hashes:
            self._lingering.append((now + LINGER_S, booking.worker, booking.hashes))
            booking.hashes = ()

    def released(self, request_id: str) -> None:
        """It has ended, or its worker did not take it."""
        booking = self._booked.pop(request_id, None)
        if booking is None:
            return
        self._computed(booking)
        self._accounts[booking.worker].requests -= 1
        self._expect_no_longer(booking.worker, booking.hashes)

    def _computed(self, booking: _PendingRequest) -> None:
        account = self._accounts[booking.worker]
        account.prompt_tokens -= booking.prompt_tokens
        account.prefill_tokens -= booking.prefill_tokens
        booking.prompt_tokens = booking.prefill_tokens = 0

    def _settle(self, now: float) -> None:
        while self._lingering and self._lingering[0][0] <= now:
            _, worker, hashes = self._lingering.popleft()
            self._expect_no_longer(worker, hashes)

    def _expect_no_longer(self, worker: int, hashes: Sequence[ChainHash]) -> None:
        account = self._accounts[worker]
        gone: list[ChainHash] = []
        for key in hashes:
            account.expected[key] -= 1
            if not account.expected[key]:
                del account.expected[key]
                gone.append(key)
        self._expected.removed(worker, gone)
        if account.empty:
            del self._accounts[worker]
            self._expected.leave(worker)
