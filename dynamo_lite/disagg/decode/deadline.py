"""A request's own time limit, on its way to the scheduler half of a decode engine.

Times are monotonic: the engine's process and the one in front of it are on one machine.
"""

import math
from typing import Any

from dynamo_lite.disagg.engine_api import Prompt
from dynamo_lite.disagg.transfer_params import DecodeRequestParams, pack, unpack


def time_limit(timeout_s: float | None, now: float) -> dict[str, Any] | None:
    """The `kv_transfer_params` of a request that has so much time left; None: any."""
    return None if timeout_s is None else pack(DecodeRequestParams(deadline=now + timeout_s))


def time_left_s(request: Prompt, now: float) -> float:
    """Infinite for a request without a limit."""
    params = unpack(request, DecodeRequestParams)
    return math.inf if params is None else params.deadline - now
