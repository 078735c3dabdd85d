"""The scheduler of an engine that can be of either role while it runs.

vLLM makes an engine's scheduler once. This one is composed of those of both roles, each of which
adds nothing in the other role.
"""

from vllm.config import VllmConfig

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.vllm.engine.arrivals import (
    ArrivalScheduler,
    may_wait_in_steps,
    schedule_arrivals_at_once,
)
from dynamo_lite.vllm.engine.short_first import (
    AsyncShortFirst,
    ShortFirst,
    ShortFirstMixin,
    let_short_pass,
)


class ShortFirstAndArrivals(ShortFirstMixin, ArrivalScheduler):
    """For engines whose steps do not overlap."""


def choose_scheduler(config: VllmConfig, engine_config: EngineConfig | None) -> None:
    """Sets the scheduler of the engine's role or roles, unless the user has set another one."""
    if engine_config is None or not engine_config.switchable:
        let_short_pass(config, engine_config)
        schedule_arrivals_at_once(config, engine_config)
    elif config.scheduler_config.scheduler_cls is None:
        if may_wait_in_steps(config):
            made = ShortFirstAndArrivals
        else:
            made = AsyncShortFirst if config.scheduler_config.async_scheduling else ShortFirst
        config.scheduler_config.scheduler_cls = f"{made.__module__}.{made.__name__}"
