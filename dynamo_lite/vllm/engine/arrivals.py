"""Lets a decode engine notice and schedule a prompt as soon as its KV has arrived.

After a step that computed nothing vLLM's engine sleeps for a millisecond, and notifications
are read once per step. So an arrival is noticed half a millisecond late on average, and
scheduled a millisecond after that. Here the ranks wait inside of such a step instead, where
they can look several times, and vLLM does not sleep after it.
"""

import time
from collections.abc import Callable

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.engine_config import DecodeEngineConfig, EngineConfig
from dynamo_lite.disagg.messages import DecodeStep
from dynamo_lite.vllm.engine.connector_types import StepMetadata

#: How long a step waits, as long as vLLM would sleep.
_WAIT_S = 0.001
#: Pause between two looks. Each costs about 20 microseconds of CPU.
_LOOK_S = 0.0002
#: As short as possible: the bridge's thread waits for the interpreter by the end of it.
_HANDOVER_S = 0.00002


def schedule_arrivals_at_once(config: VllmConfig, engine_config: EngineConfig | None) -> None:
    """Sets the scheduler of a decode engine, unless the user has set another one.

    Engines whose steps overlap keep vLLM's: they learn of an arrival one step later anyway. So do
    engines with data parallelism or draft models, for which a step without computing matters.
    """
    if engine_config is None or not isinstance(engine_config.role, DecodeEngineConfig):
        return
    plain = (
        config.max_concurrent_batches == 1
        and not config.scheduler_config.async_scheduling
        and config.parallel_config.data_parallel_size == 1
        and config.speculative_config is None
    )
    if plain and config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = f"{__name__}.{ArrivalScheduler.__name__}"


def waits_in_steps(config: VllmConfig) -> bool:
    """Whether `schedule_arrivals_at_once` has set the engine's scheduler."""
    return config.scheduler_config.get_scheduler_cls() is ArrivalScheduler


class ArrivalScheduler(Scheduler):
    """vLLM's scheduler, after whose waiting steps the engine does not sleep."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        metadata = scheduler_output.kv_connector_metadata
        if (
            isinstance(metadata, StepMetadata)
            and isinstance(metadata.step, DecodeStep)
            and metadata.step.wait
        ):
            # The engine core looks at this number next, and only to decide whether to sleep.
            scheduler_output.total_num_scheduled_tokens = 1
        return outputs


def let_bridge_run(*, sleep: Callable[[float], None] = time.sleep) -> None:
    """Gives the interpreter to the bridge's thread, which has a job to publish. In a step that
    computes nothing the engine's thread would keep it for another 0.2 ms."""
    sleep(_HANDOVER_S)


def wait_for_arrival(
    rank: DecodeRank,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when a prompt's KV has arrived, or after a millisecond."""
    until = now() + _WAIT_S
    while not rank.poll() and now() < until:
        sleep(_LOOK_S)
