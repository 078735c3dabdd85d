"""All prompts that a decode engine has decided about, one record for each decision.

The scheduler half and the control session tell each event to `RemotePrefills` once.
`explain`, spans and stage histograms read the records.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence

from dynamo_lite.disagg.attempts.ledger import Outcome
from dynamo_lite.disagg.counters import ASKED, OVERFLOW, REMOTE, Counters
from dynamo_lite.disagg.decision.rule import OVERFLOW_REASONS
from dynamo_lite.disagg.decode.attempt_events import Claimed, DoneBy, Published
from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.disagg.decode.remote_prefill import (
    Decided,
    RemotePrefill,
    report_decision,
    report_end,
    report_resume,
)
from dynamo_lite.disagg.engine_api import Block, Prompt
from dynamo_lite.protocol.trace import TraceContext, traced


class RemotePrefills:
    """Methods run on the engine's thread.

    stats: receives counts, spans, and the stages of remote prefills whose KV came. decisions:
    keeps the records for `explain`. now: monotonic. overlapping_steps: how many steps may be in
    flight, including the one being scheduled.
    """

    def __init__(
        self,
        stats: Counters,
        decisions: DecisionLog,
        now: Callable[[], float],
        overlapping_steps: int,
    ):
        self.decisions = decisions
        self._stats, self._now, self._overlapping = stats, now, overlapping_steps
        # Other classes read the next three fields; only this class writes them.
        #: The last record of each request, from its first verdict until it has finished.
        self.by_request: dict[str, RemotePrefill] = {}
        #: Records that are parked, by block hash and request.
        self.by_hash: dict[Hashable, dict[str, RemotePrefill]] = {}
        #: Prompts that are computed here, by request.
        self.computing: dict[str, RemotePrefill] = {}
        #: By attempt, from the request for a remote prefill until it has ended and its blocks are
        #: released.
        self._by_attempt: dict[str, RemotePrefill] = {}
        #: When the last remote prefill was requested.
        self.last_asked_at = 0.0
        #: When remote prefills were requested, since the last reading of the queue, and their
        #: tokens.
        self._asked: deque[tuple[float, int]] = deque()
        #: Number and tokens of the remote prefills that have not ended. The bridge may read
        #: them.
        self.jobs = self.tokens = 0

    def __bool__(self) -> bool:
        """Whether any prompt is left: waiting, computed here, or with blocks held back."""
        kept = self.by_request or self._by_attempt or self.by_hash or self.computing
        return bool(kept)

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
            prefill.prompt = None
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
            self._scheduled(prefill)
            return None
        prefill.allocated, prefill.wait = True, None
        if not prefill.tries:
            prefill.cached_tokens = prefill.decided.inputs.cached_tokens
        if not prefill.is_remote:
            self._computes(prefill, prefill.decided.at, prefill.decided.inputs.cached_tokens)
            if prefill.decided.verdict.reason in OVERFLOW_REASONS:
                self._stats.add(OVERFLOW, prefill.left_tokens)
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
        max_tries: int,
        first_block: int,
        awaited_tokens: int,
        job_tokens: int,
        hashes: Sequence[Hashable],
        above: TraceContext | None,
    ) -> float:
        """A remote prefill of the prompt is requested. Returns until when the engine waits.

        The other arguments are fields of `RemotePrefill`. The `timeout_s` and `max_tries` of
        the prompt's first remote prefill apply to the later ones too.
        """
        if prefill.until is None:
            prefill.since, prefill.until, prefill.max_tries = now, now + timeout_s, max_tries
        prefill.tries += 1
        prefill.attempt, prefill.prompt, prefill.asked_at = attempt, prompt, now
        prefill.first_block, prefill.landed_blocks = first_block, None
        prefill.awaited_tokens, prefill.job_tokens = awaited_tokens, job_tokens
        prefill.above = above
        prefill.trace = None if above is None else above.child()
        prefill.parked, prefill.hashes = True, hashes
        for key in hashes:
            self.by_hash.setdefault(key, {})[prefill.request_id] = prefill
        self.last_asked_at = now
        self._asked.append((now, job_tokens))
        self._by_attempt[attempt] = prefill
        self.jobs += 1
        self.tokens += job_tokens
        self._stats.add(ASKED, job_tokens)
        return prefill.until

    def landed(self, request_id: str, blocks: int) -> None:
        """One rank has this many of the blocks. Only blocks that all ranks have count."""
        if (prefill := self.by_request.get(request_id)) is not None:
            known = prefill.landed_blocks
            prefill.landed_blocks = blocks if known is None else min(known, blocks)

    def committed(self, request_id: str, cached: int) -> None:
        """The writers have committed to a rank; the prefill engine had `cached` tokens."""
        if (prefill := self.by_request.get(request_id)) is not None:
            prefill.writer_cached = min(cached, prefill.decided.inputs.prompt_tokens - 1)

    def unparked(self, request_id: str, *, received: bool) -> RemotePrefill | None:
        """The engine learns that the KV came, or that it will not come."""
        prefill = self.by_request.get(request_id)
        if prefill is not None:
            self._unpark(prefill)
            if received:
                prefill.prompt = None
                prefill.cached_tokens = max(prefill.cached_tokens, prefill.writer_cached)
        return prefill

    def falls_back(self, prefill: RemotePrefill) -> None:
        """The engine computes the prompt itself, since its KV will not come."""
        self._computes(prefill, self._now(), prefill.decided.inputs.cached_tokens)

    def looked_up(self, prefill: RemotePrefill, cached: int) -> None:
        """The engine is about to compute the prompt itself, except for the `cached` tokens."""
        if prefill.request_id in self.computing and prefill.left_tokens == prefill.here_tokens:
            self._computes(prefill, prefill.here_at, cached)

    def hold(self, attempt: str, blocks: Sequence[Block]) -> None:
        """The attempt's blocks stay reserved until `release`."""
        self._by_attempt[attempt].held = blocks

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
        self.tokens -= prefill.job_tokens
        prefill.ended_at, prefill.detail = self._now(), detail
        if outcome is Outcome.COMMITTED:
            prefill.received_at = prefill.ended_at
        prefill.outcome = outcome
        self._stats.add(f"{REMOTE}/{outcome.value}")
        report_end(self._stats, prefill)
        self._drop_if_over(prefill)
        return prefill

    def finished(self, request_id: str) -> RemotePrefill | None:
        """The request is over. A writer may still hold its attempt."""
        prefill = self.by_request.pop(request_id, None)
        if prefill is not None:
            self._unpark(prefill)
            prefill.prompt = None
            if request_id in self.computing:
                self._computed(prefill)
        return prefill

    def stepped(self, scheduled: Mapping[str, int]) -> None:
        """A step begins, which carries the counts and notes up to now. scheduled: how many tokens
        it computes, by request."""
        for request_id, prefill in list(self.computing.items()) if self.computing else ():
            if prefill.left_tokens > 0:
                prefill.left_tokens -= scheduled.get(request_id, 0)
            elif prefill.steps_since < self._overlapping - 1:
                prefill.steps_since += 1
            else:
                self._computed(prefill)

    # Events of the bridge

    def note(self, event: Published | Claimed | DoneBy) -> None:
        """What has become of an attempt's job."""
        prefill = self._by_attempt.get(event.attempt)
        if prefill is None or prefill.outcome is not None:
            return
        match event:
            case Published():
                prefill.published_at = event.at
            case Claimed():
                prefill.pulled_at = max(prefill.asked_at, event.pulled_at)
                prefill.claimed_at, prefill.writer = event.at, event.writer
            case DoneBy() if prefill.claimed_at is None:
                prefill.writer = event.writer

    # Questions

    def asked_since(self, read_at: float) -> tuple[int, int]:
        """Number and tokens of the remote prefills that were requested after `read_at`, which
        never decreases."""
        while self._asked and self._asked[0][0] <= read_at:
            self._asked.popleft()
        return len(self._asked), sum(tokens for _, tokens in self._asked)

    @property
    def unsettled(self) -> bool:
        """Whether an attempt of a request that does not wait any more has not ended, or its blocks
        are not released."""
        return any(not each.parked for each in self._by_attempt.values())

    def held(self) -> dict[str, Sequence[Block]]:
        """Blocks that are held back, by attempt."""
        return {name: each.held for name, each in self._by_attempt.items() if each.held}

    def _scheduled(self, prefill: RemotePrefill) -> None:
        """The engine computes the prompt's last token. Only the first time after its KV came
        counts."""
        if prefill.received_at is not None and prefill.scheduled_at is None:
            prefill.scheduled_at = self._now()
            report_resume(self._stats, prefill)

    def _computes(self, prefill: RemotePrefill, at: float, cached: int) -> None:
        prefill.here_at = at
        prefill.here_tokens = prefill.left_tokens = prefill.decided.inputs.prompt_tokens - cached
        self.computing[prefill.request_id] = prefill

    def _computed(self, prefill: RemotePrefill) -> None:
        """The engine has computed the prompt, or the request was aborted before."""
        if prefill.left_tokens <= 0:
            prefill.computed_s = self._now() - prefill.here_at
        del self.computing[prefill.request_id]

    def _unpark(self, prefill: RemotePrefill) -> None:
        prefill.parked = False
        for key in prefill.hashes:
            parked = self.by_hash[key]
            del parked[prefill.request_id]
            if not parked:
                del self.by_hash[key]
        prefill.hashes = ()

    def _drop_if_over(self, prefill: RemotePrefill) -> None:
        if prefill.outcome is not None and not prefill.held:
            self._by_attempt.pop(prefill.attempt, None)
