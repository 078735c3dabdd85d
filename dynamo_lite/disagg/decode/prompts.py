"""What a decode engine does with a prompt: `decide` at its look at the prompt, `start` when the
prompt's blocks are reserved. Both write the prompt's record, which `RemotePrefills` keeps."""

from collections import deque
from collections.abc import Callable, Iterable

from msgspec import structs

from dynamo_lite.disagg.decision.rule import decide
from dynamo_lite.disagg.decode.attempt_events import LedgerEvent
from dynamo_lite.disagg.decode.control_session import ControlSession
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import BlockPool, BlockTables, Prompt
from dynamo_lite.disagg.transfer_params import adapter_of, first_token_sampling, time_left_s
from dynamo_lite.protocol.decisions import DecisionInputs, QueueSeen
from dynamo_lite.protocol.prefill import FirstTokenWanted, RemotePrefillRequest
from dynamo_lite.runtime.clock import Clock


class Prompts:
    """Runs on the engine's thread. block_size: in tokens. new_attempt: returns a new id.
    overlapping_steps: how many steps may be in flight, including the one being scheduled."""

    def __init__(
        self,
        engine_id: str,
        block_size: int,
        pool: BlockPool,
        prefills: RemotePrefills,
        flights: SingleFlight,
        net: ControlSession,
        *,
        clock: Clock,
        new_attempt: Callable[[], str],
        overlapping_steps: int,
    ):
        self._engine_id, self._block_size, self._pool = engine_id, block_size, pool
        self._prefills, self._flights = prefills, flights
        self._net, self._new_attempt = net, new_attempt
        self._clock, self._now = clock, clock.monotonic
        #: The jobs of the step that is being scheduled.
        self._jobs: list[RemotePrefillRequest] = []
        #: The blocks that each step in flight fills.
        self._filling: deque[frozenset[int]] = deque(maxlen=overlapping_steps)

    def decide(
        self, request: Prompt, cached: int, transferable: bool, offloaded: int = 0
    ) -> tuple[int | None, bool]:
        """See `DecodeScheduler.num_new_matched_tokens`."""
        prefill = self._prefills.by_request.get(request.request_id)
        if prefill is not None and prefill.allocated and not prefill.may_retry:
            return 0, False
        if prefill is not None and self._flights.waits(prefill, cached):
            return None, False
        decided = self._decided(request, cached, transferable, prefill, offloaded)
        prefill = self._prefills.proposed(request, decided)
        if self._flights.joins(request, prefill):
            return None, False
        if not prefill.is_remote:
            return 0, False
        return request.num_prompt_tokens - 1 - cached, True

    def start(self, request: Prompt, tables: BlockTables, external: int) -> LedgerEvent | None:
        """The engine has reserved the prompt's blocks, for the KV of `external` tokens that a
        prefill worker will compute. Returns an event for the ledger.

        The job is one of those of the step.
        """
        prefill = self._prefills.allocated(request)
        if prefill is None or not external:
            return None
        job, until = self._begin(prefill, request, tables, external)
        self._jobs.append(job)
        queued_at, wait_s = prefill.times["decide"], prefill.decided.options.max_queue_wait_s
        return lambda ledger: ledger.allocated(
            request.request_id, job.attempt, until, queued_at=queued_at, max_queue_wait_s=wait_s
        )

    def step(self, filling: Iterable[int]) -> list[RemotePrefillRequest]:
        """The engine schedules no further prompt in this step. Returns the step's jobs.
        filling: blocks that it completes."""
        self._filling.append(frozenset(filling))
        jobs, self._jobs = self._jobs, []
        return [self._vouched(job) for job in jobs]

    def finished(self, request_id: str) -> None:
        """The request has ended."""
        if (prefill := self._prefills.finished(request_id)) is not None:
            self._flights.finished(prefill)

    def _decided(
        self,
        request: Prompt,
        cached: int,
        transferable: bool,
        known: RemotePrefill | None,
        offloaded: int,
    ) -> Decided:
        """known: the prompt's record so far. If the prompt has had a remote prefill before, the
        time limit of that one applies. The request's own deadline always applies."""
        at, options = self._now(), self._net.options
        timeout_s = options.remote_prefill_timeout_s
        if known is not None and known.until is not None:
            timeout_s = known.until - at
        inputs = DecisionInputs(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=cached,
            offloaded_tokens=offloaded,
            queue=self._queue(at),
            time_left_s=min(timeout_s, time_left_s(request, at)),
            transferable=transferable and request.prompt_token_ids is not None,
            leaving=self._net.leaving,
            prefix_awaited=known is not None and known.wait is not None and known.wait.served,
        )
        return Decided(decide(inputs, options), at, inputs, options)

    def _queue(self, now: float) -> QueueSeen | None:
        """The last reading plus what this engine has asked for since; no less than what it waits
        for."""
        view, workers = self._net.queue_watch.view, self._net.workers
        if view is None:
            return None
        jobs, tokens = self._prefills.asked_since(view.read_at)
        return QueueSeen(
            jobs=max(view.jobs + jobs, self._prefills.jobs),
            tokens=max(view.tokens + tokens, self._prefills.tokens),
            prefill_workers=len(workers.usable),
            age_s=max(now - view.read_at, 0.0),
            prefill_workers_alive=len(workers.responsive),
        )

    def _begin(
        self, prefill: RemotePrefill, request: Prompt, tables: BlockTables, external: int
    ) -> tuple[RemotePrefillRequest, float]:
        """Begins an attempt that brings the KV of `external` tokens. Returns its job, and until
        when the request waits, in monotonic seconds."""
        size, wanted = self._block_size, request.num_prompt_tokens - 1
        first = self._first_awaited(tables, (wanted - external) // size)
        end = -(-wanted // size)
        now, options = self._now(), prefill.decided.options
        attempt = self._new_attempt()
        until = self._prefills.asked(
            prefill,
            request,
            attempt,
            now,
            timeout_s=min(options.remote_prefill_timeout_s, time_left_s(request, now)),
            first_block=first,
            awaited_tokens=external,
            job_tokens=wanted - first * size,
            hashes=self._flights.hashes(request),
        )
        # The writer may read the prefix while it writes the rest. As long as it can touch them, the
        # blocks stay reserved, whatever becomes of the request.
        pool = self._pool.blocks
        blocks = [
            pool[block] for table in tables for block in table[:end] if not pool[block].is_null
        ]
        self._pool.touch(blocks)
        self._prefills.hold(attempt, blocks)
        job = RemotePrefillRequest(
            engine_id=self._engine_id,
            request_id=request.request_id,
            attempt=attempt,
            prompt_token_ids=(request.prompt_token_ids or [])[:wanted],
            num_computed_tokens=first * size,
            block_ids=list(tables[0][first:end]),
            # A window's prefix is not whole, so no writer may read it.
            prefix_block_ids=list(tables[0][:first]) if len(tables) == 1 else [],
            other_groups=[list(table[first:end]) for table in tables[1:]],
            deadline=self._clock.wall() + until - now,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=adapter_of(request),
            trace_headers=None if prefill.trace is None else prefill.trace.headers(),
            first_token=_first_token(request, wanted - external),
        )
        return job, until

    def _first_awaited(self, tables: BlockTables, computed: int) -> int:
        """The number of the first block that must be written, after `computed` cached ones.

        Where layers attend to a sliding window only, null blocks stand for the tokens before the
        window. Nothing is written there.
        """
        blocks = self._pool.blocks
        return min(
            next(n for n in range(computed, len(table)) if not blocks[table[n]].is_null)
            for table in tables
        )

    def _vouched(self, job: RemotePrefillRequest) -> RemotePrefillRequest:
        """Removes the prefix from the job unless every prefix block is complete and stays so.

        The prefix cache contains blocks from the moment when their computation is scheduled, and a
        prompt may hit them in the same step. A prefill worker may read them before that has ended.
        """
        for block in job.prefix_block_ids:
            if self._pool.blocks[block].is_null or any(block in step for step in self._filling):
                return structs.replace(job, prefix_block_ids=[])
        return job


def _first_token(request: Prompt, cached: int) -> FirstTokenWanted | None:
    """cached: prompt tokens in the prefix cache."""
    sampling, prompt = first_token_sampling(request), request.prompt_token_ids
    if sampling is None or not prompt:
        return None
    return FirstTokenWanted(sampling=sampling, last_token_id=prompt[-1], cached_tokens=cached)
