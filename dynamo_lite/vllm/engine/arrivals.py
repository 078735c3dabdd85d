"""Lets a decode engine notice and schedule a prompt as soon as its KV has arrived.

After a step that computed nothing vLLM's engine sleeps for a millisecond, and notifications
are read once per step. So an arrival is noticed half a millisecond late on average, and
scheduled a millisecond after that. Here the ranks wait inside of such a step instead, where
they can look several times, and vLLM does not sleep after it.

Steps and looks keep a core busy, which slows down a prefill engine whose core is another half of
the same one. So both become rarer, the longer the prompts have been away.
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

#: How long a step waits at least, as long as vLLM would sleep.
_LEAST_S = 0.001
#: The limit. A new request that comes meanwhile waits as well.
_MOST_S = 0.005
#: Between them: the share of the time for which the prompts have been away.
_SHARE = 0.01
#: Looks in one wait. Each costs about 20 microseconds of CPU.
_LOOKS = 5
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
            and metadata.step.wait_s
        ):
            # The engine core looks at this number next, and only to decide whether to sleep.
            scheduler_output.total_num_scheduled_tokens = 1
        return outputs


def let_bridge_run(*, sleep: Callable[[float], None] = time.sleep) -> None:
    """Gives the interpreter to the bridge's thread, which has a job to publish. In a step that
    computes nothing the engine's thread would keep it for another 0.2 ms."""
    sleep(_HANDOVER_S)


def arrival_wait_s(away_s: float | None) -> float:
    """How long a step that computes nothing waits for KV, in seconds.

    away_s: since the last remote prefill was requested; None if no request waits for KV.
    """
    return 0.0 if away_s is None else min(max(_SHARE * away_s, _LEAST_S), _MOST_S)


def wait_for_arrival(
    rank: DecodeRank,
    wait_s: float,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns when a prompt's KV has arrived, or after `wait_s`."""
    until = now() + wait_s
    while not rank.poll() and now() < until:
        sleep(wait_s / _LOOKS)
