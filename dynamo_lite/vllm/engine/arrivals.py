"""A decode engine's scheduler: what waits for KV does not hold up others.

Prompts that wait for the KV of another one cost a step nothing until it has arrived. Prompts whose
KV is lost do not stand before those whose KV has arrived.
"""

from typing import TYPE_CHECKING, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

if TYPE_CHECKING:
    from dynamo_lite.vllm.engine.connector import DynamoLiteConnector


class _ArrivalMixin(Scheduler):
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._let_lost_wait()
        return super().schedule(throttle_prefills)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Also skips the followers of a parked leader: in each step vLLM would look up the whole
        prefix of each, only for the connector to defer it."""
        connector = cast("DynamoLiteConnector", self.connector)
        if connector.leader_of(request.request_id) is not None:
            return False
        return super()._handle_blocked_waiting_request(request)

    def _let_lost_wait(self) -> None:
        """Prompts whose KV is lost give their blocks back, and wait before the new ones.

        vLLM would keep them before prompts whose KV has arrived, which then wait, too, until there
        are blocks; and it would reserve blocks for one that is asked for again, which would need
        twice as many as it has tokens for.
        """
        if not (lost := self.failed_recving_kv_req_ids & self.finished_recving_kv_req_ids):
            return
        # One that has kept a part of its KV holds blocks.
        holding = [each for each in self.kv_holding_waiting if not each.num_computed_tokens]
        for request in reversed([each for each in holding if each.request_id in lost]):
            self.kv_holding_waiting.remove_request(request)
            self._handle_blocked_waiting_request(request)
            self._inflight_prefills.discard(request)
            self.waiting.prepend_request(request)


class ArrivalScheduler(_ArrivalMixin, Scheduler):
    """For engines that compute one step at a time."""


class AsyncArrivalScheduler(_ArrivalMixin, AsyncScheduler):
    """For engines that schedule the next step while one runs."""
