"""What a decode engine does with a prompt, from the engine's first look at it until its end."""

from collections.abc import Callable, Iterable, Sequence

from dynamo_lite.disagg.decode.decider import Decider
from dynamo_lite.disagg.decode.job_maker import JobMaker
from dynamo_lite.disagg.decode.remote_prefill import RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.disagg.decode.resume import Resumes
from dynamo_lite.disagg.decode.single_flight import SingleFlight
from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.protocol.prefill import RemotePrefillRequest


class Prompts:
    """Runs on the engine's thread. now: monotonic."""

    def __init__(
        self,
        prefills: RemotePrefills,
        flights: SingleFlight,
        decider: Decider,
        jobs: JobMaker,
        resumes: Resumes,
        now: Callable[[], float],
    ):
        self._prefills, self._flights, self._decider = prefills, flights, decider
        self._jobs, self._resumes, self._now = jobs, resumes, now

    def looked_up(
        self, request: Prompt, cached: int, transferable: bool
    ) -> tuple[int | None, bool]:
        """See `DecodeScheduler.num_new_matched_tokens`."""
        prefill = self._prefills.by_request.get(request.request_id)
        if prefill is not None and prefill.allocated and not prefill.may_retry:
            self._prefills.looked_up(prefill, cached)
            return 0, False
        if prefill is not None and self._flights.waits(prefill, cached):
            return None, False
        decided = self._decider.decide(request, cached, transferable, prefill)
        prefill = self._prefills.proposed(request, decided)
        if self._flights.joins(request, prefill):
            return None, False
        if not prefill.is_remote:
            return 0, False
        return request.num_prompt_tokens - 1 - cached, True

    def allocated(self, request: Prompt, block_ids: Sequence[int], external: int) -> None:
        """The engine has reserved the prompt's blocks, for the KV of `external` tokens that a
        prefill worker will compute."""
        prefill = self._prefills.allocated(request)
        if prefill is not None and external:
            self._jobs.begin(prefill, request, block_ids, external)

    def step(self, filling: Iterable[int]) -> list[RemotePrefillRequest]:
        """The engine schedules no further prompt in this step. Returns the step's jobs.
        filling: blocks that it completes."""
        return self._jobs.take(filling)

    def lost(self, prefill: RemotePrefill) -> None:
        """The prompt's KV will not come, and its remote prefill has ended."""
        if not self._resumes.lost(prefill, self._now()):
            self._prefills.falls_back(prefill)

    def finished(self, request_id: str) -> None:
        """The request has ended."""
        if (prefill := self._prefills.finished(request_id)) is not None:
            self._flights.finished(prefill)
