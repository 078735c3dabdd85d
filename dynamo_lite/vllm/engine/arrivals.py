"""A decode engine's scheduler: what waits for KV does not hold up others.

Prompts that wait for the KV of another one cost a step nothing until it has arrived. Prompts whose
KV is lost do not stand before those whose KV has arrived.

After a step that computed nothing vLLM's engine sleeps for a millisecond, and notifications are
read once per step. So KV would be noticed half a millisecond late on average, and used a
millisecond after that. Here the ranks wait within such a step, where they look several times, and
vLLM does not sleep after it.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.vllm.engine.connector_types import step_of

if TYPE_CHECKING:
    from dynamo_lite.vllm.engine.connector import DynamoLiteConnector

#: How long a step that computes nothing waits for KV: as long as vLLM would sleep after it.
_WAIT_S = 0.001
#: Looks in one wait. Each costs about 20 microseconds of CPU.
_LOOKS = 5


def waits_in_steps(config: VllmConfig) -> bool:
    """Whether the engine's steps that compute nothing wait for KV.

    They do not where steps overlap: such engines learn of an arrival one step later anyway. Nor
    with draft models, or data-parallel ranks that share experts (other ranks count as engines of
    one), for which a step without computing matters.
    """
    return (
        config.max_concurrent_batches == 1
        and config.parallel_config.data_parallel_size == 1
        and config.speculative_config is None
        and issubclass(config.scheduler_config.get_scheduler_cls(), ArrivalScheduler)
    )


def wait_for_arrival(rank: DecodeRank, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when a prompt's KV has arrived, or after as long as vLLM would sleep."""
    for _ in range(_LOOKS):
        if rank.poll():
            return
        sleep(_WAIT_S / _LOOKS)


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

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        step = step_of(scheduler_output.kv_connector_metadata)
        if isinstance(step, DecodeStep) and step.wait:
            # The engine core looks at this number next, and only to decide whether to sleep.
            scheduler_output.total_num_scheduled_tokens = 1
        return outputs


class AsyncArrivalScheduler(_ArrivalMixin, AsyncScheduler):
    """For engines that schedule the next step while one runs."""
