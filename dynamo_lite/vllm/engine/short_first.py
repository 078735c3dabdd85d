"""vLLM's scheduler for prefill engines: short prompts overtake running long ones.

By default vLLM continues running requests before it admits waiting ones, and one long prompt
can take all of a step. Here long prompts skip steps while there are short ones, as vLLM's
running requests do when a step's tokens are used up. They keep their blocks and their place.
"""

from collections.abc import Iterator

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from dynamo_lite.disagg.decision.lanes import BEFORE_LONG, lane_of
from dynamo_lite.disagg.engine_config import (
    ENGINE_CONFIG_FILE,
    PrefillEngineConfig,
    read_engine_config,
)
from dynamo_lite.disagg.transfer_params import PrefillLength, unpack

#: Long prompts skip at most this many steps in a row. If skipping did not help, none is skipped
#: for the second number of steps.
_PATIENCE_STEPS, _VAIN_STEPS = 32, 8


class _ShortFirstMixin(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        assert transfer is not None
        role = read_engine_config(transfer.kv_connector_extra_config[ENGINE_CONFIG_FILE]).role
        assert isinstance(role, PrefillEngineConfig)
        self._short_length = role.queue.short_length
        self._skipped = self._no_skips = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        held = [] if self._no_skips else self._held()
        self._no_skips = max(self._no_skips - 1, 0)
        self._skipped = self._skipped + 1 if held else 0
        if self._skipped == _PATIENCE_STEPS:
            self._no_skips = 1
        if not held:
            return super().schedule(throttle_prefills)
        out = {request.request_id for request in held}
        self.running = [request for request in self.running if request.request_id not in out]
        most = self.max_num_running_reqs, self.max_num_active_reqs
        # Requests that skip the step keep their place in the batch.
        self.max_num_running_reqs -= len(held)
        self.max_num_active_reqs -= len(held)
        try:
            made = super().schedule(throttle_prefills)
        finally:
            self.max_num_running_reqs, self.max_num_active_reqs = most
            self.running = held + self.running
        if made.total_num_scheduled_tokens == 0:
            self._no_skips = _VAIN_STEPS  # there are no blocks for the short ones
        return made

    def _held(self) -> list[Request]:
        """The running long prompts, if there are short ones to compute."""
        if self.lora_config is not None and self._adapters() > self.lora_config.max_loras:
            return []  # vLLM counts the adapters of the requests that it schedules only
        computing = [r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens]
        long = [request for request in computing if not self._passes(request)]
        if not long:
            return []
        room = len(self.running) < self.max_num_active_reqs
        passing = len(long) < len(computing) or (room and any(map(self._passes, self._ready())))
        return long if passing else []

    def _adapters(self) -> int:
        """How many there are among the requests that may be scheduled together."""
        requests = (*self.running, *self.waiting, *self.kv_holding_waiting)
        return len({each.lora_request.lora_int_id for each in requests if each.lora_request})

    def _ready(self) -> Iterator[Request]:
        """Waiting requests that a step can start."""
        for request in (*self.waiting, *self.kv_holding_waiting):
            # vLLM updates the status after a prefix read only if the step has tokens left.
            if (
                request.status == RequestStatus.WAITING
                or request.request_id in self.finished_recving_kv_req_ids
            ):
                yield request

    def _passes(self, request: Request) -> bool:
        job = unpack(request, PrefillLength)
        # The decode engine counts the same way when it chooses the lane.
        tokens = (
            request.num_prompt_tokens if job is None else job.num_tokens - job.num_computed_tokens
        )
        return lane_of(tokens, request.priority, self._short_length) in BEFORE_LONG


class ShortFirst(_ShortFirstMixin, Scheduler):
    """For engines whose steps do not overlap."""


class AsyncShortFirst(_ShortFirstMixin, AsyncScheduler):
    """For engines that schedule the next step while one runs."""
