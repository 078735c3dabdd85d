"""Makes the prefill job of a request whose blocks are reserved."""

from collections.abc import Callable, Sequence

from dynamo_lite.disagg.decode.backlog import BacklogExchange
from dynamo_lite.disagg.decode.prefix_offers import first_awaited
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import BlockPool, Prompt
from dynamo_lite.disagg.transfer_params import first_token_sampling, time_left_s
from dynamo_lite.protocol.prefill import FirstTokenWanted, RemotePrefillRequest
from dynamo_lite.protocol.trace import traced
from dynamo_lite.runtime.clock import Clock


class JobMaker:
    """Runs on the engine's thread. block_size: in tokens. new_attempt: returns a new id."""

    def __init__(
        self,
        engine_id: str,
        block_size: int,
        prefills: RemotePrefills,
        flights: SingleFlight,
        backlog: BacklogExchange,
        clock: Clock,
        new_attempt: Callable[[], str],
    ):
        self._engine_id, self._block_size = engine_id, block_size
        self._prefills, self._flights, self._backlog = prefills, flights, backlog
        self._clock, self._new_attempt = clock, new_attempt

    def make(
        self,
        prefill: RemotePrefill,
        request: Prompt,
        pool: BlockPool,
        block_ids: Sequence[int],
        external: int,
    ) -> tuple[RemotePrefillRequest, float]:
        """Begins an attempt that brings the KV of `external` tokens.

        block_ids: the prompt's blocks. Returns the job, and until when the engine waits for the
        KV, in monotonic seconds.
        """
        size, wanted = self._block_size, request.num_prompt_tokens - 1
        first = first_awaited(pool, block_ids, (wanted - external) // size)
        end = -(-wanted // size)
        now, options = self._clock.monotonic(), prefill.decided.tuned.options
        job_tokens = wanted - first * size
        lane = self._backlog.lane_of(job_tokens, request.priority)
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
            job_tokens=job_tokens,
            lane=lane,
            place=self._backlog.place(lane),
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
        return job, until


def _first_token(request: Prompt, cached: int) -> FirstTokenWanted | None:
    """cached: prompt tokens in the prefix cache."""
    sampling, prompt = first_token_sampling(request), request.prompt_token_ids
    if sampling is None or not prompt:
        return None
    return FirstTokenWanted(sampling=sampling, last_token_id=prompt[-1], cached_tokens=cached)
