"""All prompts that a decode engine has decided about, one record for each decision.

The scheduler half tells each event to `RemotePrefills` once.
`explain`, spans and stage histograms read the records.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decision.rule import OVERFLOW_REASONS, uncached_tokens
from dynamo_lite.disagg.decode.decision_log import MOST
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill
from dynamo_lite.disagg.decode.reports import report_decision, report_end, report_resume
from dynamo_lite.disagg.engine_api import Block, Prompt
from dynamo_lite.disagg.metrics import ASKED, OVERFLOW, REMOTE
from dynamo_lite.protocol.trace import traced


class RemotePrefills:
    """Methods run on the engine's thread.

    stats: receives counts, spans, and the stages of remote prefills whose KV came. now: monotonic.
    hash_block_size: tokens per prefix hash (`Prompt.block_hashes`); None when the engine caches no
    prefixes.
    """

    def __init__(
        self, stats: Counters, now: Callable[[], float], hash_block_size: int | None = None
    ):
        self._stats, self._now, self.hash_block_size = stats, now, hash_block_size
        #: The final decisions about prompts, the last ones, for `explain`.
        self.decisions = deque[RemotePrefill](maxlen=MOST)
        # Other classes read the next two fields; only this class writes them.
        #: The last record of each request, from its first verdict until it has finished.
        self.by_request: dict[str, RemotePrefill] = {}
        #: Records that are parked, by block hash and request.
        self.by_hash: dict[Hashable, dict[str, RemotePrefill]] = {}
        #: By attempt, from the request for a remote prefill until it has ended and its blocks are
        #: released.
        self._by_attempt: dict[str, RemotePrefill] = {}
        #: When remote prefills were requested, since the last reading of the queue, and their
        #: tokens.
        self._asked: deque[tuple[float, int]] = deque()
        #: Number and tokens of the remote prefills that have not ended. The bridge may read
        #: them.
        self.jobs = self.tokens = 0

    def __bool__(self) -> bool:
        """Whether any request is left, or any attempt with blocks held back."""
        return bool(self.by_request or self._by_attempt or self.by_hash)

    def __repr__(self) -> str:
        return f"<RemotePrefills requests={[*self.by_request]} attempts={[*self._by_attempt]}>"

    # Events of the engine

    def proposed(self, request: Prompt, decided: Decided) -> RemotePrefill:
        """The engine allocates the prompt's blocks next. The verdict may be replaced until it
        has them."""
        request_id = request.request_id
        prefill = self.by_request.get(request_id)
        if prefill is None:
            prefill = RemotePrefill(request_id, decided)
        elif prefill.may_retry:
            prefill = prefill.next_try(decided)
        else:
            prefill.decided = decided
            return prefill
        self.by_request[request_id] = prefill
        return prefill

    def allocated(self, request: Prompt) -> RemotePrefill | None:
        """The engine has reserved the prompt's blocks, so the decision about it holds. Returns
        its record; None if the decision holds since before."""
        prefill = self.by_request.get(request.request_id)
        if prefill is None:
            return None
        if prefill.allocated:
            # The engine computes the prompt's last token. Only the first time counts.
            if "fill" in prefill.times and "resume" not in prefill.times:
                prefill.times["resume"] = self._now()
                report_resume(self._stats, prefill)
            return None
        prefill.allocated, prefill.wait = True, None
        if not prefill.tries:
            prefill.cached_tokens = prefill.decided.inputs.cached_tokens
        if prefill.decided.reason in OVERFLOW_REASONS:
            self._stats.add(OVERFLOW, uncached_tokens(prefill.decided.inputs))
        self.decisions.append(prefill)
        report_decision(self._stats, traced(request.trace_headers), prefill, self._now())
        return prefill

    def asked(
        self,
        prefill: RemotePrefill,
        prompt: Prompt,
        attempt: str,
        now: float,
        *,
        timeout_s: float,
        first_block: int,
        awaited_tokens: int,
        serves_others: bool,
        held: Sequence[Block],
    ) -> float:
        """A remote prefill of the prompt is requested. Returns until when the engine waits.

        serves_others: whether other prompts may have use for the KV. held: blocks that stay
        reserved until `release`. The other arguments are fields of `RemotePrefill`. The deadline
        of the prompt's first remote prefill applies to the later ones too.
        """
        if prefill.until is None:
            prefill.since, prefill.until = now, now + timeout_s
        prefill.tries += 1
        prefill.held = held
        prefill.attempt, prefill.prompt, prefill.times["decide"] = attempt, prompt, now
        prefill.first_block, prefill.awaited_tokens = first_block, awaited_tokens
        prefill.above = above = traced(prompt.trace_headers)
        prefill.trace = None if above is None else above.child()
        prefill.hashes = prompt.block_hashes[: self.cacheable(prompt)] if serves_others else ()
        for key in prefill.hashes:
            self.by_hash.setdefault(key, {})[prefill.request_id] = prefill
        self._asked.append((now, awaited_tokens))
        self._by_attempt[attempt] = prefill
        self.jobs += 1
        self.tokens += awaited_tokens
        self._stats.add(ASKED, awaited_tokens)
        return prefill.until

    def landed(self, request_id: str, blocks: int) -> None:
        """One rank has this many of the blocks. Only blocks that all ranks have count."""
        if (prefill := self.by_request.get(request_id)) is not None:
            known = prefill.landed_blocks
            prefill.landed_blocks = blocks if known is None else min(known, blocks)

    def unparked(self, request_id: str) -> tuple[RemotePrefill, Prompt] | None:
        """The engine learns that the KV came, or that it will not come. Returns None for KV that
        another connector has loaded."""
        prefill = self.by_request.get(request_id)
        if prefill is None or (prompt := prefill.prompt) is None:
            return None
        self._unpark(prefill)
        return prefill, prompt

    def release(self, attempt: str) -> Sequence[Block]:
        """Returns the blocks that are not held any more."""
        prefill = self._by_attempt[attempt]
        released, prefill.held = prefill.held, ()
        self._drop_if_over(prefill)
        return released

    def ended(self, attempt: str, outcome: Outcome, detail: str = "") -> RemotePrefill | None:
        """The remote prefill is over for its request. Returns its record; None if it has ended
        before."""
        prefill = self._by_attempt.get(attempt)
        if prefill is None or prefill.outcome is not None:
            return None
        self.jobs -= 1
        self.tokens -= prefill.awaited_tokens
        prefill.times["fill" if outcome is Outcome.COMMITTED else "lost"] = self._now()
        prefill.outcome, prefill.detail = outcome, detail
        self._stats.add(f"{REMOTE}/{outcome.value}")
        report_end(self._stats, prefill)
        self._drop_if_over(prefill)
        return prefill

    def finished(self, request_id: str) -> RemotePrefill | None:
        """The request is over. A writer may still hold its attempt."""
        prefill = self.by_request.pop(request_id, None)
        if prefill is not None:
            self._unpark(prefill)
        return prefill

    # Events that the bridge has left for a step

    def claimed(self, attempt: str, writer: int, at: float) -> None:
        """A prefill worker writes the attempt since `at`."""
        prefill = self._by_attempt.get(attempt)
        if prefill is not None and prefill.outcome is None:
            prefill.times["queue"], prefill.writer = at, writer

    # Questions

    def asked_since(self, read_at: float) -> tuple[int, int]:
        """Number and tokens of the remote prefills that were requested after `read_at`, which
        never decreases."""
        while self._asked and self._asked[0][0] <= read_at:
            self._asked.popleft()
        return len(self._asked), sum(tokens for _, tokens in self._asked)

    def leader_of(self, request_id: str) -> str | None:
        """The parked request for whose KV the request waits; None if there is none, so that the
        engine must call `num_new_matched_tokens`."""
        prefill = self.by_request.get(request_id)
        if prefill is None or prefill.wait is None or prefill.wait.leader is None:
            return None
        leader = self.by_request.get(prefill.wait.leader)
        return None if leader is None or leader.prompt is None else leader.request_id

    def cacheable(self, prompt: Prompt) -> int:
        """How many of its hashes are of blocks that can be hit: the last token is always
        computed."""
        size = self.hash_block_size
        if size is None:
            return 0
        return min(len(prompt.block_hashes), (prompt.num_prompt_tokens - 1) // size)

    @property
    def unsettled(self) -> bool:
        """Whether an attempt of a request that does not wait any more has not ended, or its blocks
        are not released."""
        return any(each.prompt is None for each in self._by_attempt.values())

    def _unpark(self, prefill: RemotePrefill) -> None:
        prefill.prompt = None
        for key in prefill.hashes:
            parked = self.by_hash[key]
            del parked[prefill.request_id]
            if not parked:
                del self.by_hash[key]
        prefill.hashes = ()

    def _drop_if_over(self, prefill: RemotePrefill) -> None:
        if prefill.outcome is not None and not prefill.held:
            self._by_attempt.pop(prefill.attempt, None)
