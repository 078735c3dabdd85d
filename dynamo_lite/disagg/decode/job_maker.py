"""Makes the prefill jobs of requests whose blocks are reserved."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.shared_state import LockedLedger
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import BlockPool, Prompt
from dynamo_lite.disagg.transfer_params import first_token_sampling, time_left_s
from dynamo_lite.protocol.prefill import FirstTokenWanted, RemotePrefillRequest
from dynamo_lite.protocol.trace import traced
from dynamo_lite.runtime.clock import Clock


class JobMaker:
    """Runs on the engine's thread. block_size: in tokens. new_attempt: returns a new id.
    overlapping_steps: how many steps may be in flight, including the one being scheduled."""

    def __init__(
        self,
        engine_id: str,
        block_size: int,
        pool: BlockPool,
        book: LockedLedger,
        prefills: RemotePrefills,
        flights: SingleFlight,
        clock: Clock,
        new_attempt: Callable[[], str],
        overlapping_steps: int,
    ):
        self._engine_id, self._block_size, self._pool = engine_id, block_size, pool
        self._book, self._prefills, self._flights = book, prefills, flights
        self._clock, self._new_attempt = clock, new_attempt
        #: The jobs of the step that is being scheduled.
        self._jobs: list[RemotePrefillRequest] = []
        #: The blocks that each step in flight fills.
        self._filling: deque[frozenset[int]] = deque(maxlen=overlapping_steps)

    def begin(
        self,
        prefill: RemotePrefill,
        request: Prompt,
        block_ids: Sequence[int],
        external: int,
    ) -> None:
        """Begins an attempt that brings the KV of `external` tokens. Its job is one of those of
        the step. block_ids: the prompt's blocks.
        """
        size, wanted = self._block_size, request.num_prompt_tokens - 1
        first = self._first_awaited(block_ids, (wanted - external) // size)
        end = -(-wanted // size)
        now, options = self._clock.monotonic(), prefill.decided.options
        attempt = self._new_attempt()
        until = self._prefills.asked(
            prefill,
            request,
            attempt,
            now,
            timeout_s=min(options.remote_prefill_timeout_s, time_left_s(request, now)),
            max_tries=options.max_remote_prefills,
            first_block=first,
            awaited_tokens=external,
            job_tokens=wanted - first * size,
            hashes=self._flights.hashes(request),
            above=traced(request.trace_headers),
        )
        job = RemotePrefillRequest(
            engine_id=self._engine_id,
            request_id=request.request_id,
            attempt=attempt,
            prompt_token_ids=(request.prompt_token_ids or [])[:wanted],
            num_computed_tokens=first * size,
            block_ids=list(block_ids[first:end]),
            prefix_block_ids=list(block_ids[:first]),
            deadline=self._clock.wall() + until - now,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace_headers=None if prefill.trace is None else prefill.trace.headers(),
            first_token=_first_token(request, wanted - external),
        )
        # The writer may read the prefix while it writes the rest, so both are held.
        blocks = (*job.prefix_block_ids, *job.block_ids)
        with self._book.lock:
            self._book.ledger.allocated(
                request.request_id,
                attempt,
                blocks,
                until,
                queued_at=now,
                max_queue_wait_s=options.max_queue_wait_s,
            )
        self._jobs.append(job)

    def take(self, filling: Iterable[int]) -> list[RemotePrefillRequest]:
        """Returns the jobs of the step that is being scheduled, and forgets them. filling: blocks
        that this step completes."""
        self._filling.append(frozenset(filling))
        jobs, self._jobs = self._jobs, []
        return [self._vouched(job) for job in jobs]

    def _first_awaited(self, block_ids: Sequence[int], computed: int) -> int:
        """The number of the first block that must be written, after `computed` cached ones.

        If all layers attend to a sliding window only, null blocks stand for the tokens before the
        window. Nothing is written there.
        """
        numbers = range(computed, len(block_ids))
        return next(n for n in numbers if not self._pool.blocks[block_ids[n]].is_null)

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
