"""The options of the workers of a simulated cluster, from its scenario."""

from typing import Any

import msgspec

from dynamo_lite.queue.base import QueueOptions
from dynamo_lite.services.config import PrefillWorkerConfig, VllmWorkerConfig
from tests.simulation.engine.core import SimModelConfig
from tests.simulation.scenario import Scenario

_LOCAL_TOKENS, _SHORT_TOKENS = 12, 30
#: One block: every prefix that can be read is read.
_READ_TOKENS = 4
#: Jobs that a prefill worker may hold at a time.
MOST_JOBS = PrefillWorkerConfig().most_jobs


def model_options(scenario: Scenario) -> SimModelConfig:
    return SimModelConfig(
        num_blocks=scenario.num_blocks,
        max_model_len=4 * (scenario.num_blocks - 1),
        token_s=scenario.token_s,
        tells_load=scenario.planner is not None,
    )


def decode_options(scenario: Scenario) -> dict[str, Any]:
    return msgspec.to_builtins(
        VllmWorkerConfig(
            max_local_prefill_length=_LOCAL_TOKENS,
            remote_prefill_timeout_s=scenario.remote_prefill_timeout_s,
            max_queue_wait_s=scenario.max_queue_wait_s,
            queue=_queue_options(scenario),
            kv_events=False,
        )
    )


def prefill_options(scenario: Scenario) -> dict[str, Any]:
    return msgspec.to_builtins(
        PrefillWorkerConfig(
            queue=_queue_options(scenario),
            min_prefix_read_length=_READ_TOKENS,
        )
    )


def _queue_options(scenario: Scenario) -> QueueOptions:
    return QueueOptions(
        max_jobs=scenario.max_jobs,
        ack_wait_s=scenario.ack_wait_s,
        max_deliver=scenario.max_deliver,
        short_length=_SHORT_TOKENS,
    )
